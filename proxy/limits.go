package proxy

import (
	"context"
	"math/rand/v2"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// Limits bound what client connections may take and how long. Zero means none, unless said otherwise.
type Limits struct {
	PerIP        int           // connections of one address at a time
	FirstRequest time.Duration // from the connection to its first request
	Idle         time.Duration // without a request and with none unanswered; then the connection is ended between two
	// Age is how long a connection may live: then it's ended between two requests, so that clients spread anew over several instances. Each has
	// a different limit, up to a tenth shorter, so that they don't come all at once.
	Age time.Duration
	// Unread is how long a client may leave answers unread: the kernel then ends the connection (TCP_USER_TIMEOUT).
	Unread time.Duration
}

// sweepEvery is how often the connections are held against the limits.
const sweepEvery = time.Second

// sweep ends connections that are over a limit, and those whose clients are gone unnoticed, until ctx ends.
func (s *Server) sweep(ctx context.Context) {
	limits := s.o.Limits
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			s.mu.Lock()
			for c := range s.conns {
				c.holdAgainst(limits, now)
				c.limitUnread(limits.Unread)
				c.freeAnswer(now)
				c.noticeEnd(now)
			}
			s.mu.Unlock()
		}
	}
}

// holdAgainst ends c if it is over a limit. Only the sweep calls it, with s.mu held.
func (c *conn) holdAgainst(limits Limits, now time.Time) {
	asked, _ := c.flight.totals()
	if asked != c.sweptAsked || c.flight.waits() > 0 {
		c.sweptAsked, c.quietSince = asked, now
	}
	switch {
	case asked == 0 && c.zeroAcks.Load() == 0 && limits.FirstRequest > 0 && now.Sub(c.began) > limits.FirstRequest:
		c.endFor(reasonFirstRequest)
		c.abort()
	case limits.Age > 0 && now.Sub(c.began) > c.maxAge:
		c.endFor(reasonAge)
		c.drain()
	case limits.Idle > 0 && now.Sub(c.quietSince) > limits.Idle && !c.sentUnanswered():
		c.endFor(reasonIdle)
		c.drain()
	}
}

// sentUnanswered reports whether acks=0 requests passed since the last sweep, which the queue knows nothing of.
func (c *conn) sentUnanswered() bool {
	n := c.zeroAcks.Load()
	if n == c.sweptZeroAcks {
		return false
	}
	c.sweptZeroAcks, c.quietSince = n, time.Now()
	return true
}

// endFor notes why the proxy ends a connection; the first reason counts.
func (c *conn) endFor(reason string) { c.endReason.CompareAndSwap(nil, &reason) }

// jittered is a limit up to a tenth shorter.
func jittered(age time.Duration) time.Duration {
	if age <= 0 {
		return 0
	}
	return age - time.Duration(rand.Int64N(int64(age)/10+1))
}

// limitUnread has the kernel end c if its client takes nothing for too long (TCP_USER_TIMEOUT), but only while there is something to take: that limit takes
// the place of keepAlive's, which finds within a minute that a quiet client has vanished. Only the sweep calls it, with s.mu held.
func (c *conn) limitUnread(limit time.Duration) {
	if limit <= 0 {
		return
	}
	asked, answered := c.flight.totals()
	n := c.responseBytes.Load()
	if asked == answered && n == c.sweptResponse && !c.unreadLimited {
		return
	}
	c.sweptResponse = n
	onSocket(c.client, func(fd int) {
		queued, err := unix.IoctlGetInt(fd, unix.SIOCOUTQ)
		if limited := queued > 0; err == nil && limited != c.unreadLimited {
			milliseconds := 0
			if limited {
				milliseconds = int(limit.Milliseconds())
			}
			if unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, milliseconds) == nil {
				c.unreadLimited = limited
			}
		}
	})
}

// takeAddress counts a connection of an address; false if it has too many. s.mu is held.
func (s *Server) takeAddress(ip netip.Addr) bool {
	if s.o.Limits.PerIP == 0 {
		return true
	}
	if s.perIP[ip] >= s.o.Limits.PerIP {
		return false
	}
	if s.perIP == nil {
		s.perIP = make(map[netip.Addr]int)
	}
	s.perIP[ip]++
	return true
}

// leaveAddress is the counterpart of takeAddress. s.mu is held.
func (s *Server) leaveAddress(ip netip.Addr) {
	if s.o.Limits.PerIP == 0 {
		return
	}
	if s.perIP[ip]--; s.perIP[ip] <= 0 {
		delete(s.perIP, ip)
	}
}

func addressOf(a net.Addr) netip.Addr {
	if tcp, ok := a.(*net.TCPAddr); ok {
		ip, _ := netip.AddrFromSlice(tcp.IP)
		return ip.Unmap()
	}
	return netip.Addr{}
}

func portOf(a net.Addr) int {
	if tcp, ok := a.(*net.TCPAddr); ok {
		return tcp.Port
	}
	return 0
}
