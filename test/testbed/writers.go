package testbed

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

// TopicName makes a topic name of a test's own, since tests share clusters.
func TopicName(t testing.TB) string {
	return strings.ToLower(strings.NewReplacer("/", ".", "#", "-", " ", "-").Replace(t.Name()))
}

// NewWriter is a client that writes to seeds, with acks=all unless opts say otherwise.
func NewWriter(t testing.TB, seeds []string, topic string, opts ...kgo.Opt) *kgo.Client {
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

// WithAcks are the options of a producer that asks for fewer acknowledgements, which excludes idempotence.
func WithAcks(acks kgo.Acks) []kgo.Opt {
	return []kgo.Opt{kgo.RequiredAcks(acks), kgo.DisableIdempotentWrite()}
}

// Numbered is a record with a key, a header and a number that tells it from all others of its prefix.
func Numbered(prefix string, i int) *kgo.Record {
	return &kgo.Record{
		Key: fmt.Appendf(nil, "key-%d", i), Value: fmt.Appendf(nil, "%s-%d", prefix, i),
		Headers: []kgo.RecordHeader{{Key: "n", Value: fmt.Append(nil, i)}, {Key: "empty", Value: []byte{}}, {Key: "null"}},
	}
}

// Write writes n numbered records and waits for their acknowledgements; each must succeed.
func Write(t testing.TB, seeds []string, topic, prefix string, n int, opts ...kgo.Opt) {
	t.Helper()
	cl := NewWriter(t, seeds, topic, opts...)
	defer cl.Close()
	var failures atomic.Int64
	var first sync.Once
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	for i := range n {
		cl.Produce(ctx, Numbered(prefix, i), func(_ *kgo.Record, err error) {
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

// Load writes records at a rate from several producers until stop is called.
type Load struct {
	t         testing.TB
	cancel    context.CancelFunc
	producers sync.WaitGroup
	Acked     atomic.Int64
	failed    atomic.Int64

	mu        sync.Mutex
	latencies []time.Duration // from the call to the acknowledgement
}

// StartLoad starts producers that write perSecond records of size bytes each, in all.
func StartLoad(t testing.TB, seeds []string, topic string, producers, perSecond, size int, opts ...kgo.Opt) *Load {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	l := &Load{t: t, cancel: cancel}
	for p := range producers {
		cl := NewWriter(t, seeds, topic, opts...)
		l.producers.Go(func() { l.run(ctx, cl, fmt.Sprintf("load%d", p), producers, perSecond, size) })
	}
	t.Cleanup(func() { l.cancel(); l.producers.Wait() })
	return l
}

func (l *Load) run(ctx context.Context, cl *kgo.Client, prefix string, producers, perSecond, size int) {
	const ticks = 20 // a second
	tick := time.NewTicker(time.Second / ticks)
	defer tick.Stop()
	padding := strings.Repeat(".", size)
	n, due := 0, 0.0
	for ctx.Err() == nil {
		for due += float64(perSecond) / float64(producers*ticks); due >= 1; due-- {
			r := Numbered(prefix, n)
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

func (l *Load) answered(start time.Time, err error) {
	if err != nil {
		if l.failed.Add(1) == 1 {
			l.t.Errorf("a producer saw an error: %v", err)
		}
		return
	}
	l.Acked.Add(1)
	l.mu.Lock()
	l.latencies = append(l.latencies, time.Since(start))
	l.mu.Unlock()
}

// Mark returns how many acknowledgements there were, for since.
func (l *Load) Mark() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.latencies)
}

// Since describes the latencies after a mark.
func (l *Load) Since(mark int) string {
	l.mu.Lock()
	part := slices.Clone(l.latencies[mark:])
	l.mu.Unlock()
	return Quantiles(part)
}

func Quantiles(d []time.Duration) string {
	if len(d) == 0 {
		return "none"
	}
	slices.Sort(d)
	at := func(q float64) time.Duration {
		return d[min(len(d)-1, int(q*float64(len(d))))].Round(10 * time.Microsecond)
	}
	return fmt.Sprintf("%d: median %v, p99 %v, most %v", len(d), at(0.5), at(0.99), at(1))
}

// WaitAcked waits until n more records were acknowledged, so that something happens under load, not before or after it.
func (l *Load) WaitAcked(n int64) {
	l.t.Helper()
	from := l.Acked.Load()
	kafkatest.Eventually(l.t, time.Minute, func() error {
		if got := l.Acked.Load() - from; got < n {
			return fmt.Errorf("%d records acknowledged, want %d", got, n)
		}
		return nil
	})
}

// Stop ends the load and waits for the last acknowledgement. No record may have failed.
func (l *Load) Stop() {
	l.t.Helper()
	l.cancel()
	l.producers.Wait()
	if n := l.failed.Load(); n > 0 {
		l.t.Errorf("producers saw %d errors", n)
	}
}

// Pause lets time pass, since it is the schedule that decides; false when the test has ended.
func Pause(t testing.TB, d time.Duration) bool {
	select {
	case <-t.Context().Done():
		return false
	case <-time.After(d):
		return true
	}
}
