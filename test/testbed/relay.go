package testbed

import (
	"encoding/binary"
	"io"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kbin"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/kafkatest"
)

// Relay stands in front of a cluster of one broker and counts the requests that pass, by client ID and API: a witness of what kmirror
// asks the source for that doesn't rest on kmirror's own counters. It tells clients its own address as the broker's.
type Relay struct {
	t      testing.TB
	broker string
	ln     net.Listener
	host   string
	port   int32

	mu     sync.Mutex
	counts map[requestKind]int
	conns  map[net.Conn]bool
	wg     sync.WaitGroup

	PerSecond atomic.Int64 // bytes of requests passed on a second, over each connection; 0: as they come
}

// requestKind is what requests are counted by.
type requestKind struct {
	clientID string
	apiKey   int16
}

// relayed is a request under way.
type relayed struct {
	apiKey, version int16
}

func NewRelay(t testing.TB, c kafkatest.Cluster) *Relay {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().(*net.TCPAddr)
	r := &Relay{
		t: t, broker: c.Seeds()[0], ln: ln, host: addr.IP.String(), port: int32(addr.Port),
		counts: map[requestKind]int{}, conns: map[net.Conn]bool{},
	}
	r.wg.Go(r.accept)
	t.Cleanup(r.close)
	return r
}

func (r *Relay) Addr() string { return net.JoinHostPort(r.host, strconv.Itoa(int(r.port))) }

// Count is how many requests of one API passed from a client.
func (r *Relay) Count(clientID string, key kmsg.Key) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.counts[requestKind{clientID, int16(key)}]
}

// Total is how many requests of one API passed from anyone.
func (r *Relay) Total(key kmsg.Key) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for kind, count := range r.counts {
		if kind.apiKey == int16(key) {
			n += count
		}
	}
	return n
}

func (r *Relay) close() {
	r.ln.Close()
	r.mu.Lock()
	for c := range r.conns {
		c.Close()
	}
	r.conns = nil
	r.mu.Unlock()
	r.wg.Wait()
}

// keep remembers a connection for close; false once that was called.
func (r *Relay) keep(c net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.conns == nil {
		c.Close()
		return false
	}
	r.conns[c] = true
	return true
}

func (r *Relay) accept() {
	for {
		client, err := r.ln.Accept()
		if err != nil {
			return
		}
		broker, err := net.Dial("tcp", r.broker)
		if err != nil {
			client.Close()
			continue
		}
		if r.keep(client) && r.keep(broker) {
			r.serve(client, broker)
		}
	}
}

func (r *Relay) serve(client, broker net.Conn) {
	var mu sync.Mutex
	waiting := map[int32]relayed{}
	r.wg.Go(func() {
		defer broker.Close()
		for {
			frame, err := ReadFrame(client)
			if err != nil {
				return
			}
			kind, version, correlationID := readHeader(frame)
			r.mu.Lock()
			r.counts[kind]++
			r.mu.Unlock()
			mu.Lock()
			waiting[correlationID] = relayed{kind.apiKey, version}
			mu.Unlock()
			if limit := r.PerSecond.Load(); limit > 0 {
				time.Sleep(time.Duration(len(frame)) * time.Second / time.Duration(limit)) // a narrow line
			}
			if _, err := broker.Write(frame); err != nil {
				return
			}
		}
	})
	r.wg.Go(func() {
		defer client.Close()
		for {
			frame, err := ReadFrame(broker)
			if err != nil {
				return
			}
			correlationID := int32(binary.BigEndian.Uint32(frame[4:]))
			mu.Lock()
			request := waiting[correlationID]
			delete(waiting, correlationID)
			mu.Unlock()
			if _, err := client.Write(r.readdress(request, frame)); err != nil {
				return
			}
		}
	})
}

// ReadFrame reads one frame, with its length.
func ReadFrame(conn net.Conn) ([]byte, error) {
	var size [4]byte
	if _, err := io.ReadFull(conn, size[:]); err != nil {
		return nil, err
	}
	frame := make([]byte, 4+binary.BigEndian.Uint32(size[:]))
	copy(frame, size[:])
	_, err := io.ReadFull(conn, frame[4:])
	return frame, err
}

func readHeader(frame []byte) (kind requestKind, version int16, correlationID int32) {
	b := kbin.Reader{Src: frame[4:]}
	kind.apiKey, version, correlationID = b.Int16(), b.Int16(), b.Int32()
	if id := b.NullableString(); id != nil {
		kind.clientID = *id
	}
	return kind, version, correlationID
}

// readdress names the relay instead of the broker in an answer that carries the broker's address.
func (r *Relay) readdress(request relayed, frame []byte) []byte {
	var resp kmsg.Response
	switch kmsg.Key(request.apiKey) {
	case kmsg.Metadata, kmsg.FindCoordinator, kmsg.DescribeCluster:
		resp = kmsg.ResponseForKey(request.apiKey)
	default:
		return frame
	}
	resp.SetVersion(request.version)
	body := frame[8:]
	if resp.IsFlexible() {
		body = body[1:] // no tags in the header
	}
	if err := resp.ReadFrom(body); err != nil {
		r.t.Errorf("relay: %T v%d: %v", resp, request.version, err)
		return frame
	}
	switch resp := resp.(type) {
	case *kmsg.MetadataResponse:
		for i := range resp.Brokers {
			resp.Brokers[i].Host, resp.Brokers[i].Port = r.host, r.port
		}
	case *kmsg.DescribeClusterResponse:
		for i := range resp.Brokers {
			resp.Brokers[i].Host, resp.Brokers[i].Port = r.host, r.port
		}
	case *kmsg.FindCoordinatorResponse:
		if resp.Port > 0 {
			resp.Host, resp.Port = r.host, r.port
		}
		for i := range resp.Coordinators {
			if c := &resp.Coordinators[i]; c.Port > 0 {
				c.Host, c.Port = r.host, r.port
			}
		}
	}
	out := append([]byte(nil), frame[:8]...)
	if resp.IsFlexible() {
		out = append(out, 0)
	}
	out = resp.AppendTo(out)
	binary.BigEndian.PutUint32(out, uint32(len(out)-4))
	return out
}

// RelayedCluster is a cluster as seen through a relay.
type RelayedCluster struct {
	*kafkatest.RealCluster
	*Relay
}

// Relayed puts a relay in front of a cluster.
func Relayed(t testing.TB, c *kafkatest.RealCluster) RelayedCluster {
	t.Helper()
	return RelayedCluster{c, NewRelay(t, c)}
}

// Seeds is the relay's address.
func (c RelayedCluster) Seeds() []string { return []string{c.Relay.Addr()} }
