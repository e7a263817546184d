package test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
)

// topicName makes a topic name of a test's own, since tests share clusters.
func topicName(t testing.TB) string {
	return strings.ToLower(strings.NewReplacer("/", ".", "#", "-", " ", "-").Replace(t.Name()))
}

// newWriter is a client that writes to seeds, with acks=all unless opts say otherwise.
func newWriter(t testing.TB, seeds []string, topic string, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	cl, err := kgo.NewClient(append([]kgo.Opt{
		kgo.SeedBrokers(seeds...), kgo.DefaultProduceTopic(topic), kgo.DisableClientMetrics(), kgo.MaxBufferedRecords(100_000),
	}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cl.Close)
	return cl
}

// withAcks are the options of a producer that asks for fewer acknowledgements, which excludes idempotence.
func withAcks(acks kgo.Acks) []kgo.Opt {
	return []kgo.Opt{kgo.RequiredAcks(acks), kgo.DisableIdempotentWrite()}
}

// numbered is a record with a key, a header and a number that tells it from all others of its prefix.
func numbered(prefix string, i int) *kgo.Record {
	return &kgo.Record{
		Key: fmt.Appendf(nil, "key-%d", i), Value: fmt.Appendf(nil, "%s-%d", prefix, i),
		Headers: []kgo.RecordHeader{{Key: "n", Value: fmt.Append(nil, i)}, {Key: "empty", Value: []byte{}}, {Key: "null"}},
	}
}

// write writes n numbered records and waits for their acknowledgements; each must succeed.
func write(t testing.TB, seeds []string, topic, prefix string, n int, opts ...kgo.Opt) {
	t.Helper()
	cl := newWriter(t, seeds, topic, opts...)
	defer cl.Close()
	var failures atomic.Int64
	var first sync.Once
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	for i := range n {
		cl.Produce(ctx, numbered(prefix, i), func(_ *kgo.Record, err error) {
			if err != nil {
				failures.Add(1)
				first.Do(func() { t.Errorf("record %s-%d: %v", prefix, i, err) })
			}
		})
	}
	if err := cl.Flush(ctx); err != nil {
		t.Fatalf("flush: %v", err)
	}
	if failures.Load() > 0 {
		t.Fatalf("%d of %d records of %q failed", failures.Load(), n, prefix)
	}
}

// load writes records at a rate from several producers until stop is called.
type load struct {
	t         testing.TB
	cancel    context.CancelFunc
	producers sync.WaitGroup
	acked     atomic.Int64
	failed    atomic.Int64

	mu        sync.Mutex
	latencies []time.Duration // from the call to the acknowledgement
}

// startLoad starts producers that write perSecond records of size bytes each, in all.
func startLoad(t testing.TB, seeds []string, topic string, producers, perSecond, size int, opts ...kgo.Opt) *load {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{t: t, cancel: cancel}
	for p := range producers {
		cl := newWriter(t, seeds, topic, opts...)
		l.producers.Go(func() { l.run(ctx, cl, fmt.Sprintf("load%d", p), producers, perSecond, size) })
	}
	t.Cleanup(func() { l.cancel(); l.producers.Wait() })
	return l
}

func (l *load) run(ctx context.Context, cl *kgo.Client, prefix string, producers, perSecond, size int) {
	const ticks = 20 // a second
	tick := time.NewTicker(time.Second / ticks)
	defer tick.Stop()
	padding := strings.Repeat(".", size)
	n, due := 0, 0.0
	for ctx.Err() == nil {
		for due += float64(perSecond) / float64(producers*ticks); due >= 1; due-- {
			r := numbered(prefix, n)
			if pad := size - len(r.Value); pad > 0 {
				r.Value = append(r.Value, padding[:pad]...)
			}
			n++
			start := time.Now()
			cl.Produce(context.Background(), r, func(_ *kgo.Record, err error) { l.answered(start, err) })
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
	flushed, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := cl.Flush(flushed); err != nil {
		l.t.Errorf("flush: %v", err)
	}
}

func (l *load) answered(start time.Time, err error) {
	if err != nil {
		if l.failed.Add(1) == 1 {
			l.t.Errorf("a producer saw an error: %v", err)
		}
		return
	}
	l.acked.Add(1)
	l.mu.Lock()
	l.latencies = append(l.latencies, time.Since(start))
	l.mu.Unlock()
}

// mark returns how many acknowledgements there were, for since.
func (l *load) mark() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.latencies)
}

// since describes the latencies after a mark.
func (l *load) since(mark int) string {
	l.mu.Lock()
	part := slices.Clone(l.latencies[mark:])
	l.mu.Unlock()
	return quantiles(part)
}

func quantiles(d []time.Duration) string {
	if len(d) == 0 {
		return "none"
	}
	slices.Sort(d)
	at := func(q float64) time.Duration {
		return d[min(len(d)-1, int(q*float64(len(d))))].Round(10 * time.Microsecond)
	}
	return fmt.Sprintf("%d: median %v, p99 %v, most %v", len(d), at(0.5), at(0.99), at(1))
}

// waitAcked waits until n more records were acknowledged, so that something happens under load, not before or after it.
func (l *load) waitAcked(n int64) {
	l.t.Helper()
	from := l.acked.Load()
	kafkatest.Eventually(l.t, time.Minute, func() error {
		if got := l.acked.Load() - from; got < n {
			return fmt.Errorf("%d records acknowledged, want %d", got, n)
		}
		return nil
	})
}

// stop ends the load and waits for the last acknowledgement. No record may have failed.
func (l *load) stop() {
	l.t.Helper()
	l.cancel()
	l.producers.Wait()
	if n := l.failed.Load(); n > 0 {
		l.t.Errorf("producers saw %d errors", n)
	}
}
