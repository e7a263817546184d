package proxy

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kmirror/internal/bufpool"
	"kmirror/protocol"
)

func TestAcksZeroHasNoAnswer(t *testing.T) {
	b := script(t, func(c net.Conn, h protocol.RequestHeader, frame []byte) {
		if h.APIKey == protocol.KeyProduce {
			return
		}
		c.Write(responseFrame(metadata(h.APIVersion), h.CorrelationID))
	})
	for _, version := range []int16{0, 3, 8, 9, 12, 13} {
		s := startBefore(t, b, Options{Sink: &recorder{}})
		before := b.read()
		c := dialRaw(t, s.Addr())
		const n = 10_000
		frame := requestFrame(produceTo(version, 0, records(1)), 7)
		go c.send(bytes.Repeat(frame, n), requestFrame(kmsg.NewPtrMetadataRequest(), 9))
		if id := protocol.CorrelationID(c.receive()); id != 9 {
			t.Errorf("v%d: first answer has correlation ID %d, want 9", version, id)
		}
		if got := b.read() - before; got != n+1 {
			t.Errorf("v%d: the broker read %d requests, want %d", version, got, n+1)
		}
		eventually(t, "nothing is in flight", func() bool { return s.Status().InFlight == 0 })
	}
}

func TestMixedAcksAreAnsweredInOrder(t *testing.T) {
	b := script(t, func(c net.Conn, h protocol.RequestHeader, frame []byte) {
		if acks, _, _ := protocol.ProduceAcks(frame, h); acks != 0 {
			c.Write(produced(h, frame, nil))
		}
	})
	sink := &recorder{}
	s := startBefore(t, b, Options{Sink: sink})
	c := dialRaw(t, s.Addr())
	var want []int32
	var all []byte
	r := rand.New(rand.NewSource(1))
	offered := 0
	for id := range int32(1000) {
		acks := int16(r.Intn(3)) - 1
		if acks != 0 {
			want = append(want, id)
		}
		if acks == -1 {
			offered++
		}
		all = append(all, requestFrame(produceTo(9, acks, records(1)), id)...)
	}
	go c.send(all)
	for _, id := range want {
		if got := protocol.CorrelationID(c.receive()); got != id {
			t.Fatalf("answer has correlation ID %d, want %d", got, id)
		}
	}
	if got := sink.records(); got != offered {
		t.Errorf("the sink was offered %d records, want %d", got, offered)
	}
}

func TestAFullQueueStopsReading(t *testing.T) {
	open := make(chan struct{})
	b := script(t, func(c net.Conn, h protocol.RequestHeader, frame []byte) {
		<-open
		echo(c, h, frame)
	})
	release := sync.OnceFunc(func() { close(open) })
	t.Cleanup(release)
	s := startBefore(t, b, Options{})
	c := dialRaw(t, s.Addr())
	const n = 5 * maxInFlight
	go func() {
		for id := range int32(n) {
			c.Write(rawRequest(68, 0, id, []byte("heartbeat")))
		}
	}()
	eventually(t, "the queue is full", func() bool { return s.Status().InFlight == maxInFlight })
	release()
	for id := range int32(n) {
		if got := protocol.CorrelationID(c.receive()); got != id {
			t.Fatalf("answer has correlation ID %d, want %d", got, id)
		}
	}
}

func TestALateAnswerIsWaitedFor(t *testing.T) {
	release := make(chan struct{})
	b := script(t, func(c net.Conn, h protocol.RequestHeader, frame []byte) {
		if h.APIKey == int16(kmsg.JoinGroup) {
			<-release
		}
		echo(c, h, frame)
	})
	s := startBefore(t, b, Options{FrameTimeout: 30 * time.Millisecond})
	late := dialRaw(t, s.Addr())
	late.send(rawRequest(int16(kmsg.JoinGroup), 5, 1, nil), rawRequest(int16(kmsg.Heartbeat), 3, 2, nil))
	// The clock of this test: a request that stops midway is given up.
	half := dialRaw(t, s.Addr())
	half.send(rawRequest(3, 1, 1, make([]byte, 100))[:50])
	half.wantClosed("half a frame")
	close(release)
	for id := range int32(2) {
		if got := protocol.CorrelationID(late.receive()); got != id+1 {
			t.Fatalf("answer has correlation ID %d, want %d", got, id+1)
		}
	}
}

// versionsBroker answers ApiVersions as a broker does that knows it up to v3.
func versionsBroker(c net.Conn, h protocol.RequestHeader, frame []byte) {
	response := kmsg.NewPtrApiVersionsResponse()
	response.ApiKeys = []kmsg.ApiVersionsResponseApiKey{{ApiKey: 1, MinVersion: 4, MaxVersion: 18}, {ApiKey: 18, MaxVersion: 3}, {ApiKey: 30000, MaxVersion: 7}}
	response.Version = h.APIVersion
	if h.APIVersion > 3 {
		response.Version, response.ErrorCode, response.ApiKeys = 0, 35, response.ApiKeys[1:2]
	}
	c.Write(responseFrame(response, h.CorrelationID))
}

func TestApiVersionsThatTheBrokerRefuses(t *testing.T) {
	s := startBefore(t, script(t, versionsBroker), Options{})
	c := dialRaw(t, s.Addr())
	for id, version := range []int16{99, 5, 4, 0, 3} {
		c.send(rawRequest(18, version, int32(id), append([]byte{0xff, 0xff, 0}, make([]byte, 10)...)))
		frame := c.receive()
		if got := protocol.CorrelationID(frame); got != int32(id) {
			t.Fatalf("v%d: answer has correlation ID %d, want %d", version, got, id)
		}
		if version > 3 {
			r := decode(t, kmsg.NewPtrApiVersionsResponse(), 0, frame)
			if r.ErrorCode != 35 || len(r.ApiKeys) != 1 || r.ApiKeys[0].ApiKey != 18 || r.ApiKeys[0].MaxVersion != 3 {
				t.Errorf("v%d: got error %d, %v, want 35 and ApiVersions up to v3", version, r.ErrorCode, r.ApiKeys)
			}
			continue
		}
		r := decode(t, kmsg.NewPtrApiVersionsResponse(), version, frame)
		if r.ErrorCode != 0 || len(r.ApiKeys) != 3 || r.ApiKeys[0].MinVersion != 4 || r.ApiKeys[0].MaxVersion != 15 || r.ApiKeys[2].MaxVersion != 7 {
			t.Errorf("v%d: got error %d, %v", version, r.ErrorCode, r.ApiKeys)
		}
	}
}

func TestAVersionThatIsNotOfferedEndsTheConnection(t *testing.T) {
	s := startBefore(t, script(t, nil), Options{})
	for _, h := range []protocol.RequestHeader{{APIKey: 0, APIVersion: 14}, {APIKey: 1, APIVersion: 16}, {APIKey: 3, APIVersion: 14},
		{APIKey: 10, APIVersion: 7}, {APIKey: 60, APIVersion: 3}, {APIKey: 3, APIVersion: -1}, {APIKey: -1}} {
		c := dialRaw(t, s.Addr())
		c.send(rawRequest(h.APIKey, h.APIVersion, 1, make([]byte, 20)))
		c.wantClosed(fmt.Sprintf("key %d v%d", h.APIKey, h.APIVersion))
	}
}

func TestUnknownRequestsPassByteForByte(t *testing.T) {
	s := startBefore(t, script(t, nil), Options{})
	c := dialRaw(t, s.Addr())
	r := rand.New(rand.NewSource(1))
	keys := []int16{1, 8, 11, 19, 68, 69, 71, 72, 76, 77, 80, 88, 92, 95, 200, 10_000, 32_767}
	for id := range int32(300) {
		size := []int{0, 1, 100, maxPeek - 12, maxPeek - 11, pipeBuffer - 12, pipeBuffer, pipeBuffer + 1, 1 << 20}[r.Intn(9)]
		if id == 100 {
			size = 20 << 20
		}
		body := make([]byte, size)
		r.Read(body)
		frame := rawRequest(keys[r.Intn(len(keys))], int16(r.Intn(16)), id, body)
		go c.send(frame)
		if got, want := c.receive(), rawResponse(id, body); !bytes.Equal(got, want) {
			t.Fatalf("request %d of %d bytes: got %d bytes, %.40x, want %d, %.40x", id, len(frame), len(got), got, len(want), want)
		}
	}
}

func TestFramesCutIntoPieces(t *testing.T) {
	s := startBefore(t, script(t, nil), Options{})
	c := dialRaw(t, s.Addr())
	r := rand.New(rand.NewSource(1))
	var all []byte
	var bodies [][]byte
	for id := range int32(200) {
		body := make([]byte, r.Intn(3000))
		r.Read(body)
		bodies = append(bodies, body)
		all = append(all, rawRequest(68, 0, id, body)...)
	}
	go func() {
		for len(all) > 0 {
			n := min(len(all), 1+r.Intn(5000))
			c.Write(all[:n])
			all = all[n:]
		}
	}()
	for id, body := range bodies {
		if got, want := c.receive(), rawResponse(int32(id), body); !bytes.Equal(got, want) {
			t.Fatalf("request %d: got %.40x, want %.40x", id, got, want)
		}
	}
}

func TestWhatIsNotKafkaIsClosedAndNamed(t *testing.T) {
	core, logs := observer.New(zap.WarnLevel)
	s := startBefore(t, script(t, nil), Options{Logger: zap.New(core), MaxRequestBytes: 1 << 20})
	for _, tc := range []struct{ name, bytes, cause string }{
		{"TLS", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "frame size 369295618: a TLS hello: the client speaks TLS, this listener doesn't"},
		{"HTTP", "GET / HTTP/1.1\r\n\r\n", "frame size 1195725856: an HTTP request, not a Kafka client"},
		{"junk", "blah", "frame size 1651269992: larger than the limit of 1048576 bytes, or not a Kafka client"},
		{"huge", "\x7f\xff\xff\xff", "frame size 2147483647: larger than the limit of 1048576 bytes, or not a Kafka client"},
		{"zero", "\x00\x00\x00\x00", "frame size 0: smaller than a request header: not a Kafka client"},
		{"negative", "\x80\x00\x00\x00", "frame size -2147483648: smaller than a request header: not a Kafka client"},
	} {
		s.warnings.mu.Lock()
		clear(s.warnings.kind)
		s.warnings.mu.Unlock()
		for range 5 {
			c := dialRaw(t, s.Addr())
			c.send([]byte(tc.bytes))
			c.wantClosed(tc.name)
		}
		eventually(t, "connections are gone", func() bool { return s.Status().Connections == 0 })
		lines := logs.FilterMessage("connection closed").All()
		logs.TakeAll()
		if len(lines) != 1 || lines[0].ContextMap()["error"] != tc.cause {
			t.Errorf("%s: logged %v, want one line with %q", tc.name, lines, tc.cause)
		}
	}
}

func TestABrokerThatSpeaksTLSIsNamed(t *testing.T) {
	core, logs := observer.New(zap.WarnLevel)
	b := script(t, func(c net.Conn, _ protocol.RequestHeader, _ []byte) {
		c.Write([]byte("\x15\x03\x03\x00\x02\x02\x28"))
		c.Close()
	})
	s := startBefore(t, b, Options{Logger: zap.New(core)})
	c := dialRaw(t, s.Addr())
	c.send(rawRequest(68, 0, 1, nil))
	c.wantClosed("TLS alert")
	eventually(t, "it is logged", func() bool { return logs.FilterMessage("connection closed").Len() == 1 })
	got := logs.FilterMessage("connection closed").All()[0].ContextMap()["error"]
	if want := fmt.Sprintf("broker %s: a TLS alert: the broker speaks TLS, kmirror doesn't", b.ln.Addr()); got != want {
		t.Errorf("logged %q, want %q", got, want)
	}
}

func TestABrokerThatNeverAnswersIsNamed(t *testing.T) {
	core, logs := observer.New(zap.WarnLevel)
	b := script(t, func(c net.Conn, _ protocol.RequestHeader, _ []byte) { c.Close() })
	s := startBefore(t, b, Options{Logger: zap.New(core)})
	c := dialRaw(t, s.Addr())
	c.send(rawRequest(18, 3, 1, nil))
	c.wantClosed("broker closed")
	eventually(t, "it is logged", func() bool {
		lines := logs.FilterMessageSnippet("does it expect TLS or SASL?").All()
		return len(lines) == 1 && lines[0].ContextMap()["broker_address"] == b.ln.Addr().String()
	})
}

func TestAResponseOutOfOrderEndsTheConnection(t *testing.T) {
	b := script(t, func(c net.Conn, h protocol.RequestHeader, frame []byte) {
		h.CorrelationID++
		echo(c, h, frame)
	})
	s := startBefore(t, b, Options{})
	c := dialRaw(t, s.Addr())
	c.send(rawRequest(68, 0, 1, nil))
	c.wantClosed("wrong correlation ID")
}

func TestBytesBeforeCloseArrive(t *testing.T) {
	b := script(t, func(net.Conn, protocol.RequestHeader, []byte) {})
	s := startBefore(t, b, Options{})
	const connections, each = 100, 50
	for range connections {
		c := dialRaw(t, s.Addr())
		c.send(bytes.Repeat(requestFrame(produceTo(9, 0, records(1)), 1), each))
		c.Close()
	}
	eventually(t, "all requests sent before close are at the broker", func() bool { return b.read() == connections*each })
	eventually(t, "connections are gone", func() bool { return s.Status().Connections == 0 })
}

func TestAnswersBeforeTheBrokersCloseArrive(t *testing.T) {
	b := script(t, func(c net.Conn, h protocol.RequestHeader, frame []byte) {
		echo(c, h, frame)
		if h.CorrelationID == 9 {
			c.Close()
		}
	})
	s := startBefore(t, b, Options{})
	for range 50 {
		c := dialRaw(t, s.Addr())
		for id := range int32(10) {
			c.send(rawRequest(68, 0, id, make([]byte, 1000)))
		}
		for id := range int32(10) {
			if got := protocol.CorrelationID(c.receive()); got != id {
				t.Fatalf("answer has correlation ID %d, want %d", got, id)
			}
		}
		c.wantClosed("broker closed")
	}
}

// TestASlowBrokerDoesNotTimeTheClientOut: the bound on a request that stops midway is for clients that don't send, not for
// brokers that don't read (throttling).
func TestASlowBrokerDoesNotTimeTheClientOut(t *testing.T) {
	ln := listen(t)
	s := start(t, Options{Seeds: []string{ln.Addr().String()}, FrameTimeout: 100 * time.Millisecond})
	probe, err := ln.Accept() // the proxy looks whether the seed is alive
	if err != nil {
		t.Fatal(err)
	}
	probe.Close()
	c := dialRaw(t, s.Addr())
	broker, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer broker.Close()
	body := make([]byte, 30<<20) // more than the sockets hold
	rand.New(rand.NewSource(1)).Read(body)
	go c.send(rawRequest(68, 0, 1, body))
	half := dialRaw(t, s.Addr()) // the clock of this test: twice the bound
	for range 2 {
		other, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		half.send(make([]byte, 2))
		half.wantClosed("half a size")
		other.Close()
		half = dialRaw(t, s.Addr())
	}
	frame, err := readFrame(broker)
	if err != nil || !bytes.Equal(frame[12:], body) {
		t.Errorf("the broker read %d bytes and %v, want the whole request", len(frame), err)
	}
}

func TestAClientsHalfCloseStillGetsItsAnswers(t *testing.T) {
	b := script(t, nil)
	s := startBefore(t, b, Options{})
	c := dialRaw(t, s.Addr())
	c.send(rawRequest(68, 0, 1, []byte("last")))
	c.Conn.(*net.TCPConn).CloseWrite()
	if got, want := c.receive(), rawResponse(1, []byte("last")); !bytes.Equal(got, want) {
		t.Errorf("got %x, want %x", got, want)
	}
	c.wantClosed("after the last answer")
}

func TestAbortedConnectionsLeaveNothing(t *testing.T) {
	b := script(t, nil)
	sink := &recorder{}
	s := startBefore(t, b, Options{Sink: sink})
	warm := dialRaw(t, s.Addr())
	warm.send(rawRequest(68, 0, 1, nil))
	warm.receive()
	warm.Close()
	eventually(t, "connections are gone", func() bool { return s.Status().Connections == 0 })
	goroutines, descriptors := runtime.NumGoroutine(), openDescriptors(t)
	for i := range 500 {
		c, err := net.Dial("tcp", s.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		switch i % 4 {
		case 1:
			c.Write([]byte{0, 0})
		case 2:
			c.Write(requestFrame(produceTo(9, -1, records(1)), 1))
		case 3:
			c.Write(requestFrame(produceTo(9, -1, make([]byte, 200_000)), 1)[:100_000])
		}
		c.(*net.TCPConn).SetLinger(0) // reset
		c.Close()
	}
	eventually(t, "goroutines and descriptors are back to where they were", func() bool {
		return s.Status().Connections == 0 && runtime.NumGoroutine() <= goroutines+2 && openDescriptors(t) <= descriptors+2
	})
	if held := s.held.Load(); held != 0 {
		t.Errorf("%d bytes are still held", held)
	}
}

func openDescriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("needs /proc/self/fd")
	}
	return len(entries)
}

func TestAResetOnEitherSideEndsBoth(t *testing.T) {
	b := script(t, func(c net.Conn, h protocol.RequestHeader, _ []byte) {
		c.(*net.TCPConn).SetLinger(0)
		c.Close()
	})
	s := startBefore(t, b, Options{})
	c := dialRaw(t, s.Addr())
	c.send(rawRequest(68, 0, 1, nil))
	c.wantClosed("broker's reset")
	eventually(t, "connections are gone", func() bool { return s.Status().Connections == 0 })
}

// TestSlowClientsTakeBoundedMemory lets 200 clients ask for 50 MiB each and read none of it.
func TestSlowClientsTakeBoundedMemory(t *testing.T) {
	const size, connections, read = 50 << 20, 200, 2
	// Of each answer the kernel holds what fits its buffers on both sides of the proxy, and in the pipe that joins them.
	const inKernel = 4 << 20
	var sent atomic.Int64
	body := make([]byte, 64<<10)
	b := script(t, func(c net.Conn, h protocol.RequestHeader, _ []byte) {
		var prefix [8]byte
		binary.BigEndian.PutUint32(prefix[:], 4+size)
		binary.BigEndian.PutUint32(prefix[4:], uint32(h.CorrelationID))
		c.(*net.TCPConn).SetWriteBuffer(64 << 10)
		c.Write(prefix[:])
		for range size / len(body) {
			n, err := c.Write(body)
			sent.Add(int64(n))
			if err != nil {
				return
			}
		}
	})
	cert, pool := certificate(t)
	for _, tt := range []struct {
		name   string
		server *tls.Config
		each   int64 // bytes that a connection may take
	}{
		{"plaintext", nil, 16 << 10}, // the kernel moves them
		{"TLS", &tls.Config{Certificates: []tls.Certificate{cert}}, pipeBuffer + 96<<10},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := startBefore(t, b, Options{DownstreamTLS: tt.server})
			dial := func() *rawClient {
				c := dialRaw(t, s.Addr())
				// The kernel's buffers for what nobody reads would take all that it allows to TCP, on the whole machine.
				c.Conn.(*net.TCPConn).SetReadBuffer(32 << 10)
				if tt.server != nil {
					c.Conn = tls.Client(c.Conn, &tls.Config{RootCAs: pool, ServerName: "127.0.0.1"})
					c.r = bufio.NewReader(c.Conn)
				}
				return c
			}
			dial().Close() // what is set up once isn't counted
			before := heapInUse()
			sent.Store(0)
			var clients []*rawClient
			for range connections {
				c := dial()
				c.send(rawRequest(1, 11, 1, nil))
				clients = append(clients, c)
			}
			for _, c := range clients {
				c.r.Peek(1) // the answer has begun, and isn't read
			}
			if each := standing(t, &sent) / connections; each > inKernel {
				t.Errorf("the broker sent %d bytes to each client that doesn't read, want at most %d", each, inKernel)
			} else {
				t.Logf("the broker sent %d bytes to each client", each)
			}
			if grown := heapInUse() - before; grown > connections*tt.each {
				t.Errorf("%d slow clients take %d bytes each, want at most %d", connections, grown/connections, tt.each)
			} else {
				t.Logf("%d bytes for each of %d clients", grown/connections, connections)
			}
			for _, c := range clients[:read] {
				if got := len(c.receive()); got != size+8 {
					t.Errorf("got %d bytes, want %d", got, size+8)
				}
			}
			for _, c := range clients {
				c.Close()
			}
		})
	}
}

// TestDeafClientsOfRewrittenAnswers: an answer that is rewritten is kept whole until its client has taken it, but once.
func TestDeafClientsOfRewrittenAnswers(t *testing.T) {
	const size, connections = 3 << 20, 30
	response := metadata(12, Broker{1, "127.0.0.1", 9092})
	topic := kmsg.NewMetadataResponseTopic()
	topic.Topic = kmsg.StringPtr("orders")
	for range size / 50 { // bytes that a partition takes
		p := kmsg.NewMetadataResponseTopicPartition()
		p.Replicas, p.ISR, p.OfflineReplicas = []int32{1, 2, 3}, []int32{1, 2, 3}, []int32{}
		topic.Partitions = append(topic.Partitions, p)
	}
	response.Topics = append(response.Topics, topic)
	answer := responseFrame(response, 1)
	b := script(t, func(c net.Conn, _ protocol.RequestHeader, _ []byte) { c.Write(answer) })
	s := startBefore(t, b, Options{AnswerBytes: int64(connections+1) * int64(len(answer))}) // room for all: what each takes is looked for
	once := dialRaw(t, s.Addr())
	once.send(requestFrame(&kmsg.MetadataRequest{Version: 12}, 1))
	once.receive()
	before := heapInUse()
	var clients []*rawClient
	for range connections {
		c := dialRaw(t, s.Addr())
		c.Conn.(*net.TCPConn).SetReadBuffer(32 << 10)
		c.send(requestFrame(&kmsg.MetadataRequest{Version: 12}, 1))
		clients = append(clients, c)
	}
	for _, c := range clients {
		c.r.Peek(1)
	}
	var written atomic.Int64
	eventually(t, "no answer is taken further", func() bool {
		var n int64
		s.mu.Lock()
		defer s.mu.Unlock()
		for c := range s.conns {
			n += c.responseBytes.Load()
		}
		return written.Swap(n) == n
	})
	grown := (heapInUse() - before) / connections
	t.Logf("%d bytes for each of %d answers of %d", grown, connections, len(answer))
	if limit := int64(bufpool.Footprint(len(answer)+rewriteSpare+256)) + pipeBuffer; grown > limit {
		t.Errorf("a client that doesn't read takes %d bytes for an answer of %d, want at most %d", grown, len(answer), limit)
	}
	for _, c := range clients {
		if got := len(c.receive()); got < len(answer)-10 {
			t.Errorf("got %d bytes, want the whole answer of about %d", got, len(answer))
		}
	}
}

// standing waits until n doesn't grow any more.
func standing(t *testing.T, n *atomic.Int64) int64 {
	was, still := int64(-1), 0
	eventually(t, "the broker can't send more", func() bool {
		now := n.Load()
		if still++; now != was {
			was, still = now, 0
		}
		return still == 50
	})
	return was
}

// heapInUse is what of the heap is reachable, without what pools keep.
func heapInUse() int64 {
	var stats runtime.MemStats
	runtime.GC() // a pool lets go of what two collections found unused
	runtime.GC()
	runtime.ReadMemStats(&stats)
	return int64(stats.HeapAlloc)
}

// TestIdleConnectionsHoldNoBuffer: between requests a connection keeps neither of its pipes' buffers, of pipeBuffer each.
func TestIdleConnectionsHoldNoBuffer(t *testing.T) {
	const connections = 200
	cert, pool := certificate(t)
	for name, secure := range map[string]*tls.Config{"plaintext": nil, "TLS": {Certificates: []tls.Certificate{cert}}} {
		t.Run(name, func(t *testing.T) {
			s := startBefore(t, script(t, nil), Options{DownstreamTLS: secure})
			before := heapInUse()
			var clients []*rawClient
			for range connections {
				c := dialRaw(t, s.Addr())
				if secure != nil {
					c.Conn = tls.Client(c.Conn, &tls.Config{RootCAs: pool, ServerName: "127.0.0.1"})
					c.r = bufio.NewReader(c.Conn)
				}
				c.send(rawRequest(68, 0, 1, make([]byte, 20_000)))
				c.receive()
				clients = append(clients, c)
			}
			eventually(t, "all wait for their next request", func() bool {
				s.mu.Lock()
				defer s.mu.Unlock()
				for c := range s.conns {
					if !c.requests.waiting() {
						return false
					}
				}
				return len(s.conns) == len(clients)
			})
			grown := (heapInUse() - before) / connections // the clients' and the broker's own too
			t.Logf("%d bytes each", grown)
			if grown > pipeBuffer*3/4 {
				t.Errorf("an idle connection takes %d bytes, want less than a buffer, %d", grown, pipeBuffer)
			}
		})
	}
}

func TestTooManyConnections(t *testing.T) {
	s := startBefore(t, script(t, nil), Options{MaxConnections: 2})
	var clients []*rawClient
	for range 2 {
		c := dialRaw(t, s.Addr())
		c.send(rawRequest(68, 0, 1, nil))
		c.receive()
		clients = append(clients, c)
	}
	dialRaw(t, s.Addr()).wantClosed("third connection")
	clients[0].Close()
	eventually(t, "a place is free", func() bool { return s.Status().Connections == 1 })
	c := dialRaw(t, s.Addr())
	c.send(rawRequest(68, 0, 1, nil))
	c.receive()
}

// saslBroker answers as a broker with SASL handshakes of v0: raw tokens after it.
func saslBroker(tokens int, reply func(c net.Conn, token []byte)) func(net.Conn, protocol.RequestHeader, []byte) {
	left := 0
	return func(c net.Conn, h protocol.RequestHeader, frame []byte) {
		switch {
		case left > 0:
			left--
			reply(c, frame[4:])
		case h.APIKey == protocol.KeySASLHandshake:
			response := kmsg.NewPtrSASLHandshakeResponse()
			response.SupportedMechanisms = []string{"PLAIN", "GSSAPI"}
			if bytes.Contains(frame, []byte("NOTHING")) {
				response.ErrorCode = 33
			} else {
				left = tokens
			}
			c.Write(responseFrame(response, h.CorrelationID))
		default:
			echo(c, h, frame)
		}
	}
}

func rawToken(token string) []byte {
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(token))), token...)
}

func handshake(mechanism string, version int16, id int32) []byte {
	request := kmsg.NewPtrSASLHandshakeRequest()
	request.Version, request.Mechanism = version, mechanism
	return requestFrame(request, id)
}

func TestRawPlainTokenAfterHandshakeV0(t *testing.T) {
	b := script(t, saslBroker(1, func(c net.Conn, token []byte) {
		if string(token) != "\x00\x03\x00\x01user\x00secret" { // looks like a Metadata request
			t.Errorf("broker got token %q", token)
		}
		c.Write(rawToken(""))
	}))
	s := startBefore(t, b, Options{})
	c := dialRaw(t, s.Addr())
	c.send(handshake("NOTHING", 0, 1))
	c.receive()
	c.send(rawRequest(68, 0, 2, []byte("no token after a refusal")))
	c.receive()
	c.send(handshake("PLAIN", 0, 3))
	c.receive()
	c.send(rawToken("\x00\x03\x00\x01user\x00secret"), rawRequest(3, 1, 4, nil)[:0])
	if got := c.receive(); len(got) != 4 {
		t.Errorf("answer to the token is %x, want an empty one", got)
	}
	c.send(rawRequest(68, 0, 5, []byte("after")))
	if got := c.receive(); !bytes.Equal(got, rawResponse(5, []byte("after"))) {
		t.Errorf("request after authentication: got %x", got)
	}
}

func TestRawTokensUntilARequest(t *testing.T) {
	n := 0
	b := script(t, saslBroker(3, func(c net.Conn, token []byte) {
		if n++; n < 3 {
			c.Write(rawToken("challenge"))
		} // the last token of GSSAPI has no answer
	}))
	s := startBefore(t, b, Options{})
	c := dialRaw(t, s.Addr())
	c.send(handshake("GSSAPI", 0, 1))
	c.receive()
	for _, token := range []string{"\x60\x82\x02\x03 first token", ""} {
		c.send(rawToken(token))
		if got := c.receive(); !bytes.Equal(got, rawToken("challenge")) {
			t.Fatalf("answer to token %q is %q", token, got)
		}
	}
	c.send(rawToken("\x05\x04\x04\xff last token"))
	c.send(rawRequest(68, 0, 5, []byte("after")))
	if got := c.receive(); !bytes.Equal(got, rawResponse(5, []byte("after"))) {
		t.Errorf("request after authentication: got %x", got)
	}
}

func TestSaslAuthenticateIsOpaqueAtAnyTime(t *testing.T) {
	s := startBefore(t, script(t, nil), Options{})
	c := dialRaw(t, s.Addr())
	var sent [][]byte
	for id := range int32(30) {
		key := []int16{17, 36, 68}[id%3]
		body := []byte(fmt.Sprintf("token %d", id))
		sent = append(sent, body)
		c.send(rawRequest(key, 1, id, body))
	}
	for id, body := range sent {
		if got := c.receive(); !bytes.Equal(got, rawResponse(int32(id), body)) {
			t.Fatalf("request %d: got %x", id, got)
		}
	}
}

func TestDrainAnswersWhatIsInFlight(t *testing.T) {
	release, read := make(chan struct{}), make(chan struct{}, 10)
	b := script(t, func(c net.Conn, h protocol.RequestHeader, frame []byte) {
		read <- struct{}{}
		<-release
		echo(c, h, frame)
	})
	s, err := New(Options{Listen: "127.0.0.1:0", Seeds: []string{b.ln.Addr().String()}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	busy, idle := dialRaw(t, s.Addr()), dialRaw(t, s.Addr())
	busy.send(rawRequest(68, 0, 1, []byte("in flight")))
	<-read
	eventually(t, "both are connected", func() bool { return b.connections() >= 2 && s.Status().Connections == 2 })
	cancel()
	idle.wantClosed("idle connection at shutdown")
	if c, err := net.Dial("tcp", s.Addr().String()); err == nil {
		c.SetDeadline(time.Now().Add(20 * time.Second))
		if _, err := io.ReadFull(c, make([]byte, 1)); err == nil {
			t.Error("a new connection is served during shutdown")
		}
		c.Close()
	}
	select {
	case err := <-done:
		t.Fatalf("Run returned %v with a request in flight", err)
	default:
	}
	close(release)
	if got := busy.receive(); !bytes.Equal(got, rawResponse(1, []byte("in flight"))) {
		t.Errorf("got %x", got)
	}
	busy.wantClosed("after the last answer")
	if err := <-done; err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
}

// TestDrainUnderLoadLosesNoAnswer stops the proxy while clients send without pause: what the broker was sent, and answered, must
// reach the client, though the client's further requests stay unread.
func TestDrainUnderLoadLosesNoAnswer(t *testing.T) {
	var mu sync.Mutex
	answered := make(map[string]int) // by client
	b := script(t, func(c net.Conn, h protocol.RequestHeader, frame []byte) {
		mu.Lock()
		answered[string(frame[12:20])]++
		mu.Unlock()
		c.Write(rawResponse(h.CorrelationID, frame[12:]))
	})
	s, err := New(Options{Listen: "127.0.0.1:0", Seeds: []string{b.ln.Addr().String()}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	got := make(map[string]int)
	var wg sync.WaitGroup
	var clients []*rawClient
	for range 4 { // all of them before the first may end the server: one that comes later is refused
		clients = append(clients, dialRaw(t, s.Addr()))
	}
	for i, c := range clients {
		name := fmt.Sprintf("client %d", i)
		body := append([]byte(name), make([]byte, 3000)...)
		wg.Go(func() {
			for id := int32(0); ; id++ {
				if _, err := c.Write(rawRequest(68, 0, id, body)); err != nil {
					return
				}
			}
		})
		wg.Go(func() {
			n := 0
			for {
				if _, err := readFrame(c.r); err != nil {
					break
				}
				if n++; n == 100 {
					cancel()
				}
			}
			c.Close()
			mu.Lock()
			got[name] = n
			mu.Unlock()
		})
	}
	wg.Wait()
	if err := <-done; err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
	mu.Lock()
	defer mu.Unlock()
	for name, n := range answered {
		if got[name] != n {
			t.Errorf("%s got %d answers of the broker's %d", name, got[name], n)
		}
	}
}

func TestGraceEndsWhatIsNeverAnswered(t *testing.T) {
	read := make(chan struct{}, 1)
	b := script(t, func(net.Conn, protocol.RequestHeader, []byte) { read <- struct{}{} })
	s, err := New(Options{Listen: "127.0.0.1:0", Seeds: []string{b.ln.Addr().String()}, Grace: 20 * time.Millisecond, Sink: &recorder{}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	c := dialRaw(t, s.Addr())
	c.send(requestFrame(produceTo(9, -1, records(1)), 1))
	<-read
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
	c.wantClosed("after the grace time")
	if held := s.held.Load(); held != 0 {
		t.Errorf("%d bytes are still held", held)
	}
}

// TestDamagedFramesHarmNoOneElse sends requests with random damage, and answers of a broker that does the same, beside a client
// whose requests must all be answered.
func TestDamagedFramesHarmNoOneElse(t *testing.T) {
	seed := time.Now().UnixNano()
	t.Logf("seed %d", seed)
	damage := func(r *rand.Rand, frame []byte) []byte {
		frame = bytes.Clone(frame)
		for range r.Intn(4) {
			frame[4+r.Intn(len(frame)-4)] ^= byte(1 << r.Intn(8))
		}
		if r.Intn(10) == 0 {
			frame[r.Intn(4)] ^= byte(1 << r.Intn(8))
		}
		return frame[:len(frame)-r.Intn(2)*r.Intn(len(frame))]
	}
	var mu sync.Mutex
	answers := rand.New(rand.NewSource(seed))
	b := script(t, func(c net.Conn, h protocol.RequestHeader, frame []byte) {
		var answer []byte
		switch h.APIKey {
		case 68:
			echo(c, h, frame)
			return
		case protocol.KeyProduce:
			answer = produced(h, frame, nil)
		default:
			answer = responseFrame(metadata(9, Broker{1, "127.0.0.1", 9092}), h.CorrelationID)
		}
		mu.Lock()
		answer = damage(answers, answer)
		mu.Unlock()
		c.Write(answer)
		if len(answer)%3 == 0 {
			c.Close()
		}
	})
	s := startBefore(t, b, Options{Sink: &recorder{}, Logger: nopLogger, MaxRequestBytes: 1 << 20, FrameTimeout: 200 * time.Millisecond})
	r := rand.New(rand.NewSource(seed + 1))
	frames := [][]byte{requestFrame(produceTo(9, -1, records(1), records(2)), 1), requestFrame(produceTo(13, -1, records(1)), 1),
		requestFrame(kmsg.NewPtrMetadataRequest(), 2), handshake("PLAIN", 0, 3), requestFrame(kmsg.NewPtrApiVersionsRequest(), 4)}
	var wg sync.WaitGroup
	for range 8 {
		r := rand.New(rand.NewSource(r.Int63()))
		wg.Go(func() {
			for range 40 {
				c, err := net.Dial("tcp", s.Addr().String())
				if err != nil {
					t.Error(err)
					return
				}
				c.SetDeadline(time.Now().Add(50 * time.Millisecond))
				for range 1 + r.Intn(5) {
					c.Write(damage(r, frames[r.Intn(len(frames))]))
				}
				io.Copy(io.Discard, c)
				c.Close()
			}
		})
	}
	good := dialRaw(t, s.Addr())
	for id := range int32(500) {
		body := make([]byte, 100)
		good.send(rawRequest(68, 0, id, body))
		if got := good.receive(); !bytes.Equal(got, rawResponse(id, body)) {
			t.Fatalf("request %d: got %x", id, got)
		}
	}
	wg.Wait()
	eventually(t, "nothing is held", func() bool { return s.held.Load() == 0 && s.Status().Connections == 1 })
}
