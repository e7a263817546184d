// Package tunnel has the proxies that tests reach brokers through: SOCKS5 and HTTP CONNECT, each with a user's password, or, with user "", for all who
// name none. It isn't for production: nothing has a deadline.
//
//	p := tunnel.Socks(t, "user", "password")
//	dial(p.URL("user", "password"))
package tunnel

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
)

// Proxy is a listener that opens tunnels until the test ends.
type Proxy struct {
	scheme, address string
	// Opened counts the tunnels that led to where the client wanted.
	Opened atomic.Int64

	ended sync.WaitGroup
	mu    sync.Mutex
	open  map[net.Conn]bool
}

// Address is the proxy's HOST:PORT.
func (p *Proxy) Address() string { return p.address }

// URL names the proxy as proxy_url does, with user "" without credentials.
func (p *Proxy) URL(user, password string) string {
	u := &url.URL{Scheme: p.scheme, Host: p.address}
	if user != "" {
		u.User = url.UserPassword(user, password)
	}
	return u.String()
}

// Socks starts a SOCKS5 proxy (RFC 1928, RFC 1929).
func Socks(t testing.TB, user, password string) *Proxy {
	t.Helper()
	return start(t, "socks5", func(p *Proxy, c net.Conn) { p.serveSocks(c, user, password) })
}

// Connect starts an HTTP proxy whose answer to a CONNECT that succeeded is a status line's end, and header lines where answer has several lines.
func Connect(t testing.TB, user, password, answer string) *Proxy {
	t.Helper()
	return start(t, "http", func(p *Proxy, c net.Conn) { p.serveConnect(c, user, password, answer) })
}

func start(t testing.TB, scheme string, serve func(*Proxy, net.Conn)) *Proxy {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{scheme: scheme, address: ln.Addr().String(), open: make(map[net.Conn]bool)}
	p.ended.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			p.ended.Go(func() {
				defer c.Close()
				if p.keep(c) {
					serve(p, c)
				}
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		p.closeAll()
		p.ended.Wait()
	})
	return p
}

// keep remembers a connection for the end; false once that has come.
func (p *Proxy) keep(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open == nil {
		return false
	}
	p.open[c] = true
	return true
}

func (p *Proxy) closeAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.open {
		c.Close()
	}
	p.open = nil
}

// dial opens the far side of a tunnel.
func (p *Proxy) dial(address string) (net.Conn, error) {
	to, err := net.Dial("tcp", address)
	if err == nil && !p.keep(to) {
		to.Close()
		err = net.ErrClosed
	}
	return to, err
}

// join passes on both ways until either side ends.
func (p *Proxy) join(client io.Reader, c, to net.Conn) {
	p.Opened.Add(1)
	p.ended.Go(func() {
		_, _ = io.Copy(c, to) // any end is one
		c.Close()
	})
	_, _ = io.Copy(to, client)
	to.Close()
}

// The answers of RFC 1928.
var (
	socksGranted = []byte{5, 0, 0, 1, 0, 0, 0, 0, 0, 0}
	socksRefused = []byte{5, 5, 0, 1, 0, 0, 0, 0, 0, 0}
)

func (p *Proxy) serveSocks(c net.Conn, user, password string) {
	b := make([]byte, 256)
	read := func(n int) []byte { _, _ = io.ReadFull(c, b[:n]); return b[:n] } // what is missing is wrong
	method := byte(2)                                                         // a user's password
	if user == "" {
		method = 0 // none
	}
	if !bytes.Contains(read(int(read(2)[1])), []byte{method}) {
		_, _ = c.Write([]byte{5, 0xff})
		return
	}
	_, _ = c.Write([]byte{5, method})
	if method == 2 {
		name := string(read(int(read(2)[1])))
		if secret := string(read(int(read(1)[0]))); name != user || secret != password {
			_, _ = c.Write([]byte{1, 1})
			return
		}
		_, _ = c.Write([]byte{1, 0})
	}
	host := ""
	switch read(4)[3] {
	case 1:
		host = net.IP(read(4)).String()
	case 3:
		host = string(read(int(read(1)[0])))
	case 4:
		host = net.IP(read(16)).String()
	}
	port := read(2)
	to, err := p.dial(net.JoinHostPort(host, strconv.Itoa(int(port[0])<<8|int(port[1]))))
	if err != nil {
		_, _ = c.Write(socksRefused)
		return
	}
	_, _ = c.Write(socksGranted)
	p.join(c, c, to)
}

func (p *Proxy) serveConnect(c net.Conn, user, password, answer string) {
	r := bufio.NewReader(c)
	req, err := http.ReadRequest(r)
	if err != nil {
		return
	}
	req.Header.Set("Authorization", req.Header.Get("Proxy-Authorization"))
	if name, secret, named := req.BasicAuth(); named != (user != "") || req.Method != http.MethodConnect || name != user || secret != password {
		answer = "407 Proxy Authentication Required\r\nContent-Length: 0"
		fmt.Fprintf(c, "HTTP/1.1 %s\r\n\r\n", answer)
		return
	}
	to, err := p.dial(req.Host)
	if err != nil {
		fmt.Fprint(c, "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
		return
	}
	fmt.Fprintf(c, "HTTP/1.1 %s\r\n\r\n", answer)
	p.join(r, c, to)
}
