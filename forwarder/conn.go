package forwarder

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/bufpool"
	"kmirror/internal/sock"
)

const (
	dialTimeout = 5 * time.Second
	// answerTimeout bounds how long a broker may take for an answer. A Produce that waits for replicas is answered within
	// produceTimeout; a broker that says nothing for longer is treated as gone, with the outcome unknown.
	answerTimeout    = 15 * time.Second
	maxResponseBytes = 512 << 20
)

var (
	errConnClosed    = errors.New("connection closed")
	errAnswerTimeout = errors.New("no answer in time")
)

// conn is one connection to one broker. It is never redialled (rule S1): what is sent on it is applied in order (F10), and once it
// is broken nothing more will be. Requests are pipelined; safe for concurrent use.
type conn struct {
	nc       net.Conn
	addr     string
	format   *kmsg.RequestFormatter
	versions map[int16]int16 // API key -> highest version the broker takes

	mu       sync.Mutex
	calls    []call     // sent or about to be, oldest first
	writes   []outgoing // not yet written, oldest first
	err      error      // sticky: why the connection ended
	corr     int32
	wake     chan struct{} // size 1: writes isn't empty or err is set
	ended    chan struct{} // closed once err is set
	finished chan struct{} // closed after the last call was answered or failed
	// throttledUntil is when the broker reads from this connection again (KIP-219).
	throttledUntil time.Time

	login login
}

// call is a request that awaits its answer. done is called once, on the reader's goroutine: with the answer's body, which it owns
// through buf, or with an error; after an error the outcome is unknown.
type call struct {
	correlationID int32
	flexible      bool // the response header carries tags
	deadline      time.Time
	done          func(body []byte, buf *bufpool.Buf, err error)
}

// outgoing is one request frame in pieces. head is released after the write; the other pieces belong to the caller until done.
type outgoing struct {
	head   *bufpool.Buf
	pieces net.Buffers
}

// dialConn connects, authenticates and asks for API versions.
func dialConn(ctx context.Context, addr, clientID string, opts ClusterOptions) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	nc, err := dialNet(ctx, addr, opts)
	if err != nil {
		return nil, err
	}
	c := &conn{
		nc: nc, addr: addr, versions: map[int16]int16{},
		format: kmsg.NewRequestFormatter(kmsg.FormatterClientID(clientID)),
		wake:   make(chan struct{}, 1), ended: make(chan struct{}), finished: make(chan struct{}),
		login: login{mechanisms: opts.SASL},
	}
	deadline, _ := ctx.Deadline()
	nc.SetDeadline(deadline)
	stop := context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })
	err = c.handshake(ctx)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		nc.Close()
		return nil, fmt.Errorf("broker %s: %w", addr, err)
	}
	nc.SetDeadline(time.Time{})
	var wg sync.WaitGroup
	wg.Go(c.write)
	go c.read(&wg)
	return c, nil
}

func dialNet(ctx context.Context, addr string, opts ClusterOptions) (net.Conn, error) {
	if opts.Dial != nil {
		return opts.Dial(ctx, "tcp", addr)
	}
	return new(sock.Dialer).DialContext(ctx, "tcp", addr)
}

// handshake runs before the two goroutines: request and answer in turn.
func (c *conn) handshake(ctx context.Context) error {
	versions, err := c.askVersions()
	if err != nil {
		return fmt.Errorf("ApiVersions: %w", err)
	}
	for _, k := range versions.ApiKeys {
		c.versions[k.ApiKey] = k.MaxVersion
	}
	if len(c.login.mechanisms) > 0 {
		return c.logIn(ctx, c.roundTrip)
	}
	return nil
}

// askVersions asks with v3 and falls back to v0, the version in which an older broker refuses a newer question (KIP-511).
func (c *conn) askVersions() (*kmsg.ApiVersionsResponse, error) {
	for _, version := range []int16{3, 0} {
		req := kmsg.NewPtrApiVersionsRequest()
		req.Version = version
		req.ClientSoftwareName, req.ClientSoftwareVersion = "kmirror", "1"
		body, err := c.roundTrip(req)
		if err != nil {
			return nil, err
		}
		resp := req.ResponseKind().(*kmsg.ApiVersionsResponse)
		if len(body) >= 2 && int16(binary.BigEndian.Uint16(body)) == kerr.UnsupportedVersion.Code {
			continue
		}
		if err := resp.ReadFrom(body); err != nil {
			return nil, err
		}
		return resp, kerr.ErrorForCode(resp.ErrorCode)
	}
	return nil, kerr.UnsupportedVersion
}

// roundTrip sends one request and reads its answer on the caller's goroutine; only the handshake uses it.
func (c *conn) roundTrip(req kmsg.Request) ([]byte, error) {
	c.corr++
	if _, err := c.nc.Write(c.format.AppendRequest(nil, req, c.corr)); err != nil {
		return nil, err
	}
	var prefix [8]byte
	if _, err := io.ReadFull(c.nc, prefix[:]); err != nil {
		return nil, err
	}
	size := int32(binary.BigEndian.Uint32(prefix[:]))
	if size < 4 || size > 1<<20 {
		return nil, fmt.Errorf("answer of %d bytes: not a Kafka broker, or TLS spoken to a plain port or the reverse", size)
	}
	body := make([]byte, size-4)
	if _, err := io.ReadFull(c.nc, body); err != nil {
		return nil, err
	}
	if got := int32(binary.BigEndian.Uint32(prefix[4:])); got != c.corr {
		return nil, fmt.Errorf("correlation ID %d, want %d", got, c.corr)
	}
	if flexibleAnswer(req) {
		return skipTags(body)
	}
	return body, nil
}

// flexibleAnswer reports whether the response header carries tags. ApiVersions keeps header v0 in all versions (KIP-511).
func flexibleAnswer(req kmsg.Request) bool {
	return req.Key() != int16(kmsg.ApiVersions) && req.ResponseKind().IsFlexible()
}

// skipTags drops the tagged fields that end a flexible response header.
func skipTags(b []byte) ([]byte, error) {
	n, used := binary.Uvarint(b)
	if used <= 0 {
		return nil, io.ErrUnexpectedEOF
	}
	for b = b[used:]; n > 0; n-- {
		_, tag := binary.Uvarint(b)
		if tag <= 0 {
			return nil, io.ErrUnexpectedEOF
		}
		size, used := binary.Uvarint(b[tag:])
		if used <= 0 || size > uint64(len(b)-tag-used) {
			return nil, io.ErrUnexpectedEOF
		}
		b = b[tag+used+int(size):]
	}
	return b, nil
}

// version returns the highest version of an API that both sides speak, at most limit; false if the broker doesn't have the API.
func (c *conn) version(key, limit int16) (int16, bool) {
	v, ok := c.versions[key]
	return min(v, limit), ok
}

// request sends req at the highest common version, at most limit, and waits for the answer. The answer may alias buf, which the
// caller releases once it is done with the answer.
func (c *conn) request(ctx context.Context, req kmsg.Request, limit int16) (resp kmsg.Response, buf *bufpool.Buf, err error) {
	version, ok := c.version(req.Key(), min(limit, req.MaxVersion()))
	if !ok {
		return nil, nil, kerr.UnsupportedVersion
	}
	req.SetVersion(version)
	if err := c.waitThrottled(ctx); err != nil {
		return nil, nil, err
	}
	type answer struct {
		body []byte
		buf  *bufpool.Buf
		err  error
	}
	answered := make(chan answer, 1)
	c.send(time.Now().Add(answerTimeout), flexibleAnswer(req), func(correlationID int32) outgoing {
		frame := c.format.AppendRequest(nil, req, correlationID)
		return outgoing{pieces: net.Buffers{frame}}
	}, func(body []byte, buf *bufpool.Buf, err error) { answered <- answer{body, buf, err} })
	select {
	case a := <-answered:
		if a.err != nil {
			return nil, nil, fmt.Errorf("broker %s: %w", c.addr, a.err)
		}
		resp = req.ResponseKind()
		if err := resp.ReadFrom(a.body); err != nil {
			a.buf.Release()
			return nil, nil, fmt.Errorf("broker %s: %s answer: %w", c.addr, kmsg.NameForKey(req.Key()), err)
		}
		if t, ok := resp.(kmsg.ThrottleResponse); ok {
			millis, _ := t.Throttle()
			c.throttled(time.Duration(millis) * time.Millisecond)
		}
		return resp, a.buf, nil
	case <-ctx.Done():
		go func() { // the answer, or the connection's end, still comes: nothing else would release it
			if a := <-answered; a.buf != nil {
				a.buf.Release()
			}
		}()
		return nil, nil, context.Cause(ctx)
	}
}

// throttled takes note that the broker leaves the connection unread for a time: answers to what was sent before come as much later.
func (c *conn) throttled(wait time.Duration) {
	if wait <= 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.throttledUntil = time.Now().Add(wait)
	for i := range c.calls {
		c.calls[i].deadline = c.calls[i].deadline.Add(wait)
	}
	if len(c.calls) > 0 {
		c.nc.SetReadDeadline(c.calls[0].deadline)
	}
	c.nc.SetWriteDeadline(c.throttledUntil.Add(answerTimeout)) // of a write that stands still meanwhile
}

// waitThrottled waits until the broker reads from the connection.
func (c *conn) waitThrottled(ctx context.Context) error {
	c.mu.Lock()
	wait := time.Until(c.throttledUntil)
	c.mu.Unlock()
	if wait <= 0 {
		return nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-c.ended: // send says why
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}

// send queues one request without blocking. frame builds it for the given correlation ID.
func (c *conn) send(deadline time.Time, flexible bool, frame func(correlationID int32) outgoing, done func([]byte, *bufpool.Buf, error)) {
	c.mu.Lock()
	if c.err != nil {
		err := c.err
		c.mu.Unlock()
		done(nil, nil, err)
		return
	}
	if wait := time.Until(c.throttledUntil); wait > 0 {
		deadline = deadline.Add(wait)
	}
	c.corr++
	c.writes = append(c.writes, frame(c.corr))
	c.calls = append(c.calls, call{correlationID: c.corr, flexible: flexible, deadline: deadline, done: done})
	if len(c.calls) == 1 {
		c.nc.SetReadDeadline(deadline)
	}
	c.mu.Unlock()
	c.signal()
}

func (c *conn) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// close ends the connection; calls under way fail with err. It doesn't wait: finished tells when the last call was failed.
func (c *conn) close(err error) {
	c.mu.Lock()
	if c.err == nil {
		c.err = err
		close(c.ended)
	}
	c.mu.Unlock()
	c.nc.Close()
	c.signal()
}

func (c *conn) write() {
	var batch []outgoing
	var pieces net.Buffers
	for {
		<-c.wake
		if err := c.renewLogin(); err != nil {
			c.close(fmt.Errorf("log in again: %w", err))
		}
		c.mu.Lock()
		batch, c.writes = c.writes, batch[:0]
		err := c.err
		c.nc.SetWriteDeadline(time.Now().Add(answerTimeout + max(0, time.Until(c.throttledUntil))))
		c.mu.Unlock()
		if err == nil && len(batch) > 0 {
			pieces = pieces[:0]
			for _, o := range batch {
				pieces = append(pieces, o.pieces...)
			}
			if _, err = sock.WriteBuffers(c.nc, pieces); err != nil {
				c.close(err)
			}
			clear(pieces)
		}
		for i, o := range batch {
			if o.head != nil {
				o.head.Release()
			}
			batch[i] = outgoing{}
		}
		if err != nil {
			return
		}
	}
}

// read hands each answer to its call. It ends with the connection, after the writer (which may still read memory that a call's owner
// would release), and fails what is left.
func (c *conn) read(writer *sync.WaitGroup) {
	err := c.readAnswers()
	c.close(err)
	writer.Wait()
	c.mu.Lock()
	calls, writes := c.calls, c.writes
	c.calls, c.writes, err = nil, nil, c.err
	c.mu.Unlock()
	for _, o := range writes {
		if o.head != nil {
			o.head.Release()
		}
	}
	for _, call := range calls {
		call.done(nil, nil, err)
	}
	close(c.finished)
}

func (c *conn) readAnswers() error {
	in := newFrameReader(c.nc)
	for {
		buf, err := in.next()
		if err != nil {
			if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
				return errAnswerTimeout
			}
			return err
		}
		correlationID := int32(binary.BigEndian.Uint32(buf.B))
		c.mu.Lock()
		if len(c.calls) == 0 || c.calls[0].correlationID != correlationID {
			c.mu.Unlock()
			buf.Release()
			return fmt.Errorf("answer with correlation ID %d that nobody asked for", correlationID)
		}
		call := c.calls[0]
		c.calls = c.calls[1:]
		if len(c.calls) > 0 {
			c.nc.SetReadDeadline(c.calls[0].deadline)
		} else {
			c.calls = nil
			c.nc.SetReadDeadline(time.Time{})
		}
		c.mu.Unlock()
		body := buf.B[4:]
		if call.flexible {
			if body, err = skipTags(body); err != nil {
				buf.Release()
				call.done(nil, nil, err)
				return err
			}
		}
		call.done(body, buf, nil)
	}
}

// frameReader reads length-prefixed frames: small ones through a buffer, so that several cost one system call, large ones directly
// into the memory that is handed on.
type frameReader struct {
	r     io.Reader
	store []byte
	have  []byte // the unread part of store
}

func newFrameReader(r io.Reader) *frameReader { return &frameReader{r: r, store: make([]byte, 8<<10)} }

// next returns the next frame without its length; it has 4 bytes at least.
func (f *frameReader) next() (*bufpool.Buf, error) {
	for len(f.have) < 4 {
		n := copy(f.store, f.have)
		m, err := f.r.Read(f.store[n:])
		if m == 0 && err != nil {
			if err == io.EOF && n > 0 {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
		f.have = f.store[:n+m]
	}
	size := int32(binary.BigEndian.Uint32(f.have))
	if size < 4 || size > maxResponseBytes {
		return nil, fmt.Errorf("answer of %d bytes", size)
	}
	f.have = f.have[4:]
	buf := bufpool.Get(int(size))
	n := copy(buf.B, f.have)
	f.have = f.have[n:]
	if _, err := io.ReadFull(f.r, buf.B[n:]); err != nil {
		buf.Release()
		return nil, err
	}
	return buf, nil
}
