package kafkatest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// readTimeout bounds the reading of one topic.
const readTimeout = 2 * time.Minute

// Offsets is the range [Start, End) of a partition's log that consumers see; End is the high watermark.
type Offsets struct{ Start, End int64 }

// LogOffsets returns the offsets of every partition of topic, by partition.
func LogOffsets(t testing.TB, c Cluster, topic string) []Offsets {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
	defer cancel()
	offsets, err := settledOffsets(ctx, kadm.NewClient(c.Client(t)), topic)
	if err != nil {
		t.Fatal(err)
	}
	return offsets
}

// settledOffsets is logOffsets, asked again where a leader was elected just now and doesn't know its high watermark yet.
func settledOffsets(ctx context.Context, adm *kadm.Client, topic string) (offsets []Offsets, err error) {
	var permanent error
	err = poll(30*time.Second, func() error {
		offsets, permanent = logOffsets(ctx, adm, topic)
		if kerr.IsRetriable(permanent) && !errors.Is(permanent, kerr.UnknownTopicOrPartition) {
			return permanent
		}
		return nil
	})
	if err == nil {
		err = permanent
	}
	return offsets, err
}

func logOffsets(ctx context.Context, adm *kadm.Client, topic string) ([]Offsets, error) {
	starts, err := adm.ListStartOffsets(ctx, topic)
	if err == nil {
		err = starts.Error()
	}
	if err != nil {
		return nil, fmt.Errorf("start offsets of %s: %w", topic, err)
	}
	ends, err := adm.ListEndOffsets(ctx, topic)
	if err == nil {
		err = ends.Error()
	}
	if err != nil {
		return nil, fmt.Errorf("end offsets of %s: %w", topic, err)
	}
	offsets := make([]Offsets, len(ends[topic]))
	for p, end := range ends[topic] {
		offsets[p] = Offsets{starts[topic][p].Offset, end.Offset}
	}
	return offsets, nil
}

// ReadAll returns the records of a partition from its log start to its high watermark as of now. Records of aborted and
// of open transactions are among them unless opts have kgo.FetchIsolationLevel(kgo.ReadCommitted()); markers never are.
func ReadAll(t testing.TB, c Cluster, topic string, partition int32, opts ...kgo.Opt) []*kgo.Record {
	t.Helper()
	all, err := readTopic(t, c, topic, []int32{partition}, opts)
	if err != nil {
		t.Fatal(err)
	}
	return all[partition]
}

// ReadTopic is ReadAll for every partition of topic, by partition.
func ReadTopic(t testing.TB, c Cluster, topic string, opts ...kgo.Opt) [][]*kgo.Record {
	t.Helper()
	all, err := readTopic(t, c, topic, nil, opts)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// readTopic reads the partitions named, or all. The result is indexed by partition.
func readTopic(t testing.TB, c Cluster, topic string, only []int32, opts []kgo.Opt) ([][]*kgo.Record, error) {
	ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
	defer cancel()
	cl, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(c.Seeds()...), kgo.KeepControlRecords(), kgo.FetchMaxWait(100 * time.Millisecond)}, opts...)...)
	if err != nil {
		return nil, err
	}
	defer cl.Close()
	offsets, err := settledOffsets(ctx, kadm.NewClient(cl), topic)
	if err != nil {
		return nil, err
	}
	from := make(map[int32]kgo.Offset)
	for p, o := range offsets {
		if o.End > o.Start && (only == nil || slices.Contains(only, int32(p))) {
			from[int32(p)] = kgo.NewOffset().At(o.Start)
		}
	}
	cl.AddConsumePartitions(map[string]map[int32]kgo.Offset{topic: from})

	all := make([][]*kgo.Record, len(offsets))
	for len(from) > 0 {
		fetches := cl.PollFetches(ctx)
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("reading %s: %d partitions didn't reach %v within %v", topic, len(from), offsets, readTimeout)
		}
		fetches.EachPartition(func(p kgo.FetchTopicPartition) {
			if p.Err != nil {
				err = errors.Join(err, fmt.Errorf("reading %s partition %d: %w", topic, p.Partition, p.Err))
			}
			for _, r := range p.Records {
				end := offsets[p.Partition].End
				if r.Offset < end && !r.Attrs.IsControl() {
					all[p.Partition] = append(all[p.Partition], r)
				}
				if r.Offset >= end-1 {
					delete(from, p.Partition)
				}
			}
		})
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

// Comparison changes what Equal, WaitEqual and Diff compare.
type Comparison func(*comparison)

type comparison struct {
	offsets    bool
	mirrorName string
	foreign    func(*kgo.Record) bool
	opts       []kgo.Opt
}

// SameOffsets compares offsets too.
func SameOffsets() Comparison { return func(c *comparison) { c.offsets = true } }

// MirrorTopic names the topic on the mirror if it's called otherwise.
func MirrorTopic(name string) Comparison { return func(c *comparison) { c.mirrorName = name } }

// IgnoreForeign leaves out the mirror's records for which foreign is true: those that others wrote there.
func IgnoreForeign(foreign func(*kgo.Record) bool) Comparison {
	return func(c *comparison) { c.foreign = foreign }
}

// ReadCommitted compares what consumers with isolation level read_committed see.
func ReadCommitted() Comparison {
	return func(c *comparison) { c.opts = append(c.opts, kgo.FetchIsolationLevel(kgo.ReadCommitted())) }
}

// Equal fails the test unless each partition of topic has the same records in the same order on source and mirror:
// keys, values, headers and timestamps. It reads both with kgo alone, none of kmirror's own code.
func Equal(t testing.TB, source, mirror Cluster, topic string, how ...Comparison) {
	t.Helper()
	if err := Diff(t, source, mirror, topic, how...); err != nil {
		t.Fatal(err)
	}
}

// WaitEqual waits until Equal holds.
func WaitEqual(t testing.TB, source, mirror Cluster, topic string, timeout time.Duration, how ...Comparison) {
	t.Helper()
	cmp := newComparison(topic, how)
	sourceAdm, mirrorAdm := kadm.NewClient(source.Client(t)), kadm.NewClient(mirror.Client(t))
	Eventually(t, timeout, func() error {
		// The offsets tell cheaply that it's too early.
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		want, err := logOffsets(ctx, sourceAdm, topic)
		if err != nil {
			return err
		}
		got, err := logOffsets(ctx, mirrorAdm, cmp.mirrorName)
		if err != nil {
			return err
		}
		if cmp.opts == nil && total(got) < total(want) {
			return fmt.Errorf("mirror of %s has %d offsets of %d: %v, want %v", topic, total(got), total(want), got, want)
		}
		return Diff(t, source, mirror, topic, how...)
	})
}

func total(offsets []Offsets) (n int64) {
	for _, o := range offsets {
		n += o.End - o.Start
	}
	return n
}

func newComparison(topic string, how []Comparison) comparison {
	cmp := comparison{mirrorName: topic, foreign: func(*kgo.Record) bool { return false }}
	for _, h := range how {
		h(&cmp)
	}
	return cmp
}

// Diff says what Equal would fail with: the first differing record of each partition.
func Diff(t testing.TB, source, mirror Cluster, topic string, how ...Comparison) error {
	t.Helper()
	cmp := newComparison(topic, how)
	want, err := readTopic(t, source, topic, nil, cmp.opts)
	if err != nil {
		return fmt.Errorf("source: %w", err)
	}
	got, err := readTopic(t, mirror, cmp.mirrorName, nil, cmp.opts)
	if err != nil {
		return fmt.Errorf("mirror: %w", err)
	}
	if len(got) != len(want) {
		return fmt.Errorf("mirror of %s has %d partitions, want %d", topic, len(got), len(want))
	}
	for p := range want {
		got := slices.DeleteFunc(got[p], cmp.foreign)
		if diff := cmp.first(want[p], got); diff != nil {
			err = errors.Join(err, fmt.Errorf("%s partition %d: source has %d records, mirror %d: %w", topic, p, len(want[p]), len(got), diff))
		}
	}
	return err
}

// first describes the first difference between two lists of records.
func (cmp *comparison) first(want, got []*kgo.Record) error {
	for i := range max(len(want), len(got)) {
		switch {
		case i >= len(got):
			return fmt.Errorf("mirror ends before source %s", describe(want[i]))
		case i >= len(want):
			return fmt.Errorf("mirror has more: %s", describe(got[i]))
		case !sameRecord(want[i], got[i]) || cmp.offsets && want[i].Offset != got[i].Offset:
			return fmt.Errorf("record %d: source %s, mirror %s", i, describe(want[i]), describe(got[i]))
		}
	}
	return nil
}

// sameRecord compares what a producer sent. A null key or value isn't an empty one.
func sameRecord(a, b *kgo.Record) bool {
	return sameBytes(a.Key, b.Key) && sameBytes(a.Value, b.Value) && a.Timestamp.Equal(b.Timestamp) &&
		slices.EqualFunc(a.Headers, b.Headers, func(a, b kgo.RecordHeader) bool {
			return a.Key == b.Key && sameBytes(a.Value, b.Value)
		})
}

func sameBytes(a, b []byte) bool { return bytes.Equal(a, b) && (a == nil) == (b == nil) }

func describe(r *kgo.Record) string {
	const most = 60
	value := r.Value[:min(len(r.Value), most)]
	return fmt.Sprintf("offset %d (producer %d, %v, key %q, value %q…, %d headers)", r.Offset, r.ProducerID, r.Timestamp.UTC().Format(time.RFC3339Nano), r.Key, value, len(r.Headers))
}
