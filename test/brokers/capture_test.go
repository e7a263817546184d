package brokers

import (
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// captureOf sends parts over a connection from a captured port of an address, each after the one before was read, while 127.0.0.1:9092 and [::1]:9092 are
// hidden. Where the client watches, the capture is of another port.
func captureOf(t *testing.T, listen string, watch bool, parts []string) (seen int64, found []string) {
	t.Helper()
	ln, err := net.Listen("tcp", net.JoinHostPort(listen, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	port := ln.Addr().(*net.TCPAddr).Port
	if watch {
		port = kafkatest.PortBlock(t, 1)
	}
	c, err := testbed.StartCapture(port)
	if err != nil {
		if errors.Is(err, syscall.EPERM) && os.Getenv("CI") == "" { // a container without CAP_NET_RAW
			t.Skipf("%v: no test of kmirror looks for brokers' addresses here", err)
		}
		t.Fatalf("%v; without it no test of kmirror looks for brokers' addresses", err)
	}
	c.Hide("127.0.0.1:9092", "[::1]:9092")
	client, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if watch {
		client = c.Watch(client)
	}
	defer client.Close()
	server, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	for _, part := range parts {
		if _, err := io.Copy(server, strings.NewReader(part)); err != nil {
			t.Fatal(err)
		}
		if n, err := io.ReadFull(client, make([]byte, len(part))); n < len(part) {
			t.Fatal(err)
		}
	}
	seen, _, found = c.Done()
	return seen, found
}

// TestCaptureFindsAddresses proves the witness that every test of kmirror has: a server that sends a hidden address is found out, in both forms, also
// when it is cut in two, over IPv6, and by what a client reads.
func TestCaptureFindsAddresses(t *testing.T) {
	const four, six = "127.0.0.1", "::1"
	for name, c := range map[string]struct {
		listen string
		watch  bool
		parts  []string
		found  bool
	}{
		"host and port":              {four, false, []string{"\x0a127.0.0.1\x00\x00\x23\x84rest"}, true},
		"cut in two":                 {four, false, []string{"\x00\x09127.0.", "0.1\x00\x00\x23\x84"}, true},
		"as text":                    {four, false, []string{"moved to 127.0.0.1:9092, sorry"}, true},
		"another port":               {four, false, []string{"\x0a127.0.0.1\x00\x00\x23\x85 127.0.0.1:9093"}, false},
		"in a broker's setting":      {four, false, []string{"PLAINTEXT://127.0.0.1:9092,CONTROLLER://127.0.0.1:9093"}, false},
		"over IPv6":                  {six, false, []string{"\x0a127.0.0.1\x00\x00\x23\x84rest"}, true},
		"IPv6 address":               {six, false, []string{"\x04::1\x00\x00\x23\x84rest"}, true},
		"IPv6 address as text":       {six, false, []string{"moved to [::", "1]:9092, sorry"}, true},
		"other bytes over IPv6":      {six, false, []string{"\x04::1\x00\x00\x23\x85rest"}, false},
		"what a client reads":        {four, true, []string{"\x0a127.0.0.1\x00\x00\x23\x84rest"}, true},
		"what a client reads in two": {four, true, []string{"moved to 127.0.", "0.1:9092, sorry"}, true},
		"what else a client reads":   {four, true, []string{"\x0a127.0.0.1\x00\x00\x23\x85"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			size := len(strings.Join(c.parts, ""))
			seen, found := captureOf(t, c.listen, c.watch, c.parts)
			if seen != int64(size) {
				t.Errorf("the capture saw %d bytes, want %d", seen, size)
			}
			if (len(found) > 0) != c.found {
				t.Errorf("the capture found %q, want an address: %v", found, c.found)
			}
		})
	}
}
