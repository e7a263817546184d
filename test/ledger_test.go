package test

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
)

var seedFlag = flag.Uint64("seed", 0, "seed of the random schedules; 0: a new one, which is printed")

// newSeed returns the seed of a test's random schedule and says how to replay it.
func newSeed(t testing.TB) uint64 {
	t.Helper()
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()>>1 | 1
	}
	t.Logf("seed %d: go test ./test -run '^%s$' -seed %d", seed, t.Name(), seed)
	return seed
}

// newRandom is the source of one actor's decisions: the same for a seed, whatever the other actors do meanwhile.
func newRandom(seed uint64, actor string) *rand.Rand {
	var stream uint64
	for _, c := range []byte(actor) {
		stream = stream*31 + uint64(c)
	}
	return rand.New(rand.NewPCG(seed, stream))
}

// between is a random duration in [low, high).
func between(random *rand.Rand, low, high time.Duration) time.Duration {
	return low + time.Duration(random.Int64N(int64(high-low)))
}

// ledger writes numbered records and knows which of them were acknowledged. Every record is unlike any other: its number is in key,
// value and a header, and its timestamp is its own.
type ledger struct {
	t       testing.TB
	topic   string
	cancel  context.CancelFunc
	running sync.WaitGroup
	written atomic.Int64
	acks    atomic.Int64
	failed  atomic.Int64

	mu    sync.Mutex
	acked map[string]bool // by value
}

// ledgerOptions say how a ledger is written.
type ledgerOptions struct {
	writers   int
	perSecond int       // of all writers together
	from      time.Time // timestamp of the first record; each is 1 ms after the one before
	size      int       // of a value, in bytes
	kgo       []kgo.Opt
}

// startLedger starts writers with acks=all and idempotence. Writer i bootstraps from seeds[i mod n].
func startLedger(t testing.TB, topic string, o ledgerOptions, seeds ...[]string) *ledger {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	l := &ledger{t: t, topic: topic, cancel: cancel, acked: make(map[string]bool)}
	t.Cleanup(func() { cancel(); l.running.Wait() })
	for w := range o.writers {
		cl, err := kgo.NewClient(append([]kgo.Opt{
			kgo.SeedBrokers(seeds[w%len(seeds)]...), kgo.DefaultProduceTopic(topic), kgo.DisableClientMetrics(), kgo.ClientID(fmt.Sprintf("writer-%d", w)),
			kgo.MaxBufferedRecords(1_000_000), kgo.RecordPartitioner(kgo.RoundRobinPartitioner()), kgo.ProducerLinger(5 * time.Millisecond),
			kgo.RequestTimeoutOverhead(5 * time.Second), kgo.DialTimeout(2 * time.Second), kgo.RetryTimeout(5 * time.Minute),
		}, o.kgo...)...)
		if err != nil {
			t.Fatal(err)
		}
		l.running.Go(func() { l.write(ctx, cl, w, o) })
	}
	return l
}

// write is one writer: it goes on in the rhythm of its ticks, however many acknowledgements are missing.
func (l *ledger) write(ctx context.Context, cl *kgo.Client, writer int, o ledgerOptions) {
	defer cl.Close()
	const ticks = 50 // a second
	tick := time.NewTicker(time.Second / ticks)
	defer tick.Stop()
	n, due := 0, 0.0
	for ctx.Err() == nil {
		for due += float64(o.perSecond) / float64(o.writers*ticks); due >= 1; due-- {
			l.produce(cl, ledgerRecord(writer, n, o))
			n++
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
	flushed, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := cl.Flush(flushed); err != nil {
		l.t.Errorf("writer %d: %d records are still unacknowledged 2 minutes after the last: %v", writer, cl.BufferedProduceRecords(), err)
	}
}

func ledgerRecord(writer, n int, o ledgerOptions) *kgo.Record {
	value := fmt.Appendf(nil, "writer %d number %07d ", writer, n)
	if pad := o.size - len(value); pad > 0 {
		value = append(value, bytes.Repeat([]byte{'.'}, pad)...)
	}
	r := &kgo.Record{
		Key: fmt.Appendf(nil, "%d-%d", writer, n), Value: value, Timestamp: o.from.Add(time.Duration(n) * time.Millisecond),
		Headers: []kgo.RecordHeader{{Key: "number", Value: fmt.Appendf(nil, "%d-%d", writer, n)}, {Key: "empty", Value: []byte{}}, {Key: "null"}},
	}
	if n%10 == 9 {
		r.Key = nil
	}
	return r
}

func (l *ledger) produce(cl *kgo.Client, r *kgo.Record) {
	l.written.Add(1)
	cl.Produce(context.Background(), r, func(r *kgo.Record, err error) {
		if err != nil {
			if l.failed.Add(1) <= 3 {
				l.t.Errorf("record %q isn't acknowledged: %v", r.Value, err)
			}
			return
		}
		l.acks.Add(1)
		l.mu.Lock()
		l.acked[string(r.Value)] = true
		l.mu.Unlock()
	})
}

// waitAcks waits until n more records were acknowledged.
func (l *ledger) waitAcks(n int64) {
	l.t.Helper()
	from := l.acks.Load()
	kafkatest.Eventually(l.t, 2*time.Minute, func() error {
		if got := l.acks.Load() - from; got < n {
			return fmt.Errorf("%d records acknowledged, want %d", got, n)
		}
		return nil
	})
}

// stop ends the writers and waits for their last acknowledgements.
func (l *ledger) stop() {
	l.t.Helper()
	l.cancel()
	l.running.Wait()
	l.t.Logf("%d records written, %d acknowledged, %d failed", l.written.Load(), l.acks.Load(), l.failed.Load())
}

// check compares both logs with what was acknowledged and with each other: each acknowledged record once, the mirror in the source's
// order with the same keys, headers and timestamps. Records that others wrote to the mirror are left out by foreign, if it isn't nil.
func (l *ledger) check(source, mirror kafkatest.Cluster, how ...kafkatest.Comparison) {
	l.t.Helper()
	defer func() { // also when the logs differ: it says how
		l.checkLog(source, "source")
		l.checkLog(mirror, "mirror")
	}()
	kafkatest.WaitEqual(l.t, source, mirror, l.topic, time.Minute, how...)
}

// checkLog counts what one cluster holds.
func (l *ledger) checkLog(c kafkatest.Cluster, name string) {
	l.t.Helper()
	count := make(map[string]int)
	for _, records := range kafkatest.ReadTopic(l.t, c, l.topic) {
		for _, r := range records {
			if bytes.HasPrefix(r.Value, []byte("writer ")) {
				count[string(r.Value)]++
			}
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	missing, twice := 0, 0
	for value := range l.acked {
		if count[value] == 0 {
			if missing++; missing == 1 {
				l.t.Errorf("%s: acknowledged record %q is missing", name, value)
			}
		}
	}
	for value, n := range count {
		if n > 1 {
			if twice++; twice == 1 {
				l.t.Errorf("%s: record %q is there %d times", name, value, n)
			}
		}
	}
	if missing+twice > 0 {
		l.t.Errorf("%s: of %d acknowledged records %d are missing; %d are there more than once", name, len(l.acked), missing, twice)
	}
}

// logBytes is the size of a topic's log segments on every broker that holds a replica, by broker ID.
func logBytes(t testing.TB, c *kafkatest.RealCluster, topic string) map[int32]int64 {
	t.Helper()
	sizes := make(map[int32]int64)
	for _, b := range c.Brokers() {
		dirs, err := filepath.Glob(filepath.Join(b.DataDir(), topic+"-*"))
		if err != nil {
			t.Fatal(err)
		}
		for _, dir := range dirs {
			err := filepath.WalkDir(dir, func(name string, entry fs.DirEntry, err error) error {
				if err != nil || !strings.HasSuffix(name, ".log") {
					return err
				}
				info, err := entry.Info()
				if err == nil {
					sizes[b.ID] += info.Size()
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	return sizes
}
