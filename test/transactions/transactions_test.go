package transactions

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kversion"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

const patience = 2 * time.Minute

// transactor writes transactions to one partition.
type transactor struct {
	t         testing.TB
	cl        *kgo.Client
	prefix    string
	partition int32
	n         int
}

// newTransactor speaks the transaction protocol of a Kafka release: v2 (KIP-890) from 4.0 on.
func newTransactor(t testing.TB, seeds []string, topic, prefix string, partition int32, release *kversion.Versions) *transactor {
	t.Helper()
	return &transactor{t: t, prefix: prefix, partition: partition, cl: testbed.NewWriter(t, seeds, topic, kgo.TransactionalID(topic+prefix),
		kgo.MaxVersions(release), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.TransactionTimeout(time.Minute))}
}

// begin opens a transaction and writes n records in it, which are on the source's disk then.
func (x *transactor) begin(ctx context.Context, n int) {
	if err := x.cl.BeginTransaction(); err != nil {
		x.t.Error(err)
	}
	for range n {
		r := testbed.Numbered(x.prefix, x.n)
		r.Partition = x.partition
		x.n++
		x.cl.Produce(ctx, r, func(_ *kgo.Record, err error) {
			if err != nil {
				x.t.Errorf("%s: %v", x.prefix, err)
			}
		})
	}
	if err := x.cl.Flush(ctx); err != nil {
		x.t.Error(err)
	}
}

func (x *transactor) end(ctx context.Context, commit bool) {
	if err := x.cl.EndTransaction(ctx, kgo.TransactionEndTry(commit)); err != nil {
		x.t.Errorf("%s: %v", x.prefix, err)
	}
}

// sameEnds checks that the logs end at the same offsets.
func sameEnds(t testing.TB, source, mirror kafkatest.Cluster, topic string) {
	t.Helper()
	kafkatest.Eventually(t, patience, func() error {
		want, got := fmt.Sprint(kafkatest.LogOffsets(t, source, topic)), fmt.Sprint(kafkatest.LogOffsets(t, mirror, topic))
		if want != got {
			return fmt.Errorf("the mirror's log is at %s, the source's at %s", got, want)
		}
		return nil
	})
}

// equal compares what readers see: those of the source with read_committed, those of the mirror in either isolation level.
func equal(t testing.TB, source, mirror kafkatest.Cluster, topic string, how ...kafkatest.Comparison) {
	t.Helper()
	kafkatest.WaitEqual(t, source, mirror, topic, patience, append(how, kafkatest.ReadCommitted())...)
	for p, records := range kafkatest.ReadTopic(t, mirror, topic) {
		committed := kafkatest.ReadAll(t, mirror, topic, int32(p), kgo.FetchIsolationLevel(kgo.ReadCommitted()))
		if len(records) != len(committed) {
			t.Errorf("partition %d: %d records with read_uncommitted, %d with read_committed", p, len(records), len(committed))
		}
	}
}

// TestEveryShapeKeepsItsOffsets: producers of both transaction protocols interleave commits and aborts with plain records, one transaction hangs, and kmirror is killed in
// between; with topics.offsets=identical every record has its source's offset and both logs end alike.
func TestEveryShapeKeepsItsOffsets(t *testing.T) {
	t.Parallel()
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 2, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic, "--topics.offsets", "identical")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var running sync.WaitGroup
	for i, release := range []*kversion.Versions{kversion.V3_6_0(), kversion.Stable()} {
		x := newTransactor(t, in.Seeds(), topic, fmt.Sprint("v", i+1), 0, release)
		running.Go(func() {
			for n := range 12 {
				x.begin(ctx, n%5)
				x.end(ctx, n%3 != 1)
			}
		})
	}
	running.Go(func() {
		for i := range 6 {
			testbed.Write(t, in.Seeds(), topic, fmt.Sprint("plain", i), 7)
		}
	})
	running.Wait()
	equal(t, source, mirror, topic, kafkatest.SameOffsets())
	sameEnds(t, source, mirror, topic)

	hanging := newTransactor(t, in.Seeds(), topic, "hanging", 1, kversion.Stable())
	hanging.begin(ctx, 3)
	behind := newTransactor(t, source.Seeds(), topic, "behind", 1, kversion.Stable())
	before := kafkatest.LogOffsets(t, mirror, topic)[1].End
	for range 3 {
		behind.begin(ctx, 2)
		behind.end(ctx, true)
	}
	in.WaitCaughtUp(patience) // with all that can be known to be committed
	if end := kafkatest.LogOffsets(t, mirror, topic)[1].End; end != before {
		t.Errorf("the mirror went on to offset %d behind an open transaction at %d", end, before)
	}
	in.Kill()
	in.Start()
	hanging.cl = newTransactor(t, source.Seeds(), topic, "hanging", 1, kversion.Stable()).cl // aborts what hangs
	hanging.begin(ctx, 1)
	hanging.end(ctx, true)
	equal(t, source, mirror, topic, kafkatest.SameOffsets())
	sameEnds(t, source, mirror, topic)
	in.WaitCaughtUp(patience)
}

// TestMarkersKeepOffsetsUnderKills: with the default settings each commit costs one empty transaction on the mirror, and a kill -9 at any moment, also between those, leaves
// offsets as they were.
func TestMarkersKeepOffsetsUnderKills(t *testing.T) {
	t.Parallel()
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 1, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	x := newTransactor(t, source.Seeds(), topic, "txn", 0, kversion.Stable())
	random := testbed.NewRandom(testbed.NewSeed(t), "kills")
	done := make(chan struct{})
	go func() {
		defer close(done)
		for n := range 300 {
			x.begin(ctx, n%4)
			x.end(ctx, true)
		}
	}()
	for writing := true; writing; {
		select {
		case <-done:
			writing = false
		case <-time.After(testbed.Between(random, 300*time.Millisecond, 2*time.Second)):
		}
		in.Kill()
		in.Start()
	}
	equal(t, source, mirror, topic)
	in.WaitCaughtUp(patience)
	if err := kafkatest.Diff(t, source, mirror, topic, kafkatest.ReadCommitted(), kafkatest.SameOffsets()); err != nil {
		t.Error(err)
	}
	sameEnds(t, source, mirror, topic)
}

// TestFillTimeIsBounded: a partition that markers would hold up for longer than timing.fill goes on with offsets of its own.
func TestFillTimeIsBounded(t *testing.T) {
	t.Parallel()
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 1, 1)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	x := newTransactor(t, source.Seeds(), topic, "txn", 0, kversion.Stable())
	commit := func(n int) {
		for range n {
			x.begin(ctx, 1)
			x.end(ctx, true)
		}
	}
	commit(3)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	in.WaitCaughtUp(patience)
	sameEnds(t, source, mirror, topic)
	if n := in.Metrics()["kmirror_forwarder_fillers_total"]; n != 3 {
		t.Errorf("%v fillers were written, want one for each of the 3 markers", n)
	}
	in.Stop()
	commit(300)
	in.Args = append(in.Args, "--timing.fill", "500ms")
	in.Start()
	equal(t, source, mirror, topic)
	in.WaitCaughtUp(patience)
	if n := in.Metrics()["kmirror_forwarder_fillers_total"]; n >= 300 {
		t.Errorf("%v fillers were written, want fewer than the 300 markers", n)
	}
	if !strings.Contains(in.Log(), "longer than timing.fill") {
		t.Error("the log doesn't say that offsets shift")
	}
	code, out := testbed.Run(t, "offsets", "--name", strings.TrimPrefix(in.Group(), "kmirror."), "--source", source.Seeds()[0], "--mirror", mirror.Seeds()[0],
		"--topic", topic, "--offset", "604")
	if last := kafkatest.ReadAll(t, mirror, topic, 0); code != 0 || !strings.Contains(out, fmt.Sprintf("is mirror offset %d", last[len(last)-1].Offset)) {
		t.Errorf("kmirror offsets of the last record: exit code %d, %q; want mirror offset %d", code, out, last[len(last)-1].Offset)
	}
}
