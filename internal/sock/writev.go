package sock

import (
	"net"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// maxPieces bounds the pieces of one system call (IOV_MAX).
const maxPieces = 1024

// WriteBuffers writes all pieces to c, to a Conn in as few calls as there can be (writev(2)). It consumes pieces, as net.Buffers' own WriteTo does.
func WriteBuffers(c net.Conn, pieces net.Buffers) (int64, error) {
	w, ok := c.(*Conn)
	if !ok {
		return pieces.WriteTo(c)
	}
	t := &w.out
	t.Lock()
	defer t.Unlock()
	t.begin(nil, 0)
	t.rest = pieces
	if t.tryAll == nil {
		t.tryAll = t.sendAll
	}
	err := w.raw.Write(t.tryAll)
	t.rest = nil
	clear(t.vectors[:cap(t.vectors)])
	n, err := t.end(w, "write", err)
	return int64(n), err
}

func (t *transfer) sendAll(fd uintptr) (done bool) {
	for t.gather() {
		n, errno := t.calls.do(unix.SYS_WRITEV, fd, uintptr(unsafe.Pointer(unsafe.SliceData(t.vectors))), uintptr(len(t.vectors)), 0, 0, 0)
		switch errno {
		case 0:
			t.n += n
			t.consume(n)
		case unix.EAGAIN:
			return false
		default:
			t.err = os.NewSyscallError("writev", errno)
			return true
		}
	}
	return true
}

// gather lists what the next call is to write; false if nothing is left.
func (t *transfer) gather() bool {
	t.vectors = t.vectors[:0]
	size := 0
	for _, b := range t.rest {
		if len(t.vectors) == maxPieces || size >= maxCall {
			break
		}
		if len(b) > 0 {
			v := unix.Iovec{Base: unsafe.SliceData(b)}
			v.SetLen(len(b))
			t.vectors = append(t.vectors, v)
			size += len(b)
		}
	}
	return len(t.vectors) > 0
}

// consume takes the first n bytes off the rest.
func (t *transfer) consume(n int) {
	for n > 0 {
		m := min(n, len(t.rest[0]))
		t.rest[0] = t.rest[0][m:]
		if n -= m; len(t.rest[0]) == 0 {
			t.rest = t.rest[1:]
		}
	}
}
