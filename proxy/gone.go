package proxy

import (
	"crypto/tls"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// peerState is how far a peer has ended its connection.
type peerState int8

const (
	peerThere peerState = iota
	peerEnded           // its stream; it may still read
	peerReset
)

// noticeEnd ends c if its client is gone and nobody would notice: while the request goroutine waits for the broker, to take a request or to answer, it
// doesn't read from the client. A reset ends c at once. After an orderly end the broker still gets what it was sent, as long as it takes some of it in
// halfCloseWait. Only the sweep calls it, with s.mu held.
func (c *conn) noticeEnd(now time.Time) {
	if c.requests.waiting() || c.endedBy.Load() != 0 {
		return // the request goroutine notices, or has
	}
	switch stateOf(c.client) {
	case peerThere:
		c.leftSince = time.Time{}
		return
	case peerEnded:
		if n := c.requestBytes.Load(); c.leftSince.IsZero() || n != c.leftBytes {
			c.leftSince, c.leftBytes = now, n
		}
		if now.Sub(c.leftSince) <= halfCloseWait {
			return
		}
	}
	c.endFor(reasonClient)
	c.abort()
}

// waiting reports whether the pipe waits for a frame's first byte, and so for the peer's end.
func (p *pipe) waiting() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.idle
}

// stateOf asks the kernel, and takes nothing from the socket.
func stateOf(peer net.Conn) (state peerState) {
	onSocket(peer, func(fd int) {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		if n, err := unix.Poll(fds, 0); n != 1 || err != nil {
			return
		}
		switch events := fds[0].Revents; {
		case events&(unix.POLLERR|unix.POLLHUP) != 0:
			state = peerReset
		case events&unix.POLLRDHUP != 0:
			state = peerEnded
		}
	})
	return state
}

// onSocket calls f with the socket below a connection, unless it's closed.
func onSocket(c net.Conn, f func(fd int)) {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	if s, ok := c.(syscall.Conn); ok {
		if raw, err := s.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { f(int(fd)) }) // fails for a closed one alone
		}
	}
}
