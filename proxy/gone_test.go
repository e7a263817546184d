package proxy

import (
	"bytes"
	"errors"
	"net"
	"os"
	"testing"
	"time"
)

// deafBroker accepts connections and reads nothing of them. Its first connection was the proxy's own look at it.
func deafBroker(t testing.TB) net.Listener {
	t.Helper()
	ln := listen(t)
	go func() {
		var open []net.Conn
		for {
			c, err := ln.Accept()
			if err != nil {
				break
			}
			open = append(open, c)
		}
		for _, c := range open {
			c.Close()
		}
	}()
	return ln
}

// fillUp writes requests until the proxy takes no more of them.
func fillUp(t testing.TB, c *rawClient) {
	t.Helper()
	request := rawRequest(68, 0, 7, make([]byte, 1<<20))
	c.SetWriteDeadline(time.Now().Add(time.Second))
	for {
		if _, err := c.Write(request); errors.Is(err, os.ErrDeadlineExceeded) {
			return
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

// TestAGoneClientIsNoticedWhileTheBrokerTakesNothing: while a request waits for a broker that reads nothing, nobody reads from its client. A reset ends the
// connection all the same, and so does a client's end once the broker has taken nothing for a time.
func TestAGoneClientIsNoticedWhileTheBrokerTakesNothing(t *testing.T) {
	s := start(t, Options{Seeds: []string{deafBroker(t).Addr().String()}})
	c := dialRaw(t, s.Addr())
	fillUp(t, c)
	c.Conn.(*net.TCPConn).SetLinger(0)
	c.Close()
	eventually(t, "the reset client's connection is gone", func() bool { return s.connections() == 0 })

	c = dialRaw(t, s.Addr())
	request := rawRequest(68, 0, 7, nil)
	c.send(bytes.Repeat(request, maxInFlight+10))
	c.Conn.(*net.TCPConn).CloseWrite()
	each := func(f func(*conn)) {
		s.mu.Lock()
		defer s.mu.Unlock()
		for c := range s.conns {
			f(c)
		}
	}
	eventually(t, "the queue is full, and the client's end has come", func() (ended bool) {
		each(func(c *conn) {
			ended = stateOf(c.client) == peerEnded && c.requestBytes.Load() == int64(maxInFlight*len(request))
		})
		return ended
	})
	now := time.Now()
	for _, after := range []time.Duration{0, halfCloseWait / 2, halfCloseWait} {
		each(func(c *conn) {
			if c.noticeEnd(now.Add(after)); c.endReason.Load() != nil {
				t.Errorf("%v after the client's end its connection is ended, before the broker could take what it was sent", after)
			}
		})
	}
	each(func(c *conn) { c.noticeEnd(now.Add(halfCloseWait + 2*time.Second)) })
	eventually(t, "the ended client's connection is gone", func() bool { return s.connections() == 0 })
}
