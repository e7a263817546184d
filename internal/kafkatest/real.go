package kafkatest

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"
)

// RealCluster is Apache Kafka in KRaft mode. Every broker is a controller too, so of three brokers any one may die and the
// others go on, as the quorum of three controllers does.
type RealCluster struct {
	brokers []*Broker
	dir     string
	// ID is the cluster ID.
	ID string
}

// Real starts a cluster for the length of the test. If the test fails, the ends of the brokers' logs are shown.
func Real(t testing.TB, opts ...Option) *RealCluster {
	t.Helper()
	inst := needKafka(t)
	c, err := newRealCluster(inst, newOptions(opts))
	if c != nil {
		t.Cleanup(c.close)
		t.Cleanup(func() { c.showLogs(t) })
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (*RealCluster) Kind() Kind { return KindReal }

func (c *RealCluster) Seeds() []string {
	var seeds []string
	for _, b := range c.brokers {
		seeds = append(seeds, b.Addr)
	}
	return seeds
}

func (c *RealCluster) Listeners() []string {
	all := c.Seeds()
	for _, b := range c.brokers {
		all = slices.AppendSeq(all, maps.Values(b.listeners))
	}
	return all
}

func (c *RealCluster) Client(t testing.TB, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	return newClient(t, c.Seeds(), opts)
}

// Broker returns the broker with that ID; they count from 1 unless IDs says otherwise. nil if there is none.
func (c *RealCluster) Broker(id int32) *Broker {
	for _, b := range c.brokers {
		if b.ID == id {
			return b
		}
	}
	return nil
}

// Brokers returns all brokers.
func (c *RealCluster) Brokers() []*Broker { return c.brokers }

// Stop ends all brokers cleanly, together.
func (c *RealCluster) Stop(t testing.TB) { c.endAll(t, syscall.SIGTERM) }

// Kill ends all brokers with kill -9.
func (c *RealCluster) Kill(t testing.TB) { c.endAll(t, syscall.SIGKILL) }

// Start starts all brokers after Stop or Kill and waits until they serve.
func (c *RealCluster) Start(t testing.TB) {
	t.Helper()
	if err := c.start(); err != nil {
		t.Fatal(err)
	}
}

// WaitInSync waits until every replica of every partition is in sync, as a test wants before it takes the next broker down.
func (c *RealCluster) WaitInSync(t testing.TB) {
	t.Helper()
	adm := kadm.NewClient(c.Client(t))
	Eventually(t, readyTimeout, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		topics, err := adm.ListTopicsWithInternal(ctx)
		if err != nil {
			return err
		}
		topics.EachPartition(func(p kadm.PartitionDetail) {
			if p.Err != nil || p.Leader < 0 || len(p.ISR) < len(p.Replicas) {
				err = fmt.Errorf("%s partition %d: leader %d, in sync %v of %v, error %v", p.Topic, p.Partition, p.Leader, p.ISR, p.Replicas, p.Err)
			}
		})
		return err
	})
}

func (c *RealCluster) endAll(t testing.TB, sig syscall.Signal) {
	t.Helper()
	var g errgroup.Group
	for _, b := range c.brokers {
		g.Go(func() error { b.end(t, sig); return nil })
	}
	g.Wait()
}

// newRealCluster returns the cluster also with an error, for close.
func newRealCluster(inst installation, o options) (*RealCluster, error) {
	dir, err := newFolder()
	if err != nil {
		return nil, err
	}
	c := &RealCluster{dir: dir, ID: newID()}
	base, err := reservePorts((2 + len(o.listeners)) * o.brokers)
	if err != nil {
		return c, err
	}
	var voters []string
	var g errgroup.Group
	ids := o.ids
	for i := range o.brokers {
		if len(o.ids) == 0 {
			ids = append(ids, int32(i+1))
		}
		voters = append(voters, fmt.Sprintf("%d@127.0.0.1:%d", ids[i], base+o.brokers+i))
	}
	for i, id := range ids {
		b := &Broker{ID: id, Addr: fmt.Sprintf("127.0.0.1:%d", base+i), inst: inst, dir: filepath.Join(dir, strconv.Itoa(int(id)))}
		b.flags, b.listeners = jvmFlags(inst, b.dir, o), make(map[string]string)
		for j, l := range o.listeners {
			b.listeners[l.name] = fmt.Sprintf("127.0.0.1:%d", base+(2+j)*o.brokers+i)
		}
		b.config = brokerConfig(o, b, strings.Join(voters, ","), base+o.brokers+i)
		c.brokers = append(c.brokers, b)
	}
	for _, b := range c.brokers {
		g.Go(func() error { return c.format(b) })
	}
	if err := g.Wait(); err != nil {
		return c, err
	}
	return c, c.start()
}

// newID makes a cluster ID: 16 random bytes in URL-safe base64.
func newID() string {
	id := make([]byte, 16)
	rand.Read(id)
	id[0] &= 0x7f // Kafka's tools take an ID that begins with '-' for an option
	return base64.RawURLEncoding.EncodeToString(id)
}

// quickFlags suit a process that lives for seconds: the quick compiler alone, which needs half the CPU time until a broker
// serves, and one collector thread.
var quickFlags = []string{"-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"}

// commonFlags load classes from the archive, if there is one, and say no word about one that doesn't fit. Into tmp go the
// native libraries that Kafka's jars unpack, and which a process that is killed leaves.
func commonFlags(inst installation, tmp string) []string {
	flags := []string{tmpFlag(tmp), "-Xshare:auto", "-Xlog:cds=off", "-Xlog:cds+dynamic=off", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"}
	if inst.archive != "" {
		flags = append(flags, "-XX:SharedArchiveFile="+inst.archive)
	}
	return flags
}

func tmpFlag(dir string) string { return "-Djava.io.tmpdir=" + dir }

func toolFlags(inst installation, tmp string) []string {
	return append(commonFlags(inst, tmp), quickFlags...)
}

func jvmFlags(inst installation, tmp string, o options) []string {
	flags := commonFlags(inst, tmp)
	if !o.optimized {
		flags = append(flags, quickFlags...)
	}
	level := os.Getenv("KMIRROR_KAFKA_LOG")
	if level == "" {
		level = "warn"
	}
	flags = append(flags, "-Xmx"+o.heap, "-Dorg.slf4j.simpleLogger.defaultLogLevel="+level,
		"-Dorg.slf4j.simpleLogger.showDateTime=true", "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
		"-Dorg.slf4j.simpleLogger.log.org.apache.kafka.common.config=error", // unused settings
		"-Dorg.slf4j.simpleLogger.log.org.apache.kafka.clients.NetworkClient=error")
	return append(flags, o.jvm...)
}

// brokerConfig is a broker as production has it, but small: few internal partitions, few threads, quick to notice a death.
func brokerConfig(o options, b *Broker, voters string, controllerPort int) map[string]string {
	replicas := strconv.Itoa(min(o.brokers, 3))
	minISR := strconv.Itoa(min(o.brokers, 2))
	config := map[string]string{
		"process.roles":                  "broker,controller",
		"node.id":                        strconv.Itoa(int(b.ID)),
		"controller.quorum.voters":       voters,
		"controller.listener.names":      "CONTROLLER",
		"inter.broker.listener.name":     "PLAINTEXT",
		"listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
		"listeners":                      fmt.Sprintf("PLAINTEXT://%s,CONTROLLER://127.0.0.1:%d", b.Addr, controllerPort),
		"advertised.listeners":           "PLAINTEXT://" + b.Addr,
		"log.dirs":                       b.DataDir(),

		"auto.create.topics.enable":  "false",
		"default.replication.factor": replicas,

		"offsets.topic.num.partitions":                     "4",
		"offsets.topic.replication.factor":                 replicas,
		"transaction.state.log.num.partitions":             "4",
		"transaction.state.log.replication.factor":         replicas,
		"transaction.state.log.min.isr":                    minISR,
		"share.coordinator.state.topic.num.partitions":     "1",
		"share.coordinator.state.topic.replication.factor": replicas,
		"share.coordinator.state.topic.min.isr":            minISR,
		"group.initial.rebalance.delay.ms":                 "0",
		"group.min.session.timeout.ms":                     "1000",

		"broker.session.timeout.ms":    "3000",
		"broker.heartbeat.interval.ms": "500",

		"controller.quorum.fetch.timeout.ms":        "1000",
		"controller.quorum.election.timeout.ms":     "500",
		"controller.quorum.election.backoff.max.ms": "300",

		"num.network.threads": "2",
		"num.io.threads":      "4",
		"background.threads":  "2",

		"num.recovery.threads.per.data.dir": "1",
		"log.cleaner.dedupe.buffer.size":    "16777216", // of the heap; the default is 128 MiB
	}
	for _, l := range o.listeners {
		config["listeners"] += "," + l.name + "://" + b.listeners[l.name]
		config["advertised.listeners"] += "," + l.name + "://" + cmp.Or(l.advertised, b.listeners[l.name])
		config["listener.security.protocol.map"] += "," + l.name + ":" + l.protocol
	}
	maps.Copy(config, o.config)
	return config
}

// format prepares a broker's folder.
func (c *RealCluster) format(b *Broker) error {
	if err := os.MkdirAll(b.dir, 0o777); err != nil {
		return err
	}
	properties := filepath.Join(b.dir, "server.properties")
	if err := writeProperties(properties, b.config); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	args := append(toolFlags(b.inst, b.dir), "-cp", b.inst.jars, "kafka.tools.StorageTool", "format", "-t", c.ID, "-c", properties)
	if out, err := exec.CommandContext(ctx, b.inst.java, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("kafkatest: format broker %d: %w\n%s", b.ID, err, out)
	}
	return nil
}

// start starts all brokers and waits until each knows all others.
func (c *RealCluster) start() error {
	var ids []int32
	for _, b := range c.brokers {
		ids = append(ids, b.ID)
		if err := b.start(); err != nil {
			return err
		}
	}
	var g errgroup.Group
	for _, b := range c.brokers {
		g.Go(func() error { return b.waitReady(ids) })
	}
	return g.Wait()
}

func (c *RealCluster) showLogs(t testing.TB) {
	if !t.Failed() {
		return
	}
	for _, b := range c.brokers {
		t.Log(b.LogTail(30))
	}
}

// close ends what is left and removes the folders.
func (c *RealCluster) close() {
	for _, b := range c.brokers {
		b.kill()
	}
	removeFolder(c.dir)
}
