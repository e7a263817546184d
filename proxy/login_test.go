package proxy

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"kmirror/protocol"
)

// TestRawTokensEnd: after the log-in's end a frame is a request again, and one that can't be is refused, not passed on as a token.
func TestRawTokensEnd(t *testing.T) {
	for _, mechanism := range []string{"PLAIN", "GSSAPI", "SCRAM-SHA-256"} {
		t.Run(mechanism, func(t *testing.T) {
			b := script(t, saslBroker(1, func(c net.Conn, token []byte) { c.Write(rawToken("")) }))
			s := startBefore(t, b, Options{})
			c := dialRaw(t, s.Addr())
			c.send(handshake(mechanism, 0, 1))
			c.receive()
			c.send(rawToken("\x60 a token"))
			c.receive()
			c.send(rawRequest(68, 0, 2, []byte("a request")))
			c.receive()
			c.send(rawToken("\xff\x82 this is no request"))
			c.wantClosed("after bytes that are neither a request nor a token")
		})
	}
}

// noAnswer stands for the answer of a broker that gives none to a raw token.
const noAnswer = "none"

// TestTheFirstRequestBehindTokens: the last token of an exchange may have an answer or none, and what follows it may come with it, before the client has
// seen any. Every answer reaches the client as the broker sent it, and a frame behind the tokens is a request.
func TestTheFirstRequestBehindTokens(t *testing.T) {
	for _, tt := range []struct {
		name, mechanism string
		tokens, answers []string
	}{
		{"GSSAPI", "GSSAPI", []string{"\x60\x82\x02\x03 ticket", "", "\x05\x04\x04\xff choice"}, []string{"\x60\x82\x01\x02 mutual", "\x05\x04\x05\xff offer", noAnswer}},
		{"GSSAPI, all answered", "GSSAPI", []string{"\x60\x82\x02\x03 ticket", "\x05\x04\x04\xff choice"}, []string{"\x05\x04\x05\xff offer", ""}},
		{"GSSAPI, two without an answer", "GSSAPI", []string{"\x60\x82\x02\x03 ticket", "\x05\x04\x04\xff choice"}, []string{noAnswer, noAnswer}},
		{"SCRAM", "SCRAM-SHA-512", []string{"n,,n=alice,r=nonce", "c=biws,r=nonce,p=proof"}, []string{"r=nonce,s=salt,i=4096", "v=signature"}},
		{"OAUTHBEARER", "OAUTHBEARER", []string{"n,,\x01auth=Bearer token\x01\x01"}, []string{""}},
		{"PLAIN, as a request", "PLAIN", []string{"\x00\x03\x00\x01user\x00secret"}, []string{""}},
	} {
		for _, pieces := range []int{1 << 20, 5, 1} {
			t.Run(fmt.Sprintf("%s in pieces of %d", tt.name, pieces), func(t *testing.T) {
				answers := tt.answers
				broker := saslBroker(len(tt.tokens), func(c net.Conn, _ []byte) {
					if answers[0] != noAnswer {
						c.Write(rawToken(answers[0]))
					}
					answers = answers[1:]
				})
				b := script(t, func(c net.Conn, h protocol.RequestHeader, frame []byte) {
					if len(answers) > 0 || h.APIKey != protocol.KeyProduce {
						broker(c, h, frame)
					}
				})
				c := dialRaw(t, startBefore(t, b, Options{}).Addr())
				c.send(handshake(tt.mechanism, 0, 1))
				c.receive()
				var sent, want []byte
				for i, token := range tt.tokens {
					sent = append(sent, rawToken(token)...)
					if tt.answers[i] == noAnswer {
						continue
					}
					if want = append(want, rawToken(tt.answers[i])...); i == len(tt.tokens)-1 {
						break
					}
					c.send(sent)
					c.wantBytes(want)
					sent, want = nil, nil
				}
				sent = append(sent, requestFrame(produceTo(3, 0, records(1)), 4)...) // acks=0, which has no answer either
				for id := range int32(3) {
					sent = append(sent, rawRequest(68, 0, 5+id, []byte("after"))...)
					want = append(want, rawResponse(5+id, []byte("after"))...)
				}
				for piece := range slices.Chunk(sent, pieces) {
					c.send(piece)
				}
				c.wantBytes(want)
			})
		}
	}
}

// wantBytes reads as many bytes as are wanted, and no frames.
func (c *rawClient) wantBytes(want []byte) {
	c.t.Helper()
	got := make([]byte, len(want))
	if n, err := io.ReadFull(c.r, got); err != nil || !bytes.Equal(got, want) {
		c.t.Fatalf("got %q (%v), want %q", got[:n], err, want)
	}
}

// TestAnUnansweredTokenHoldsNothingUp: a token without an answer is no request in flight: not for the gauge, nor for limits, nor at the end of the
// connection or of the proxy.
func TestAnUnansweredTokenHoldsNothingUp(t *testing.T) {
	read := make(chan struct{}, 10)
	logIn := func(t *testing.T, s *Server) *rawClient {
		c := dialRaw(t, s.Addr())
		c.send(handshake("GSSAPI", 0, 1))
		c.receive()
		c.send(rawToken("\x05\x04\x04\xff choice"))
		<-read
		return c
	}
	broker := func(t *testing.T) *scripted {
		return script(t, saslBroker(1, func(net.Conn, []byte) { read <- struct{}{} }))
	}
	t.Run("client ends", func(t *testing.T) {
		s := startBefore(t, broker(t), Options{})
		c := logIn(t, s)
		if n := s.Status().InFlight; n != 0 {
			t.Errorf("%d requests are in flight, want 0", n)
		}
		c.Close()
		eventually(t, "the connection is gone", func() bool { return s.Status().Connections == 0 })
	})
	t.Run("idle", func(t *testing.T) {
		s := startBefore(t, broker(t), Options{Limits: Limits{Idle: time.Millisecond}})
		logIn(t, s).wantClosed("idle connection")
	})
	t.Run("shutdown", func(t *testing.T) {
		s, err := New(Options{Listen: "127.0.0.1:0", Seeds: []string{broker(t).ln.Addr().String()}, Grace: 40 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx) }()
		c := logIn(t, s)
		cancel()
		c.wantClosed("at shutdown")
		if err := <-done; err != nil {
			t.Errorf("Run = %v, want nil", err)
		}
	})
	t.Run("broker refuses", func(t *testing.T) {
		b := script(t, saslBroker(1, func(c net.Conn, _ []byte) { c.Close(); read <- struct{}{} }))
		logIn(t, startBefore(t, b, Options{})).wantClosed("as the broker closed")
	})
}

// TestRefusedLogin: the log names the client, the mechanism and the broker's error, and nothing that was sent as a secret.
func TestRefusedLogin(t *testing.T) {
	for _, at := range []int16{protocol.KeySASLHandshake, protocol.KeySASLAuthenticate} {
		t.Run(fmt.Sprint(at), func(t *testing.T) {
			log, logs := observed()
			b := script(t, func(c net.Conn, h protocol.RequestHeader, frame []byte) {
				code := byte(0)
				if h.APIKey == at {
					code = map[int16]byte{protocol.KeySASLHandshake: 33, protocol.KeySASLAuthenticate: 58}[at]
				}
				c.Write(rawResponse(h.CorrelationID, []byte{0, code, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}))
			})
			s := startBefore(t, b, Options{Logger: log})
			c := dialRaw(t, s.Addr())
			c.send(handshake("PLAIN", 1, 1))
			c.receive()
			c.send(rawRequest(36, 1, 2, append([]byte{0xff, 0xff, 0, 0, 0, 14}, "\x00alice\x00s3cret-"...)))
			c.receive()
			want := map[int16]string{protocol.KeySASLHandshake: "UNSUPPORTED_SASL_MECHANISM", protocol.KeySASLAuthenticate: "SASL_AUTHENTICATION_FAILED"}[at]
			eventually(t, "a log line", func() bool { return logs.FilterMessageSnippet("refused a client's log-in").Len() == 1 })
			fields := logs.FilterMessageSnippet("refused a client's log-in").All()[0].ContextMap()
			if fields["mechanism"] != "PLAIN" || fields["error"] != want || fields["client"] != c.LocalAddr().String() {
				t.Errorf("the log says %v, want PLAIN, %s, %s", fields, want, c.LocalAddr())
			}
			for _, e := range logs.All() {
				if strings.Contains(e.Message+fmt.Sprint(e.ContextMap()), "s3cret") {
					t.Errorf("the log shows a secret: %s %v", e.Message, e.ContextMap())
				}
			}
		})
	}
}
