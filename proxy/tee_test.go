package proxy

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/bufpool"
	"kmirror/protocol"
)

// teeCase sends one Produce request through a proxy and returns what the sink was told.
func teeCase(t *testing.T, request *kmsg.ProduceRequest, change func(*kmsg.ProduceResponse)) *recorder {
	t.Helper()
	b := script(t, func(c net.Conn, h protocol.RequestHeader, frame []byte) { c.Write(produced(h, frame, change)) })
	sink := &recorder{}
	s := startBefore(t, b, Options{Sink: sink})
	c := dialRaw(t, s.Addr())
	c.send(requestFrame(request, 7))
	c.receive()
	if held := s.held.Load(); held != 0 {
		t.Errorf("%d bytes are held after the answer", held)
	}
	return sink
}

func firstPartition(r *kmsg.ProduceResponse) *kmsg.ProduceResponseTopicPartition {
	return &r.Topics[0].Partitions[0]
}

func TestAcknowledgedBatchesAreOffered(t *testing.T) {
	big := append(records(3), make([]byte, 100_000)...)
	binary.BigEndian.PutUint32(big[8:], uint32(len(big)-12))
	for version := int16(3); version <= 13; version++ {
		for _, batches := range [][][]byte{{records(3)}, {big}, {records(1), big, records(2)}} {
			sink := teeCase(t, produceTo(version, -1, batches...), nil)
			if len(sink.offers) != len(batches) {
				t.Fatalf("v%d: %d batches were offered, want %d", version, len(sink.offers), len(batches))
			}
			for i, o := range sink.offers {
				name, id := "orders", protocol.TopicID{}
				if version >= 13 {
					name, id = "", protocol.TopicID{1, 2, 3}
				}
				if o.Topic != name || o.TopicID != id || o.Partition != int32(i) || o.BaseOffset != 100+int64(i) || !bytes.Equal(o.Batch, batches[i]) {
					t.Errorf("v%d: offered topic %q %x partition %d offset %d, %d bytes, want %q %x %d %d, %d bytes", version,
						o.Topic, o.TopicID, o.Partition, o.BaseOffset, len(o.Batch), name, id, i, 100+i, len(batches[i]))
				}
			}
		}
	}
}

func TestBatchesThatMayNotBeOffered(t *testing.T) {
	with := func(change func(b []byte)) []byte {
		b := records(3)
		change(b)
		return b
	}
	plain := func(acks int16, b []byte) *kmsg.ProduceRequest { return produceTo(9, acks, b) }
	for _, tc := range []struct {
		name    string
		request *kmsg.ProduceRequest
		change  func(*kmsg.ProduceResponse)
		grown   []int64
		doubts  int
	}{
		{name: "acks=1", request: plain(1, records(3)), grown: []int64{101}},
		{name: "transactional", request: plain(-1, with(func(b []byte) { b[22] |= protocol.AttrTransactional })), grown: []int64{103}},
		{name: "control", request: plain(-1, with(func(b []byte) { b[22] |= protocol.AttrControl })), grown: []int64{103}},
		{name: "v0", request: produceTo(0, -1, records(3)), grown: []int64{101}},
		{name: "v1", request: produceTo(1, 1, records(3)), grown: []int64{101}},
		{name: "v2", request: produceTo(2, -1, records(3)), grown: []int64{101}},
		{name: "old format", request: plain(-1, with(func(b []byte) { b[16] = 1 })), grown: []int64{101}},
		{name: "two batches", request: plain(-1, append(records(3), records(4)...)), grown: []int64{107}},
		{name: "count that isn't its range", request: plain(-1, with(func(b []byte) { b[60] = 1 })), grown: []int64{103}},
		{name: "cut", request: plain(-1, records(3)[:70]), grown: []int64{101}},
		{name: "no records", request: plain(-1, nil), grown: []int64{101}},
		{name: "append time", request: plain(-1, records(3)), grown: []int64{103},
			change: func(r *kmsg.ProduceResponse) { firstPartition(r).LogAppendTime = 1700000000000 }},
		{name: "refused", request: plain(-1, records(3)),
			change: func(r *kmsg.ProduceResponse) { p := firstPartition(r); p.ErrorCode, p.BaseOffset = 10, -1 }},
		{name: "repeat without offset", request: plain(-1, records(3)), change: func(r *kmsg.ProduceResponse) { firstPartition(r).BaseOffset = -1 }},
		{name: "unknown topic", request: plain(-1, records(3)), doubts: 1, change: func(r *kmsg.ProduceResponse) { firstPartition(r).ErrorCode = 3 }},
		{name: "not leader", request: plain(-1, records(3)), doubts: 1, change: func(r *kmsg.ProduceResponse) { firstPartition(r).ErrorCode = 6 }},
		{name: "unknown topic ID", request: produceTo(13, -1, records(3)), doubts: 1, change: func(r *kmsg.ProduceResponse) { firstPartition(r).ErrorCode = 100 }},
		{name: "in a transaction", request: func() *kmsg.ProduceRequest {
			r := plain(-1, records(3))
			r.TransactionID = kmsg.StringPtr("t")
			return r
		}(), grown: []int64{101}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			sink := teeCase(t, tc.request, tc.change)
			if len(sink.offers) != 0 || !slices.Equal(sink.grown, tc.grown) || sink.doubts != tc.doubts {
				t.Errorf("the sink got %d offers, grown %v, %d doubts, want 0, %v, %d", len(sink.offers), sink.grown, sink.doubts, tc.grown, tc.doubts)
			}
		})
	}
}

func TestAnswersInAnotherOrderFindTheirBatches(t *testing.T) {
	var batches [][]byte
	for i := range 50 {
		batches = append(batches, records(i+1))
	}
	for _, version := range []int16{9, 13} {
		sink := teeCase(t, produceTo(version, -1, batches...), func(r *kmsg.ProduceResponse) {
			slices.Reverse(r.Topics[0].Partitions)
			r.Topics[0].Partitions[3].ErrorCode = 10
		})
		if len(sink.offers) != 49 {
			t.Fatalf("v%d: %d batches were offered, want 49", version, len(sink.offers))
		}
		for _, o := range sink.offers {
			if o.Batch.RecordCount() != o.Partition+1 {
				t.Errorf("v%d: partition %d was offered with %d records", version, o.Partition, o.Batch.RecordCount())
			}
		}
	}
}

// keeper takes every batch and keeps its memory.
type keeper struct {
	recorder
	memory []protocol.Releaser
}

func (k *keeper) Offer(b protocol.AckedBatch) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.offers, k.memory = append(k.offers, b), append(k.memory, b.Memory)
	b.Batch.Stamp(5, 1, 2) // the owner may change it
	return true
}

func TestTheSinkOwnsWhatItTook(t *testing.T) {
	b := script(t, func(c net.Conn, h protocol.RequestHeader, frame []byte) { c.Write(produced(h, frame, nil)) })
	sink := &keeper{}
	s := startBefore(t, b, Options{Sink: sink})
	c := dialRaw(t, s.Addr())
	for id := range int32(200) {
		one := records(int(id) + 1)
		c.send(requestFrame(produceTo(9, -1, one), id))
		c.receive()
		c.send(requestFrame(produceTo(9, -1, one, one), id))
		c.receive()
	}
	for i, o := range sink.offers {
		if got, want := o.Batch.RecordCount(), int32(i/3+1); got != want || o.Batch.ProducerID() != 5 {
			t.Fatalf("batch %d has %d records of producer %d, want %d of 5: its memory was used again", i, got, o.Batch.ProducerID(), want)
		}
		sink.memory[i].Release()
	}
}

func TestARefusedBatchIsReleased(t *testing.T) {
	b := script(t, func(c net.Conn, h protocol.RequestHeader, frame []byte) { c.Write(produced(h, frame, nil)) })
	s := startBefore(t, b, Options{Sink: &recorder{refuse: true}})
	c := dialRaw(t, s.Addr())
	for range 50 {
		c.send(requestFrame(produceTo(9, -1, records(1)), 1), requestFrame(produceTo(9, -1, records(1), records(1)), 2))
		c.receive()
		c.receive()
	}
	if held := s.held.Load(); held != 0 {
		t.Errorf("%d bytes are held", held)
	}
}

func TestBeyondTheBoundRequestsPassWithoutTheSink(t *testing.T) {
	b := script(t, func(c net.Conn, h protocol.RequestHeader, frame []byte) { c.Write(produced(h, frame, nil)) })
	sink := &recorder{}
	s := startBefore(t, b, Options{Sink: sink, HeldBytes: 10_000})
	c := dialRaw(t, s.Addr())
	big := append(records(3), make([]byte, 100_000)...)
	binary.BigEndian.PutUint32(big[8:], uint32(len(big)-12))
	c.send(requestFrame(produceTo(9, -1, big), 1), requestFrame(produceTo(9, -1, records(1)), 2))
	c.receive()
	c.receive()
	if sink.records() != 1 || !slices.Equal(sink.grown, []int64{101}) {
		t.Errorf("the sink got %d records and grown %v, want 1 and [101]", sink.records(), sink.grown)
	}
}

// The batches of a request stay in its frame, which counts as held until the last is let go; where half of what may be held is, they are copied, so that new requests can be.
func TestBatchesShareTheirRequestsFrame(t *testing.T) {
	b := script(t, func(c net.Conn, h protocol.RequestHeader, frame []byte) { c.Write(produced(h, frame, nil)) })
	sink := &keeper{}
	request := requestFrame(produceTo(9, -1, records(1), records(2), records(3)), 7)
	size := int64(len(request))
	s := startBefore(t, b, Options{Sink: sink, HeldBytes: 5 * size})
	c := dialRaw(t, s.Addr())
	for i, want := range []int64{size, 2 * size, 2 * size} {
		c.send(request)
		c.receive()
		if held := s.held.Load(); held != want {
			t.Errorf("%d bytes are held after request %d, want %d", held, i, want)
		}
	}
	for i, o := range sink.offers {
		if got, want := o.Batch.RecordCount(), int32(i%3+1); got != want || o.Batch.ProducerID() != 5 {
			t.Errorf("batch %d has %d records of producer %d, want %d of 5", i, got, o.Batch.ProducerID(), want)
		}
	}
	for i, want := range []int64{2 * size, 2 * size, size, size, size, 0, 0, 0, 0} {
		sink.memory[i].Release()
		if held := s.held.Load(); held != want {
			t.Errorf("%d bytes are held after %d releases, want %d", held, i+1, want)
		}
	}
}

// releaser takes every batch and lets it go, as fast as can be.
type releaser struct{ recorder }

func (r *releaser) Offer(b protocol.AckedBatch) bool {
	b.Memory.Release()
	return true
}

// exchange returns a function that sends one request through the proxy and reads its answer, without allocating.
func exchange(t testing.TB, s *Server, request, response []byte) func() {
	c := dialRaw(t, s.Addr())
	answer := make([]byte, len(response))
	return func() {
		c.Write(request)
		for n := 0; n < len(answer); {
			m, err := c.Conn.Read(answer[n:])
			if err != nil {
				t.Fatal(err)
			}
			n += m
		}
	}
}

// constant starts a broker that gives one answer to every request of one size, without allocating.
func constant(t testing.TB, requestSize int, response []byte) *scripted {
	ln := listen(t)
	b := &scripted{t: t, ln: ln}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				in := make([]byte, 256<<10)
				out := bytes.Repeat(response, 1+len(in)/requestSize)
				have := 0
				for {
					n, err := c.Read(in)
					if err != nil {
						return
					}
					have += n
					whole := have / requestSize
					have -= whole * requestSize
					if _, err := c.Write(out[:whole*len(response)]); err != nil {
						return
					}
				}
			}()
		}
	}()
	t.Cleanup(func() { ln.Close(); <-done })
	return b
}

func TestTheFramePathsAllocateNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector's pools drop buffers")
	}
	produce := requestFrame(produceTo(11, -1, records(1)), 7)
	acked := produced(protocol.ParseRequestHeader(produce), produce, nil)
	large := requestFrame(produceTo(11, -1, batchOf(48<<10)), 7)
	for _, tc := range []struct {
		name              string
		request, response []byte
	}{
		{"large opaque", rawRequest(68, 0, 7, make([]byte, 48<<10)), rawResponse(7, make([]byte, 48<<10))},
		{"large produce", large, produced(protocol.ParseRequestHeader(large), large, nil)},
		{"opaque", rawRequest(68, 0, 7, []byte("heartbeat")), rawResponse(7, []byte("ok"))},
		{"produce", produce, acked},
	} {
		s := startBefore(t, constant(t, len(tc.request), tc.response), Options{Sink: &releaser{}})
		once := exchange(t, s, tc.request, tc.response)
		once()
		if n := testing.AllocsPerRun(500, once); n > 0 {
			t.Errorf("%s: %v allocations a frame, want 0", tc.name, n)
		}
	}
}

// benchmarkPipelined sends many requests at a time and reads their answers.
func benchmarkPipelined(b *testing.B, direct bool, sink Sink, request, response []byte) {
	broker := constant(b, len(request), response)
	address := broker.ln.Addr()
	if !direct {
		address = startBefore(b, broker, Options{Sink: sink, Logger: nopLogger}).Addr()
	}
	const batch = 100
	once := func() func() {
		c := dialRaw(b, address)
		requests, answers := bytes.Repeat(request, batch), make([]byte, batch*len(response))
		return func() {
			c.Write(requests)
			for n := 0; n < len(answers); {
				m, err := c.Conn.Read(answers[n:])
				if err != nil {
					b.Fatal(err)
				}
				n += m
			}
		}
	}()
	b.SetBytes(int64(len(request)))
	b.ReportAllocs()
	b.ResetTimer()
	for i := 0; i < b.N; i += batch {
		once()
	}
}

func BenchmarkRelay(b *testing.B) {
	small := requestFrame(produceTo(11, -1, records(1)), 7)
	smallAnswer := produced(protocol.ParseRequestHeader(small), small, nil)
	opaque := rawRequest(68, 0, 7, make([]byte, len(small)-12))
	b.Run("direct", func(b *testing.B) { benchmarkPipelined(b, true, nil, small, smallAnswer) })
	b.Run("opaque", func(b *testing.B) { benchmarkPipelined(b, false, nil, opaque, smallAnswer) })
	b.Run("produce", func(b *testing.B) { benchmarkPipelined(b, false, nil, small, smallAnswer) })
	b.Run("tee", func(b *testing.B) { benchmarkPipelined(b, false, &releaser{}, small, smallAnswer) })
}

func BenchmarkTee(b *testing.B) {
	frame := requestFrame(produceTo(11, -1, records(1)), 7)
	answer := produced(protocol.ParseRequestHeader(frame), frame, nil)
	c := &conn{s: &Server{o: Options{Sink: &releaser{}}}}
	b.ReportAllocs()
	for b.Loop() {
		c.s.hold(len(frame))
		r := request{header: protocol.ParseRequestHeader(frame), answer: answerProduce, frame: bufpool.Get(len(frame)), copied: true}
		copy(r.frame.B, frame)
		if _, err := c.produceAnswered(&r, answer); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkFetch relays responses of 1 MiB, as consumers get them.
func BenchmarkFetch(b *testing.B) {
	request := rawRequest(1, 11, 7, make([]byte, 100))
	response := rawResponse(7, make([]byte, 1<<20))
	for _, direct := range []bool{true, false} {
		b.Run(map[bool]string{true: "direct", false: "proxy"}[direct], func(b *testing.B) {
			broker := script(b, func(c net.Conn, _ protocol.RequestHeader, _ []byte) { c.Write(response) })
			address := broker.ln.Addr()
			if !direct {
				address = startBefore(b, broker, Options{Logger: nopLogger}).Addr()
			}
			c := dialRaw(b, address)
			c.SetDeadline(time.Time{})
			answer := make([]byte, len(response))
			b.SetBytes(int64(len(response)))
			b.ResetTimer()
			for b.Loop() {
				c.Write(request)
				if _, err := io.ReadFull(c.Conn, answer); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
