package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"kmirror/internal/kafkatest"
)

// versionsRequest is an ApiVersions request, v0, whose body has so many bytes too many.
func versionsRequest(more int) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(10+more))
	return append(append(b, 0, 18, 0, 0, 0, 0, 0, 7, 0xff, 0xff), make([]byte, more)...)
}

// peer is a client that says what a test wants.
type peer struct {
	net.Conn
	t *testing.T
}

// ask sends b, and a request, and waits for the answer.
func (p peer) ask(b ...byte) {
	p.t.Helper()
	p.say(append(b, versionsRequest(0)...))
	var size [4]byte
	_, err := io.ReadFull(p, size[:])
	if err == nil {
		_, err = io.CopyN(io.Discard, p, int64(binary.BigEndian.Uint32(size[:])))
	}
	if err != nil {
		p.t.Errorf("a client that is within all limits gets %v, want an answer", err)
	}
}

func (p peer) say(b []byte) {
	p.t.Helper()
	if _, err := p.Write(b); err != nil {
		p.t.Error(err)
	}
}

// wantEnd waits until kmirror ends the connection.
func (p peer) wantEnd() {
	p.t.Helper()
	if _, err := io.Copy(io.Discard, p); errors.Is(err, os.ErrDeadlineExceeded) {
		p.t.Error("the connection isn't ended")
	}
}

// proxyCase is a setting of the proxy's and a client that comes over it.
type proxyCase struct {
	name, flags, reason string
	over                func(dial func() peer)
}

var limitCases = []proxyCase{
	{"connections", "--proxy.limits.connections=2", "limit", func(dial func() peer) {
		dial().ask()
		dial().ask()
		dial().wantEnd()
	}},
	{"connections of an address", "--proxy.limits.connections_per_ip=1 --proxy.proxy_protocol=allowed", "limit", func(dial func() peer) {
		dial().ask()
		dial().ask(header...)
		second := dial()
		second.say(header)
		second.wantEnd()
	}},
	{"request size", "--proxy.limits.request_bytes=1KiB", "frame", func(dial func() peer) {
		p := dial()
		p.say(versionsRequest(1015))
		p.wantEnd()
	}},
	{"request size, the largest", "--proxy.limits.request_bytes=1KiB --proxy.limits.idle=1s", "idle", func(dial func() peer) {
		p := dial()
		p.say(versionsRequest(1014))
		if _, err := io.ReadFull(p, make([]byte, 4)); err != nil {
			p.t.Errorf("a request of just the limit gets %v, want an answer", err)
		}
		p.wantEnd()
	}},
	{"progress", "--proxy.limits.frame_time=1s", "timeout", func(dial func() peer) {
		p := dial()
		p.say(versionsRequest(0)[:7])
		p.wantEnd()
	}},
	{"first request", "--proxy.limits.first_request=1s", "first-request", func(dial func() peer) { dial().wantEnd() }},
	{"idle", "--proxy.limits.idle=1s", "idle", func(dial func() peer) {
		p := dial()
		p.ask()
		p.wantEnd()
	}},
	{"age", "--proxy.limits.age=1s", "age", func(dial func() peer) {
		p := dial()
		p.ask()
		p.wantEnd()
	}},
	{"unread", "--proxy.limits.unread=1s", "unread", func(dial func() peer) {
		p := dial()
		for begun, request := time.Now(), versionsRequest(0); time.Since(begun) < 30*time.Second; {
			if _, err := p.Write(request); err != nil {
				return
			}
		}
		p.t.Error("a client that reads nothing isn't let go")
	}},
}

var headerCases = []proxyCase{
	{"PROXY header, off", "", "frame", func(dial func() peer) {
		dial().ask()
		p := dial()
		p.say(header)
		p.wantEnd()
	}},
	{"PROXY header, allowed", "--proxy.proxy_protocol=allowed", "proxy-header", func(dial func() peer) {
		dial().ask()
		dial().ask(header...)
		p := dial()
		p.say([]byte("PROXY nonsense\r\n"))
		p.wantEnd()
	}},
	{"PROXY header, required", "--proxy.proxy_protocol=required", "proxy-header", func(dial func() peer) {
		dial().ask(header...)
		p := dial()
		p.say(versionsRequest(0))
		p.wantEnd()
	}},
}

// header names a client behind a load balancer.
var header = []byte("PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n")

// TestSettingsReachTheProxy: each limit, and each way to take PROXY protocol headers, does what its setting says; the reason is counted.
func TestSettingsReachTheProxy(t *testing.T) {
	source := kafkatest.Fake(t)
	for _, tt := range slices.Concat(limitCases, headerCases) {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			listen, admin := freePort(t), freePort(t)
			args := []string{"proxy", "--roles", "proxy", "--source", source.Seeds()[0], "--listen", listen, "--admin", admin}
			start(t, append(args, strings.Fields(tt.flags)...)...)
			waitReady(t, admin)
			tt.over(func() peer {
				c, err := net.Dial("tcp", listen)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { c.Close() })
				if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
					t.Fatal(err)
				}
				return peer{c, t}
			})
			counted := fmt.Sprintf("kmirror_proxy_connections_closed_total{reason=%q} 1\n", tt.reason)
			kafkatest.Eventually(t, 20*time.Second, func() error {
				text, err := adminPage(admin, "/metrics")
				if err == nil && !strings.Contains(text, counted) {
					err = fmt.Errorf("no %q in the metrics", counted)
				}
				return err
			})
		})
	}
}
