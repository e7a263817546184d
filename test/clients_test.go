package test

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/test/clients"
	"kmirror/test/testbed"
)

// TestClients runs unchanged clients with nothing but the proxy's bootstrap address against a source of three brokers. What they wrote
// is on the mirror, with the same codec; none of them ever has a connection to a broker's own port.
func TestClients(t *testing.T) {
	source := kafkatest.Real(t, kafkatest.Brokers(3))
	_, mirror := kafkatest.Shared(t)
	in := testbed.Start(t, source, mirror, "--topics", "/clients-.*/", "--topics.replication_factor", "1")
	c := clientTest{source: source, mirror: mirror, in: in}
	c.client(t, "java", clientTest.java)
	c.client(t, "kafka's tools", clientTest.tools)
	c.client(t, "franz-go", clientTest.franz)
	for _, client := range clients.All() {
		c.client(t, client.Name, func(c clientTest, t *testing.T) { c.foreign(t, client) })
	}
	t.Run("transparent", c.sameAnswers)
}

type clientTest struct {
	source *kafkatest.RealCluster
	mirror kafkatest.Cluster
	in     *testbed.Instance
	ports  *[]int // that client processes had connections to; checked after each client
}

// client runs the test of one client, and then looks at where its processes had connections to.
func (c clientTest) client(t *testing.T, name string, test func(clientTest, *testing.T)) {
	t.Run(name, func(t *testing.T) {
		c.ports = new([]int)
		test(c, t)
		if !t.Failed() {
			testbed.WantOnlyProxy(t, name, *c.ports, c.source.Seeds(), c.proxyAddresses())
		}
	})
}

// run runs a client process to its end and returns its output. Its sockets are watched.
func (c clientTest) run(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := kafkatest.Spawn(cmd); err != nil {
		t.Fatal(err)
	}
	watch := testbed.WatchSockets(cmd.Process.Pid)
	timer := time.AfterFunc(2*time.Minute, func() { cmd.Process.Kill() })
	defer timer.Stop()
	err := cmd.Wait()
	*c.ports = append(*c.ports, watch.Done()...)
	if err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, out.String())
	}
	return out.String()
}

// tool runs one of Kafka's command line tools.
func (c clientTest) tool(t *testing.T, class string, args ...string) string {
	t.Helper()
	return c.run(t, kafkatest.ToolCommand(t, class, args...))
}

// proxyAddresses are the bootstrap listener's and the brokers' listeners.
func (c clientTest) proxyAddresses() []string {
	addresses := slices.Clone(c.in.Seeds())
	for _, b := range c.source.Brokers() {
		addresses = append(addresses, c.in.BrokerAddr(b.ID))
	}
	return addresses
}

// settled waits until a topic's records are equal on both sides, codecs too, and returns its records, of all partitions, on the mirror.
func (c clientTest) settled(t *testing.T, topic string) (records []*kgo.Record) {
	t.Helper()
	kafkatest.WaitEqual(t, c.source, c.mirror, topic, time.Minute, kafkatest.SameOffsets())
	sent := kafkatest.ReadTopic(t, c.source, topic)
	for p, partition := range kafkatest.ReadTopic(t, c.mirror, topic) {
		for i, r := range partition {
			if got, want := r.Attrs.CompressionType(), sent[p][i].Attrs.CompressionType(); got != want {
				t.Fatalf("%s partition %d offset %d has codec %s on the mirror, %s on the source", topic, p, r.Offset, codecs[got], codecs[want])
			}
		}
		records = append(records, partition...)
	}
	return records
}

// wantCodec fails unless records came with a codec, numbered as in batch attributes. Clients send what doesn't shrink without one.
func wantCodec(t *testing.T, records []*kgo.Record, codec uint8) {
	t.Helper()
	used := 0
	for _, r := range records {
		switch got := r.Attrs.CompressionType(); got {
		case codec:
			used++
		case 0:
		default:
			t.Fatalf("%s partition %d offset %d has codec %s, want %s", r.Topic, r.Partition, r.Offset, codecs[got], codecs[codec])
		}
	}
	if used == 0 {
		t.Fatalf("none of %d records has codec %s", len(records), codecs[codec])
	}
}

// codecs by their numbers in a batch's attributes.
var codecs = []string{"none", "gzip", "snappy", "lz4", "zstd"}

const performance = "org.apache.kafka.tools.ProducerPerformance"

func (c clientTest) java(t *testing.T) {
	bootstrap := c.in.Seeds()[0]
	c.tool(t, "org.apache.kafka.tools.TopicCommand", "--bootstrap-server", bootstrap, "--create", "--topic", "clients-java",
		"--partitions", "6", "--replication-factor", "3")
	produce := func(t *testing.T, topic string, properties ...string) {
		t.Helper()
		properties = append([]string{"bootstrap.servers=" + bootstrap}, properties...)
		out := c.tool(t, performance, append([]string{"--topic", topic, "--num-records", "5000", "--record-size", "300", "--throughput", "-1",
			"--producer-props"}, properties...)...)
		if !strings.Contains(out, "5000 records sent") {
			t.Fatalf("ProducerPerformance %q printed\n%s", properties, out)
		}
	}
	for _, properties := range [][]string{
		{"acks=all", "enable.idempotence=true"}, {"acks=all", "enable.idempotence=false"},
		{"acks=1", "enable.idempotence=false"}, {"acks=0", "enable.idempotence=false"},
	} {
		produce(t, "clients-java", properties...)
	}
	if got := len(c.settled(t, "clients-java")); got != 20_000 {
		t.Errorf("the mirror has %d records, want 20000", got)
	}
	for number, codec := range codecs[1:] {
		topic := "clients-java-" + codec
		kafkatest.CreateTopic(t, c.source, topic, 3, 3)
		produce(t, topic, "acks=all", "compression.type="+codec)
		wantCodec(t, c.settled(t, topic), uint8(number+1))
	}
	c.javaGroup(t, bootstrap)
}

// javaGroup consumes through the proxy in a group, and asks for the group through it.
func (c clientTest) javaGroup(t *testing.T, bootstrap string) {
	out := c.tool(t, "org.apache.kafka.tools.consumer.ConsoleConsumer", "--bootstrap-server", bootstrap, "--topic", "clients-java",
		"--group", "java-readers", "--from-beginning", "--max-messages", "20000", "--timeout-ms", "60000")
	if got := strings.Count(out, "\n"); got < 20_000 {
		t.Errorf("the console consumer printed %d lines, want 20000", got)
	}
	out = c.tool(t, "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand", "--bootstrap-server", bootstrap, "--describe", "--group", "java-readers")
	lag := groupLag(t, out, "clients-java")
	if len(lag) != 6 {
		t.Errorf("the group command printed lags %v for clients-java, want 6 of them:\n%s", lag, out)
	}
	for partition, n := range lag {
		if n != 0 {
			t.Errorf("lag of partition %d = %d, want 0", partition, n)
		}
	}
}

// tools runs what an operator runs (case C04): it works, and what it prints names the proxy, never a broker's own address.
func (c clientTest) tools(t *testing.T) {
	at := []string{"--bootstrap-server", c.in.Seeds()[0]}
	for class, args := range map[string][]string{
		"org.apache.kafka.tools.BrokerApiVersionsCommand": at,
		"org.apache.kafka.tools.MetadataQuorumCommand":    append(slices.Clone(at), "describe", "--status"),
		"org.apache.kafka.tools.TopicCommand":             append(slices.Clone(at), "--describe", "--topic", "clients-java"),
		"org.apache.kafka.tools.LogDirsCommand":           append(slices.Clone(at), "--describe", "--topic-list", "clients-java"),
	} {
		out := c.tool(t, class, args...)
		if out == "" {
			t.Errorf("%s printed nothing", class)
		}
		for _, address := range c.source.Seeds() {
			if strings.Contains(out, address) {
				t.Errorf("%s names %s, a broker's own address:\n%s", class, address, out)
			}
		}
	}
}

// groupLag reads the lags of a topic from what kafka-consumer-groups --describe prints, by partition.
func groupLag(t testing.TB, out, topic string) map[int]int64 {
	t.Helper()
	lags := map[int]int64{}
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		if len(fields) < 6 || fields[1] != topic {
			continue
		}
		var partition int
		var lag int64
		if _, err := fmt.Sscan(fields[2]+" "+fields[5], &partition, &lag); err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		lags[partition] = lag
	}
	return lags
}

// dialedPorts makes a franz-go client note where it connects to.
type dialedPorts struct {
	mu        sync.Mutex
	addresses []string
}

func (d *dialedPorts) dial(ctx context.Context, network, address string) (net.Conn, error) {
	d.mu.Lock()
	d.addresses = append(d.addresses, address)
	d.mu.Unlock()
	return (&net.Dialer{}).DialContext(ctx, network, address)
}

func (c clientTest) franz(t *testing.T) {
	dialed := &dialedPorts{}
	dial := kgo.Dialer(dialed.dial)
	admin := kadm.NewClient(testbed.NewWriter(t, c.in.Seeds(), "", dial))
	variants := []struct {
		name string
		opts []kgo.Opt
	}{
		{"idempotent", nil},
		{"acks-all", []kgo.Opt{kgo.DisableIdempotentWrite()}},
		{"acks-1", testbed.WithAcks(kgo.LeaderAck())},
		// Last, when all partitions have been written to: a broker that doesn't know yet that it leads one drops what asks for no answer.
		{"acks-0", testbed.WithAcks(kgo.NoAck())},
	}
	for i, codec := range []kgo.CompressionCodec{kgo.NoCompression(), kgo.GzipCompression(), kgo.SnappyCompression(), kgo.Lz4Compression(), kgo.ZstdCompression()} {
		topic := "clients-franz-" + codecs[i]
		if _, err := admin.CreateTopic(t.Context(), 6, 3, nil, topic); err != nil {
			t.Fatal(err)
		}
		for _, v := range variants {
			testbed.Write(t, c.in.Seeds(), topic, v.name, 500, append([]kgo.Opt{dial, kgo.ProducerBatchCompression(codec)}, v.opts...)...)
		}
		records := c.settled(t, topic)
		if len(records) != 2000 {
			t.Errorf("%s has %d records, want 2000", topic, len(records))
		}
		wantCodec(t, records, uint8(i))
	}
	c.franzGroup(t, "clients-franz-none", 2000, dial)
	dialed.mu.Lock()
	defer dialed.mu.Unlock()
	*c.ports = testbed.PortsOf(t, dialed.addresses)
}

// franzGroup reads a topic with a group of three members through the proxy, once, and commits.
func (c clientTest) franzGroup(t *testing.T, topic string, want int, dial kgo.Opt) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	seen := make(chan string, want)
	var members sync.WaitGroup
	for range 3 {
		cl := testbed.NewWriter(t, c.in.Seeds(), "", dial, kgo.ConsumerGroup("franz-readers"), kgo.ConsumeTopics(topic),
			kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
		members.Go(func() {
			defer cl.LeaveGroupContext(context.Background())
			for {
				fetches := cl.PollFetches(ctx)
				if fetches.IsClientClosed() || ctx.Err() != nil {
					return
				}
				fetches.EachRecord(func(r *kgo.Record) { seen <- string(r.Value) })
			}
		})
	}
	values := map[string]bool{}
	for len(values) < want {
		select {
		case value := <-seen:
			values[value] = true
		case <-ctx.Done():
			t.Errorf("the group read %d records, want %d", len(values), want)
			members.Wait()
			return
		}
	}
	cancel()
	members.Wait()
}

// foreign runs a client of another make: every codec, every kind of acknowledgement, and a group.
func (c clientTest) foreign(t *testing.T, client clients.Client) {
	topic := "clients-" + client.Name
	if _, err := kadm.NewClient(testbed.NewWriter(t, c.in.Seeds(), "")).CreateTopic(t.Context(), 4, 3, nil, topic); err != nil {
		t.Fatal(err)
	}
	const each = 300
	want := map[string]int{}
	produce := func(prefix, codec, acks string, idempotent bool) {
		t.Helper()
		c.run(t, client.Producer(t, clients.Production{
			Bootstrap: c.in.Seeds()[0], Topic: topic, Prefix: prefix, Count: each, Acks: acks, Codec: codec, Idempotent: idempotent,
		}))
		for i := range each {
			want[fmt.Sprintf("%s-%d", prefix, i)] = 1
		}
	}
	for i, codec := range client.Codecs {
		produce("codec."+codec, codec, "all", i%2 == 0)
	}
	produce("acks1", "none", "1", false)
	produce("acks0", client.Codecs[len(client.Codecs)-1], "0", false)

	got, sent := map[string]int{}, map[string][]*kgo.Record{}
	for _, r := range c.settled(t, topic) {
		value := string(r.Value)
		got[value]++
		if codec, ok := strings.CutPrefix(value, "codec."); ok {
			codec, _, _ = strings.Cut(codec, "-")
			sent[codec] = append(sent[codec], r)
		}
	}
	for codec, records := range sent {
		wantCodec(t, records, uint8(slices.Index(codecs, codec)))
	}
	if !maps.Equal(got, want) {
		t.Errorf("the mirror has %d records, want the %d that were written, each once", len(got), len(want))
	}
	out := c.run(t, client.Consumer(t, c.in.Seeds()[0], topic, "readers-"+client.Name, len(want)))
	if read := strings.Fields(out); len(read) != len(want) {
		t.Errorf("the group consumer printed %d values, want %d", len(read), len(want))
	}
}

// sameAnswers compares what the proxy answers with what the brokers do (G2): errors and offsets are the source's.
func (c clientTest) sameAnswers(t *testing.T) {
	kafkatest.CreateTopic(t, c.source, "clients-answers", 1, 3, "max.message.bytes", "20000")
	ask := func(seeds []string, r *kgo.Record) (int64, error) {
		cl := testbed.NewWriter(t, seeds, "clients-answers", kgo.ProducerBatchMaxBytes(1<<20), kgo.MaxProduceRequestsInflightPerBroker(1), kgo.RecordRetries(0),
			kgo.ProducerBatchCompression(kgo.NoCompression()))
		defer cl.Close()
		got, err := cl.ProduceSync(t.Context(), r).First()
		if err != nil {
			return -1, err
		}
		return got.Offset, nil
	}
	for i := range int64(3) {
		offset, err := ask(c.in.Seeds(), testbed.Numbered("answers", int(i)))
		if err != nil || offset != i {
			t.Errorf("record %d: offset %d, error %v; want offset %d", i, offset, err, i)
		}
	}
	for name, r := range map[string]*kgo.Record{
		"too large":      {Value: bytes.Repeat([]byte("x"), 30_000)},
		"from tomorrow":  {Value: []byte("x"), Timestamp: time.Now().Add(48 * time.Hour)},
		"no such topic":  {Topic: "clients-absent", Value: []byte("x")},
		"internal topic": {Topic: "__consumer_offsets", Value: []byte("x")},
	} {
		direct, through := *r, *r
		_, want := ask(c.source.Seeds(), &direct)
		_, got := ask(c.in.Seeds(), &through)
		if want == nil || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: through the proxy %v, directly %v", name, got, want)
		}
	}
	c.settled(t, "clients-answers")
}
