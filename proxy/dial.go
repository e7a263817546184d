package proxy

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
)

// dialBroker connects to a broker, or for the bootstrap listener to any seed, else to any broker known.
func (s *Server) dialBroker(b *broker, client endpoints) (net.Conn, error) {
	ctx := withClient(s.base, client)
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
	keepAlive(c)
	if t, ok := c.(*net.TCPConn); ok {
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
	config := s.o.UpstreamTLS.Clone()
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
