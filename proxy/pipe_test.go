package proxy

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"

	"kmirror/internal/sock"
)

// pipeBetween returns a pipe and the far ends of its sockets.
func pipeBetween(t *testing.T, frameTimeout time.Duration) (p *pipe, sender, receiver net.Conn) {
	t.Helper()
	connect := func() (near, far net.Conn) {
		ln := listen(t)
		far, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		if near, err = ln.Accept(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { near.Close(); far.Close() })
		return near, far
	}
	from, sender := connect()
	to, receiver := connect()
	p = &pipe{}
	p.init(sock.Wrap(from), sock.Wrap(to), frameTimeout, func(int) {})
	return p, sender, receiver
}

func TestAnInterruptedPipeStopsBetweenFrames(t *testing.T) {
	p, sender, _ := pipeBetween(t, time.Minute)
	sender.Write([]byte("frame"))
	if _, err := p.peek(2); err != nil {
		t.Fatal(err)
	}
	p.interrupt()
	if b, err := p.peek(5); string(b) != "frame" || err != nil {
		t.Errorf("peek inside a frame = %q, %v, want the frame", b, err)
	}
	p.pass(5)
	sender.Write([]byte("next"))
	if _, err := p.peek(1); err != errInterrupted {
		t.Errorf("peek at the next frame = %v, want errInterrupted", err)
	}
}

func TestAWaitingPipeIsInterrupted(t *testing.T) {
	p, _, _ := pipeBetween(t, time.Minute)
	done := make(chan error)
	go func() {
		_, err := p.peek(1)
		done <- err
	}()
	eventually(t, "the pipe waits", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.idle
	})
	p.interrupt()
	if err := <-done; err != errInterrupted {
		t.Errorf("peek = %v, want errInterrupted", err)
	}
	if p.buf != nil {
		t.Error("an idle pipe holds a buffer")
	}
}

func TestReplacedAndTakenBytesKeepTheirPlace(t *testing.T) {
	p, sender, receiver := pipeBetween(t, 0)
	sender.Write([]byte("onetwothreefour"))
	if _, err := p.peek(15); err != nil {
		t.Fatal(err)
	}
	p.pass(3)
	if err := p.replace(3, []byte("2")); err != nil {
		t.Fatal(err)
	}
	taken := make([]byte, 5)
	if err := p.take(taken); err != nil || string(taken) != "three" {
		t.Fatalf("take = %q, %v", taken, err)
	}
	p.pass(4)
	if err := p.flush(); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 8)
	if _, err := io.ReadFull(receiver, got); err != nil || !bytes.Equal(got, []byte("one2four")) {
		t.Errorf("the receiver got %q, %v, want one2four", got, err)
	}
}
