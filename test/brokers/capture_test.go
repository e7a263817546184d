package brokers

import (
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"kmirror/test/testbed"
)

// captureOf sends parts over a connection from a captured port, each after the one before was read, while 127.0.0.1:9092 is hidden.
func captureOf(t *testing.T, parts []string) (seen int64, found []string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := testbed.StartCapture(ln.Addr().(*net.TCPAddr).Port)
	if err != nil {
		if errors.Is(err, syscall.EPERM) && os.Getenv("CI") == "" { // a container without CAP_NET_RAW
			t.Skipf("%v: no test of kmirror looks for brokers' addresses here", err)
		}
		t.Fatalf("%v; without it no test of kmirror looks for brokers' addresses", err)
	}
	c.Hide("127.0.0.1:9092")
	client, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
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
		if _, err := io.ReadFull(client, make([]byte, len(part))); err != nil {
			t.Fatal(err)
		}
	}
	seen, _, found = c.Done()
	return seen, found
}

// TestCaptureFindsAddresses proves the witness that every test of kmirror has: a server that sends a hidden address is found out, in both forms, also
// when it is cut in two.
func TestCaptureFindsAddresses(t *testing.T) {
	for name, c := range map[string]struct {
		parts []string
		found bool
	}{
		"host and port":         {[]string{"\x0a127.0.0.1\x00\x00\x23\x84rest"}, true},
		"cut in two":            {[]string{"\x00\x09127.0.", "0.1\x00\x00\x23\x84"}, true},
		"as text":               {[]string{"moved to 127.0.0.1:9092, sorry"}, true},
		"another port":          {[]string{"\x0a127.0.0.1\x00\x00\x23\x85 127.0.0.1:9093"}, false},
		"in a broker's setting": {[]string{"PLAINTEXT://127.0.0.1:9092,CONTROLLER://127.0.0.1:9093"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			size := len(strings.Join(c.parts, ""))
			seen, found := captureOf(t, c.parts)
			if seen != int64(size) {
				t.Errorf("the capture saw %d bytes, want %d", seen, size)
			}
			if (len(found) > 0) != c.found {
				t.Errorf("the capture found %q, want an address: %v", found, c.found)
			}
		})
	}
}
