package kafkatest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// OldCluster is one broker of Kafka 0.10.2.1 with its ZooKeeper: message format v1, no headers, no idempotence, no topic IDs.
type OldCluster struct {
	broker *Broker
	dir    string
	zk     *exec.Cmd
}

// OldKafka is what an old Kafka takes: 0.10 for its broker and its clients, the others for their Java clients alone.
type OldKafka struct {
	name    string // of the folder of its pom, and of its jars
	install func() (installation, error)
}

// OldKafkas are the old versions that tests use, by name.
var OldKafkas = map[string]OldKafka{
	"0.10.2": newOldKafka("kafka-0.10"),
	"0.11":   newOldKafka("kafka-clients-0.11"), // the newest that logs in by SaslHandshake v0
	"1.0":    newOldKafka("kafka-clients-1.0"),
	"2.0":    newOldKafka("kafka-clients-2.0"),
}

func newOldKafka(name string) OldKafka {
	return OldKafka{name: name, install: sync.OnceValues(func() (installation, error) {
		today, err := installed()
		if err != nil {
			return installation{}, err
		}
		root, err := repositoryRoot()
		if err != nil {
			return installation{}, err
		}
		dir := filepath.Join(root, ".cache", name)
		unlock, err := lockFile(dir + ".lock")
		if err != nil {
			return installation{}, err
		}
		defer unlock()
		if err := fetchJars(today.java, filepath.Join(root, "internal", "kafkatest", name, "pom.xml"), dir); err != nil {
			return installation{}, err
		}
		return installation{java: today.java, jars: filepath.Join(dir, "*")}, nil
	})}
}

// need is needKafka for an old Kafka.
func (k OldKafka) need(t testing.TB) installation {
	t.Helper()
	needKafka(t)
	inst, err := k.install()
	switch {
	case err == nil:
	case errors.Is(err, errMissing) && os.Getenv("CI") == "":
		t.Skipf("kafkatest: %s: %v", k.name, err)
	default:
		t.Fatalf("kafkatest: %s: %v", k.name, err)
	}
	return inst
}

// needOld is needKafka for Kafka 0.10.2.1.
func needOld(t testing.TB) installation {
	t.Helper()
	return OldKafkas["0.10.2"].need(t)
}

// CompileJava is CompileJava with an old Kafka's jars.
func (k OldKafka) CompileJava(t testing.TB, sources string) JavaProgram {
	t.Helper()
	return compileJava(t, k.need(t), sources)
}

// Old starts a Kafka 0.10.2.1 for the length of the test.
func Old(t testing.TB) *OldCluster {
	t.Helper()
	inst := needOld(t)
	c, err := newOldCluster(inst)
	if c != nil {
		t.Cleanup(c.close)
		t.Cleanup(func() {
			if t.Failed() {
				t.Log(c.broker.LogTail(30))
			}
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func newOldCluster(inst installation) (*OldCluster, error) {
	dir, err := newFolder()
	if err != nil {
		return nil, err
	}
	base, err := reservePorts(2)
	if err != nil {
		return nil, err
	}
	log4j := filepath.Join(dir, "log4j.properties")
	if err := writeProperties(log4j, map[string]string{
		"log4j.rootLogger": "WARN, out", "log4j.appender.out": "org.apache.log4j.ConsoleAppender",
		"log4j.appender.out.layout": "org.apache.log4j.PatternLayout", "log4j.appender.out.layout.ConversionPattern": "%d %p %m%n",
	}); err != nil {
		return nil, err
	}
	flags := append([]string{tmpFlag(dir), "-Xmx256m", "-Dlog4j.configuration=file:" + log4j}, quickFlags...)
	zookeeper := fmt.Sprintf("127.0.0.1:%d", base)
	c := &OldCluster{dir: dir, broker: &Broker{
		ID: 1, Addr: fmt.Sprintf("127.0.0.1:%d", base+1), inst: inst, flags: flags, dir: dir,
		config: map[string]string{
			"broker.id": "1", "listeners": fmt.Sprintf("PLAINTEXT://127.0.0.1:%d", base+1), "zookeeper.connect": zookeeper, "log.dirs": filepath.Join(dir, "data"),
			"offsets.topic.num.partitions": "4", "offsets.topic.replication.factor": "1", "auto.create.topics.enable": "false",
			"log.cleaner.dedupe.buffer.size": "16777216",
		},
	}}
	if err := c.startZooKeeper(inst, flags, base); err != nil {
		return c, err
	}
	if err := c.broker.start(); err != nil {
		return c, err
	}
	return c, c.broker.waitReady([]int32{1})
}

func (c *OldCluster) startZooKeeper(inst installation, flags []string, port int) error {
	properties := filepath.Join(c.dir, "zookeeper.properties")
	if err := writeProperties(properties, map[string]string{
		"dataDir": filepath.Join(c.dir, "zookeeper"), "clientPort": fmt.Sprint(port), "clientPortAddress": "127.0.0.1", "maxClientCnxns": "0",
	}); err != nil {
		return err
	}
	args := append(append([]string{}, flags...), "-cp", inst.jars, "org.apache.zookeeper.server.quorum.QuorumPeerMain", properties)
	c.zk = exec.Command(inst.java, args...)
	if err := Spawn(c.zk); err != nil {
		c.zk = nil
		return fmt.Errorf("kafkatest: zookeeper: %w", err)
	}
	return poll(readyTimeout, func() error {
		conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err == nil {
			conn.Close()
		}
		return err
	})
}

func (c *OldCluster) close() {
	c.broker.kill()
	if c.zk != nil {
		c.zk.Process.Kill()
		_ = c.zk.Wait() // it was killed
	}
	removeFolder(c.dir)
}

func (*OldCluster) Kind() Kind { return KindReal }

// Seeds is the broker's address.
func (c *OldCluster) Seeds() []string { return []string{c.broker.Addr} }

func (c *OldCluster) Listeners() []string { return c.Seeds() }

// Client returns a client of the cluster, without what such a broker doesn't know.
func (c *OldCluster) Client(t testing.TB, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	return newClient(t, c.Seeds(), append([]kgo.Opt{kgo.DisableIdempotentWrite()}, opts...))
}

// OldConsoleProducer lets the producer of Kafka 0.10.2.1 write lines "key:value" and waits for its end.
func OldConsoleProducer(t testing.TB, bootstrap, topic, codec string, lines ...string) {
	t.Helper()
	inst := needOld(t)
	args := append([]string{tmpFlag(scratch(t))}, quickFlags...)
	args = append(args, "-cp", inst.jars, "kafka.tools.ConsoleProducer", "--broker-list", bootstrap, "--topic", topic,
		"--compression-codec", codec, "--request-required-acks", "-1", "--property", "parse.key=true", "--property", "key.separator=:")
	cmd := exec.CommandContext(t.Context(), inst.java, args...)
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	timer := time.AfterFunc(toolTimeout, func() { cmd.Process.Kill() })
	defer timer.Stop()
	if out, err := cmd.CombinedOutput(); err != nil || strings.Contains(string(out), "Error when sending") {
		t.Fatalf("kafkatest: the old console producer: %v\n%s", err, out)
	}
}
