package proxy

import (
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/protocol"
)

// largeMetadata is an answer that sockets don't hold.
func largeMetadata(id int32) []byte {
	m := metadata(1)
	for range 1000 {
		topic := kmsg.NewMetadataResponseTopic()
		topic.Topic = kmsg.StringPtr(strings.Repeat("t", 30_000))
		m.Topics = append(m.Topics, topic)
	}
	return responseFrame(m, id)
}

// TestLargeAnswersHaveABound: answers that are read whole have one bound over all connections. Who finds no room waits, and a peer that keeps the room from
// others, a client that doesn't read or a broker that stopped midway, is ended; while nobody waits, both may take their time.
func TestLargeAnswersHaveABound(t *testing.T) {
	large := largeMetadata(7)
	for _, tt := range []struct {
		name   string
		sent   int // of the first answer
		reason string
	}{
		{"clients that don't read", len(large), reasonUnread},
		{"a broker that stopped midway", len(large) / 2, reasonBroker},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var answered atomic.Bool
			b := script(t, func(c net.Conn, _ protocol.RequestHeader, _ []byte) {
				n := len(large)
				if !answered.Swap(true) {
					n = tt.sent
				}
				c.Write(large[:n])
			})
			logger, logs := observed()
			s := startBefore(t, b, Options{AnswerBytes: int64(len(large)) * 3 / 2, AnswerPatience: 300 * time.Millisecond, Logger: logger})
			ask := func() *rawClient {
				c := dialRaw(t, s.Addr())
				c.send(requestFrame(&kmsg.MetadataRequest{Version: 1}, 7))
				return c
			}
			silent := ask()
			eventually(t, "the first answer is held and stands still", func() bool {
				s.mu.Lock()
				defer s.mu.Unlock()
				for c := range s.conns {
					return c.way.stands(time.Now()) > 3*s.answers.patience
				}
				return false
			})
			if held, n := s.answers.held.Load(), s.connections(); held != int64(len(large)) || n != 1 {
				t.Errorf("%d bytes are held, %d connections are open, want %d and the one: nobody waits", held, n, len(large))
			}
			other := ask()
			if got := len(other.receive()); got < len(large) {
				t.Errorf("the client that waited got %d bytes, want %d", got, len(large))
			}
			silent.Close()
			other.Close()
			eventually(t, "nothing is held", func() bool {
				return s.connections() == 0 && s.answers.held.Load() == 0 && s.answers.waiting.Load() == 0
			})
			if n := logs.FilterMessage(limitCauses[tt.reason]).Len(); n != 1 {
				t.Errorf("the log tells %d times why the first client's connection was ended, want once", n)
			}
		})
	}
}

// TestAnswersBeforeAWaitingOneAreWritten: what came with a large answer that finds no room, and before it, reaches the client meanwhile.
func TestAnswersBeforeAWaitingOneAreWritten(t *testing.T) {
	large := largeMetadata(7)
	small := rawResponse(6, []byte("hello"))
	var asked atomic.Int64
	b := script(t, func(c net.Conn, h protocol.RequestHeader, _ []byte) {
		switch {
		case h.APIKey != protocol.KeyMetadata:
		case asked.Add(1) == 1:
			c.Write(large)
		default:
			c.Write(append(small[:len(small):len(small)], large...))
		}
	})
	s := startBefore(t, b, Options{AnswerBytes: int64(len(large)), AnswerPatience: time.Hour})
	metadata := requestFrame(&kmsg.MetadataRequest{Version: 1}, 7)
	silent := dialRaw(t, s.Addr())
	silent.send(metadata)
	eventually(t, "the first answer is held", func() bool { return s.answers.held.Load() > 0 })
	other := dialRaw(t, s.Addr())
	other.send(rawRequest(68, 0, 6, nil), metadata)
	if got := other.receive(); string(got) != string(small) {
		t.Errorf("the first answer is %q, want %q", got, small)
	}
	eventually(t, "the second one waits", func() bool { return s.answers.waiting.Load() == 1 })
	silent.Close()
	if got := len(other.receive()); got < len(large) {
		t.Errorf("the client that waited got %d bytes, want %d", got, len(large))
	}
}
