package security

import (
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl"
	"golang.org/x/sync/errgroup"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// TestHandshakeV0 is the log-in of old clients (KIP-43): after a SaslHandshake v0 come tokens without headers, then requests, on a real broker and
// through the proxy, with and without TLS. Wrong passwords end as they do directly.
func TestHandshakeV0(t *testing.T) {
	source := startSecured(t)
	broker := source.Broker(1)
	trusting := source.ca.client(source.ca, 1)
	t.Run("a plain connection to TLS", func(t *testing.T) { spokenToInPlain(t, source) })
	for _, tt := range []struct {
		name, listener string
		tls            *tls.Config // of connections to the broker
	}{
		{"plain connections", "SASL", nil},
		{"TLS to the source", "SECURE", trusting},
	} {
		t.Run(tt.name, func(t *testing.T) {
			direct := broker.Listener(tt.listener)
			accessLog := filepath.Join(t.TempDir(), "access.log")
			args := append([]string{"--roles", "proxy", "--log.level", "debug", "--log.access", accessLog}, ownLogin("source", "PLAIN")...)
			if tt.tls != nil {
				args = append(args, "--source.tls.enabled=true", "--source.tls.ca_file", source.ca.file)
			}
			in := testbed.Start(t, seedsOf{source, []string{direct}}, source, args...)
			for _, mechanism := range []string{"PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"} {
				for _, secret := range []string{password, "wr0ng"} {
					want := logInV0(t, direct, tt.tls, mechanism, secret)
					got := logInV0(t, in.BrokerAddr(1), nil, mechanism, secret)
					if got != want {
						t.Errorf("%s: through the proxy %q, directly %q", mechanism, got, want)
					}
					if served := strings.HasPrefix(want, "served"); served != (secret == password) {
						t.Errorf("%s with password %q: %q", mechanism, secret, want)
					}
				}
			}
			if want, got := logInV0(t, direct, tt.tls, "NONE", ""), logInV0(t, in.BrokerAddr(1), nil, "NONE", ""); got != want || !strings.Contains(want, "UNSUPPORTED") {
				t.Errorf("a mechanism that isn't enabled: through the proxy %q, directly %q", got, want)
			}
			kafkatest.Eventually(t, 30*time.Second, func() error {
				if n := in.Metrics()["kmirror_proxy_connections"]; n != 0 {
					return fmt.Errorf("%v connections are left", n)
				}
				return nil
			})
			access, err := os.ReadFile(accessLog)
			if err != nil {
				t.Fatal(err)
			}
			for _, mechanism := range []string{"PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"} {
				for _, result := range []string{"ok", "the broker ended the connection"} {
					if n := testbed.CountLines(string(access), `"authenticate"`, fmt.Sprintf("%q", mechanism), fmt.Sprintf("%q", user), fmt.Sprintf("%q", result)); n != 1 {
						t.Errorf("the access log tells %d times of a log-in of %s with %s: %s, want once\n%s", n, user, mechanism, result, access)
					}
				}
			}
			if testbed.CountLines(in.Log(), "refused a client's log-in", "127.0.0.1", "PLAIN") == 0 {
				t.Error("the log doesn't name the client and the mechanism of a refused log-in")
			}
			wantNoSecret(t, in.Log()+string(access))
		})
	}
}

// spokenToInPlain is the end of case C05: a source that speaks TLS, where kmirror's settings say nothing of it. Clients are let go at once, and the log
// names the broker and the cause, once.
func spokenToInPlain(t *testing.T, source secured) {
	address := source.Broker(1).Listener("SECURE")
	in := testbed.New(t, seedsOf{source, []string{address}}, source, "--roles", "proxy")
	if err := in.Launch(); err != nil {
		t.Fatal(err)
	}
	kafkatest.Eventually(t, 30*time.Second, func() error { _, err := in.AskStatus(); return err })
	versions := kmsg.NewPtrApiVersionsRequest()
	versions.Version = 2
	begun := time.Now()
	var g errgroup.Group
	g.SetLimit(20)
	for range 200 {
		g.Go(func() error {
			c, err := net.Dial("tcp", in.Seeds()[0])
			if err != nil {
				return err
			}
			defer c.Close()
			if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
				return err
			}
			if _, err := exchange(c, versions, 1); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				return fmt.Errorf("a client got %v, want the end of its connection", err)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	named := 0
	for line := range strings.Lines(in.Log()) {
		if strings.Contains(line, "WARN\tproxy\t") && strings.Contains(line, address) && strings.Contains(line, "TLS") && strings.Contains(line, "client") {
			named++
		}
	}
	if limit := 1 + int(time.Since(begun)/(10*time.Second)); named == 0 || named > limit {
		t.Errorf("%d log lines name the broker, %s, and TLS, want one in 10 s\n%s", named, address, in.LogTail(20))
	}
	kafkatest.Eventually(t, 30*time.Second, func() error {
		if m := in.Metrics(); m["kmirror_proxy_connections"] != 0 || m["kmirror_proxy_requests_in_flight"] != 0 {
			return fmt.Errorf("%v connections and %v requests are left", m["kmirror_proxy_connections"], m["kmirror_proxy_requests_in_flight"])
		}
		return nil
	})
}

// logInV0 logs in by SaslHandshake v0, asks for metadata twice, and tells what came of it.
func logInV0(t *testing.T, address string, config *tls.Config, mechanism, secret string) string {
	t.Helper()
	return logInV0With(t, address, config, mechanism, func() (sasl.Session, []byte, error) {
		return login(mechanism, user, secret).Authenticate(t.Context(), address)
	})
}

// logInV0With is logInV0 with a session that begin returns, with its first token, once the broker takes the mechanism.
func logInV0With(t *testing.T, address string, config *tls.Config, mechanism string, begin func() (sasl.Session, []byte, error)) string {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if config != nil {
		config := config.Clone()
		config.ServerName = "127.0.0.1"
		c = tls.Client(c, config)
	}
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	handshake := kmsg.NewPtrSASLHandshakeRequest()
	handshake.Mechanism = mechanism
	resp, err := exchange(c, handshake, 1)
	if err != nil {
		return outcome("handshake", err)
	}
	if code := resp.(*kmsg.SASLHandshakeResponse).ErrorCode; code != 0 {
		return fmt.Sprintf("handshake: %v of %v", kerr.ErrorForCode(code), resp.(*kmsg.SASLHandshakeResponse).SupportedMechanisms)
	}
	session, message, err := begin()
	if err != nil {
		t.Fatal(err)
	}
	for done := false; !done; {
		if err := writeToken(c, message); err != nil {
			return outcome("token", err)
		}
		frame, err := testbed.ReadFrame(c)
		if err != nil {
			return outcome("token", err)
		}
		if done, message, err = session.Challenge(frame[4:]); err != nil {
			return "token: " + err.Error()
		}
	}
	if message != nil { // the last token of GSSAPI, which has no answer
		if err := writeToken(c, message); err != nil {
			return outcome("last token", err)
		}
	}
	metadata := kmsg.NewPtrMetadataRequest()
	metadata.Version, metadata.Topics = 5, []kmsg.MetadataRequestTopic{}
	for i := range int32(2) {
		if resp, err = exchange(c, metadata, 10+i); err != nil {
			return outcome("metadata", err)
		}
	}
	return fmt.Sprintf("served by %d brokers", len(resp.(*kmsg.MetadataResponse).Brokers))
}

func writeToken(c net.Conn, token []byte) error {
	_, err := c.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(token))), token...))
	return err
}

// exchange sends a request that isn't flexible, and decodes its answer.
func exchange(c net.Conn, req kmsg.Request, correlationID int32) (kmsg.Response, error) {
	if _, err := c.Write(kmsg.NewRequestFormatter(kmsg.FormatterClientID("old")).AppendRequest(nil, req, correlationID)); err != nil {
		return nil, err
	}
	frame, err := testbed.ReadFrame(c)
	if err != nil {
		return nil, err
	}
	if got := int32(binary.BigEndian.Uint32(frame[4:])); got != correlationID {
		return nil, fmt.Errorf("correlation ID %d, want %d", got, correlationID)
	}
	resp := req.ResponseKind()
	resp.SetVersion(req.GetVersion())
	return resp, resp.ReadFrom(frame[8:])
}

// outcome names an error without the addresses in it.
func outcome(step string, err error) string {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return step + ": closed"
	}
	return step + ": " + addresses.ReplaceAllString(err.Error(), "ADDRESS")
}
