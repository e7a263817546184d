package proxy

import (
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"kmirror/internal/bufpool"
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
	p.lookInto, p.rawN, p.rawErr = b, 0, nil
	err := p.raw.Read(p.rawLook)
	p.lookInto = nil
	if err == nil {
		err = p.rawErr
	}
	return p.rawN, err
}

// tryLook returns false if nothing is there yet; see syscall.RawConn.Read.
func (p *pipe) tryLook(fd uintptr) (done bool) {
	p.rawN, done, p.rawErr = receive(int(fd), p.lookInto, unix.MSG_PEEK)
	return done
}

// receive reads what there is from a socket that doesn't block. It returns false if nothing is there yet, and io.EOF at the stream's end.
// unix.Recvfrom would allocate an address.
func receive(fd int, b []byte, flags uintptr) (n int, done bool, err error) {
	for {
		r, _, errno := unix.Syscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), flags, 0, 0)
		switch {
		case errno == unix.EINTR:
			continue
		case errno == unix.EAGAIN:
			return 0, false, nil
		case errno != 0:
			return 0, true, os.NewSyscallError("recvfrom", errno)
		case r == 0:
			return 0, true, io.EOF
		}
		return int(r), true, nil
	}
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

// spliceMost moves the next n bytes, and returns how many it left because so few are read and written.
func (p *pipe) spliceMost(n int) (left int, err error) {
	for n > spliceMin {
		m, err := p.splice(n)
		if n -= m; err != nil && (m == 0 || !errors.Is(err, os.ErrDeadlineExceeded)) {
			return n, err
		}
	}
	return n, nil
}

// splice moves up to n bytes inside the kernel where it can (net.TCPConn.ReadFrom), and returns how many it moved. After os.ErrDeadlineExceeded, which
// covers the writes too, the rest can be moved with a deadline of its own.
func (p *pipe) splice(n int) (int, error) {
	if err := p.limitWait(); err != nil {
		return 0, err
	}
	p.limited = io.LimitedReader{R: p.from, N: int64(n)}
	m, err := p.to.(*net.TCPConn).ReadFrom(&p.limited)
	p.count(int(m))
	switch {
	case err == nil && m < int64(n):
		err = io.ErrUnexpectedEOF
	case err != nil && !errors.Is(err, os.ErrDeadlineExceeded) && p.readable():
		err = &writeError{err}
	}
	return int(m), err
}

// readable reports whether the socket that the pipe reads from is in order, for an error that doesn't say which of two sockets it is of.
func (p *pipe) readable() (ok bool) {
	var b [1]byte
	err := p.raw.Control(func(fd uintptr) {
		_, _, err := receive(int(fd), b[:], unix.MSG_PEEK)
		ok = err == nil
	})
	return ok && err == nil
}
