package proxy

import (
	"context"
	"crypto/tls"
	"net"
	"testing"
	"time"

	"go.uber.org/zap"

	"kmirror/protocol"
)

// TestUnreachableWait: a client isn't let go at once, nor all of them at the same time, but none waits longer for a dial that took long already.
func TestUnreachableWait(t *testing.T) {
	least := func(time.Duration) time.Duration { return 0 }
	most := func(limit time.Duration) time.Duration { return limit - 1 }
	for _, tt := range []struct {
		name   string
		took   time.Duration
		random func(time.Duration) time.Duration
		want   time.Duration
	}{
		{"refused at once", 0, least, unreachableDelay},
		{"refused at once, the other end", 0, most, 2*unreachableDelay - 1},
		{"refused after a while", 60 * time.Millisecond, least, unreachableDelay - 60*time.Millisecond},
		{"timed out", dialTimeout, most, 0},
	} {
		if got := unreachableWait(tt.took, tt.random); got != tt.want {
			t.Errorf("%s: unreachableWait = %v, want %v", tt.name, got, tt.want)
		}
	}
}

// TestUnreachableBrokerIsNotDialledInATightLoop: a client that comes again at once finds out no faster than every 100 ms that the source is down.
func TestUnreachableBrokerIsNotDialledInATightLoop(t *testing.T) {
	b := script(t, nil)
	s := startBefore(t, b, Options{})
	b.ln.Close()
	for range 3 {
		begun := time.Now()
		c := dialRaw(t, s.Addr())
		c.wantClosed("a broker that is down")
		if took := time.Since(begun); took < unreachableDelay {
			t.Errorf("closed after %v, want at least %v", took, unreachableDelay)
		}
	}
}

// stuck is a dialler that gets nowhere, as to a source whose queue is full, until a test lets it.
func stuck(open <-chan struct{}) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		select {
		case <-open:
			return (&net.Dialer{}).DialContext(ctx, network, address)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// TestWrongBytesBeforeTheSourceAnswers: who has come to the wrong place is told at once, and who went is let go, however slow the source is. Good bytes wait.
func TestWrongBytesBeforeTheSourceAnswers(t *testing.T) {
	b := script(t, nil)
	open := make(chan struct{})
	log, logs := observed()
	s := startBefore(t, b, Options{Dial: stuck(open), Logger: log})
	begun := time.Now()
	wrong := dialRaw(t, s.Addr())
	wrong.Write([]byte{'G', 'E'})
	wrong.Write([]byte("T / HTTP/1.1\r\n\r\n"))
	wrong.wantClosed("HTTP")
	gone, vanished := dialRaw(t, s.Addr()), dialRaw(t, s.Addr())
	gone.Close()
	vanished.Conn.(*net.TCPConn).SetLinger(0)
	vanished.Close()
	patient := dialRaw(t, s.Addr())
	patient.send(rawRequest(68, 0, 7, []byte("hello"))[:protocol.SizePrefix+1])
	eventually(t, "only the good client is left", func() bool { return s.connections() == 1 })
	if took := time.Since(begun); took > dialTimeout/2 {
		t.Errorf("that took %v, as long as the dial", took)
	}
	if n := logs.FilterField(zap.String("reason", reasonBadFrame)).Len(); n != 1 {
		t.Errorf("%d log lines about the wrong bytes, want 1", n)
	}
	close(open)
	patient.send(rawRequest(68, 0, 7, []byte("hello"))[protocol.SizePrefix+1:])
	if got := string(patient.receive()[8:]); got != "hello" {
		t.Errorf("the good client got %q, want its echo: what it sent while the source was dialled isn't lost", got)
	}
	if n := logs.FilterField(zap.String("reason", reasonDial)).Len(); n != 0 {
		t.Errorf("%d log lines about dials that were given up for the clients' own sake", n)
	}
}

// TestShutdownOfConnectionsThatBegin: a client that hasn't sent its PROXY header, its TLS hello, or whose broker is being dialled, holds nothing up.
func TestShutdownOfConnectionsThatBegin(t *testing.T) {
	cert, _ := certificate(t)
	for name, o := range map[string]Options{
		"header": {ProxyHeader: ProxyHeaderRequired}, "TLS": {DownstreamTLS: &tls.Config{Certificates: []tls.Certificate{cert}}}, "dial": {Dial: stuck(nil)},
	} {
		t.Run(name, func(t *testing.T) {
			o.Listen, o.Logger, o.Seeds = "127.0.0.1:0", zap.NewNop(), []string{script(t, nil).ln.Addr().String()}
			s, err := New(o)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- s.Run(ctx) }()
			c := dialRaw(t, s.Addr())
			eventually(t, "the connection is there", func() bool { return s.connections() == 1 })
			begun := time.Now()
			cancel()
			c.wantClosed("at shutdown")
			if err := <-done; err != nil || time.Since(begun) > 5*time.Second {
				t.Errorf("Run returned %v after %v, want nil at once", err, time.Since(begun))
			}
		})
	}
}
