package topics

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// TestRepartitionedTopic: a topic of three partitions goes to one of five, on real brokers and under kill -9: each record once, where a producer would send its key, and
// in the order of its source partition.
func TestRepartitionedTopic(t *testing.T) {
	t.Parallel()
	const from, to = 3, 5
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, from, 1)
	kafkatest.CreateTopic(t, mirror, topic, to, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic, "--topics.partitions", "repartition")
	random := testbed.NewRandom(testbed.NewSeed(t), "kills")
	noKeys := testbed.NewWriter(t, in.Seeds(), topic)
	for round := range 5 {
		testbed.Write(t, in.Seeds(), topic, fmt.Sprint("keyed", round), 400)
		for i := range 100 {
			noKeys.Produce(t.Context(), &kgo.Record{Value: fmt.Append(nil, "bare", round, "-", i)}, func(_ *kgo.Record, err error) {
				if err != nil {
					t.Error(err)
				}
			})
		}
		if err := noKeys.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(testbed.Between(random, 0, 300*time.Millisecond))
		in.Kill()
		in.Start()
	}
	in.WaitCaughtUp(2 * time.Minute)

	partitioner := kgo.StickyKeyPartitioner(nil).ForTopic(topic)
	place := map[string][2]int64{} // value -> source partition and offset
	for partition, records := range kafkatest.ReadTopic(t, source, topic) {
		for _, r := range records {
			place[string(r.Value)] = [2]int64{int64(partition), r.Offset}
		}
	}
	seen := 0
	var asked []string
	for partition, records := range kafkatest.ReadTopic(t, mirror, topic) {
		var last [from]int64
		for i := range last {
			last[i] = -1
		}
		for _, r := range records {
			at, ok := place[string(r.Value)]
			if !ok {
				t.Fatalf("mirror partition %d offset %d holds %q, which the source doesn't", partition, r.Offset, r.Value)
			}
			if at[1] <= last[at[0]] {
				t.Fatalf("%q of source partition %d offset %d stands behind offset %d on mirror partition %d", r.Value, at[0], at[1], last[at[0]], partition)
			}
			last[at[0]] = at[1]
			if r.Key != nil && partitioner.Partition(&kgo.Record{Key: r.Key}, to) != partition {
				t.Errorf("key %q is in partition %d", r.Key, partition)
			}
			if seen++; at[0] == 1 && partition == 4 {
				asked = append(asked, fmt.Sprintf("%d=%d", at[1], r.Offset))
			}
		}
		if len(records) == 0 {
			t.Errorf("mirror partition %d is empty", partition)
		}
	}
	if seen != len(place) {
		t.Errorf("the mirror holds %d records of %d", seen, len(place))
	}
	wantMapped(t, in, source, mirror, topic, asked)
	args := []string{"verify", "--source", strings.Join(source.Seeds(), ","), "--mirror", strings.Join(mirror.Seeds(), ","), "--topics", topic}
	if code, out := testbed.Run(t, append(args, "--name", strings.TrimPrefix(in.Group(), "kmirror."), "--topics.partitions", "repartition")...); code != 0 || strings.Count(out, " to ") != from*to {
		t.Errorf("kmirror verify exits with %d, want 0 and %d pairs:\n%s", code, from*to, out)
	}
}

// wantMapped asks kmirror offsets for pairs source=mirror of source partition 1 and mirror partition 4.
func wantMapped(t *testing.T, in *testbed.Instance, source, mirror kafkatest.Cluster, topic string, pairs []string) {
	t.Helper()
	var offsets []string
	for _, pair := range pairs {
		offset, _, _ := strings.Cut(pair, "=")
		offsets = append(offsets, offset)
	}
	code, out := testbed.Run(t, "offsets", "--json", "--name", strings.TrimPrefix(in.Group(), "kmirror."), "--source", strings.Join(source.Seeds(), ","),
		"--mirror", strings.Join(mirror.Seeds(), ","), "--topics.partitions", "repartition", "--topic", topic, "--partition", "1", "--mirror-partition", "4",
		"--offset", strings.Join(offsets, ","))
	if code != 0 {
		t.Fatalf("kmirror offsets exits with %d: %s", code, out)
	}
	var got []string
	for lines := json.NewDecoder(strings.NewReader(out)); lines.More(); {
		var a struct {
			Source int64 `json:"source_offset"`
			Mirror int64 `json:"mirror_offset"`
		}
		if err := lines.Decode(&a); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		got = append(got, fmt.Sprintf("%d=%d", a.Source, a.Mirror))
	}
	if fmt.Sprint(got) != fmt.Sprint(pairs) {
		t.Errorf("offsets are mapped as %v, want %v", got, pairs)
	}
}
