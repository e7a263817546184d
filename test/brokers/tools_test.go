package brokers

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// address is a host and port in what tools print, in one word or in two columns.
var address = regexp.MustCompile(`127\.0\.0\.1(?::| +)([0-9]+)`)

// TestToolsShowTheProxysAddresses is case C04: what looks brokers and coordinators up is told the proxy's addresses and connects to nothing else.
func TestToolsShowTheProxysAddresses(t *testing.T) {
	source := kafkatest.Real(t, kafkatest.IDs(1, 2, sparseID))
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 3, 3)
	in := newInstance(t, source, source, "--roles", "proxy")
	in.Start()
	own := []string{in.Seeds()[0], in.BrokerAddr(1), in.BrokerAddr(2), in.BrokerAddr(sparseID)}
	writeInGroupAndTransaction(t, in, topic)

	bootstrap := in.Seeds()[0]
	for name, tool := range map[string]struct {
		cmd  *exec.Cmd
		want int // addresses printed at least
	}{
		"kafka-topics":          {kafkatest.ToolCommand(t, "org.apache.kafka.tools.TopicCommand", "--bootstrap-server", bootstrap, "--describe", "--topic", topic), 0},
		"kafka-consumer-groups": {kafkatest.ToolCommand(t, "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand", "--bootstrap-server", bootstrap, "--describe", "--group", "tools", "--state"), 1},
		"kafka-cluster":         {kafkatest.ToolCommand(t, "org.apache.kafka.tools.ClusterTool", "list-endpoints", "--bootstrap-server", bootstrap), 3},
		"kafka-metadata-quorum": {kafkatest.ToolCommand(t, "org.apache.kafka.tools.MetadataQuorumCommand", "--bootstrap-server", bootstrap, "describe", "--replication"), 0},
		"kafka-broker-api":      {kafkatest.ToolCommand(t, "org.apache.kafka.tools.BrokerApiVersionsCommand", "--bootstrap-server", bootstrap), 3},
		"kcat":                  {need(t, exec.CommandContext(t.Context(), "kcat", "-L", "-b", bootstrap)), 3},
		"kafkajs":               {kafkajsAdmin(t, bootstrap), 3},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			tool.cmd.Stdout, tool.cmd.Stderr = &out, &out
			if err := kafkatest.Spawn(tool.cmd); err != nil {
				t.Fatal(err)
			}
			watch := testbed.WatchSockets(tool.cmd.Process.Pid)
			err := tool.cmd.Wait()
			seen := watch.Done()
			if err != nil {
				t.Fatalf("%v\n%s", err, out.String())
			}
			for _, port := range testbed.PortsOf(t, source.Seeds()) { // some tools are too quick to be seen with the proxy's
				if slices.Contains(seen, port) {
					t.Errorf("it had a connection to port %d, which is a broker's own", port)
				}
			}
			var shown []string
			for _, found := range address.FindAllStringSubmatch(out.String(), -1) {
				shown = append(shown, "127.0.0.1:"+found[1])
			}
			for _, a := range shown {
				if !slices.Contains(own, a) {
					t.Errorf("it shows %s, want the proxy's addresses %v alone:\n%s", a, own, out.String())
				}
			}
			if len(shown) < tool.want {
				t.Errorf("it shows the addresses %v, want at least %d:\n%s", shown, tool.want, out.String())
			}
		})
	}
}

// need skips where a program isn't installed, but not on CI.
func need(t *testing.T, cmd *exec.Cmd) *exec.Cmd {
	t.Helper()
	if cmd.Err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal(cmd.Err)
		}
		t.Skipf("%v; `make deps` installs it", cmd.Err)
	}
	return cmd
}

// kafkajsAdmin prints what kafkajs's describeCluster says.
func kafkajsAdmin(t *testing.T, bootstrap string) *exec.Cmd {
	cmd := need(t, exec.CommandContext(t.Context(), "node", "-e", `
const { Kafka, logLevel } = require('kafkajs')
const admin = new Kafka({ brokers: [process.argv[1]], logLevel: logLevel.ERROR }).admin()
const run = async () => {
  await admin.connect()
  for (const b of (await admin.describeCluster()).brokers) console.log(b.host + ':' + b.port)
  await admin.describeGroups(['tools'])
  await admin.disconnect()
}
run().catch(e => { console.error(e); process.exit(1) })`, bootstrap))
	cmd.Env = append(os.Environ(), "NODE_PATH="+filepath.Join(kafkatest.Root(t), ".cache", "node", "node_modules"))
	return cmd
}

// writeInGroupAndTransaction looks up both kinds of coordinator: a transactional producer writes, and a member of group tools reads.
func writeInGroupAndTransaction(t *testing.T, in *testbed.Instance, topic string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	producer := testbed.NewWriter(t, in.Seeds(), topic, kgo.TransactionalID("tools"))
	if err := producer.BeginTransaction(); err != nil {
		t.Fatal(err)
	}
	if err := producer.ProduceSync(ctx, testbed.Numbered("tools", 1)).FirstErr(); err != nil {
		t.Fatal(err)
	}
	if err := producer.EndTransaction(ctx, kgo.TryCommit); err != nil {
		t.Fatal(err)
	}
	consumer := testbed.NewWriter(t, in.Seeds(), "", kgo.ConsumerGroup("tools"), kgo.ConsumeTopics(topic), kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	for n := 0; n == 0; {
		fetches := consumer.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			t.Fatal(err)
		}
		n = fetches.NumRecords()
	}
	groups, err := kadm.NewClient(producer).DescribeGroups(ctx, "tools")
	if err != nil || groups["tools"].Err != nil {
		t.Fatal(err, groups["tools"].Err)
	}
	if c := groups["tools"].Coordinator; fmt.Sprintf("%s:%d", c.Host, c.Port) != in.BrokerAddr(c.NodeID) {
		t.Errorf("the coordinator of group tools is at %s:%d, want %s", c.Host, c.Port, in.BrokerAddr(c.NodeID))
	}
}
