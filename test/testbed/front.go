package testbed

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pires/go-proxyproto"
)

// Front is a load balancer in front of a broker's listener, at the address that the broker advertises (kafkatest.FrontedListener). It may want PROXY
// protocol headers, be far away, and be down.
type Front struct {
	t               testing.TB
	listen, target  string
	header          func(*proxyproto.Header)
	delay           atomic.Int64 // in nanoseconds, each way
	mu              sync.Mutex
	ln              net.Listener
	open            map[net.Conn]bool // nil while it's down
	accepting, copy sync.WaitGroup
}

// chunksUnderWay bounds what one direction of a connection has under way.
const chunksUnderWay = 4096

// NewFront serves until the test ends. Where header isn't nil, connections must begin with a PROXY protocol header, which it is given.
func NewFront(t testing.TB, listen, target string, header func(*proxyproto.Header)) *Front {
	t.Helper()
	f := &Front{t: t, listen: listen, target: target, header: header}
	f.Up()
	t.Cleanup(f.Down)
	return f
}

// SetDelay makes bytes take that long, each way, from now on.
func (f *Front) SetDelay(d time.Duration) { f.delay.Store(int64(d)) }

// Up listens again after Down.
func (f *Front) Up() {
	f.t.Helper()
	ln, err := net.Listen("tcp", f.listen)
	if err != nil {
		f.t.Fatal(err)
	}
	if f.header != nil {
		ln = &proxyproto.Listener{
			Listener:       ln,
			ConnPolicy:     func(proxyproto.ConnPolicyOptions) (proxyproto.Policy, error) { return proxyproto.REQUIRE, nil },
			ValidateHeader: func(h *proxyproto.Header) error { f.header(h); return nil },
		}
	}
	f.mu.Lock()
	f.ln, f.open = ln, make(map[net.Conn]bool)
	f.mu.Unlock()
	f.accepting.Go(func() { f.accept(ln) })
}

// Down refuses connections and ends those that are open.
func (f *Front) Down() {
	f.mu.Lock()
	f.ln.Close()
	for c := range f.open {
		c.Close()
	}
	f.open = nil
	f.mu.Unlock()
	f.accepting.Wait()
	f.copy.Wait()
}

func (f *Front) accept(ln net.Listener) {
	for {
		client, err := ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue
		}
		broker, err := net.Dial("tcp", f.target)
		if err != nil {
			client.Close()
			continue
		}
		if f.keep(client, broker) {
			f.copy.Go(func() { f.pass(client, broker) })
			f.copy.Go(func() { f.pass(broker, client) })
		}
	}
}

// keep remembers connections for Down; false, and they are closed, once that was called.
func (f *Front) keep(conns ...net.Conn) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range conns {
		if f.open == nil {
			c.Close()
		} else {
			f.open[c] = true
		}
	}
	return f.open != nil
}

// chunk is what was read at once, and when it shall arrive.
type chunk struct {
	b  []byte
	at time.Time
}

// pass copies from one side to the other, late. The end of either side ends both.
func (f *Front) pass(from, to net.Conn) {
	chunks := make(chan chunk, chunksUnderWay)
	f.copy.Go(func() {
		defer to.Close()
		for c := range chunks {
			time.Sleep(time.Until(c.at)) // the way is that long
			if _, err := to.Write(c.b); err != nil {
				from.Close()
			}
		}
	})
	for {
		b := make([]byte, 32<<10)
		n, err := from.Read(b)
		if n > 0 {
			chunks <- chunk{b[:n], time.Now().Add(time.Duration(f.delay.Load()))}
		}
		if err != nil {
			if err != io.EOF {
				to.Close()
			}
			break
		}
	}
	close(chunks)
	f.mu.Lock()
	delete(f.open, from)
	f.mu.Unlock()
	from.Close()
}
