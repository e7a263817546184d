package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"time"

	"golang.org/x/net/proxy"

	"kmirror/internal/sock"
	kproxy "kmirror/proxy"
)

// dialFunc opens a TCP connection.
type dialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// newDial returns how brokers are reached: directly, or through the proxy that rawURL names.
func newDial(rawURL string) (dialFunc, error) {
	direct := &sock.Dialer{Dialer: net.Dialer{Timeout: dialTimeout, KeepAlive: 15 * time.Second}}
	if rawURL == "" {
		return direct.DialContext, nil
	}
	u, err := url.Parse(rawURL)
	if err != nil {
		return nil, errors.New("proxy_url is no URL") // the text might hold a password
	}
	if u.Scheme == "http" {
		return func(ctx context.Context, network, address string) (net.Conn, error) {
			return dialConnect(ctx, direct, u, network, address)
		}, nil
	}
	through, err := proxy.FromURL(u, direct)
	if err != nil {
		return nil, fmt.Errorf("proxy_url: %w", err)
	}
	dialer, ok := through.(proxy.ContextDialer)
	if !ok {
		return nil, fmt.Errorf("proxy_url: scheme %s can't be given up in time", u.Scheme)
	}
	return dialer.DialContext, nil
}

// dialConnect asks an HTTP proxy for a tunnel (RFC 9110, CONNECT). A broker says nothing before it's asked, so no byte of the tunnel can stand behind the
// proxy's answer.
func dialConnect(ctx context.Context, direct *sock.Dialer, u *url.URL, network, address string) (net.Conn, error) {
	c, err := direct.DialContext(ctx, network, u.Host)
	if err != nil {
		return nil, fmt.Errorf("HTTP proxy: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	err = connect(c, u, address)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("HTTP proxy %s: %w", u.Host, err)
	}
	return c, nil
}

func connect(c net.Conn, u *url.URL, address string) error {
	req := &http.Request{Method: http.MethodConnect, URL: &url.URL{Opaque: address}, Host: address, Header: http.Header{}}
	if u.User != nil {
		password, _ := u.User.Password()
		req.SetBasicAuth(u.User.Username(), password)
		req.Header.Set("Proxy-Authorization", req.Header.Get("Authorization"))
		req.Header.Del("Authorization")
	}
	if err := req.Write(c); err != nil {
		return err
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), req)
	if err != nil {
		return err
	}
	// Any 2xx opens the tunnel, and a body's length in it means nothing (RFC 9110, 9.3.6): the body isn't touched.
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("CONNECT %s: %s", address, resp.Status)
	}
	return nil
}

// inTime bounds a whole dial: a proxy's answer and the TLS handshake too, which kgo leaves to its dialer.
func inTime(dial dialFunc) dialFunc {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, dialTimeout)
		defer cancel()
		return dial(ctx, network, address)
	}
}

// withHeader adds a PROXY protocol header to a dialFunc; 0 adds none.
func withHeader(dial dialFunc, version int) dialFunc {
	if version == 0 {
		return dial
	}
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		if err := kproxy.SendProxyHeader(ctx, c, version); err != nil {
			c.Close()
			return nil, err
		}
		return c, nil
	}
}

// withTLS adds TLS to a dialFunc; the server's name is the host dialled unless the configuration names another.
func withTLS(dial dialFunc, newConfig func() *tls.Config) dialFunc {
	if newConfig == nil {
		return dial
	}
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		config := newConfig()
		if config.ServerName == "" {
			if config.ServerName, _, err = net.SplitHostPort(address); err != nil {
				c.Close()
				return nil, err
			}
		}
		t := tls.Client(c, config)
		if err := t.HandshakeContext(ctx); err != nil {
			c.Close()
			return nil, err
		}
		return t, nil
	}
}
