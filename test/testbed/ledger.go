package testbed

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

// NewSeed returns the seed of a test's random schedule and says how to replay it.
func NewSeed(t testing.TB) uint64 {
	t.Helper()
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()>>1 | 1
	}
	t.Logf("seed %d: go test -run '^%s$' -seed %d", seed, t.Name(), seed)
	return seed
}

// NewRandom is the source of one actor's decisions: the same for a seed, whatever the other actors do meanwhile.
func NewRandom(seed uint64, actor string) *rand.Rand {
	var stream uint64
	for _, c := range []byte(actor) {
		stream = stream*31 + uint64(c)
	}
	return rand.New(rand.NewPCG(seed, stream))
}

// Between is a random duration in [low, high).
func Between(random *rand.Rand, low, high time.Duration) time.Duration {
	return low + time.Duration(random.Int64N(int64(high-low)))
}

// Ledger writes numbered records and knows which of them were acknowledged. Every record is unlike any other: its number is in key,
// value and a header, and its timestamp is its own.
type Ledger struct {
	t       testing.TB
	topic   string
	cancel  context.CancelFunc
	running sync.WaitGroup
	Written atomic.Int64
	Acks    atomic.Int64
	Failed  atomic.Int64
	// renumbered counts how often a client gave itself a new producer epoch since a broker had found its sequences out of order, as happens when a
	// leader changes under several requests in flight. franz-go then sends again what was in flight, though it may be in the log: the client
	// itself gives up idempotence, through the proxy as without it.
	renumbered atomic.Int64

	mu    sync.Mutex
	acked map[string]bool // by value
}

// LedgerOptions say how a ledger is written.
type LedgerOptions struct {
	Writers   int
	PerSecond int       // of all writers together
	From      time.Time // timestamp of the first record; each is 1 ms after the one before
	Size      int       // of a value, in bytes
	Client    []kgo.Opt
}

// StartLedger starts writers with acks=all and idempotence. Writer i bootstraps from seeds[i mod n].
func StartLedger(t testing.TB, topic string, o LedgerOptions, seeds ...[]string) *Ledger {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	l := &Ledger{t: t, topic: topic, cancel: cancel, acked: make(map[string]bool)}
	t.Cleanup(func() { cancel(); l.running.Wait() })
	for w := range o.Writers {
		cl, err := kgo.NewClient(append([]kgo.Opt{
			kgo.SeedBrokers(seeds[w%len(seeds)]...), kgo.DefaultProduceTopic(topic), kgo.DisableClientMetrics(), kgo.ClientID(fmt.Sprintf("writer-%d", w)),
			kgo.MaxBufferedRecords(1_000_000), kgo.RecordPartitioner(kgo.RoundRobinPartitioner()), kgo.ProducerLinger(5 * time.Millisecond),
			kgo.ProducerOnDataLossDetected(func(string, int32) { l.renumbered.Add(1) }),
			kgo.RequestTimeoutOverhead(5 * time.Second), kgo.DialTimeout(2 * time.Second), kgo.RetryTimeout(5 * time.Minute),
		}, o.Client...)...)
		if err != nil {
			t.Fatal(err)
		}
		l.running.Go(func() { l.Write(ctx, cl, w, o) })
	}
	return l
}

// Write is one writer: it goes on in the rhythm of its ticks, however many acknowledgements are missing.
func (l *Ledger) Write(ctx context.Context, cl *kgo.Client, writer int, o LedgerOptions) {
	defer cl.Close()
	const ticks = 50 // a second
	tick := time.NewTicker(time.Second / ticks)
	defer tick.Stop()
	n, due := 0, 0.0
	for ctx.Err() == nil {
		for due += float64(o.PerSecond) / float64(o.Writers*ticks); due >= 1; due-- {
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

func ledgerRecord(writer, n int, o LedgerOptions) *kgo.Record {
	value := fmt.Appendf(nil, "writer %d number %07d ", writer, n)
	if pad := o.Size - len(value); pad > 0 {
		value = append(value, bytes.Repeat([]byte{'.'}, pad)...)
	}
	r := &kgo.Record{
		Key: fmt.Appendf(nil, "%d-%d", writer, n), Value: value, Timestamp: o.From.Add(time.Duration(n) * time.Millisecond),
		Headers: []kgo.RecordHeader{{Key: "number", Value: fmt.Appendf(nil, "%d-%d", writer, n)}, {Key: "empty", Value: []byte{}}, {Key: "null"}},
	}
	if n%10 == 9 {
		r.Key = nil
	}
	return r
}

func (l *Ledger) produce(cl *kgo.Client, r *kgo.Record) {
	l.Written.Add(1)
	cl.Produce(context.Background(), r, func(r *kgo.Record, err error) {
		if err != nil {
			if l.Failed.Add(1) <= 3 {
				l.t.Errorf("record %q isn't acknowledged: %v", r.Value, err)
			}
			return
		}
		l.Acks.Add(1)
		l.mu.Lock()
		l.acked[string(r.Value)] = true
		l.mu.Unlock()
	})
}

// WaitAcks waits until n more records were acknowledged.
func (l *Ledger) WaitAcks(n int64) {
	l.t.Helper()
	from := l.Acks.Load()
	kafkatest.Eventually(l.t, 2*time.Minute, func() error {
		if got := l.Acks.Load() - from; got < n {
			return fmt.Errorf("%d records acknowledged, want %d", got, n)
		}
		return nil
	})
}

// Stop ends the writers and waits for their last acknowledgements.
func (l *Ledger) Stop() {
	l.t.Helper()
	l.cancel()
	l.running.Wait()
	l.t.Logf("%d records written, %d acknowledged, %d failed", l.Written.Load(), l.Acks.Load(), l.Failed.Load())
}

// Check compares both logs with what was acknowledged and with each other: each acknowledged record once, the mirror in the source's
// order with the same keys, headers and timestamps. Records that others wrote to the mirror are left out by foreign, if it isn't nil.
func (l *Ledger) Check(source, mirror kafkatest.Cluster, how ...kafkatest.Comparison) {
	l.t.Helper()
	defer func() { // also when the logs differ: it says how
		l.checkLog(source, "source")
		l.checkLog(mirror, "mirror")
	}()
	kafkatest.WaitEqual(l.t, source, mirror, l.topic, time.Minute, how...)
}

// WantOrder fails unless each writer's records are in the order in which they were written, within each partition.
func (l *Ledger) WantOrder(c kafkatest.Cluster) {
	l.t.Helper()
	if n := l.renumbered.Load(); n > 0 {
		l.t.Logf("clients gave up their sequences %d times, and their order with them", n)
		return
	}
	for p, records := range kafkatest.ReadTopic(l.t, c, l.topic) {
		last := make(map[int]int) // number + 1, by writer
		for _, r := range records {
			var writer, number int
			if _, err := fmt.Sscanf(string(r.Value), "writer %d number %d", &writer, &number); err != nil {
				continue
			}
			if number < last[writer] {
				l.t.Errorf("partition %d offset %d: writer %d's record %d comes after %d", p, r.Offset, writer, number, last[writer]-1)
				return
			}
			last[writer] = number + 1
		}
	}
}

// checkLog counts what one cluster holds.
func (l *Ledger) checkLog(c kafkatest.Cluster, name string) {
	l.t.Helper()
	first := make(map[string]*kgo.Record)
	count, where := make(map[string]int), make(map[string][]string)
	for _, records := range kafkatest.ReadTopic(l.t, c, l.topic) {
		for _, r := range records {
			if bytes.HasPrefix(r.Value, []byte("writer ")) {
				value := string(r.Value)
				if count[value]++; count[value] == 1 {
					first[value] = r
					continue
				}
				for _, x := range []*kgo.Record{first[value], r} {
					where[value] = append(where[value], fmt.Sprintf("partition %d offset %d (leader epoch %d, producer %d, epoch %d)",
						x.Partition, x.Offset, x.LeaderEpoch, x.ProducerID, x.ProducerEpoch))
				}
			}
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	missing, twice := 0, 0
	doubled := l.t.Errorf
	if l.renumbered.Load() > 0 {
		doubled = l.t.Logf // by the client; that the mirror has the same is checked record by record
		l.t.Logf("clients gave up their sequences %d times", l.renumbered.Load())
	}
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
				doubled("%s: record %q is there %d times: %s", name, strings.TrimRight(value, "."), n, strings.Join(where[value], ", "))
			}
		}
	}
	if missing > 0 {
		l.t.Errorf("%s: of %d acknowledged records %d are missing", name, len(l.acked), missing)
	}
	if twice > 0 {
		doubled("%s: of %d acknowledged records %d are there more than once", name, len(l.acked), twice)
	}
}

// LogBytes is the size of a topic's log segments on every broker that holds a replica, by broker ID.
func LogBytes(t testing.TB, c *kafkatest.RealCluster, topic string) map[int32]int64 {
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
