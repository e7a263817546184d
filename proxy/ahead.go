package proxy

import (
	"sync/atomic"

	"kmirror/internal/bufpool"
	"kmirror/internal/sock"
)

// Between two TCP sockets, a pipe whose last frame was large expects another large one: it looks at the beginning of the next frame without taking
// it out of the socket (MSG_PEEK), so that the kernel can move the frame whole, without a copy (splice). A frame that is kept is copied out once, by
// another look.
const (
	headBuffer = 512      // bytes of a look at the beginning of a frame
	spliceMin  = 16 << 10 // fewer bytes are read and written
)

// head is peek for callers that may stream the frame: its bytes may be still in the socket. n <= pipeBuffer.
func (p *pipe) head(n int) ([]byte, error) {
	for p.end-p.next < n {
		if err := p.fill(n); err != nil {
			return p.unread(), err
		}
	}
	return p.unread(), nil
}

// takeIn reads what was only looked at, and what follows it, into a buffer of the usual size.
func (p *pipe) takeIn() error {
	p.leave()
	p.large = false
	if err := p.limitWait(); err != nil {
		return err
	}
	p.buf = bufpool.Get(pipeBuffer)
	m, err := p.from.Read(p.buf.B)
	p.end = m
	if m == 0 && err != nil {
		p.release()
		return midFrame(err)
	}
	return nil
}

// leave forgets what was looked at, which is all in the socket. It reports whether there was such a look.
func (p *pipe) leave() bool {
	if !p.ahead {
		return false
	}
	p.ahead = false
	p.release()
	return true
}

// look waits for bytes and copies what there is into b, without taking it out of the socket.
func (p *pipe) look(b []byte) (int, error) {
	if err := p.limitWait(); err != nil {
		return 0, err
	}
	return p.socket.Peek(b)
}

// spliceKept is streamKept for a frame that is whole in the socket, as far as it has come.
func (p *pipe) spliceKept(keep []byte, whole *atomic.Uint64, seq uint64) error {
	for at := 0; at < len(keep); {
		m, err := p.look(keep[at:])
		if err != nil {
			return midFrame(err)
		}
		if at += m; at == len(keep) {
			whole.Store(seq)
		}
		if m, err = p.spliceMost(m); err != nil {
			return err
		}
		if err := p.streamThrough(keep[at-m:at], nil, 0); err != nil { // the same bytes once more
			return err
		}
	}
	return nil
}

// spliceMost moves the next n bytes inside the kernel, and returns how many it left because so few are read and written.
func (p *pipe) spliceMost(n int) (left int, err error) {
	if n <= spliceMin {
		return n, nil
	}
	k, err := sock.GetPipe()
	if err != nil {
		return n, nil // too many files are open: so these bytes are copied
	}
	defer k.Release()
	for n > spliceMin {
		if err := p.limitWait(); err != nil {
			return n, err
		}
		if _, err := k.Fill(p.socket, n); err != nil {
			return n, midFrame(err)
		}
		m, err := k.Drain(p.direct)
		p.count(m)
		if n -= m; err != nil {
			return n, &writeError{err}
		}
	}
	return n, nil
}
