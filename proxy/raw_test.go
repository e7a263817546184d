package proxy

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/protocol"
)

// scripted is a broker whose answers a test makes up. It is also the only one, unless a test lists more.
type scripted struct {
	t      testing.TB
	ln     net.Listener
	answer func(c net.Conn, h protocol.RequestHeader, frame []byte) // writes what it wants to c, within one connection in order

	mu       sync.Mutex
	frames   int // read so far, over all connections
	accepted int
}

// script starts a broker. answer nil echoes: the response is the correlation ID and the body of the request.
func script(t testing.TB, answer func(c net.Conn, h protocol.RequestHeader, frame []byte)) *scripted {
	t.Helper()
	if answer == nil {
		answer = echo
	}
	b := &scripted{t: t, ln: listen(t), answer: answer}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := b.ln.Accept()
			if err != nil {
				return
			}
			b.mu.Lock()
			b.accepted++
			b.mu.Unlock()
			wg.Go(func() { b.serve(c) })
		}
	})
	t.Cleanup(func() {
		b.ln.Close()
		wg.Wait()
	})
	return b
}

func (b *scripted) serve(c net.Conn) {
	defer c.Close()
	r := bufio.NewReader(c)
	for {
		frame, err := readFrame(r)
		if err != nil {
			return
		}
		b.mu.Lock()
		b.frames++
		b.mu.Unlock()
		var h protocol.RequestHeader
		if len(frame) >= protocol.RequestPrefix {
			h = protocol.ParseRequestHeader(frame)
		}
		b.answer(c, h, frame)
	}
}

func (b *scripted) read() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.frames
}

func (b *scripted) connections() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.accepted
}

func echo(c net.Conn, h protocol.RequestHeader, frame []byte) {
	c.Write(rawResponse(h.CorrelationID, frame[protocol.RequestPrefix:]))
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	return ln
}

// startBefore runs a proxy before a scripted broker.
func startBefore(t testing.TB, b *scripted, o Options) *Server {
	t.Helper()
	o.Seeds = []string{b.ln.Addr().String()}
	return start(t, o)
}

// rawClient speaks frames to the proxy.
type rawClient struct {
	net.Conn
	t testing.TB
	r *bufio.Reader
}

func dialRaw(t testing.TB, address net.Addr) *rawClient {
	t.Helper()
	c, err := net.Dial("tcp", address.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(30 * time.Second))
	return &rawClient{c, t, bufio.NewReader(c)}
}

func (c *rawClient) send(frames ...[]byte) {
	c.t.Helper()
	for _, f := range frames {
		if _, err := c.Write(f); err != nil {
			c.t.Fatalf("write to the proxy: %v", err)
		}
	}
}

// receive returns the next response frame.
func (c *rawClient) receive() []byte {
	c.t.Helper()
	frame, err := readFrame(c.r)
	if err != nil {
		c.t.Fatalf("read from the proxy: %v", err)
	}
	return frame
}

// wantClosed waits until the proxy closes the connection, without another byte.
func (c *rawClient) wantClosed(why string) {
	c.t.Helper()
	n, err := io.Copy(io.Discard, c.r)
	if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() || n > 0 {
		c.t.Errorf("%s: got %d bytes and %v, want a closed connection", why, n, err)
	}
}

func readFrame(r io.Reader) ([]byte, error) {
	var size [4]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return nil, err
	}
	frame := make([]byte, 4+int(binary.BigEndian.Uint32(size[:])))
	copy(frame, size[:])
	_, err := io.ReadFull(r, frame[4:])
	return frame, err
}

// rawRequest is a frame with any key, version and body.
func rawRequest(key, version int16, correlationID int32, body []byte) []byte {
	frame := binary.BigEndian.AppendUint32(nil, uint32(8+len(body)))
	frame = binary.BigEndian.AppendUint16(frame, uint16(key))
	frame = binary.BigEndian.AppendUint16(frame, uint16(version))
	frame = binary.BigEndian.AppendUint32(frame, uint32(correlationID))
	return append(frame, body...)
}

func rawResponse(correlationID int32, body []byte) []byte {
	frame := binary.BigEndian.AppendUint32(nil, uint32(4+len(body)))
	frame = binary.BigEndian.AppendUint32(frame, uint32(correlationID))
	return append(frame, body...)
}

// requestFrame is the frame of a kmsg request.
func requestFrame(request kmsg.Request, correlationID int32) []byte {
	return kmsg.NewRequestFormatter(kmsg.FormatterClientID("client")).AppendRequest(nil, request, correlationID)
}

// responseFrame is the frame of a kmsg response.
func responseFrame(response kmsg.Response, correlationID int32) []byte {
	var body []byte
	if response.IsFlexible() && response.Key() != protocol.KeyAPIVersions {
		body = append(body, 0)
	}
	return rawResponse(correlationID, response.AppendTo(body))
}

// decode reads a response frame.
func decode[R kmsg.Response](t testing.TB, response R, version int16, frame []byte) R {
	t.Helper()
	response.SetVersion(version)
	body := frame[8:]
	if response.IsFlexible() && response.Key() != protocol.KeyAPIVersions {
		body = body[1:]
	}
	if err := response.ReadFrom(body); err != nil {
		t.Fatalf("%T v%d: %v", response, version, err)
	}
	return response
}

// metadata answers Metadata requests with these brokers.
func metadata(version int16, brokers ...Broker) *kmsg.MetadataResponse {
	m := kmsg.NewPtrMetadataResponse()
	m.Version = version
	for _, b := range brokers {
		m.Brokers = append(m.Brokers, kmsg.MetadataResponseBroker{NodeID: b.ID, Host: b.Host, Port: b.Port})
	}
	return m
}

// brokerAt is a broker at a listener's address.
func brokerAt(id int32, ln net.Listener) Broker {
	a := ln.Addr().(*net.TCPAddr)
	return Broker{ID: id, Host: a.IP.String(), Port: int32(a.Port)}
}

// records is a record batch of n records, as an idempotent producer would send it.
func records(n int) []byte {
	batch := make([]byte, protocol.BatchHeaderSize+20)
	binary.BigEndian.PutUint32(batch[8:], uint32(len(batch)-12))
	batch[16] = 2
	binary.BigEndian.PutUint32(batch[23:], uint32(n-1))
	binary.BigEndian.PutUint32(batch[57:], uint32(n))
	return batch
}

// batchOf is a record batch of a single record and n bytes.
func batchOf(n int) []byte {
	batch := make([]byte, n)
	copy(batch, records(1))
	binary.BigEndian.PutUint32(batch[8:], uint32(n-12))
	return batch
}

// produceTo is a Produce request for partitions 0 to len(batches)-1.
func produceTo(version, acks int16, batches ...[]byte) *kmsg.ProduceRequest {
	request := kmsg.NewPtrProduceRequest()
	request.Version, request.Acks = version, acks
	topic := kmsg.ProduceRequestTopic{Topic: "orders", TopicID: [16]byte{1, 2, 3}}
	for i, b := range batches {
		topic.Partitions = append(topic.Partitions, kmsg.ProduceRequestTopicPartition{Partition: int32(i), Records: b})
	}
	request.Topics = append(request.Topics, topic)
	return request
}

// produced answers a Produce request: partition p is appended at 100 + p. change may alter it.
func produced(h protocol.RequestHeader, frame []byte, change func(*kmsg.ProduceResponse)) []byte {
	response := kmsg.NewPtrProduceResponse()
	response.Version = h.APIVersion
	index := make(map[string]int)
	for r := protocol.NewProduceRequest(frame); r.Next(); {
		name := fmt.Sprintf("%s%x", r.Topic, r.TopicID)
		if _, ok := index[name]; !ok {
			index[name] = len(response.Topics)
			response.Topics = append(response.Topics, kmsg.ProduceResponseTopic{Topic: string(r.Topic), TopicID: r.TopicID})
		}
		p := kmsg.NewProduceResponseTopicPartition()
		p.Partition, p.BaseOffset = r.Partition, 100+int64(r.Partition)
		topic := &response.Topics[index[name]]
		topic.Partitions = append(topic.Partitions, p)
	}
	if change != nil {
		change(response)
	}
	return responseFrame(response, h.CorrelationID)
}
