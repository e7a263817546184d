package main

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/pires/go-proxyproto"
	"github.com/twmb/franz-go/pkg/kfake"

	"kmirror/internal/kafkatest"
	"kmirror/internal/tunnel"
)

// serve accepts until the test ends.
func serve(t *testing.T, handle func(net.Conn)) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go handle(c)
		}
	}()
	return ln.Addr().String()
}

const established = "200 Connection established"

func TestDialThroughProxies(t *testing.T) {
	echo := serve(t, func(c net.Conn) { io.Copy(c, c); c.Close() })
	socks, httpProxy := tunnel.Socks(t, "u", "s3cret"), tunnel.Connect(t, "u", "s3cret", established)
	odd := tunnel.Connect(t, "u", "s3cret", "299 Fine\r\nContent-Length: 1000000") // any 2xx opens the tunnel, and a length in it means nothing
	openSocks, openHTTP := tunnel.Socks(t, "", ""), tunnel.Connect(t, "", "", established)
	for _, url := range []string{"", socks.URL("u", "s3cret"), httpProxy.URL("u", "s3cret"), odd.URL("u", "s3cret"), openSocks.URL("", ""), openHTTP.URL("", "")} {
		dial, err := newDial(url)
		if err != nil {
			t.Fatalf("newDial: %v", err)
		}
		c, err := dial(t.Context(), "tcp", echo)
		if err != nil {
			t.Errorf("%q: %v", url, err)
			continue
		}
		fmt.Fprint(c, "hello")
		b := make([]byte, 5)
		if _, err := io.ReadFull(c, b); err != nil || string(b) != "hello" {
			t.Errorf("%q: got %q, %v through it", url, b, err)
		}
		c.Close()
		if _, err := dial(t.Context(), "tcp", "127.0.0.1:1"); err == nil {
			t.Errorf("%q: a closed port is reached", url)
		}
	}
	moved := tunnel.Connect(t, "u", "wr0ng", "302 Found\r\nLocation: /\r\nContent-Length: 0")
	for _, url := range []string{socks.URL("u", "wr0ng"), httpProxy.URL("u", "wr0ng"), moved.URL("u", "wr0ng"), socks.URL("", ""), httpProxy.URL("", "")} {
		dial, err := newDial(url)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := dial(t.Context(), "tcp", echo); err == nil || strings.Contains(err.Error(), "wr0ng") {
			t.Errorf("%s: error with a wrong password or none = %v, want one without it", url, err)
		}
	}
}

// TestDialIsBounded: what accepts and never answers, as a proxy or in the TLS handshake, is given up.
func TestDialIsBounded(t *testing.T) {
	silent := serve(t, func(c net.Conn) { io.Copy(io.Discard, c); c.Close() })
	for name, c := range map[string]cluster{
		"SOCKS5": {dial: mustDial(t, "socks5://"+silent)}, "CONNECT": {dial: mustDial(t, "http://"+silent)},
		"TLS": {dial: mustDial(t, ""), tls: (&tls.Config{ServerName: "x"}).Clone},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if _, err := c.options().Dial(t.Context(), "tcp", silent); err == nil {
				t.Error("a connection came of it")
			}
		})
	}
}

func mustDial(t *testing.T, url string) dialFunc {
	t.Helper()
	dial, err := newDial(url)
	if err != nil {
		t.Fatal(err)
	}
	return dial
}

// TestBothClustersThroughProxies: everything that kmirror dials goes through the proxies that are named.
func TestBothClustersThroughProxies(t *testing.T) {
	source, mirror := kafkatest.Fake(t), kafkatest.Fake(t)
	kafkatest.CreateTopic(t, source, "orders", 2, 1)
	listen, admin := freePort(t), freePort(t)
	start(t, "proxy", "--listen", listen, "--admin", admin, "--source", source.Seeds()[0], "--mirror", mirror.Seeds()[0],
		"--source.proxy_url", tunnel.Socks(t, "u", "s3cret").URL("u", "s3cret"), "--mirror.proxy_url", tunnel.Connect(t, "u", "s3cret", established).URL("u", "s3cret"))
	waitReady(t, admin)
	if code, output := run(t, "status", "--admin", admin, "--until-caught-up", "--timeout", "30s"); code != 0 {
		t.Errorf("status = exit code %d: %s, want 0", code, output)
	}
}

// TestSourceBehindProxyProtocol: where the source requires a PROXY protocol header, kmirror's own clients and raw connections begin with one too,
// and so does verify. The mirror doesn't expect one.
func TestSourceBehindProxyProtocol(t *testing.T) {
	var mu sync.Mutex
	commands := map[proxyproto.ProtocolVersionAndCommand]int{}
	listen := func(network, address string) (net.Listener, error) {
		ln, err := net.Listen(network, address)
		return &proxyproto.Listener{
			Listener:   ln,
			ConnPolicy: func(proxyproto.ConnPolicyOptions) (proxyproto.Policy, error) { return proxyproto.REQUIRE, nil },
			ValidateHeader: func(h *proxyproto.Header) error {
				mu.Lock()
				defer mu.Unlock()
				commands[h.Command]++
				return nil
			},
		}, err
	}
	source, mirror := kafkatest.Fake(t, kafkatest.FakeOpts(kfake.ListenFn(listen), kfake.SeedTopics(2, "orders"))), kafkatest.Fake(t)
	for _, version := range []string{"v1", "v2"} {
		t.Run(version, func(t *testing.T) {
			listen, admin := freePort(t), freePort(t)
			args := []string{"--name", version, "--source", source.Seeds()[0], "--mirror", mirror.Seeds()[0], "--proxy.send_proxy_protocol", version, "--topics.rename", version + ".{topic}"}
			start(t, append([]string{"proxy", "--listen", listen, "--admin", admin}, args...)...)
			waitReady(t, admin)
			produce(t, listen, "orders", 20)
			if code, output := run(t, "status", "--admin", admin, "--until-caught-up", "--timeout", "30s"); code != 0 {
				t.Errorf("status = exit code %d: %s, want 0", code, output)
			}
			if code, output := run(t, append([]string{"verify"}, args...)...); code != 0 {
				t.Errorf("verify = exit code %d: %s, want 0", code, output)
			}
		})
	}
	mu.Lock()
	defer mu.Unlock()
	if commands[proxyproto.PROXY] == 0 || commands[proxyproto.LOCAL] == 0 {
		t.Errorf("headers by command: %v, want some of clients and some of kmirror's own", commands)
	}
}
