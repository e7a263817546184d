package verify

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/protocol"
)

// spreadPair is a topic of two partitions, copied to three.
type spreadPair struct {
	source, mirror *kgo.Client
	topic          string
	segments       string
	writers        [2]*kgo.Client // of the mirror, for each source partition one
	given          [2][3][]*kgo.Record
}

const spreadRecords = 60 // of each source partition

func newSpreadPair(t *testing.T) *spreadPair {
	t.Helper()
	source, mirror := kafkatest.Shared(t)
	p := &spreadPair{topic: strings.ReplaceAll(t.Name(), "/", "-")}
	p.segments = p.topic + "-segments"
	manual := kgo.RecordPartitioner(kgo.ManualPartitioner())
	p.source, p.mirror = source.Client(t, manual), mirror.Client(t, manual)
	kafkatest.CreateTopic(t, source, p.topic, 2, 1)
	kafkatest.CreateTopic(t, mirror, p.topic, 3, 1)
	kafkatest.CreateTopic(t, mirror, p.segments, 1, 1)
	for of := range int32(2) {
		p.writers[of] = mirror.Client(t, manual)
		id, _, err := p.writers[of].ProducerID(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		send(t, p.mirror, &kgo.Record{Topic: p.segments, Value: fmt.Appendf(nil, `{"topic":%q,"partition":%d,"fence":{"producer_id":%d}}`, p.topic, of, id)})
		for n := range int64(spreadRecords) {
			r := record(int(of)*1000 + int(n))
			r.Topic, r.Partition = p.topic, of
			to := (n + int64(of)) % 3
			if n%2 == 0 {
				to = int64(protocol.KeyPartition(r.Key, 3))
			} else {
				r.Key = nil
			}
			send(t, p.source, r)
			p.given[of][to] = append(p.given[of][to], r)
		}
	}
	return p
}

func send(t *testing.T, client *kgo.Client, records ...*kgo.Record) {
	t.Helper()
	if err := client.ProduceSync(t.Context(), records...).FirstErr(); err != nil {
		t.Fatal(err)
	}
}

// copyTo writes what is given to each mirror partition there, taking turns among the source partitions.
func (p *spreadPair) copyTo(t *testing.T) {
	t.Helper()
	for to := range int32(3) {
		for n := range spreadRecords {
			for of := range p.given {
				if n < len(p.given[of][to]) {
					c := *p.given[of][to][n]
					c.Partition = to
					send(t, p.writers[of], &c)
				}
			}
		}
	}
}

// verify returns what was found for source partition 1 and mirror partition 2, and of all.
func (p *spreadPair) verify(t *testing.T) (Partition, Report) {
	t.Helper()
	report, err := Run(t.Context(), Options{Source: p.source, Mirror: p.mirror, Topics: func(name string) bool { return name == p.topic }, FromEarliest: true, Parallel: 2,
		Segments: p.segments, Repartition: true})
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Partitions) != 6 {
		t.Fatalf("report = %+v, want an entry for each of the 2 source partitions and 3 mirror partitions", report)
	}
	return report.Partitions[5], report
}

func TestRepartitionedIsEqual(t *testing.T) {
	p := newSpreadPair(t)
	p.copyTo(t)
	send(t, p.mirror, &kgo.Record{Topic: p.topic, Partition: 2, Value: []byte("of others")})
	got, report := p.verify(t)
	compared := int64(0)
	for _, entry := range report.Partitions {
		compared += entry.Compared
	}
	if report.Result != Equal || !report.Repartitioned || compared != 2*spreadRecords || got.Compared != int64(len(p.given[1][2])) || got.Foreign != 1 {
		t.Errorf("verify = %+v, want all %d records equal", report, 2*spreadRecords)
	}
}

func TestRepartitionedDiffers(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(p *spreadPair)
	}{
		{"a record is missing", func(p *spreadPair) { p.given[1][2] = slices.Delete(p.given[1][2], 4, 5) }},
		{"the last record is missing", func(p *spreadPair) { p.given[1][2] = p.given[1][2][:len(p.given[1][2])-1] }},
		{"a record is there twice", func(p *spreadPair) { p.given[1][2] = slices.Insert(p.given[1][2], 4, p.given[1][2][4]) }},
		{"records changed places", func(p *spreadPair) { g := p.given[1][2]; g[4], g[5] = g[5], g[4] }},
		{"a record of another partition", func(p *spreadPair) { p.given[1][2] = append(p.given[1][2], p.given[1][0][0]) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newSpreadPair(t)
			tc.change(p)
			p.copyTo(t)
			got, report := p.verify(t)
			for _, other := range report.Partitions[:5] {
				if other.Result != Equal {
					t.Errorf("%d to %d: %s, want equal", other.Partition, other.MirrorPartition, other.Summary())
				}
			}
			if got.Result != Different || report.Result != Different {
				t.Errorf("verify = %s: %s, want different", got.Result, got.Summary())
			}
		})
	}
}

// TestRepartitionedTables: where compaction took a key's copy, since another source partition has the key too, nobody can tell, and the others' last records count.
func TestRepartitionedTables(t *testing.T) {
	p := newSpreadPair(t)
	p.copyTo(t)
	// as the cleaner would leave mirror partition 2: the common key's record of source partition 1 is gone
	common := &kgo.Record{Topic: p.topic, Partition: 1, Key: []byte("key 1"), Value: []byte("older")}
	if to := protocol.KeyPartition(common.Key, 3); to != 2 {
		t.Fatalf("the common key goes to %d", to)
	}
	send(t, p.source, common)
	newer := *common
	newer.Partition, newer.Value = 0, []byte("newer")
	send(t, p.source, &newer)
	copied := newer
	copied.Partition = 2
	send(t, p.writers[0], &copied)
	if got, _ := p.verify(t); got.Result != Different {
		t.Errorf("not compacted: %s: %s, want different", got.Result, got.Summary())
	}
	setPolicy(t, p.source, p.topic, "compact")
	setPolicy(t, p.mirror, p.topic, "compact")
	if got, report := p.verify(t); report.Result != Equal || !got.Compacted || got.Changed != 1 {
		t.Errorf("compacted: %s: %s, want equal, with the common key left out", report.Result, got.Summary())
	}
}
