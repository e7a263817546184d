// Package sock has TCP connections whose system calls stay unknown to Go's scheduler.
//
// Package net announces each read and write to the scheduler, in case it takes long. In a process that mostly waits, as a proxy does, each of them
// then wakes the runtime's watcher thread (sysmon), which takes a quarter of all the processor time of a plain relay. But on a socket that doesn't block
// no call waits: there is nothing to announce.
package sock

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// maxCall bounds the bytes of one system call, and with them how long it keeps a processor that Go believes to run Go code.
	maxCall = 1 << 20
	// announceEvery is how many calls go unannounced. The watcher thread also sees to it that goroutines that never wait let others run, and that the
	// network is looked at while all processors are busy: so it must wake sooner or later.
	announceEvery = 64
)

// Conn is a TCP connection. As with every net.Conn, its methods may be called from several goroutines at once.
type Conn struct {
	*net.TCPConn
	raw     syscall.RawConn
	in, out transfer
}

// transfer is one direction's state of a call, so that none is allocated.
type transfer struct {
	sync.Mutex
	calls calls
	b     []byte
	flags int
	n     int
	err   error
	try   func(fd uintptr) (done bool) // see syscall.RawConn
	many  *pieces                      // nil until WriteBuffers
}

// Wrap returns c as a *Conn if it is a *net.TCPConn, else c itself.
func Wrap(c net.Conn) net.Conn {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return c
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return c
	}
	w := &Conn{TCPConn: t, raw: raw}
	w.in.try, w.out.try = w.in.receive, w.out.send
	return w
}

// Read implements net.Conn.
func (c *Conn) Read(b []byte) (int, error) { return c.receive(b, 0) }

// Peek waits for bytes and copies what there is, up to len(b), without taking it out of the socket; else it is as Read.
func (c *Conn) Peek(b []byte) (int, error) { return c.receive(b, unix.MSG_PEEK) }

func (c *Conn) receive(b []byte, flags int) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	t := &c.in
	t.Lock()
	defer t.Unlock()
	t.begin(b, flags)
	err := c.raw.Read(t.try)
	return t.end(c, "read", err)
}

// Write implements net.Conn.
func (c *Conn) Write(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	t := &c.out
	t.Lock()
	defer t.Unlock()
	t.begin(b, unix.MSG_NOSIGNAL)
	err := c.raw.Write(t.try)
	return t.end(c, "write", err)
}

// AwaitRead calls try, for TryReceive, until it returns true: at once, and again whenever there may be something to read. It returns the error of a
// deadline or a closed connection.
func (c *Conn) AwaitRead(try func(fd uintptr) (done bool)) error {
	return c.named("read", c.raw.Read(try))
}

// TryReceive reads what there is, with the flags of recv(2). It returns false if nothing is there yet, and io.EOF at the stream's end.
func (c *Conn) TryReceive(fd uintptr, b []byte, flags int) (n int, done bool, err error) {
	return received(c.in.calls.do(unix.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(min(len(b), maxCall)), uintptr(flags), 0, 0))
}

func (t *transfer) begin(b []byte, flags int) { t.b, t.flags, t.n, t.err = b, flags, 0, nil }

func (t *transfer) end(c *Conn, op string, err error) (int, error) {
	t.b = nil
	if err == nil {
		err = t.err
	}
	return t.n, c.named(op, err)
}

func (t *transfer) receive(fd uintptr) (done bool) {
	t.n, done, t.err = received(t.calls.do(unix.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(unsafe.SliceData(t.b))), uintptr(min(len(t.b), maxCall)), uintptr(t.flags), 0, 0))
	return done
}

func (t *transfer) send(fd uintptr) (done bool) {
	for t.n < len(t.b) {
		rest := t.b[t.n:]
		n, errno := t.calls.do(unix.SYS_SENDTO, fd, uintptr(unsafe.Pointer(unsafe.SliceData(rest))), uintptr(min(len(rest), maxCall)), uintptr(t.flags), 0, 0)
		switch errno {
		case 0:
			t.n += n
		case unix.EAGAIN:
			return false
		default:
			t.err = os.NewSyscallError("write", errno)
			return true
		}
	}
	return true
}

// received is what recv(2) tells.
func received(n int, errno unix.Errno) (_ int, done bool, err error) {
	switch {
	case errno == unix.EAGAIN:
		return 0, false, nil
	case errno != 0:
		return 0, true, os.NewSyscallError("read", errno)
	case n == 0:
		return 0, true, io.EOF
	}
	return n, true, nil
}

// calls makes the system calls of one direction of a connection. An idle connection's memory is mostly its two stacks, so what lies below a wait is flat.
type calls uint

// announce counts a call and reports whether it's to be announced.
func (c *calls) announce() bool {
	*c++
	return *c%announceEvery == 0
}

// do calls until no signal came between.
//
//go:uintptrescapes
func (c *calls) do(trap, a1, a2, a3, a4, a5, a6 uintptr) (n int, errno unix.Errno) {
	raceBefore()
	for {
		var r uintptr
		if c.announce() {
			r, _, errno = unix.Syscall6(trap, a1, a2, a3, a4, a5, a6)
		} else {
			r, _, errno = unix.RawSyscall6(trap, a1, a2, a3, a4, a5, a6)
		}
		switch errno {
		case 0:
			raceAfter(a1)
			return int(r), 0
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// named gives an error the form of package net's.
func (c *Conn) named(op string, err error) error {
	if err == nil || err == io.EOF {
		return err
	}
	if e, ok := errors.AsType[*net.OpError](err); ok {
		err = e.Err
	}
	return &net.OpError{Op: op, Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
}
