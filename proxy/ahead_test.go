package proxy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kmirror/internal/sock"
	"kmirror/protocol"
)

// TestFramesOfAllSizesKeepTheirPlace mixes every way in which a frame leaves a pipe, so that each follows each, with bytes that come in pieces. Where too many
// files are open, the kernel has no pipe to move them through.
func TestFramesOfAllSizesKeepTheirPlace(t *testing.T) {
	t.Run("moved", func(t *testing.T) {
		p, sender, receiver := pipeBetween(t, time.Minute)
		passEveryWay(t, p, sender, receiver)
	})
	t.Run("copied", func(t *testing.T) {
		p, sender, receiver := pipeBetween(t, time.Minute)
		openNoMoreFiles(t)
		passEveryWay(t, p, sender, receiver)
	})
}

// openNoMoreFiles has this process at its limit of open files until the test ends. Nothing may run beside it.
func openNoMoreFiles(t *testing.T) {
	t.Helper()
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	free, err := unix.Dup(0) // the lowest that isn't in use
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(free)
	if err := unix.Prlimit(0, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(free), Max: limit.Max}, nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Prlimit(0, unix.RLIMIT_NOFILE, &limit, nil); err != nil {
			t.Fatal(err)
		}
	})
	for { // those that the pool has
		if _, err := sock.GetPipe(); errors.Is(err, unix.EMFILE) {
			return
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

func passEveryWay(t *testing.T, p *pipe, sender, receiver net.Conn) {
	t.Helper()
	rnd := rand.New(rand.NewSource(1))
	sizes := []int{20, 400, 600, maxPeek, maxPeek + 1, pipeBuffer + 1, 200 << 10}
	frames := make([][]byte, 400)
	var sent []byte
	for i := range frames {
		frames[i] = make([]byte, sizes[rnd.Intn(len(sizes))])
		rnd.Read(frames[i])
		sent = append(sent, frames[i]...)
	}
	go func() {
		defer sender.(*net.TCPConn).CloseWrite()
		rnd := rand.New(rand.NewSource(2))
		for rest := sent; len(rest) > 0; {
			n := min(len(rest), []int{1, 5, 1000, spliceMin + 1, 100 << 10, 1 << 20}[rnd.Intn(6)])
			sender.Write(rest[:n])
			rest = rest[n:]
		}
	}()
	var want []byte
	looks := 0
	done := make(chan []byte)
	go func() {
		got, _ := io.ReadAll(receiver)
		done <- got
	}()
	for i, frame := range frames {
		head, err := p.head(protocol.RequestPrefix)
		if err != nil || !bytes.Equal(head[:protocol.RequestPrefix], frame[:protocol.RequestPrefix]) {
			t.Fatalf("frame %d begins with %x, %v, want %x", i, head, err, frame[:protocol.RequestPrefix])
		}
		if p.ahead {
			looks++
		}
		way := rnd.Intn(5)
		if way > 2 && len(frame) > maxPeek {
			way = rnd.Intn(3)
		}
		switch out := make([]byte, len(frame)); way {
		case 0:
			err = p.stream(len(frame))
		case 1:
			var whole atomic.Uint64
			if err = p.streamKept(out, &whole, 7); !bytes.Equal(out, frame) || whole.Load() != 7 {
				t.Fatalf("frame %d of %d bytes was kept as another, whole %d", i, len(frame), whole.Load())
			}
		case 2:
			if err = p.take(out); !bytes.Equal(out, frame) {
				t.Fatalf("frame %d of %d bytes was taken as another", i, len(frame))
			}
			err = errors.Join(err, p.write(out))
		default:
			var b []byte
			if b, err = p.peek(len(frame)); err == nil && !bytes.Equal(b[:len(frame)], frame) {
				t.Fatalf("frame %d of %d bytes looks like another", i, len(frame))
			}
			if way == 4 {
				frame = []byte("replaced")
				err = errors.Join(err, p.replace(len(out), frame))
			} else {
				p.pass(len(frame))
			}
		}
		if err != nil {
			t.Fatalf("frame %d of %d bytes, way %d: %v", i, len(frame), way, err)
		}
		want = append(want, frame...)
	}
	if _, err := p.head(1); err != io.EOF {
		t.Errorf("after the last frame: %v, want io.EOF", err)
	}
	p.direct.CloseWrite()
	if got := <-done; !bytes.Equal(got, want) {
		t.Errorf("the receiver got %d bytes, which aren't the %d that passed", len(got), len(want))
	}
	if looks < len(frames)/4 {
		t.Errorf("only %d of %d frames were looked at ahead", looks, len(frames))
	}
}

// expectsLarge returns a pipe that has let a large frame go, so that it looks at the next one ahead.
func expectsLarge(t *testing.T, frameTimeout time.Duration) (p *pipe, sender, receiver *net.TCPConn) {
	t.Helper()
	p, from, to := pipeBetween(t, frameTimeout)
	large := make([]byte, maxPeek+1)
	from.Write(large)
	if _, err := p.head(1); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(p.stream(len(large)), p.flush()); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(to, large); err != nil {
		t.Fatal(err)
	}
	return p, from.(*net.TCPConn), to.(*net.TCPConn)
}

func TestAFrameThatEndsEarly(t *testing.T) {
	for _, tc := range []struct {
		sent string
		want error
	}{{"", io.EOF}, {"ab", io.ErrUnexpectedEOF}} {
		p, sender, _ := expectsLarge(t, time.Minute)
		sender.Write([]byte(tc.sent))
		sender.CloseWrite()
		if b, err := p.head(protocol.SizePrefix); err != tc.want || string(b) != tc.sent {
			t.Errorf("head of the stream's last bytes %q = %q, %v, want all and %v", tc.sent, b, err, tc.want)
		}
	}
	const size = 4 * spliceMin
	for _, cut := range []int{protocol.SizePrefix, spliceMin / 2, spliceMin + 1} {
		var whole atomic.Uint64
		for way, pass := range map[string]func(p *pipe) error{
			"streamed": func(p *pipe) error { return p.stream(size) },
			"kept":     func(p *pipe) error { return p.streamKept(make([]byte, size), &whole, 7) },
		} {
			p, sender, receiver := expectsLarge(t, time.Minute)
			sent := bytes.Repeat([]byte("x"), cut)
			sender.Write(sent)
			sender.CloseWrite()
			if _, err := p.head(protocol.SizePrefix); err != nil || !p.ahead {
				t.Fatalf("head = %v, ahead %v", err, p.ahead)
			}
			if err := pass(p); err != io.ErrUnexpectedEOF || whole.Load() != 0 {
				t.Errorf("a frame that is %s, cut at %d: %v, whole %d, want io.ErrUnexpectedEOF and 0", way, cut, err, whole.Load())
			}
			p.direct.CloseWrite()
			if got, _ := io.ReadAll(receiver); !bytes.Equal(got, sent) {
				t.Errorf("the receiver got %d bytes, want the %d that came", len(got), len(sent))
			}
		}
	}
}

// TestWhichSocketFailed: a write error is the broker's, all others are the client's; the kernel moves bytes for both.
func TestWhichSocketFailed(t *testing.T) {
	frame := make([]byte, 64<<20) // more than the sockets hold
	for _, kept := range []bool{false, true} {
		for _, resets := range []string{"sender", "receiver"} {
			t.Run(fmt.Sprintf("kept %v, %s resets", kept, resets), func(t *testing.T) {
				p, sender, receiver := expectsLarge(t, time.Minute)
				if resets == "receiver" {
					go sender.Write(frame)
				} else {
					sender.Write(frame[:spliceMin+1])
				}
				if _, err := p.head(protocol.SizePrefix); err != nil || !p.ahead {
					t.Fatalf("head = %v, ahead %v", err, p.ahead)
				}
				done := make(chan error)
				go func() {
					if kept {
						done <- p.streamKept(make([]byte, len(frame)), new(atomic.Uint64), 7)
					} else {
						done <- p.stream(len(frame))
					}
				}()
				io.ReadFull(receiver, make([]byte, spliceMin))
				gone := receiver
				if resets == "sender" {
					gone = sender
				}
				gone.SetLinger(0)
				gone.Close()
				err := <-done
				if _, isWrite := errors.AsType[*writeError](err); err == nil || isWrite != (resets == "receiver") {
					t.Errorf("error %v (%T), a write error: %v", err, err, isWrite)
				}
			})
		}
	}
}

func TestAFrameThatStopsMidwayTimesOut(t *testing.T) {
	for _, kept := range []bool{false, true} {
		p, sender, _ := expectsLarge(t, 20*time.Millisecond)
		sender.Write(make([]byte, spliceMin+1))
		if _, err := p.head(protocol.SizePrefix); err != nil || !p.ahead {
			t.Fatalf("head = %v, ahead %v", err, p.ahead)
		}
		err := p.stream
		if kept {
			err = func(n int) error { return p.streamKept(make([]byte, n), new(atomic.Uint64), 7) }
		}
		if err := err(4 * spliceMin); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("kept %v: %v, want a deadline exceeded", kept, err)
		}
	}
}

func TestACutPipeStopsInsideAKeptFrame(t *testing.T) {
	p, sender, receiver := expectsLarge(t, time.Minute)
	sender.Write(make([]byte, spliceMin+1))
	if _, err := p.head(protocol.SizePrefix); err != nil || !p.ahead {
		t.Fatalf("head = %v, ahead %v", err, p.ahead)
	}
	done := make(chan error)
	go func() { done <- p.streamKept(make([]byte, maxPeek+1), new(atomic.Uint64), 7) }()
	io.ReadFull(receiver, make([]byte, spliceMin+1))
	p.cut()
	if err := <-done; err != errCut && !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("streamKept = %v, want errCut or a deadline exceeded", err)
	}
}

func TestAnInterruptedPipeStopsAfterAFrameLookedAtAhead(t *testing.T) {
	p, sender, _ := expectsLarge(t, time.Minute)
	sender.Write([]byte("frame"))
	if _, err := p.head(2); err != nil || !p.ahead {
		t.Fatalf("head = %v, ahead %v", err, p.ahead)
	}
	p.interrupt()
	if b, err := p.peek(5); string(b) != "frame" || err != nil {
		t.Errorf("peek inside a frame = %q, %v, want the frame", b, err)
	}
	p.pass(5)
	if _, err := p.head(1); err != errInterrupted {
		t.Errorf("head of the next frame = %v, want errInterrupted", err)
	}
}
