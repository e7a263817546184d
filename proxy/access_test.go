package proxy

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"kmirror/protocol"
)

// accessLogger writes into a buffer as kmirror does into its file.
func accessLogger() (*zap.Logger, *lockedBuffer) {
	out := &lockedBuffer{}
	encoder := zapcore.NewJSONEncoder(zapcore.EncoderConfig{MessageKey: "event", EncodeTime: zapcore.RFC3339NanoTimeEncoder, EncodeDuration: zapcore.SecondsDurationEncoder})
	return zap.New(zapcore.NewCore(encoder, out, zap.DebugLevel)), out
}

// wantAccess waits until one connection's end is in the log, and compares all of its events; those at the begin and the end by their reason alone.
func wantAccess(t *testing.T, out *lockedBuffer, want ...string) {
	t.Helper()
	eventually(t, "the end is in the access log", func() bool { return strings.Contains(out.String(), `"close"`) })
	var got []string
	for line := range strings.Lines(out.String()) {
		var e struct{ Event, Client, Mechanism, Principal, Outcome, Topic, Topic_ID, Reason string }
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if e.Client == "" {
			t.Errorf("%q names no client", line)
		}
		got = append(got, strings.Join(strings.Fields(strings.Join([]string{e.Event, e.Mechanism, e.Principal, e.Outcome, e.Topic, e.Topic_ID, e.Reason}, " ")), " "))
	}
	if !slices.Equal(got, want) {
		t.Errorf("the access log tells %q, want %q\n%s", got, want, out.String())
	}
	if strings.Contains(out.String(), "s3cret") {
		t.Errorf("the access log shows a secret:\n%s", out.String())
	}
}

// TestTopicsOfTheAccessLog: topics are told whatever the version, with acknowledgements and without, with a mirror and without one. Where producers name them
// by ID alone, answers that they have had tell the name.
func TestTopicsOfTheAccessLog(t *testing.T) {
	b := script(t, func(c net.Conn, h protocol.RequestHeader, frame []byte) {
		if h.APIKey == protocol.KeyMetadata {
			m := metadata(h.APIVersion)
			topic := kmsg.NewMetadataResponseTopic()
			topic.Topic, topic.TopicID = kmsg.StringPtr("orders"), [16]byte{1, 2, 3}
			m.Topics = append(m.Topics, topic)
			c.Write(responseFrame(m, h.CorrelationID))
		} else if acks, _, _ := protocol.ProduceAcks(frame, h); acks != 0 {
			c.Write(produced(h, frame, nil))
		}
	})
	large := batchOf(100_000)
	for _, tt := range []struct {
		name    string
		sink    Sink
		frames  [][]byte
		answers int
		want    []string
	}{
		{"v0, mirror", &recorder{}, [][]byte{requestFrame(produceTo(0, -1, records(1)), 1)}, 1, []string{"produce orders"}},
		{"v2, no mirror", nil, [][]byte{requestFrame(produceTo(2, 1, records(1)), 1)}, 1, []string{"produce orders"}},
		{"acks=0, v1", nil, [][]byte{requestFrame(produceTo(1, 0, records(1)), 1)}, 0, []string{"produce orders"}},
		{"v3, no mirror", nil, [][]byte{requestFrame(produceTo(3, -1, records(1)), 1)}, 1, []string{"produce orders"}},
		{"v9, mirror", &recorder{}, [][]byte{requestFrame(produceTo(9, 1, records(1)), 1)}, 1, []string{"produce orders"}},
		{"v13, unknown ID", nil, [][]byte{requestFrame(produceTo(13, -1, records(1)), 1)}, 1, []string{"produce AQIDAAAAAAAAAAAAAAAAAA"}},
		{"acks=0", nil, [][]byte{requestFrame(produceTo(9, 0, records(1), records(1)), 1), requestFrame(produceTo(9, 0, records(1)), 2)}, 0, []string{"produce orders"}},
		{"acks=0, large", &recorder{}, [][]byte{requestFrame(produceTo(8, 0, large, large), 1)}, 0, []string{"produce orders"}},
		{"acks=0, v13", nil, [][]byte{requestFrame(&kmsg.MetadataRequest{Version: 12}, 1), requestFrame(produceTo(13, 0, large), 2)}, 1,
			[]string{"produce orders AQIDAAAAAAAAAAAAAAAAAA"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			log, out := accessLogger()
			s := startBefore(t, b, Options{Access: log, Sink: tt.sink})
			c := dialRaw(t, s.Addr())
			for i, frame := range tt.frames {
				c.send(frame)
				if i < tt.answers {
					c.receive()
				}
			}
			c.Close()
			wantAccess(t, out, slices.Concat([]string{"connect"}, tt.want, []string{"close client"})...)
		})
	}
}

// TestLoginsOfTheAccessLog: log-ins of old clients, whose tokens have no header, are told too, and a token that the broker refuses in two steps never counts as
// accepted.
func TestLoginsOfTheAccessLog(t *testing.T) {
	v0 := func(mechanism string, tokens ...string) (frames [][]byte) {
		frames = append(frames, handshake(mechanism, 0, 1))
		for _, x := range tokens {
			frames = append(frames, rawToken(x))
		}
		return frames
	}
	token := func(id int32, text string) []byte {
		req := kmsg.NewPtrSASLAuthenticateRequest()
		req.Version, req.SASLAuthBytes = 1, []byte(text)
		return requestFrame(req, id)
	}
	refusal := func(id int32, code int16, text string) []byte {
		resp := kmsg.NewPtrSASLAuthenticateResponse()
		resp.Version, resp.ErrorCode, resp.SASLAuthBytes = 1, code, []byte(text)
		return responseFrame(resp, id)
	}
	accepted := responseFrame(kmsg.NewPtrSASLHandshakeResponse(), 1)
	const webToken = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJjYXJvbCIsImF1ZCI6InMzY3JldCJ9." // {"alg":"none"}.{"sub":"carol","aud":"s3cret"}.
	const bearer = "n,,\x01auth=Bearer s3cret\x01\x01"
	for _, tt := range []struct {
		name            string
		frames, answers [][]byte // the broker ends the connection where it has no answer
		want            string
		closed          string
	}{
		{"PLAIN", v0("PLAIN", "\x00alice\x00s3cret"), [][]byte{accepted, rawToken("")}, "authenticate PLAIN alice ok", "close client"},
		{"PLAIN refused", v0("PLAIN", "\x00alice\x00s3cret"), [][]byte{accepted}, "authenticate PLAIN alice the broker ended the connection", "close broker"},
		{"SCRAM", v0("SCRAM-SHA-512", "n,,n=bob,r=s3cret", "c=biws,r=s3cret,p=s3cret"), [][]byte{accepted, rawToken("r=s3cret"), rawToken("v=s3cret")},
			"authenticate SCRAM-SHA-512 bob ok", "close client"},
		{"SCRAM refused", v0("SCRAM-SHA-256", "n,,n=bob,r=s3cret", "c=biws,r=s3cret,p=s3cret"), [][]byte{accepted, rawToken("r=s3cret")},
			"authenticate SCRAM-SHA-256 bob the broker ended the connection", "close broker"},
		{"OAUTHBEARER refused", [][]byte{handshake("OAUTHBEARER", 1, 1), token(2, bearer), token(3, "\x01")},
			[][]byte{accepted, refusal(2, 0, `{"status":"invalid_token"}`), refusal(3, 58, "")}, "authenticate OAUTHBEARER SASL_AUTHENTICATION_FAILED", "close client"},
		{"GSSAPI", v0("GSSAPI", "\x60 ticket"), [][]byte{accepted, rawToken("\x05\x04")}, "authenticate GSSAPI token accepted", "close client"},
		{"OAUTHBEARER with a name", [][]byte{handshake("OAUTHBEARER", 1, 1), token(2, "n,,\x01auth=bearer "+webToken+"\x01traceparent=1\x01\x01")},
			[][]byte{accepted, refusal(2, 0, "")}, "authenticate OAUTHBEARER carol ok", "close client"},
		{"OAUTHBEARER", [][]byte{handshake("OAUTHBEARER", 1, 1), token(2, bearer)}, [][]byte{accepted, refusal(2, 0, "")}, "authenticate OAUTHBEARER ok", "close client"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := 0
			b := script(t, func(c net.Conn, _ protocol.RequestHeader, _ []byte) {
				if n == len(tt.answers) {
					c.Close()
					return
				}
				c.Write(tt.answers[n])
				n++
			})
			log, out := accessLogger()
			main, logs := observed()
			s := startBefore(t, b, Options{Access: log, Logger: main})
			c := dialRaw(t, s.Addr())
			for i, frame := range tt.frames {
				c.send(frame)
				if i < len(tt.answers) {
					if got := c.receive(); !bytes.Equal(got, tt.answers[i]) {
						t.Fatalf("answer %d is %x, want %x", i, got, tt.answers[i])
					}
				} else {
					c.wantClosed("the broker ended it")
				}
			}
			c.Close()
			wantAccess(t, out, "connect", tt.want, tt.closed)
			refused := !strings.HasSuffix(tt.want, "ok") && !strings.HasSuffix(tt.want, "accepted")
			if warned := logs.FilterMessage("the broker refused a client's log-in").Len() == 1; warned != refused {
				t.Errorf("warned of a refused log-in: %v, want %v", warned, refused)
			}
		})
	}
}

// TestRefusedConnectionsAreInTheAccessLog: who was let in nowhere is told too; health checks aren't.
func TestRefusedConnectionsAreInTheAccessLog(t *testing.T) {
	cert, _ := certificate(t)
	for _, tt := range []struct {
		name   string
		o      Options
		say    string
		reason string
	}{
		{"no TLS handshake", Options{DownstreamTLS: &tls.Config{Certificates: []tls.Certificate{cert}}}, "GET / HTTP/1.1\r\n", reasonTLS},
		{"no PROXY header", Options{ProxyHeader: ProxyHeaderRequired}, "GET / HTTP/1.1\r\n", reasonProxyHeader},
		{"broker down", Options{Dial: (&net.Dialer{Timeout: time.Nanosecond}).DialContext}, "\x00\x00\x00\x10", reasonDial},
	} {
		t.Run(tt.name, func(t *testing.T) {
			log, out := accessLogger()
			tt.o.Access = log
			s := startBefore(t, script(t, nil), tt.o)
			if tt.reason != reasonDial {
				dialRaw(t, s.Addr()).Close() // a health check
			}
			c := dialRaw(t, s.Addr())
			c.send([]byte(tt.say))
			c.wantClosed(tt.name)
			wantAccess(t, out, "close "+tt.reason)
		})
	}
	t.Run("too many", func(t *testing.T) {
		log, out := accessLogger()
		s := startBefore(t, script(t, nil), Options{Access: log, MaxConnections: 1})
		c := dialRaw(t, s.Addr())
		eventually(t, "the place is taken", func() bool { return s.connections() == 1 })
		dialRaw(t, s.Addr()).wantClosed("a second one")
		eventually(t, "it's told", func() bool { return strings.Contains(out.String(), `"reason":"limit"`) })
		c.Close()
	})
}
