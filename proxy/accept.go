package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"go.uber.org/zap"

	"kmirror/internal/sock"
	"kmirror/protocol"
)

func (s *Server) acceptBootstrap() {
	if err := s.accept(s.ln, nil); err != nil {
		s.stop(fmt.Errorf("bootstrap listener: %w", err))
	}
}

func (s *Server) acceptBroker(b *broker) {
	if err := s.accept(b.ln, b); err != nil {
		s.stop(fmt.Errorf("listener of broker %d: %w", b.id, err))
	}
}

// accept takes connections until the listener is closed.
func (s *Server) accept(ln net.Listener, b *broker) error {
	for {
		client, err := ln.Accept()
		switch {
		case err == nil:
		case errors.Is(err, net.ErrClosed):
			return nil
		case failsOnce(err):
			s.warnings.warn("accept", "", "can't accept connections", zap.Error(err))
			pause(s.base, 50*time.Millisecond)
			continue
		default:
			return err
		}
		s.metrics.accepted.Inc()
		if !s.takeSlot() {
			client.Close()
			s.metrics.closedBy[reasonLimit].Inc()
			s.accessRefused(client, b)
			s.warnings.warn(reasonLimit, addressOf(client.RemoteAddr()).String(), "connection refused: too many are open", zap.Stringer("client", client.RemoteAddr()))
			continue
		}
		s.wg.Go(func() { s.serveClient(client, b) })
	}
}

// failsOnce tells whether an error of accept is about one connection or a shortage, so that the listener can go on. Linux hands on the errors of the network
// that a new connection has already met, and those of a firewall (accept(2)).
func failsOnce(err error) bool {
	errno, ok := errors.AsType[syscall.Errno](err)
	return ok && errno != syscall.EBADF && errno != syscall.EINVAL && errno != syscall.ENOTSOCK
}

func (s *Server) takeSlot() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.slots >= s.o.MaxConnections || s.draining {
		return false
	}
	s.slots++
	return true
}

// serveClient serves one client connection of the bootstrap listener (b nil) or a broker's.
func (s *Server) serveClient(client net.Conn, b *broker) {
	client = sock.Wrap(client)
	defer func() {
		s.mu.Lock()
		s.slots--
		s.mu.Unlock()
	}()
	defer client.Close()
	if !s.beginConnecting(client) {
		return
	}
	defer s.endConnecting(client)
	keepAlive(client)
	if t, ok := client.(*sock.Conn); ok {
		t.SetWriteBuffer(answerBuffer)
	}
	now := time.Now()
	c := &conn{s: s, broker: b, client: client, began: now, quietSince: now, maxAge: jittered(s.o.Limits.Age), ends: endsOf(client)}
	c.beginAccess()
	err := c.readHeader()
	if err == nil && !s.admit(addressOf(c.ends.client)) { // before a TLS handshake, so that nobody holds places by not beginning one
		err = closing(reasonLimit, "connection refused: %d of this address are open", s.o.Limits.PerIP)
	} else if err == nil {
		defer s.dismiss(addressOf(c.ends.client))
		err = aside(c.handshake)
	}
	if err != nil {
		s.closed(c, err, nil)
		return
	}
	towards := c.broker
	if towards != nil && s.guesses(towards) {
		c.guessed, towards = true, nil
	}
	err = aside(func() (err error) {
		c.source, err = s.connectSource(c, towards)
		return err
	})
	if err != nil {
		if e, ok := errors.AsType[*closeError](err); ok && e.reason == reasonDial {
			pause(s.base, unreachableWait(time.Since(now), rand.N[time.Duration]))
			reset(client)
		}
		s.closed(c, err, nil)
		return
	}
	if !s.enter(c) {
		reset(client)
		c.source.Close()
		return
	}
	s.endConnecting(client)
	c.accessConnected()
	c.serve()
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
}

// aside calls f on another stack: dialling and TLS handshakes take a deep one, and a goroutine keeps what it took.
func aside(f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	return <-done
}

// unreachableWait is how much longer a client whose broker can't be reached waits for the end of its connection, which took so long already: without
// it, clients that come again at once would keep the proxy busy with dialling while the source is down. Each waits differently, so that they don't
// come again all at once.
func unreachableWait(took time.Duration, random func(time.Duration) time.Duration) time.Duration {
	return max(0, unreachableDelay+random(unreachableDelay)-took)
}

// unreachableDelay is the least; Kafka clients themselves wait 50 ms to 1 s before they dial again (reconnect.backoff.ms).
const unreachableDelay = 100 * time.Millisecond

// readHeader takes the PROXY protocol header, which comes before all else and says who the client is.
func (c *conn) readHeader() (err error) {
	s := c.s
	if c.ends, err = readProxyHeader(c.client, s.o.ProxyHeader, s.o.FrameTimeout); err != nil {
		return greetError(reasonProxyHeader, err)
	}
	c.host = s.advertised(c.ends.proxy)
	return nil
}

// handshake takes the TLS handshake, whose server name may choose the broker.
func (c *conn) handshake() error {
	s := c.s
	if s.o.DownstreamTLS == nil {
		return nil
	}
	t, err := handshakeTLS(s.base, c.client, s.o.DownstreamTLS, s.o.FrameTimeout)
	if err != nil {
		return greetError(reasonTLS, handshakeCause(err))
	}
	c.client = t
	if s.o.SNI.Pattern != "" {
		if c.broker, err = s.route(t.ConnectionState().ServerName); err != nil {
			return &closeError{reasonServerName, err}
		}
	}
	return nil
}

// handshakeCause names what a client did instead of a TLS handshake, where that can be told.
func handshakeCause(err error) error {
	if e, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return fmt.Errorf("%w: %s", err, protocol.ForeignToTLS(e.RecordHeader[:]))
	}
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("no TLS handshake in time: %w", err)
	}
	return err
}

// greetError is a closeError, but for a client that went without a word, of which nobody is warned.
func greetError(reason string, err error) error {
	if err == errNothingSent {
		return err
	}
	return &closeError{reason, err}
}

// admit counts a connection of an address; false if it has too many.
func (s *Server) admit(ip netip.Addr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.takeAddress(ip)
}

// dismiss is the counterpart of admit.
func (s *Server) dismiss(ip netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leaveAddress(ip)
}

// reset makes the coming close a reset. Direct, a client would be refused by a broker that is down, and would try again; a plain end of a
// connection before its first answer is what brokers do to a wrong login or protocol, and franz-go, for one, gives up on that.
func reset(client net.Conn) {
	if tcp, ok := client.(*sock.Conn); ok {
		_ = tcp.SetLinger(0) // of a connection that is lost anyway
	}
}

// beginConnecting lists a connection that isn't served yet, so that drain reaches it; false if it's too late.
func (s *Server) beginConnecting(client net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		return false
	}
	s.connecting[client] = struct{}{}
	return true
}

func (s *Server) endConnecting(client net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.connecting, client)
}

// enter lists c, so that drain and abort reach it; false if it's too late.
func (s *Server) enter(c *conn) bool {
	c.begin()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining || c.guessed && c.broker.named.Load() { // endGuesses came before
		return false
	}
	s.conns[c] = struct{}{}
	return true
}

// advertised is the host that this client is told.
func (s *Server) advertised(here net.Addr) string {
	if s.o.Advertise != "" {
		return s.o.Advertise
	}
	if ip := net.ParseIP(s.bindHost); s.bindHost != "" && (ip == nil || !ip.IsUnspecified()) {
		return s.bindHost
	}
	return addressOf(here).String()
}

// answerBuffer bounds what the kernel keeps, in each of two sockets, of answers for a client that doesn't read; it doubles the figure. Left to
// itself it goes up to several MiB. Brokers bound theirs too, to 100 KiB unless told otherwise (socket.send.buffer.bytes).
const answerBuffer = 512 << 10

// keepAlive finds peers that vanished without a word within about a minute.
func keepAlive(c net.Conn) {
	if t, ok := c.(*sock.Conn); ok {
		t.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 10 * time.Second, Count: 4})
	}
}
