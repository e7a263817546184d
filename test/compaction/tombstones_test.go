package compaction

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// What each client writes under its prefix: a value and then a tombstone for one key, an empty value, and a record with an empty key.
const (
	pythonScript = `
import sys
from kafka import KafkaProducer
bootstrap, topic, prefix = sys.argv[1:]
p = KafkaProducer(bootstrap_servers=bootstrap, acks="all")
key = lambda s: (prefix + s).encode()
for k, v in [(key("gone"), b"value"), (key("empty"), b"value"), (key("gone"), None), (key("empty"), b""), (b"", prefix.encode())]:
    p.send(topic, key=k, value=v).get(30)
p.close()`
	nodeScript = `
const { Kafka, logLevel } = require("kafkajs");
const [bootstrap, topic, prefix] = process.argv.slice(1);
(async () => {
  const p = new Kafka({ brokers: [bootstrap], logLevel: logLevel.WARN }).producer();
  await p.connect();
  for (const [key, value] of [["gone", "value"], ["empty", "value"], ["gone", null], ["empty", ""]])
    await p.send({ topic, acks: -1, messages: [{ key: prefix + key, value }] });
  await p.send({ topic, acks: -1, messages: [{ key: "", value: prefix }] });
  await p.disconnect();
})().catch((e) => { console.error(e); process.exit(1); });`
)

// writeTombstones has every client write the same through bootstrap.
func writeTombstones(t *testing.T, bootstrap, topic, round string) {
	t.Helper()
	root := kafkatest.Root(t)
	run := func(name string, cmd *exec.Cmd) {
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, out)
		}
	}
	run("kafka-python", exec.CommandContext(t.Context(), filepath.Join(root, ".cache", "venv", "bin", "python"), "-c", pythonScript, bootstrap, topic, "python"+round))
	node := exec.CommandContext(t.Context(), "node", "-e", nodeScript, bootstrap, topic, "node"+round)
	node.Env = append(os.Environ(), "NODE_PATH="+filepath.Join(root, ".cache", "node", "node_modules"))
	run("kafkajs", node)
	java := kafkatest.ToolCommand(t, "org.apache.kafka.tools.ConsoleProducer", "--bootstrap-server", bootstrap, "--topic", topic, "--sync",
		"--reader-property", "parse.key=true", "--reader-property", "key.separator=:", "--reader-property", "null.marker=NULL")
	java.Stdin = strings.NewReader(strings.ReplaceAll("Pgone:value\nPempty:value\nPgone:NULL\nPempty:\n:P\n", "P", "java"+round))
	run("Java's console producer", java)
	cl := testbed.NewWriter(t, []string{bootstrap}, topic)
	defer cl.Close()
	for _, r := range []*kgo.Record{
		{Key: []byte("goGone" + round), Value: []byte("value")}, {Key: []byte("goEmpty" + round), Value: []byte("value")}, {Key: []byte("goGone" + round)},
		{Key: []byte("goEmpty" + round), Value: []byte{}}, {Key: []byte{}, Value: []byte("go" + round)},
	} {
		if err := cl.ProduceSync(t.Context(), r).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestTombstonesOfEveryClient is case C16: null stays null and empty stays empty, for keys and values, from every client, as it passes and read back; after
// cleaning the keys with tombstones are gone on the mirror as on the source.
func TestTombstonesOfEveryClient(t *testing.T) {
	t.Parallel()
	for _, program := range []string{filepath.Join(kafkatest.Root(t), ".cache", "venv", "bin", "python"), "node"} {
		if _, err := exec.LookPath(program); err != nil {
			if os.Getenv("CI") != "" {
				t.Fatal(err)
			}
			t.Skipf("%v; `make deps` installs it", err)
		}
	}
	source, mirror := clusters(t)
	topic := testbed.TopicName(t)
	compactedTopic(t, source, topic, 0)
	compactedTopic(t, mirror, topic, 0)
	plain := topic + "-plain"
	kafkatest.CreateTopic(t, source, plain, 1, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic+","+plain)
	testbed.WaitLive(t, in, topic, 1)
	testbed.WaitLive(t, in, plain, 1)
	writeTombstones(t, in.Seeds()[0], plain, "-live")
	writeTombstones(t, in.Seeds()[0], topic, "-live")
	cl := testbed.NewWriter(t, in.Seeds(), plain)
	if err := cl.ProduceSync(t.Context(), &kgo.Record{Value: []byte("without a key")}, &kgo.Record{}).FirstErr(); err != nil {
		t.Fatal(err)
	}
	kafkatest.WaitEqual(t, source, mirror, plain, patience, kafkatest.SameOffsets())
	in.Stop()
	writeTombstones(t, source.Seeds()[0], plain, "-later")
	writeTombstones(t, source.Seeds()[0], topic, "-later")
	in.Start()
	in.WaitCaughtUp(patience)
	kafkatest.WaitEqual(t, source, mirror, plain, patience, kafkatest.SameOffsets())

	// A record each 200 ms rolls the segments, until the cleaners are done.
	h := newHistory(t, source.Seeds(), topic)
	h.keys = 1
	kafkatest.Eventually(t, patience, func() error {
		h.write(1)
		for name, c := range map[string]kafkatest.Cluster{"source": source, "mirror": mirror} {
			for _, r := range kafkatest.ReadAll(t, c, topic, 0) {
				if strings.Contains(strings.ToLower(string(r.Key)), "gone") {
					return fmt.Errorf("the %s still holds key %q with value %q", name, r.Key, r.Value)
				}
			}
		}
		time.Sleep(200 * time.Millisecond)
		return nil
	})
	in.WaitCaughtUp(patience)
	equalMaps(t, source, mirror, topic)
	if m := finalMap(kafkatest.ReadAll(t, mirror, topic, 0)); len(m) != 4*2+2 && len(m) != 4*2+1 {
		t.Errorf("the mirror has %d keys in the end: %v; want the empty ones of 4 clients in 2 rounds, the empty key, and the last record's", len(m), m)
	}
}
