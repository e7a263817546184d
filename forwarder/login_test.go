package forwarder

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/plain"

	"kmirror/internal/bufpool"
)

// expiringBroker answers one connection; each log-in holds for a time. It returns the API keys that it was asked for.
func expiringBroker(t *testing.T, ln net.Listener, lifetime time.Duration, asked chan<- int16) {
	nc, err := ln.Accept()
	if err != nil {
		return
	}
	defer nc.Close()
	for {
		var size [4]byte
		if _, err := io.ReadFull(nc, size[:]); err != nil {
			return
		}
		frame := make([]byte, binary.BigEndian.Uint32(size[:]))
		if _, err := io.ReadFull(nc, frame); err != nil {
			return
		}
		req := kmsg.RequestForKey(int16(binary.BigEndian.Uint16(frame)))
		req.SetVersion(int16(binary.BigEndian.Uint16(frame[2:])))
		resp := req.ResponseKind()
		switch r := resp.(type) {
		case *kmsg.ApiVersionsResponse:
			r.ApiKeys = []kmsg.ApiVersionsResponseApiKey{{ApiKey: 36, MaxVersion: 2}, {ApiKey: 3, MaxVersion: 8}}
		case *kmsg.SASLAuthenticateResponse:
			r.SessionLifetimeMillis = lifetime.Milliseconds()
		}
		asked <- req.Key()
		body := slices.Clone(frame[4:8])
		if flexibleAnswer(req) {
			body = append(body, 0)
		}
		body = resp.AppendTo(body)
		if _, err := nc.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...)); err != nil {
			t.Errorf("answer: %v", err)
			return
		}
	}
}

// TestLogInAgain: a connection logs in again before its session ends, between requests that are on their way, each of which is answered.
func TestLogInAgain(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	asked := make(chan int16, 10_000)
	var broker sync.WaitGroup
	broker.Go(func() { expiringBroker(t, ln, 100*time.Millisecond, asked) })
	c, err := dialConn(t.Context(), ln.Addr().String(), "test", ClusterOptions{SASL: []sasl.Mechanism{plain.Auth{User: "u", Pass: "p"}.AsMechanism()}})
	if err != nil {
		t.Fatal(err)
	}
	var answers sync.WaitGroup
	for begun := time.Now(); time.Since(begun) < 500*time.Millisecond; time.Sleep(time.Millisecond) {
		for range 3 {
			answers.Add(1)
			req := kmsg.NewPtrMetadataRequest()
			req.Version = 8
			c.send(time.Now().Add(answerTimeout), false, func(correlationID int32) outgoing {
				return outgoing{pieces: net.Buffers{c.format.AppendRequest(nil, req, correlationID)}}
			}, func(_ []byte, buf *bufpool.Buf, err error) {
				defer answers.Done()
				if err != nil {
					t.Errorf("request: %v", err)
					return
				}
				buf.Release()
			})
		}
	}
	answers.Wait()
	c.close(errConnClosed)
	<-c.finished
	broker.Wait()
	close(asked)
	logIns, others := 0, 0
	for key := range asked {
		switch key {
		case 36:
			logIns++
		case 3:
			others++
		}
	}
	if logIns < 3 {
		t.Errorf("logged in %d times with %d requests, want at least 3", logIns, others)
	}
}

// TestThrottled: what a throttled broker answers late is still in time, and the next question waits.
func TestThrottled(t *testing.T) {
	ours, theirs := net.Pipe()
	defer ours.Close()
	defer theirs.Close()
	deadline := time.Now().Add(time.Second)
	c := &conn{nc: ours, calls: []call{{deadline: deadline}}, ended: make(chan struct{})}
	c.throttled(300 * time.Millisecond)
	if got := c.calls[0].deadline; !got.Equal(deadline.Add(300 * time.Millisecond)) {
		t.Errorf("deadline moved by %v, want 300ms", got.Sub(deadline))
	}
	begun := time.Now()
	if err := c.waitThrottled(t.Context()); err != nil || time.Since(begun) < 200*time.Millisecond {
		t.Errorf("waited %v, %v, want 300ms", time.Since(begun), err)
	}
	c.throttled(time.Hour)
	ctx, cancel := context.WithCancelCause(t.Context())
	want := fmt.Errorf("no longer wanted")
	cancel(want)
	if err := c.waitThrottled(ctx); err != want {
		t.Errorf("waitThrottled = %v, want %v", err, want)
	}
}
