package proxy

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"kmirror/internal/bufpool"
	"kmirror/internal/sock"
)

const (
	pipeBuffer = 64 << 10 // bytes of a borrowed read buffer
	maxPeek    = 32 << 10 // frames up to here are looked at whole in the buffer, larger ones are streamed
)

var (
	// errInterrupted says that the pipe stopped between two frames because interrupt was called.
	errInterrupted = errors.New("interrupted between frames")
	// errCut says that the pipe stopped, maybe inside a frame, because cut was called.
	errCut = errors.New("cut off")
)

// pipe moves frames from one socket to another. It reads as much as there is, lets its owner look at it, and writes what passed
// in as few calls as possible, straight from the read buffer. While nothing flows it has no buffer.
//
//	buf: [ written | passed, to be written | not yet looked at | free ]
//	              sent                    next                end
//
// Invariant: what passed is written before the pipe waits for more, so that nothing sits in it while the sender is silent.
// One goroutine owns a pipe; only interrupt and cut may be called from others.
type pipe struct {
	from, to net.Conn
	// frameTimeout bounds the wait for the next byte inside a frame; 0 for no bound. Between frames there is none.
	frameTimeout time.Duration
	count        func(n int) // told of bytes written

	buf             *bufpool.Buf
	sent, next, end int

	socket  *sock.Conn // from, if it is a TCP connection: waits for bytes without a buffer
	rawRead func(fd uintptr) bool
	rawN    int
	rawErr  error

	direct *sock.Conn // to, if both ends are TCP connections
	large  bool       // the next frame is looked at ahead
	ahead  bool       // what buf has is still in the socket

	timed bool // a read deadline is set

	mu          sync.Mutex
	idle        bool        // waiting between frames
	off         bool        // cut
	interrupted atomic.Bool // written under mu
}

func (p *pipe) init(from, to net.Conn, frameTimeout time.Duration, count func(int)) {
	p.from, p.to, p.frameTimeout, p.count = from, to, frameTimeout, count
	if c, ok := from.(*sock.Conn); ok {
		p.socket, p.rawRead = c, p.tryRead
		p.direct, _ = to.(*sock.Conn)
	}
}

// peek returns the bytes not yet looked at, at least n of them, n <= pipeBuffer. They are valid until the next call of any
// method but pass. With an error it returns what there is.
func (p *pipe) peek(n int) ([]byte, error) {
	for p.ahead || p.end-p.next < n {
		if err := p.fill(n); err != nil {
			return p.unread(), err
		}
	}
	return p.unread(), nil
}

func (p *pipe) unread() []byte {
	if p.buf == nil {
		return nil
	}
	return p.buf.B[p.next:p.end:p.end]
}

// pass lets the next n bytes go; they must have been peeked at.
func (p *pipe) pass(n int) { p.next += n }

// replace writes b instead of the next n bytes, which must have been peeked at.
func (p *pipe) replace(n int, b []byte) error {
	if err := p.flush(); err != nil {
		return err
	}
	p.next += n
	p.sent = p.next
	return p.write(b)
}

// flush writes what passed.
func (p *pipe) flush() error {
	if p.sent == p.next {
		return nil
	}
	b := p.buf.B[p.sent:p.next]
	p.sent = p.next
	return p.write(b)
}

func (p *pipe) write(b []byte) error {
	n, err := p.to.Write(b)
	p.count(n)
	if err != nil {
		return &writeError{err}
	}
	return nil
}

// writeError is an error of the socket that a pipe writes to; all others are of the one that it reads from.
type writeError struct{ error }

func (e *writeError) Unwrap() error { return e.error }

// stream lets the next n bytes go without looking at them.
func (p *pipe) stream(n int) error {
	p.leave()
	p.large = p.direct != nil && n > maxPeek
	here := min(n, p.end-p.next)
	p.pass(here)
	if n -= here; n == 0 {
		return nil
	}
	if err := p.flush(); err != nil {
		return err
	}
	p.release()
	if p.direct != nil {
		var err error
		if n, err = p.spliceMost(n); n == 0 || err != nil {
			return err
		}
	}
	scratch := bufpool.Get(min(n, pipeBuffer))
	defer scratch.Release()
	for n > 0 {
		m := min(n, len(scratch.B))
		if err := p.streamThrough(scratch.B[:m], nil, 0); err != nil {
			return err
		}
		n -= m
	}
	return nil
}

// streamKept lets the next len(keep) bytes go, writes all of them, and keeps them. It stores seq in whole once keep is filled,
// which is before the last byte is written, so that who answers can read keep.
func (p *pipe) streamKept(keep []byte, whole *atomic.Uint64, seq uint64) error {
	p.large = p.direct != nil
	if p.leave() {
		return p.spliceKept(keep, whole, seq)
	}
	here := copy(keep, p.unread())
	p.pass(here)
	if here == len(keep) {
		whole.Store(seq)
	}
	if err := p.flush(); err != nil {
		return err
	}
	return p.streamThrough(keep[here:], whole, seq)
}

// streamThrough reads into b and writes what it reads as it comes, until b was filled once; see streamKept. The pipe's own
// buffer is empty.
func (p *pipe) streamThrough(b []byte, whole *atomic.Uint64, seq uint64) error {
	for at := 0; at < len(b); {
		if err := p.limitWait(); err != nil {
			return err
		}
		m, err := p.from.Read(b[at:])
		if m > 0 {
			if at+m == len(b) && whole != nil {
				whole.Store(seq)
			}
			if err := p.write(b[at : at+m]); err != nil {
				return err
			}
			at += m
		}
		if err != nil && at < len(b) {
			return midFrame(err)
		}
	}
	return nil
}

// fill reads more, after flushing, and makes room for at least n unread bytes. What was only looked at is read first.
func (p *pipe) fill(n int) error {
	if p.ahead {
		return p.takeIn()
	}
	if err := p.flush(); err != nil {
		return err
	}
	if p.next == p.end {
		p.release()
		return p.fillIdle()
	}
	if p.next+n > len(p.buf.B) || p.end == len(p.buf.B) {
		p.end = copy(p.buf.B, p.buf.B[p.next:p.end])
		p.sent, p.next = 0, 0
	}
	if err := p.limitWait(); err != nil {
		return err
	}
	m, err := p.from.Read(p.buf.B[p.end:])
	p.end += m
	if m == 0 && err != nil {
		return midFrame(err)
	}
	return nil
}

// fillIdle waits for the first bytes of a frame without a deadline, and, where the socket allows, without a buffer.
func (p *pipe) fillIdle() error {
	if err := p.beginIdle(); err != nil {
		return err
	}
	err := p.readIdle()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle = false
	if p.end == 0 && errors.Is(err, os.ErrDeadlineExceeded) {
		switch {
		case p.off:
			return errCut
		case p.interrupted.Load():
			return errInterrupted
		}
	}
	p.timed = p.timed || p.interrupted.Load() // interrupt may have set a deadline that the rest of a frame must not see
	return err
}

func (p *pipe) beginIdle() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.off:
		return errCut
	case p.interrupted.Load():
		return errInterrupted
	}
	p.idle = true
	if !p.timed {
		return nil
	}
	p.timed = false
	return p.from.SetReadDeadline(time.Time{})
}

func (p *pipe) readIdle() error {
	if p.socket != nil {
		p.rawN, p.rawErr = 0, nil
		if err := p.socket.AwaitRead(p.rawRead); err != nil {
			return err
		}
		p.end = p.rawN
		return p.rawErr
	}
	var first [1]byte // a TLS connection has its own buffer; borrow ours only once there is something
	n, err := p.from.Read(first[:])
	if n == 0 {
		return err
	}
	p.buf = bufpool.Get(pipeBuffer)
	p.buf.B[0] = first[0]
	p.end = 1
	return nil
}

// tryRead reads into a fresh buffer, or returns false without one if nothing is there yet; see sock.Conn.AwaitRead.
func (p *pipe) tryRead(fd uintptr) (done bool) {
	size, flags := pipeBuffer, 0
	if p.large {
		size, flags = headBuffer, unix.MSG_PEEK
	}
	p.buf = bufpool.Get(size)
	p.rawN, done, p.rawErr = p.socket.TryReceive(fd, p.buf.B, flags)
	p.ahead = p.large && p.rawN > 0
	if p.rawN == 0 {
		p.release()
	}
	return done
}

// limitWait sets the deadline for the next bytes of a frame that has begun.
func (p *pipe) limitWait() error {
	if p.frameTimeout == 0 && !p.timed {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.off {
		return errCut
	}
	p.timed = p.frameTimeout > 0
	var until time.Time
	if p.timed {
		until = time.Now().Add(p.frameTimeout)
	}
	return p.from.SetReadDeadline(until)
}

// interrupt stops the pipe before its next frame: peek returns errInterrupted. A frame that has begun is read to its end.
func (p *pipe) interrupt() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.interrupted.Store(true)
	if p.idle {
		p.from.SetReadDeadline(time.Unix(1, 0))
	}
}

// cut stops the pipe's reading at once: errCut, or a read that is under way times out.
func (p *pipe) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.off = true
	p.from.SetReadDeadline(time.Unix(1, 0))
}

// stopped reports whether interrupt was called. A pipe that always has a part of the next frame never waits between frames, so
// its owner asks.
func (p *pipe) stopped() bool { return p.interrupted.Load() }

// release gives the empty buffer back.
func (p *pipe) release() {
	if p.buf != nil {
		p.buf.Release()
		p.buf = nil
	}
	p.sent, p.next, p.end = 0, 0, 0
}

// midFrame turns the end of the stream inside a frame into an error of its own.
func midFrame(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// skip leaves out the next n bytes, which must have been peeked at; everything before them was flushed.
func (p *pipe) skip(n int) {
	p.next += n
	p.sent = p.next
}

// take reads the next len(b) bytes into b and writes none of them.
func (p *pipe) take(b []byte) error {
	if err := p.flush(); err != nil {
		return err
	}
	p.leave()
	n := copy(b, p.unread())
	p.skip(n)
	if n == len(b) {
		return nil
	}
	p.release()
	for n < len(b) {
		if err := p.limitWait(); err != nil {
			return err
		}
		m, err := p.from.Read(b[n:])
		n += m
		if err != nil && n < len(b) {
			return midFrame(err)
		}
	}
	return nil
}
