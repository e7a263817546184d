package outages

import (
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// shortOutage is longer than kmirror waits for an answer, so that frozen requests time out.
const shortOutage, longOutage = 20 * time.Second, time.Minute

// maxOutageLines is what an outage may write to the log: a few lines for each connection and cluster, none for each batch or try.
const maxOutageLines = 30

// TestMirrorOutage is guarantee G1: whatever becomes of the mirror, producers see no error and kmirror's memory stays within its bound;
// once the mirror is back both logs are equal, offsets too, and mirroring is live again by itself.
func TestMirrorOutage(t *testing.T) {
	source, _ := kafkatest.Shared(t)
	const memory, spare = 16 << 20, 100 << 20
	for _, outage := range []struct {
		name       string
		length     time.Duration
		begin, end func(t *testing.T, mirror *kafkatest.Broker)
	}{
		{"down", longOutage, kill, start},
		{"silent", shortOutage, killAndBeSilent, start},
		{"frozen", shortOutage, freeze, thaw},
	} {
		t.Run(outage.name, func(t *testing.T) {
			t.Parallel()
			mirror := kafkatest.Real(t)
			topic := "outage-" + outage.name
			kafkatest.CreateTopic(t, source, topic, 4, 1)
			in := testbed.Start(t, source, mirror, "--topics", topic, "--mirror_memory", "16MiB")
			testbed.WaitLive(t, in, topic, 4)
			peak := watchMemory(t, in)
			l := testbed.StartLoad(t, in.Seeds(), topic, 4, 1000, 4<<10, kgo.ProducerBatchCompression(kgo.NoCompression()))
			l.WaitAcked(4000)
			t.Logf("acknowledgements with the mirror up: %s", l.Since(0))
			mark, lines, before := l.Mark(), strings.Count(in.Log(), "\n"), in.Metrics()
			t.Run("outage", func(t *testing.T) { // what begin sets up for cleaning ends with it
				outage.begin(t, mirror.Broker(1))
				select {
				case <-t.Context().Done():
				case <-time.After(outage.length): // the length of the outage, not a wait for something
				}
			})
			t.Logf("acknowledgements during the outage: %s", l.Since(mark))
			outage.end(t, mirror.Broker(1))
			l.WaitAcked(4000)
			for _, held := range []string{"go_goroutines", "process_open_fds"} { // case C31: no try leaves anything behind
				if got := in.Metrics()[held]; got > before[held]+10 {
					t.Errorf("%s = %v after the outage, %v before", held, got, before[held])
				}
			}
			l.Stop()
			in.WaitCaughtUp(time.Minute)
			kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
			testbed.WaitLive(t, in, topic, 4)
			if n := strings.Count(in.Log(), "\n") - lines; n == 0 || n > maxOutageLines {
				t.Errorf("%d log lines tell of the outage, want some that a person reads, %d at most:\n%s", n, maxOutageLines, in.LogTail(n))
			}
			if got := peak(); got > memory+spare {
				t.Errorf("kmirror held %d MiB, want %d at most", got>>20, (memory+spare)>>20)
			} else {
				t.Logf("kmirror held %d MiB at most", got>>20)
			}
		})
	}
}

// TestSourceOutage: producers see what the source says, and when it is back, after longer than kmirror's membership lasts, mirroring goes
// on by itself. kill -9 may cost the source what it hadn't flushed; never can the mirror hold something else than the source.
func TestSourceOutage(t *testing.T) {
	source := kafkatest.Real(t)
	_, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 3, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic, "--timing.session_timeout", "3s")
	testbed.WaitLive(t, in, topic, 3)
	l := testbed.StartLoad(t, in.Seeds(), topic, 3, 1000, 100)
	for _, end := range []func(testing.TB){source.Broker(1).Stop, source.Broker(1).Kill} {
		l.WaitAcked(1000)
		end(t)
		kafkatest.Eventually(t, 30*time.Second, func() error { // kmirror has noticed, and is no member any more
			if member := in.Metrics()["kmirror_forwarder_group_member"]; member != 0 {
				return fmt.Errorf("kmirror still believes in its membership")
			}
			return nil
		})
		source.Broker(1).Start(t)
		l.WaitAcked(1000)
	}
	l.Stop()
	in.WaitCaughtUp(time.Minute)
	kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
	testbed.WaitLive(t, in, topic, 3)
}

// TestSlowMirror is guarantee G1 with a mirror that is there, but slower than the producers: they don't notice, memory stays within its
// bound, and once there is room the mirror has everything.
func TestSlowMirror(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 4, 1)
	narrow := testbed.Relayed(t, mirror)
	in := testbed.Start(t, source, narrow, "--topics", topic, "--mirror_memory", "16MiB")
	testbed.WaitLive(t, in, topic, 4)
	peak := watchMemory(t, in)
	l := testbed.StartLoad(t, in.Seeds(), topic, 4, 2000, 4<<10, kgo.ProducerBatchCompression(kgo.NoCompression()))
	l.WaitAcked(2000)
	t.Logf("acknowledgements with room: %s", l.Since(0))
	mark := l.Mark()
	narrow.PerSecond.Store(1 << 20) // of about 8 MiB a second that are written
	l.WaitAcked(20_000)
	t.Logf("acknowledgements without: %s", l.Since(mark))
	narrow.PerSecond.Store(0)
	l.Stop()
	in.WaitCaughtUp(time.Minute)
	kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
	if got := peak(); got > 116<<20 {
		t.Errorf("kmirror held %d MiB, want 116 at most", got>>20)
	} else {
		t.Logf("kmirror held %d MiB at most", got>>20)
	}
}

func kill(t *testing.T, b *kafkatest.Broker)   { b.Kill(t) }
func start(t *testing.T, b *kafkatest.Broker)  { b.Start(t) }
func freeze(t *testing.T, b *kafkatest.Broker) { b.Freeze(t) }
func thaw(t *testing.T, b *kafkatest.Broker)   { b.Thaw(t) }

func killAndBeSilent(t *testing.T, b *kafkatest.Broker) { b.Kill(t); beSilent(t, b.Addr) }

// maxDialed is how many connections an outage may cost: one a second, and those that there were before.
const maxDialed = int(shortOutage/time.Second) + 10

// beSilent accepts connections to addr until the test ends, and never answers. It fails the test if there are too many tries.
func beSilent(t testing.TB, addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var conns []net.Conn
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, conn)
			mu.Unlock()
			wg.Go(func() { io.Copy(io.Discard, conn) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		mu.Lock()
		if len(conns) > maxDialed {
			t.Errorf("%d connections to a broker that never answers, want %d at most", len(conns), maxDialed)
		}
		for _, conn := range conns {
			conn.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
}

// watchMemory samples kmirror's resident memory until the returned function is called for the largest.
func watchMemory(t testing.TB, in *testbed.Instance) (peak func() int64) {
	var most atomic.Int64
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			most.Store(max(most.Load(), in.RSS()))
			select {
			case <-stop:
				return
			case <-tick.C:
			}
		}
	})
	end := sync.OnceFunc(func() { close(stop); wg.Wait() })
	t.Cleanup(end)
	return func() int64 { end(); return most.Load() }
}
