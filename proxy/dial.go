package proxy

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"time"

	"kmirror/internal/sock"
	"kmirror/protocol"
)

// connectSource connects to a broker for c, and gives up as soon as the client is gone or what it sends is no request: that the source is slow to
// take connections doesn't hold up the answer to a client that has come to the wrong place.
func (s *Server) connectSource(c *conn, towards *broker) (net.Conn, error) {
	ctx, giveUp := context.WithCancelCause(s.base)
	defer giveUp(nil)
	unwatch := c.watchBegin(giveUp)
	source, err := s.dialBroker(withClient(ctx, c.ends), towards)
	if watchErr := unwatch(); watchErr != nil {
		giveUp(watchErr)
	}
	if cause := context.Cause(ctx); cause != nil && s.base.Err() == nil {
		if err == nil {
			source.Close()
		}
		return nil, cause
	}
	if err != nil {
		return nil, &closeError{reasonDial, err}
	}
	return source, nil
}

// watchBegin calls giveUp if the client ends its connection before its first request, or begins with what is none; until unwatch. What it reads
// stays to be read. Behind TLS it sees nothing, where the handshake has seen to that.
func (c *conn) watchBegin(giveUp func(error)) (unwatch func() error) {
	tcp, ok := c.client.(*sock.Conn)
	if !ok {
		return func() error { return nil }
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		b, err := peekBytes(tcp, protocol.SizePrefix)
		switch {
		case err == nil:
			_, err = protocol.RequestSize(b, c.s.o.MaxRequestBytes)
			if err != nil {
				giveUp(&closeError{reasonBadFrame, err})
			}
		case err == io.EOF || isReset(err):
			giveUp(errNothingSent)
		}
	}()
	return func() error {
		if err := tcp.SetReadDeadline(time.Unix(1, 0)); err != nil {
			return err
		}
		<-done
		return tcp.SetReadDeadline(time.Time{})
	}
}

// dialBroker connects to a broker, or for the bootstrap listener to any seed, else to any broker known.
func (s *Server) dialBroker(ctx context.Context, b *broker) (net.Conn, error) {
	if b != nil {
		at := b.at.Load()
		if at == nil {
			return nil, fmt.Errorf("broker %d isn't in the cluster", b.id)
		}
		c, err := s.dial(ctx, at.address())
		if err != nil {
			return nil, fmt.Errorf("broker %d at %s: %w", b.id, at.address(), err)
		}
		return c, nil
	}
	c, err := s.seeds.connect(ctx)
	if err == nil {
		return c, nil
	}
	for _, k := range s.brokers.list() {
		if at := k.at.Load(); at != nil {
			if c, err := s.dial(ctx, at.address()); err == nil {
				return c, nil
			}
		}
	}
	return nil, err
}

// dial connects to an address of the source cluster, with TLS if so configured.
func (s *Server) dial(ctx context.Context, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	c, err := s.o.Dial(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	c = sock.Wrap(c)
	keepAlive(c)
	if t, ok := c.(*sock.Conn); ok {
		t.SetReadBuffer(answerBuffer)
	}
	if s.o.SendProxyHeader > 0 {
		if err := SendProxyHeader(ctx, c, s.o.SendProxyHeader); err != nil {
			c.Close()
			return nil, err
		}
	}
	if s.o.UpstreamTLS == nil {
		return c, nil
	}
	config := s.o.UpstreamTLS()
	if config.ServerName == "" {
		config.ServerName, _, _ = net.SplitHostPort(address)
	}
	t := tls.Client(c, config)
	if err := t.HandshakeContext(ctx); err != nil {
		c.Close()
		return nil, fmt.Errorf("TLS: %w", err)
	}
	return t, nil
}
