package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
)

const (
	partitions = 4
	batchBytes = 16 << 10 // Java producers' default batch.size
)

// workload is a topic full of records.
type workload struct {
	name    string
	topic   string
	records int
	size    int // value bytes
	lz4     bool
}

var workloads = []workload{
	{name: "1M x 100 B", topic: "small", records: 1_000_000, size: 100},
	{name: "500k x 1 KiB", topic: "medium", records: 500_000, size: 1024},
	{name: "500k x 1 KiB lz4", topic: "medium-lz4", records: 500_000, size: 1024, lz4: true},
}

// scaled shrinks a workload for a try.
func (w workload) scaled(by float64) workload {
	w.records = max(partitions, int(float64(w.records)*by))
	if by != 1 {
		w.name += fmt.Sprintf(" (x %g)", by)
	}
	return w
}

// bytes counts values before compression.
func (w workload) bytes() float64 { return float64(w.records) * float64(w.size) }

// load creates the workload's topic on a cluster and fills it, evenly over the partitions. Values are random but for their last
// sixteenth: franz-go doesn't compress what compression makes longer.
func (w workload) load(t testing.TB, cluster kafkatest.Cluster) {
	t.Helper()
	codec := kgo.NoCompression()
	if w.lz4 {
		codec = kgo.Lz4Compression()
	}
	kafkatest.CreateTopic(t, cluster, w.topic, partitions, 1)
	client := cluster.Client(t, kgo.DefaultProduceTopic(w.topic), kgo.ProducerBatchMaxBytes(batchBytes),
		kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchCompression(codec), kgo.MaxBufferedRecords(100_000))
	random := rand.NewChaCha8([32]byte{})
	var failure error // the first; promises run one at a time
	for i := range w.records {
		value := make([]byte, w.size)
		_, _ = random.Read(value[:w.size-w.size/16])
		client.Produce(t.Context(), &kgo.Record{Partition: int32(i % partitions), Value: value}, func(_ *kgo.Record, err error) {
			if err != nil && failure == nil {
				failure = err
			}
		})
	}
	if err := client.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if failure != nil {
		t.Fatalf("load %s: %v", w.topic, failure)
	}
}

// endOffsets sums the end offsets of a topic.
func endOffsets(ctx context.Context, admin *kadm.Client, topic string) (int64, error) {
	offsets, err := admin.ListEndOffsets(ctx, topic)
	if err == nil {
		err = offsets.Error()
	}
	var sum int64
	offsets.Each(func(o kadm.ListedOffset) { sum += o.Offset })
	return sum, err
}

// deleteTopics deletes every topic of a cluster but Kafka's own, so that the next copy starts anew.
func deleteTopics(t testing.TB, admin *kadm.Client) {
	t.Helper()
	ctx := t.Context()
	kafkatest.Eventually(t, readyTimeout, func() error {
		topics, err := admin.ListTopics(ctx) // without Kafka's internal ones
		if err != nil {
			return err
		}
		if len(topics) == 0 {
			return nil
		}
		if _, err := admin.DeleteTopics(ctx, topics.Names()...); err != nil {
			return err
		}
		return fmt.Errorf("topics %v remain: %w", topics.Names(), errNotYet)
	})
}
