package test

import (
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
)

// outageLength is longer than kmirror waits for an answer, so that frozen requests time out.
const outageLength = 20 * time.Second

// TestMirrorOutage is guarantee G1: whatever becomes of the mirror, producers see no error and kmirror's memory stays within its bound;
// once the mirror is back both logs are equal, offsets too, and mirroring is live again by itself.
func TestMirrorOutage(t *testing.T) {
	source, _ := kafkatest.Shared(t)
	mirror := kafkatest.Real(t)
	broker := mirror.Broker(1)
	const memory, spare = 16 << 20, 100 << 20
	in := startKmirror(t, source, mirror, "--topics", "/outage-.*/", "--mirror_memory", "16MiB")

	for _, outage := range []struct {
		name       string
		begin, end func(t *testing.T)
	}{
		{"down", func(t *testing.T) { broker.Kill(t) }, func(t *testing.T) { broker.Start(t) }},
		{"silent", func(t *testing.T) { broker.Stop(t); beSilent(t, broker.Addr) }, nil},
		{"frozen", func(t *testing.T) { broker.Freeze(t) }, func(t *testing.T) { broker.Thaw(t) }},
	} {
		t.Run(outage.name, func(t *testing.T) {
			topic := "outage-" + outage.name
			kafkatest.CreateTopic(t, source, topic, 4, 1)
			waitLive(t, in, topic, 4)
			peak := watchMemory(t, in)
			l := startLoad(t, in.Seeds(), topic, 4, 2000, 4<<10, kgo.ProducerBatchCompression(kgo.NoCompression()))
			l.waitAcked(4000)
			t.Logf("acknowledgements with the mirror up: %s", l.since(0))
			mark := l.mark()
			t.Run("outage", func(t *testing.T) { // what begin sets up for cleaning ends with it
				outage.begin(t)
				select {
				case <-t.Context().Done():
				case <-time.After(outageLength): // the length of the outage, not a wait for something
				}
			})
			t.Logf("acknowledgements during the outage: %s", l.since(mark))
			if outage.end != nil {
				outage.end(t)
			} else {
				broker.Start(t)
			}
			l.waitAcked(4000)
			l.stop()
			in.WaitCaughtUp(time.Minute)
			kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
			waitLive(t, in, topic, 4)
			if got := peak(); got > memory+spare {
				t.Errorf("kmirror held %d MiB, want %d at most", got>>20, (memory+spare)>>20)
			} else {
				t.Logf("kmirror held %d MiB at most", got>>20)
			}
		})
	}
}

// beSilent accepts connections to addr until the test ends, and never answers.
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
		for _, conn := range conns {
			conn.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
}

// watchMemory samples kmirror's resident memory until the returned function is called for the largest.
func watchMemory(t testing.TB, in *instance) (peak func() int64) {
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
