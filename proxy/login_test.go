package proxy

import (
	"fmt"
	"net"
	"strings"
	"testing"

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
