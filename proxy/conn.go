package proxy

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/zap"

	"kmirror/internal/bufpool"
	"kmirror/protocol"
)

// halfCloseWait is how long a broker may go on answering, and has to close its side, after a client ended its stream.
const halfCloseWait = 30 * time.Second

// lingerWait is how long a client has to close its side after the broker's, or after the last answer at shutdown.
const lingerWait = 500 * time.Millisecond

// conn is one client connection and its broker connection.
type conn struct {
	s              *Server
	client, source net.Conn
	broker         *broker // that the listener stands for; nil for the bootstrap listener
	guessed        bool    // the source connection leads to a bootstrap broker, since nobody named that broker yet
	host           string  // that this client is told to reach brokers at
	ends           endpoints
	log            *zap.Logger

	requests  pipe // client to source
	responses pipe // source to client
	way       answerWay
	flight    flight
	endedBy   atomic.Int32  // the side that ended first, endedByClient or endedByBroker
	ended     atomic.Bool   // the client ended its stream, and the broker was told
	filled    atomic.Uint64 // number of the last large request whose kept frame was read to its end
	written   atomic.Uint64 // the same, and written to the broker

	// tokens is how many raw SASL tokens follow a SaslHandshake v0; manyTokens until a frame looks like a request. Of the
	// request goroutine.
	tokens       int
	tokensSent   int         // raw tokens, of the request goroutine
	tokensTaken  int         // and the answers to them, of the response goroutine
	handshakeOK  atomic.Bool // the broker took the last SaslHandshake v0
	addressOf    protocol.AddressFunc
	produceParts []producePart // scratch of the response goroutine
	partIndex    map[partKey]int

	login                       atomic.Pointer[login] // nil: none yet
	access                      *access               // nil without an access log
	requestBytes, responseBytes atomic.Int64
	zeroAcks                    atomic.Int64 // Produce requests without an answer
	began                       time.Time
	maxAge                      time.Duration
	endReason                   atomic.Pointer[string] // why the proxy ended it, if a limit did

	sweptAsked    uint64 // of the sweep
	sweptZeroAcks int64
	quietSince    time.Time
	sweptResponse int64
	unreadLimited bool      // the kernel was told of Limits.Unread
	leftSince     time.Time // the client ended its stream, and the broker takes nothing
	leftBytes     int64
}

const manyTokens = -1

const (
	endedByClient = 1
	endedByBroker = 2
)

// noteEnd remembers which side ended first: the one that a pipe reads from, or, for a write error, writes to.
func (c *conn) noteEnd(from, to int32, err error) {
	if _, ok := errors.AsType[*writeError](err); ok {
		from = to
	}
	c.endedBy.CompareAndSwap(0, from)
}

// closeError says why the proxy ends a connection. Its reason is from a closed set, for the metric and for limiting the log.
type closeError struct {
	reason string
	err    error
}

func (e *closeError) Error() string { return e.err.Error() }
func (e *closeError) Unwrap() error { return e.err }

func closing(reason, format string, args ...any) error {
	return &closeError{reason, fmt.Errorf(format, args...)}
}

// begin makes c ready to serve, and to be drained or aborted.
func (c *conn) begin() {
	c.flight.init()
	c.requests.init(c.client, c.source, c.s.o.FrameTimeout, func(n int) { c.requestBytes.Add(int64(n)); c.s.metrics.requestBytes(n) })
	c.responses.init(c.source, c.client, 0, func(n int) { c.responseBytes.Add(int64(n)); c.s.metrics.responseBytes(n) })
	c.addressOf = c.address
}

// serve relays until either side is done, and closes both.
func (c *conn) serve() {
	done := make(chan error, 1)
	c.s.wg.Go(func() { done <- c.relayRequests() })
	responseErr := c.relayResponses()
	c.noteEnd(endedByBroker, endedByClient, responseErr)
	c.flight.close()
	closeWrite(c.client)
	c.requests.cut()
	c.source.Close()
	requestErr := <-done
	if c.endedBy.Load() != endedByClient {
		c.linger()
	}
	c.client.Close()
	c.letGo()
	c.tokenRefused()
	c.s.closed(c, requestErr, responseErr)
}

// tlsSubject is the subject of the client's certificate, "" if it showed none.
func tlsSubject(client net.Conn) string {
	if t, ok := client.(*tls.Conn); ok {
		if certs := t.ConnectionState().PeerCertificates; len(certs) > 0 {
			return certs[0].Subject.String()
		}
	}
	return ""
}

// linger reads what the client still sends, until it has seen the end of our stream and closes too, for a short time. The kernel
// would otherwise answer unread bytes with a reset, and drop answers that haven't reached the client yet.
func (c *conn) linger() {
	c.client.SetReadDeadline(time.Now().Add(lingerWait))
	scratch := bufpool.Get(maxPeek)
	defer scratch.Release()
	for {
		if _, err := c.client.Read(scratch.B); err != nil {
			return
		}
	}
}

// letGo releases what the connection still holds. Both goroutines are done.
func (c *conn) letGo() {
	c.requests.release()
	c.responses.release()
	for r, ok := c.flight.pop(); ok; r, ok = c.flight.pop() {
		c.drop(r.frame)
	}
}

// drop ends the holding of a kept frame; nil is none.
func (c *conn) drop(frame *bufpool.Buf) {
	if frame != nil {
		c.s.unhold(len(frame.B))
		frame.Release()
	}
}

// drain stops reading from the client after the request that has begun. The connection ends when all of its requests were
// answered.
func (c *conn) drain() {
	c.requests.interrupt()
	if c.ended.Load() && c.flight.waits() == 0 {
		c.source.SetReadDeadline(time.Now())
	}
}

// abort ends the connection at once.
func (c *conn) abort() {
	c.flight.close()
	c.client.Close()
	c.source.Close()
}

// relayRequests moves requests from the client to the broker until the client is done, then lets the answers come in. It
// returns nil when the client ended between two frames.
func (c *conn) relayRequests() error {
	err := c.forwardRequests()
	if err != errInterrupted {
		c.noteEnd(endedByClient, endedByBroker, err)
	}
	if w, ok := errors.AsType[*writeError](err); ok {
		// The broker is gone, but what it answered before may still be on its way to the client.
		c.source.SetReadDeadline(time.Now().Add(time.Second))
		return fmt.Errorf("write to broker: %w", w.error)
	}
	if err != nil && err != errInterrupted {
		if c.endedBy.Load() == endedByClient {
			c.abort()
		}
		return err
	}
	if err == nil {
		// The client's end of stream is passed on after all that it sent; the broker then ends its side.
		closeWrite(c.source)
		c.source.SetReadDeadline(time.Now().Add(halfCloseWait))
		c.ended.Store(true)
		if c.requests.stopped() {
			c.drain() // which may have come before ended was set
		}
		return nil
	}
	if c.flight.waitSettled() == nil {
		c.source.SetReadDeadline(time.Now()) // nothing more is to come
	}
	return nil
}

// forwardRequests returns nil at the end of the client's stream; everything that it sent was written then.
func (c *conn) forwardRequests() error {
	p := &c.requests
	for {
		if p.stopped() {
			return cmp.Or(p.flush(), errInterrupted)
		}
		b, err := p.head(protocol.SizePrefix)
		if err != nil {
			if err == io.EOF && len(b) == 0 {
				return nil
			}
			return err
		}
		if c.tokens != 0 {
			isToken, err := c.forwardToken(b)
			if err != nil {
				return err
			}
			if isToken {
				continue
			}
		}
		size, err := protocol.RequestSize(b, c.s.o.MaxRequestBytes)
		if err != nil {
			return &closeError{reasonBadFrame, err}
		}
		if b, err = p.head(protocol.RequestPrefix); err != nil {
			return err
		}
		h := protocol.ParseRequestHeader(b)
		if err := c.forwardRequest(h, size+protocol.SizePrefix); err != nil {
			return err
		}
	}
}

// forwardRequest decides about one request of n bytes and passes it on.
func (c *conn) forwardRequest(h protocol.RequestHeader, n int) error {
	if h.APIKey < 0 {
		return closing(reasonBadFrame, "API key %d: not a Kafka client", h.APIKey)
	}
	c.s.metrics.request(h.APIKey)
	// A newer ApiVersions passes: the broker refuses it, or its answer becomes a refusal, and the client asks again.
	if limit, ok := protocol.MaxVersion(h.APIKey); ok && (h.APIVersion > limit && h.APIKey != protocol.KeyAPIVersions || h.APIVersion < 0) {
		return closing(reasonVersion, "%s v%d, which kmirror doesn't offer", kmsg.NameForKey(h.APIKey), h.APIVersion)
	}
	r := request{header: h}
	watch, err := c.noteLogin(h, n)
	if err != nil {
		return err
	}
	if watch {
		r.answer = answerLogin
	}
	switch {
	case h.APIKey == protocol.KeyProduce:
		return c.forwardProduce(r, n)
	case h.APIKey == protocol.KeySASLHandshake && h.APIVersion == 0:
		return c.forwardHandshake(r, n)
	case h.APIKey == protocol.KeyAPIVersions:
		r.answer = answerVersions
	case protocol.Rewrites(h.APIKey, h.APIVersion):
		r.answer = answerRewrite
	}
	return c.forward(r, n)
}

// forward enters r in the queue, before its bytes can reach the broker, and passes on its n bytes.
func (c *conn) forward(r request, n int) error {
	if err := c.push(r); err != nil {
		return err
	}
	return c.passOn(n)
}

func (c *conn) push(r request) error {
	for !c.flight.push(r) {
		// Responses to what still sits in the pipe would never come.
		if err := c.requests.flush(); err != nil {
			return err
		}
		if err := c.flight.waitRoom(); err != nil {
			return err
		}
	}
	return nil
}

// passOn passes a frame of n bytes: whole from the buffer if it fits, else as a stream.
func (c *conn) passOn(n int) error {
	if n > maxPeek {
		return c.requests.stream(n)
	}
	if _, err := c.requests.peek(n); err != nil {
		return err
	}
	c.requests.pass(n)
	return nil
}

// forwardProduce passes on a Produce request, and keeps it if its batches may be offered to the sink.
func (c *conn) forwardProduce(r request, n int) error {
	acks, transactional, err := c.produceAcks(r.header, n)
	if err != nil {
		return err
	}
	if acks == 0 {
		c.zeroAcks.Add(1)
		if err := c.accessUnacked(n); err != nil {
			return err
		}
		return c.passOn(n) // there is no response
	}
	if c.s.o.Sink != nil || c.access != nil || protocol.Rewrites(r.header.APIKey, r.header.APIVersion) {
		r.answer = answerProduce
	}
	if c.s.o.Sink == nil || acks != -1 || transactional || !protocol.ProducesBatches(r.header.APIVersion) || !c.s.hold(n) {
		return c.forward(r, n)
	}
	r.frame = bufpool.Get(n)
	if n <= maxPeek {
		return c.forwardCopied(r, n)
	}
	return c.forwardKept(r)
}

// produceAcks looks for acks, which follows three strings, as far into the frame as needed.
func (c *conn) produceAcks(h protocol.RequestHeader, n int) (acks int16, transactional bool, err error) {
	b := c.requests.unread()
	for {
		if len(b) > n {
			b = b[:n]
		}
		acks, transactional, err = protocol.ProduceAcks(b, h)
		switch {
		case err == nil:
			return acks, transactional, nil
		case len(b) == n:
			return 0, false, closing(reasonBadFrame, "Produce v%d: %w", h.APIVersion, protocol.ErrMalformed)
		case len(b) == pipeBuffer:
			return 0, false, closing(reasonBadFrame, "Produce v%d: no acks in the first %d bytes", h.APIVersion, len(b))
		}
		if b, err = c.requests.peek(min(n, pipeBuffer, len(b)+1)); err != nil {
			return 0, false, err
		}
	}
}

// forwardCopied passes on a small request and keeps a copy.
func (c *conn) forwardCopied(r request, n int) error {
	b, err := c.requests.peek(n)
	if err == nil {
		copy(r.frame.B, b)
		r.copied = true
		err = c.push(r)
	}
	if err != nil {
		c.drop(r.frame)
		return err
	}
	c.requests.pass(n)
	return nil
}

// forwardKept passes on a large request as it comes in, through the buffer that is kept.
func (c *conn) forwardKept(r request) error {
	if err := c.push(r); err != nil {
		c.drop(r.frame)
		return err
	}
	seq := c.flight.last()
	frame := r.frame
	frame.Retain() // a broker's early answer must not free what is being written
	err := c.requests.streamKept(frame.B, &c.filled, seq)
	frame.Release()
	c.written.Store(seq)
	return err
}

// forwardHandshake passes on a SaslHandshake v0 and waits for its answer: after success the client's next frames are raw
// tokens, a size and bytes, without a header (KIP-43).
func (c *conn) forwardHandshake(r request, n int) error {
	if n > maxPeek {
		return closing(reasonBadFrame, "SaslHandshake request of %d bytes", n)
	}
	b, err := c.requests.peek(n)
	if err != nil {
		return err
	}
	tokens := manyTokens
	if strings.EqualFold(protocol.SASLMechanism(b[:n]), "PLAIN") {
		tokens = 1 // its token may look like a request
	}
	r.answer = answerHandshake
	c.handshakeOK.Store(false)
	if err := c.forward(r, n); err != nil {
		return err
	}
	if err := c.requests.flush(); err != nil {
		return err
	}
	// While it waits, nobody would notice that the client is gone. Brokers answer this request at once.
	giveUp := time.AfterFunc(c.s.o.FrameTimeout, c.abort)
	err = c.flight.waitSettled()
	if !giveUp.Stop() {
		return closing(reasonTimeout, "SaslHandshake: no answer within %v", c.s.o.FrameTimeout)
	}
	if err != nil {
		return err
	}
	if c.handshakeOK.Load() {
		c.tokens = tokens
	}
	return nil
}

// forwardToken passes on a raw SASL token, of whose frame b is the size. It returns false if the frame is a request again.
func (c *conn) forwardToken(b []byte) (isToken bool, err error) {
	size, err := protocol.TokenSize(b, c.s.o.MaxRequestBytes)
	if err != nil {
		return false, &closeError{reasonBadFrame, err}
	}
	if c.tokens == manyTokens && size >= protocol.RequestPrefix-protocol.SizePrefix {
		if b, err = c.requests.peek(protocol.RequestPrefix); err != nil {
			return false, err
		}
		// Tokens of GSSAPI, SCRAM and OAUTHBEARER begin with bytes that are no API key of Kafka.
		if h := protocol.ParseRequestHeader(b); h.APIKey >= 0 && h.APIKey <= kmsg.MaxKey && h.APIVersion >= 0 {
			c.tokens = 0
			return false, nil
		}
	}
	if c.tokens > 0 {
		c.tokens--
	}
	if err := c.noteToken(size + protocol.SizePrefix); err != nil {
		return false, err
	}
	return true, c.forward(request{answer: answerToken}, size+protocol.SizePrefix)
}

// relayResponses moves responses from the broker to the client until the broker is done. It returns nil when the broker ended
// between two frames.
func (c *conn) relayResponses() error {
	p := &c.responses
	for {
		if len(p.unread()) < protocol.SizePrefix {
			if err := p.flush(); err != nil {
				return err
			}
			c.flight.settle()
		}
		b, err := p.head(protocol.SizePrefix)
		if err == io.EOF && len(b) == 0 {
			return nil
		}
		if err == nil {
			err = c.forwardResponse()
		}
		if err != nil {
			p.flush() // what was read of earlier answers still belongs to the client
			if cause := protocol.ForeignResponse(p.unread()); cause != "" {
				err = closing(reasonForeign, "broker %s: %s", c.source.RemoteAddr(), cause)
			}
			return err
		}
	}
}

// forwardResponse passes on the response whose size was looked at, and lets its request go.
func (c *conn) forwardResponse() error {
	r, ok := c.flight.pop()
	if !ok {
		return closing(reasonResponse, "a response that no request waits for")
	}
	if r.answer == answerToken {
		var err error
		if r, err = c.behindTokens(r); err != nil {
			return err
		}
	}
	err := c.answer(&r)
	c.drop(r.frame)
	return err
}

// behindTokens returns what the next response answers: token, or the first request behind it, if that has its correlation ID. The
// last token of a GSSAPI exchange has no answer, and whether a client waits for the answer to its last one is the client's affair. No token begins as
// a correlation ID that a client counts to: it's empty, text, or GSSAPI's (0x60, 0x0504).
func (c *conn) behindTokens(token request) (request, error) {
	if _, err := protocol.ResponseSize(c.responses.unread()); err != nil {
		return token, nil // too short for a response header
	}
	b, err := c.responses.head(protocol.ResponsePrefix)
	if err != nil {
		return token, midFrame(err)
	}
	if r, ok := c.flight.popBehindTokens(protocol.CorrelationID(b)); ok {
		return r, nil
	}
	return token, nil
}

func (c *conn) answer(r *request) error {
	p := &c.responses
	prefix := p.unread()
	if r.answer == answerToken {
		size, err := protocol.TokenSize(prefix, c.s.o.MaxRequestBytes)
		if err != nil {
			return &closeError{reasonResponse, err}
		}
		c.tokenAnswered(size)
		return p.stream(size + protocol.SizePrefix)
	}
	size, err := protocol.ResponseSize(prefix)
	if err != nil {
		return &closeError{reasonResponse, err}
	}
	b, err := p.head(protocol.ResponsePrefix)
	if err != nil {
		return midFrame(err)
	}
	if id := protocol.CorrelationID(b); id != r.header.CorrelationID {
		return closing(reasonResponse, "%s v%d: response has correlation ID %d, want %d", kmsg.NameForKey(r.header.APIKey),
			r.header.APIVersion, id, r.header.CorrelationID)
	}
	n := size + protocol.SizePrefix
	switch {
	case r.answer != answerOpaque:
		return c.readResponse(r, n)
	case n > maxPeek:
		return p.stream(n)
	}
	if _, err := p.peek(n); err != nil {
		return midFrame(err)
	}
	p.pass(n)
	return nil
}

// readResponse looks at a whole response of n bytes before it passes it on, changed or not.
func (c *conn) readResponse(r *request, n int) error {
	p := &c.responses
	if n <= maxPeek {
		b, err := p.peek(n)
		if err != nil {
			return midFrame(err)
		}
		changed, err := c.rewrite(r, b[:n])
		if err != nil {
			return err
		}
		if changed == nil {
			p.pass(n)
			return nil
		}
		defer changed.Release()
		return p.replace(n, changed.B)
	}
	if n > c.s.o.MaxRequestBytes {
		return closing(reasonResponse, "%s response of %d bytes is larger than the limit", kmsg.NameForKey(r.header.APIKey), n)
	}
	return c.readLarge(r, n)
}

// rewriteSpare is how many bytes a rewritten response is expected to be longer at most; it may be more.
const rewriteSpare = 64 << 10

// rewrite returns what the client gets instead of frame; nil if frame stays as it is.
func (c *conn) rewrite(r *request, frame []byte) (changed *bufpool.Buf, err error) {
	h := r.header
	switch r.answer {
	case answerHandshake:
		c.handshakeAnswered(frame)
		c.handshakeOK.Store(protocol.SASLHandshakeAccepted(frame))
		return nil, nil
	case answerLogin:
		if h.APIKey == protocol.KeySASLHandshake {
			c.handshakeAnswered(frame)
			return nil, nil
		}
		c.loginAnswered(frame, h.APIVersion)
		return nil, nil
	case answerProduce:
		if endpoints, err := c.produceAnswered(r, frame); err != nil || !endpoints {
			return nil, err
		}
	}
	if h.APIKey == protocol.KeyMetadata {
		c.s.access.learnTopics(frame, h.APIVersion)
	}
	changed = bufpool.Get(len(frame) + min(len(frame)/2, rewriteSpare) + 256)
	if r.answer == answerVersions {
		changed.B, err = protocol.CutVersions(changed.B[:0], frame, h.APIVersion)
	} else {
		changed.B, err = protocol.Rewrite(changed.B[:0], frame, h.APIKey, h.APIVersion, c.addressOf)
	}
	if err != nil {
		changed.Release()
		return nil, &closeError{reasonResponse, err}
	}
	return changed, nil
}

// address is the protocol.AddressFunc of this client.
func (c *conn) address(nodeID int32, host []byte, port int32) (string, int32, bool) {
	b, ok := c.s.brokers.learn(nodeID, host, port)
	if !ok {
		return "", 0, false
	}
	return cmp.Or(b.host, c.host), b.port, true
}

// closeWrite ends our side of a connection's stream, so that the peer sees it after all that was written.
func closeWrite(c net.Conn) {
	if w, ok := c.(interface{ CloseWrite() error }); ok {
		w.CloseWrite()
	}
}

// quiet reports whether err is how connections end every day.
func quiet(err error) bool {
	return err == nil || errors.Is(err, errFlightClosed) || errors.Is(err, errCut) || errors.Is(err, net.ErrClosed) || errors.Is(err, io.EOF) ||
		errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, os.ErrDeadlineExceeded) || isReset(err)
}

// handshakeTLS takes a client's TLS handshake, within a bound.
func handshakeTLS(ctx context.Context, client net.Conn, config *tls.Config, timeout time.Duration) (*tls.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if _, err := awaitByte(client, timeout); err != nil {
		return nil, err
	}
	if err := client.SetReadDeadline(time.Time{}); err != nil {
		return nil, err
	}
	t := tls.Server(client, config)
	return t, t.HandshakeContext(ctx)
}
