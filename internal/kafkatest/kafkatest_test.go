package kafkatest

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

func TestMain(m *testing.M) { Main(m) }

// TestKafkaIsInstalled is run before all other tests by the Makefile, so that no other test's time goes into downloads.
func TestKafkaIsInstalled(t *testing.T) {
	needKafka(t)
	for _, old := range OldKafkas {
		old.need(t)
	}
}

// produce writes n records with acks=all to partition 0 and returns their values.
func produce(t *testing.T, c Cluster, topic, prefix string, n int) []string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cl := c.Client(t, kgo.RecordPartitioner(kgo.ManualPartitioner()))
	var values []string
	for i := range n {
		value := fmt.Sprintf("%s-%d", prefix, i)
		r := &kgo.Record{Topic: topic, Key: []byte("k"), Value: []byte(value), Headers: []kgo.RecordHeader{{Key: "h"}}}
		if err := cl.ProduceSync(ctx, r).FirstErr(); err != nil {
			t.Fatalf("produce: %v", err)
		}
		values = append(values, value)
	}
	return values
}

func wantValues(t *testing.T, records []*kgo.Record, want []string) {
	t.Helper()
	var got []string
	for _, r := range records {
		got = append(got, string(r.Value))
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Fatalf("values = %q, want %q", got, want)
	}
}

func TestEachKindKeepsRecords(t *testing.T) {
	Each(t, func(t *testing.T, c Cluster) {
		CreateTopic(t, c, "keeps", 3, 1, "max.message.bytes", "20000")
		want := produce(t, c, "keeps", "v", 5)
		wantValues(t, ReadAll(t, c, "keeps", 0), want)
		if got := LogOffsets(t, c, "keeps"); got[0] != (Offsets{0, 5}) || got[2] != (Offsets{}) || len(got) != 3 {
			t.Errorf("LogOffsets = %v, want [{0 5} {0 0} {0 0}]", got)
		}
	})
}

func TestBrokerKeepsItsLogOverKillAndStop(t *testing.T) {
	c := Real(t)
	CreateTopic(t, c, "kept", 1, 1)
	b := c.Broker(1)
	want := produce(t, c, "kept", "before", 3)
	addr, pid := b.Addr, b.PID()
	b.Kill(t)
	if b.PID() != 0 {
		t.Errorf("PID() = %d after Kill, want 0", b.PID())
	}
	b.Start(t)
	if b.Addr != addr || b.PID() == pid || b.PID() == 0 {
		t.Errorf("after Start: address %s, process %d; want address %s and another process than %d", b.Addr, b.PID(), addr, pid)
	}
	wantValues(t, ReadAll(t, c, "kept", 0), want)
	want = append(want, produce(t, c, "kept", "after", 2)...)
	b.Restart(t)
	wantValues(t, ReadAll(t, c, "kept", 0), want)
}

func TestThreeBrokersGoOnWithoutOne(t *testing.T) {
	c := Real(t, Brokers(3), Config("min.insync.replicas", "2"))
	CreateTopic(t, c, "three", 1, 3)
	c.WaitInSync(t)
	c.Broker(1).Kill(t)
	want := produce(t, c, "three", "without", 3)
	c.Broker(1).Start(t)
	c.WaitInSync(t)
	want = append(want, produce(t, c, "three", "with", 3)...)
	c.Kill(t)
	c.Start(t)
	wantValues(t, ReadAll(t, c, "three", 0), want)
}

func TestFrozenBrokerAnswersAfterThaw(t *testing.T) {
	c := Real(t)
	CreateTopic(t, c, "frozen", 1, 1)
	c.Broker(1).Freeze(t)
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	if err := c.Client(t).Ping(ctx); err == nil {
		t.Error("a frozen broker answers")
	}
	c.Broker(1).Thaw(t)
	want := produce(t, c, "frozen", "thawed", 1)
	wantValues(t, ReadAll(t, c, "frozen", 0), want)
}

func TestDiffNamesWhatDiffers(t *testing.T) {
	source, mirror := Fake(t), Fake(t)
	ctx := context.Background()
	write := func(c Cluster, topic string, records ...kgo.Record) {
		t.Helper()
		CreateTopic(t, c, topic, 1, 1)
		for _, r := range records {
			r.Topic, r.Timestamp = topic, time.UnixMilli(1700000000000)
			if err := c.Client(t).ProduceSync(ctx, &r).FirstErr(); err != nil {
				t.Fatal(err)
			}
		}
	}
	a, b := kgo.Record{Value: []byte("a")}, kgo.Record{Value: []byte("b")}
	for _, tc := range []struct {
		name           string
		source, mirror []kgo.Record
		want           string
	}{
		{"equal", []kgo.Record{a, b}, []kgo.Record{a, b}, ""},
		{"missing", []kgo.Record{a, b}, []kgo.Record{a}, "mirror ends before"},
		{"doubled", []kgo.Record{a, b}, []kgo.Record{a, b, b}, "mirror has more"},
		{"swapped", []kgo.Record{a, b}, []kgo.Record{b, a}, "record 0"},
		{"null-became-empty", []kgo.Record{{}}, []kgo.Record{{Value: []byte{}}}, "record 0"},
		{"header-lost", []kgo.Record{{Headers: []kgo.RecordHeader{{Key: "h"}}}}, []kgo.Record{{}}, "record 0"},
	} {
		write(source, tc.name, tc.source...)
		write(mirror, tc.name, tc.mirror...)
		got := fmt.Sprint(Diff(t, source, mirror, tc.name))
		if tc.want == "" && got != "<nil>" || !strings.Contains(got, tc.want) {
			t.Errorf("Diff of %s = %v, want %q", tc.name, got, tc.want)
		}
	}
}

func TestToolsRun(t *testing.T) {
	source, _ := Shared(t)
	CreateTopic(t, source, "tools", 1, 1)
	out := Tool(t, "org.apache.kafka.tools.ProducerPerformance", "--topic", "tools", "--num-records", "10", "--record-size", "10",
		"--throughput", "-1", "--producer-props", "bootstrap.servers="+source.Seeds()[0], "acks=all")
	if !strings.Contains(out, "10 records sent") {
		t.Errorf("ProducerPerformance printed %q", out)
	}
	if n := len(ReadAll(t, source, "tools", 0)); n != 10 {
		t.Errorf("%d records on the broker, want 10", n)
	}
}
