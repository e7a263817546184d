package sock

import (
	"net"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// maxPieces bounds the pieces of one system call (IOV_MAX).
const maxPieces = 1024

// pieces is what WriteBuffers has a transfer write.
type pieces struct {
	t       *transfer
	rest    net.Buffers  // what wasn't written
	vectors []unix.Iovec // of one call
	try     func(fd uintptr) (done bool)
}

// WriteBuffers writes all of b to c, to a Conn in as few calls as there can be (writev(2)). It consumes b, as net.Buffers' own WriteTo does.
func WriteBuffers(c net.Conn, b net.Buffers) (int64, error) {
	w, ok := c.(*Conn)
	if !ok {
		return b.WriteTo(c)
	}
	t := &w.out
	t.Lock()
	defer t.Unlock()
	if t.many == nil {
		t.many = &pieces{t: t}
		t.many.try = t.many.send
	}
	p := t.many
	t.begin(nil, 0)
	p.rest = b
	err := w.raw.Write(p.try)
	p.rest = nil
	clear(p.vectors[:cap(p.vectors)])
	n, err := t.end(w, "write", err)
	return int64(n), err
}

func (p *pieces) send(fd uintptr) (done bool) {
	for p.gather() {
		n, errno := p.t.calls.do(unix.SYS_WRITEV, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p.vectors))), uintptr(len(p.vectors)), 0, 0, 0)
		switch errno {
		case 0:
			p.t.n += n
			p.consume(n)
		case unix.EAGAIN:
			return false
		default:
			p.t.err = os.NewSyscallError("writev", errno)
			return true
		}
	}
	return true
}

// gather lists what the next call is to write; false if nothing is left.
func (p *pieces) gather() bool {
	p.vectors = p.vectors[:0]
	size := 0
	for _, b := range p.rest {
		if len(p.vectors) == maxPieces || size >= maxCall {
			break
		}
		if len(b) > 0 {
			v := unix.Iovec{Base: unsafe.SliceData(b)}
			v.SetLen(len(b))
			p.vectors = append(p.vectors, v)
			size += len(b)
		}
	}
	return len(p.vectors) > 0
}

// consume takes the first n bytes off the rest.
func (p *pieces) consume(n int) {
	for n > 0 {
		m := min(n, len(p.rest[0]))
		p.rest[0] = p.rest[0][m:]
		if n -= m; len(p.rest[0]) == 0 {
			p.rest = p.rest[1:]
		}
	}
}
