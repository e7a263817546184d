package sock

import (
	"bytes"
	"errors"
	"io"
	"math/rand"
	"net"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/nettest"
)

// TestConn holds a Conn against what is asked of every net.Conn, deadlines and concurrent calls among it.
func TestConn(t *testing.T) {
	nettest.TestConn(t, func() (a, b net.Conn, stop func(), err error) {
		x, y := connected(t)
		return x, y, func() { x.Close(); y.Close() }, nil
	})
}

// connected returns the two ends of a connection.
func connected(t testing.TB) (a, b *Conn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	near, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	far, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { near.Close(); far.Close() })
	return Wrap(near).(*Conn), Wrap(far).(*Conn)
}

func TestWrapLeavesOthersAlone(t *testing.T) {
	a, b := net.Pipe()
	defer b.Close()
	if Wrap(a) != a {
		t.Error("a pipe was wrapped")
	}
	c, _ := connected(t)
	if Wrap(c) != net.Conn(c) {
		t.Error("a Conn was wrapped twice")
	}
}

// TestErrorsAreNamedAsByPackageNet: logs and errors.Is read them.
func TestErrorsAreNamedAsByPackageNet(t *testing.T) {
	type attempt struct {
		name    string
		prepare func(near, far *Conn)
		do      func(c net.Conn) error
		is      error
	}
	read := func(c net.Conn) error { _, err := c.Read(make([]byte, 1)); return err }
	write := func(c net.Conn) error {
		for {
			if _, err := c.Write(make([]byte, 1<<20)); err != nil {
				return err
			}
		}
	}
	past := time.Unix(1, 0)
	reset := func(near, far *Conn) {
		far.SetLinger(0)
		far.Close()
		near.AwaitRead(func(fd uintptr) bool { // until it's here, and without taking the error
			info, err := syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_INFO)
			return err != nil || info&0xff == 7 // TCP_CLOSE
		})
	}
	for _, tc := range []attempt{
		{"read after a deadline", func(near, _ *Conn) { near.SetReadDeadline(past) }, read, os.ErrDeadlineExceeded},
		{"write after a deadline", func(near, _ *Conn) { near.SetWriteDeadline(past) }, write, os.ErrDeadlineExceeded},
		{"read when closed", func(near, _ *Conn) { near.Close() }, read, net.ErrClosed},
		{"write when closed", func(near, _ *Conn) { near.Close() }, write, net.ErrClosed},
		{"read after a reset", reset, read, syscall.ECONNRESET},
		{"write after a reset", reset, write, syscall.ECONNRESET},
		{"read at the end", func(_, far *Conn) { far.CloseWrite() }, read, io.EOF},
		{"write after the own end", func(near, _ *Conn) { near.CloseWrite() }, write, syscall.EPIPE},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var texts [2]string
			for i, plain := range []bool{true, false} {
				near, far := connected(t)
				tc.prepare(near, far)
				var c net.Conn = near
				if plain {
					c = near.TCPConn
				}
				err := tc.do(c)
				if !errors.Is(err, tc.is) {
					t.Errorf("plain %v: %v, want %v", plain, err, tc.is)
				}
				if e, ok := errors.AsType[*net.OpError](err); ok {
					e.Source, e.Addr = nil, nil
				}
				texts[i] = err.Error()
			}
			if texts[0] != texts[1] {
				t.Errorf("error %q, package net's is %q", texts[1], texts[0])
			}
		})
	}
}

func TestPeekTakesNothing(t *testing.T) {
	a, b := connected(t)
	a.Write([]byte("frame"))
	got := make([]byte, 3)
	for range 2 {
		if n, err := b.Peek(got); err != nil || string(got[:n]) != "fra"[:n] || n == 0 {
			t.Fatalf("Peek = %q, %v", got[:n], err)
		}
	}
	got = make([]byte, 5)
	if _, err := io.ReadFull(b, got); err != nil || string(got) != "frame" {
		t.Fatalf("read %q, %v after a look, want frame", got, err)
	}
	a.CloseWrite()
	if n, err := b.Peek(got); n != 0 || err != io.EOF {
		t.Errorf("Peek at the end = %d, %v, want io.EOF", n, err)
	}
}

// TestEveryByteArrivesInOrder writes more than sockets hold at once, in pieces of all sizes, so that calls are announced and not, whole and in part.
func TestEveryByteArrivesInOrder(t *testing.T) {
	a, b := connected(t)
	sent := make([]byte, 32<<20)
	rand.New(rand.NewSource(1)).Read(sent)
	done := make(chan error, 1)
	go func() {
		rnd := rand.New(rand.NewSource(2))
		for rest := sent; len(rest) > 0; {
			n := min(len(rest), 1+rnd.Intn([]int{10, 10_000, 3 << 20}[rnd.Intn(3)]))
			if m, err := a.Write(rest[:n]); m != n || err != nil {
				done <- errors.Join(err, errors.New("a short write"))
				return
			}
			rest = rest[n:]
		}
		done <- a.CloseWrite()
	}()
	got, err := io.ReadAll(b)
	if err := errors.Join(err, <-done); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, sent) {
		t.Errorf("%d bytes came, which aren't the %d sent", len(got), len(sent))
	}
}

// TestPiecesArriveInOrder: as many and as large as they come, empty ones among them, to a Conn and to others.
func TestPiecesArriveInOrder(t *testing.T) {
	a, b := connected(t)
	rnd := rand.New(rand.NewSource(1))
	var pieces net.Buffers
	for range 3000 {
		piece := make([]byte, []int{0, 1, 100, 20_000}[rnd.Intn(4)])
		rnd.Read(piece)
		pieces = append(pieces, piece)
	}
	pieces = append(pieces, nil, make([]byte, 5<<20), nil)
	all := bytes.Join(pieces, nil)
	for _, to := range []net.Conn{a, struct{ net.Conn }{a}} {
		done := make(chan []byte)
		go func() {
			got := make([]byte, len(all))
			io.ReadFull(b, got)
			done <- got
		}()
		if n, err := WriteBuffers(to, slices.Clone(pieces)); n != int64(len(all)) || err != nil {
			t.Fatalf("%T: wrote %d, %v, want %d", to, n, err, len(all))
		}
		if !bytes.Equal(<-done, all) {
			t.Errorf("%T: others came", to)
		}
	}
	if n, err := WriteBuffers(a, nil); n != 0 || err != nil {
		t.Errorf("no pieces: %d, %v", n, err)
	}
	a.SetWriteDeadline(time.Now().Add(10 * time.Millisecond))
	if n, err := WriteBuffers(a, net.Buffers{all, all}); n == 0 || n >= 2*int64(len(all)) || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("to one who doesn't read: wrote %d, %v, want a part and the deadline's error", n, err)
	}
}

// TestCallsAreAnnouncedNowAndThen: the scheduler's watcher must not sleep while goroutines run that never wait.
func TestCallsAreAnnouncedNowAndThen(t *testing.T) {
	var c calls
	announced := 0
	for range 10 * announceEvery {
		if c.announce() {
			announced++
		}
	}
	if announced != 10 {
		t.Errorf("%d of %d calls were announced, want 10", announced, 10*announceEvery)
	}
}
