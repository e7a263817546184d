package sock

import (
	"io"
	"os"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// pipeSize is what the kernel is asked to let a Pipe hold, in bytes; it may refuse where a user has many (pipe-user-pages-soft), and a smaller one does too.
const pipeSize = 1 << 20

// Pipe is a pipe of the kernel's, through which bytes go from one connection to another without a copy (splice(2)). It is of one goroutine.
type Pipe struct {
	r, w   int
	calls  calls
	held   int // bytes in it
	moved  int // of the call under way
	limit  int
	err    error
	filled func(fd uintptr) bool
	sent   func(fd uintptr) bool
	lost   runtime.Cleanup // closes it if the pool lets go of it
}

var pipes sync.Pool

// GetPipe returns an empty pipe; an error is one of the process's limits.
func GetPipe() (*Pipe, error) {
	if p, _ := pipes.Get().(*Pipe); p != nil {
		return p, nil
	}
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, os.NewSyscallError("pipe2", err)
	}
	_, _ = unix.FcntlInt(uintptr(fds[0]), unix.F_SETPIPE_SZ, pipeSize)
	p := &Pipe{r: fds[0], w: fds[1]}
	p.filled, p.sent = p.fill, p.send
	p.lost = runtime.AddCleanup(p, closeBoth, fds)
	return p, nil
}

func closeBoth(fds [2]int) {
	unix.Close(fds[0])
	unix.Close(fds[1])
}

// Release gives the pipe back. Bytes that it holds, since a connection failed, are lost.
func (p *Pipe) Release() {
	if p.held == 0 {
		pipes.Put(p)
		return
	}
	p.lost.Stop()
	closeBoth([2]int{p.r, p.w})
}

// Fill waits for bytes and moves what there is, up to n, into the empty pipe. It returns io.EOF at the stream's end.
func (p *Pipe) Fill(from *Conn, n int) (int, error) {
	p.limit, p.moved, p.err = min(n, maxCall), 0, nil
	err := from.raw.Read(p.filled)
	if err == nil {
		err = p.err
	}
	p.held += p.moved
	return p.moved, from.named("read", err)
}

func (p *Pipe) fill(fd uintptr) (done bool) {
	n, errno := p.splice(fd, uintptr(p.w), p.limit)
	switch {
	case errno == unix.EAGAIN:
		return false
	case errno != 0:
		p.err = os.NewSyscallError("splice", errno)
	case n == 0:
		p.err = io.EOF
	}
	p.moved = n
	return true
}

// Drain moves all that the pipe holds to a connection. It returns how much went.
func (p *Pipe) Drain(to *Conn) (int, error) {
	p.moved, p.err = 0, nil
	err := to.raw.Write(p.sent)
	if err == nil {
		err = p.err
	}
	return p.moved, to.named("write", err)
}

func (p *Pipe) send(fd uintptr) (done bool) {
	for p.held > 0 {
		n, errno := p.splice(uintptr(p.r), fd, p.held)
		switch errno {
		case 0:
			p.held -= n
			p.moved += n
		case unix.EAGAIN:
			return false
		default:
			p.err = os.NewSyscallError("splice", errno)
			return true
		}
	}
	return true
}

// splice moves up to n bytes; 0 at the end of the stream.
func (p *Pipe) splice(from, to uintptr, n int) (int, unix.Errno) {
	return p.calls.do(unix.SYS_SPLICE, from, 0, to, 0, uintptr(n), unix.SPLICE_F_NONBLOCK|unix.SPLICE_F_MOVE)
}
