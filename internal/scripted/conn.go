package scripted

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// broker is one node: a listener, its connections, and whether it is frozen. Fields are guarded by Cluster.mu.
type broker struct {
	cluster *Cluster
	id      int32
	addr    string
	ln      net.Listener  // nil while the broker is down
	stopped chan struct{} // closed when this incarnation ends
	thawed  chan struct{} // nil: runs; else closed by Thaw
	conns   map[*conn]bool
}

// conn is one client connection. Its requests are handled one after the other, as a Kafka broker mutes a connection
// until the answer is out.
type conn struct {
	broker  *broker
	serial  int64
	net     net.Conn
	stopped <-chan struct{}
}

const maxFrame = 100 << 20

// start begins an incarnation of the broker; the caller holds mu or is New.
func (b *broker) start(ln net.Listener) {
	b.ln, b.addr = ln, ln.Addr().String()
	b.stopped, b.conns, b.thawed = make(chan struct{}), map[*conn]bool{}, nil
	b.cluster.wg.Go(func() { b.accept(ln, b.stopped) })
}

// stop ends an incarnation as kill -9 does: nothing that waits is answered. The caller holds mu.
func (b *broker) stop() {
	if b.ln == nil {
		return
	}
	close(b.stopped)
	b.ln.Close()
	for c := range b.conns {
		c.net.Close()
	}
	b.ln = nil
}

func (b *broker) accept(ln net.Listener, stopped <-chan struct{}) {
	c := b.cluster
	for {
		nc, err := ln.Accept()
		if err != nil {
			return
		}
		c.mu.Lock()
		select {
		case <-stopped:
			nc.Close()
		default:
			c.nextConn++
			cn := &conn{broker: b, serial: c.nextConn, net: nc, stopped: stopped}
			b.conns[cn] = true
			c.wg.Go(cn.serve)
		}
		c.mu.Unlock()
	}
}

func (cn *conn) serve() {
	defer func() {
		cn.net.Close()
		cn.broker.cluster.mu.Lock()
		delete(cn.broker.conns, cn)
		cn.broker.cluster.mu.Unlock()
	}()
	for {
		frame, err := cn.readFrame()
		if err != nil || !cn.gate() {
			return
		}
		answer, ok := cn.handle(frame)
		if !ok || !cn.gate() {
			return
		}
		if answer != nil {
			if _, err := cn.net.Write(answer); err != nil {
				return
			}
		}
	}
}

// gate waits while the broker is frozen; false: the broker died.
func (cn *conn) gate() bool {
	c := cn.broker.cluster
	for {
		c.mu.Lock()
		thawed := cn.broker.thawed
		c.mu.Unlock()
		if thawed == nil {
			select {
			case <-cn.stopped:
				return false
			default:
				return true
			}
		}
		select {
		case <-thawed:
		case <-cn.stopped:
			return false
		}
	}
}

// readFrame reads one request without its length. A connection that brings no byte for ConnectionsMaxIdle ends, also within a frame.
func (cn *conn) readFrame() ([]byte, error) {
	var length [4]byte
	if err := cn.readFull(length[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(length[:])
	if n > maxFrame {
		return nil, fmt.Errorf("frame of %d bytes", n)
	}
	frame := make([]byte, n)
	return frame, cn.readFull(frame)
}

func (cn *conn) readFull(b []byte) error {
	idle := cn.broker.cluster.opts.ConnectionsMaxIdle
	for len(b) > 0 {
		if idle > 0 {
			cn.net.SetReadDeadline(time.Now().Add(idle))
		}
		n, err := cn.net.Read(b)
		if b = b[n:]; err != nil && len(b) > 0 {
			return err
		}
	}
	return nil
}

// handle decodes a request, asks the interceptors and answers. false: close the connection.
func (cn *conn) handle(frame []byte) (answer []byte, ok bool) {
	r, err := parseRequest(frame)
	if err != nil {
		return nil, false
	}
	r.Broker, r.Conn = cn.broker.id, cn.serial
	c := cn.broker.cluster
	if !c.offers(r.Key, r.Version) {
		if r.Key == apiVersionsKey {
			return encode(r, unsupportedApiVersions()), true
		}
		return nil, false
	}
	action := c.decide(r)
	return cn.act(r, action)
}

// act carries out what the interceptors chose.
func (cn *conn) act(r *Request, a Action) (answer []byte, ok bool) {
	c := cn.broker.cluster
	if a.drop == dropFirst {
		cn.net.Close()
	}
	if !waitFor(a.before, cn.stopped) {
		return nil, false
	}
	if a.before != nil && !cn.gate() {
		return nil, false
	}
	resp := a.reply
	if resp == nil && !a.skip {
		c.mu.Lock()
		resp = cn.broker.serve(&exchange{Request: r, cluster: c, broker: cn.broker, stopped: cn.stopped, fail: a.fail})
		r.Applied = true
		c.mu.Unlock()
	}
	if a.drop != keep || !waitFor(a.after, cn.stopped) {
		return nil, false
	}
	if p, ok := r.Body.(*kmsg.ProduceRequest); ok && p.Acks == 0 && a.reply == nil {
		return nil, !produceFailed(resp)
	}
	if resp == nil {
		return nil, false
	}
	if a.edit != nil {
		a.edit(resp)
	}
	return encode(r, resp), true
}

func waitFor(release, stopped <-chan struct{}) bool {
	if release == nil {
		return true
	}
	select {
	case <-release:
		return true
	case <-stopped:
		return false
	}
}

// parseRequest reads the request header (v0 to v2) and the body.
func parseRequest(frame []byte) (*Request, error) {
	if len(frame) < 10 {
		return nil, io.ErrUnexpectedEOF
	}
	r := &Request{
		Key:           int16(binary.BigEndian.Uint16(frame)),
		Version:       int16(binary.BigEndian.Uint16(frame[2:])),
		CorrelationID: int32(binary.BigEndian.Uint32(frame[4:])),
	}
	rest := frame[10:]
	if n := int(int16(binary.BigEndian.Uint16(frame[8:]))); n > 0 {
		if len(rest) < n {
			return nil, io.ErrUnexpectedEOF
		}
		r.ClientID, rest = string(rest[:n]), rest[n:]
	}
	body := kmsg.RequestForKey(r.Key)
	if body == nil {
		return nil, fmt.Errorf("unknown API key %d", r.Key)
	}
	body.SetVersion(r.Version)
	r.Body = body
	if r.Version > body.MaxVersion() {
		return r, nil // answered before the body is looked at
	}
	if body.IsFlexible() {
		var err error
		if rest, err = skipTags(rest); err != nil {
			return nil, err
		}
	}
	return r, body.ReadFrom(rest)
}

// skipTags passes over the tagged fields of a flexible request header.
func skipTags(b []byte) ([]byte, error) {
	count, n := binary.Uvarint(b)
	for b = b[max(n, 0):]; n > 0 && count > 0; count-- {
		_, n = binary.Uvarint(b)
		b = b[max(n, 0):]
		size, m := binary.Uvarint(b)
		if m <= 0 || uint64(len(b)-m) < size {
			return nil, io.ErrUnexpectedEOF
		}
		b = b[m+int(size):]
	}
	if n <= 0 {
		return nil, io.ErrUnexpectedEOF
	}
	return b, nil
}

// encode frames a response. ApiVersions responses keep header v0 in flexible versions (KIP-511).
func encode(r *Request, resp kmsg.Response) []byte {
	out := binary.BigEndian.AppendUint32(make([]byte, 4, 512), uint32(r.CorrelationID))
	if resp.IsFlexible() && r.Key != apiVersionsKey {
		out = append(out, 0)
	}
	out = resp.AppendTo(out)
	binary.BigEndian.PutUint32(out, uint32(len(out)-4))
	return out
}
