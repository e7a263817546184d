package security

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// TestLogins: kmirror's own clients log in to both clusters with each mechanism, as clients of the proxy do with their own. All connections live longer
// than a log-in holds, so that clients log in again in mid-connection, and so does kmirror; producers see no error, and mirroring stays live.
func TestLogins(t *testing.T) {
	source, mirror := startSecured(t), startSecured(t)
	for _, mechanism := range mechanisms {
		t.Run(mechanism, func(t *testing.T) {
			topic := "logins-" + strings.ToLower(mechanism)
			kafkatest.CreateTopic(t, source, topic, 3, 1)
			accessLog := filepath.Join(t.TempDir(), "access.log")
			in := testbed.Start(t, source, mirror, append(append([]string{"--topics", topic, "--log.level", "debug", "--log.access", accessLog},
				ownLogin("source", mechanism)...), ownLogin("mirror", mechanism)...)...)
			testbed.WaitLive(t, in, topic, 3)
			var loads []*testbed.Load
			for _, client := range mechanisms {
				loads = append(loads, testbed.StartLoad(t, in.Seeds(), topic, 1, 100, 100, kgo.SASL(login(client, user, password))))
			}
			begun := time.Now()
			kafkatest.Eventually(t, time.Minute, func() error {
				if time.Since(begun) < 3*reauthentication {
					return errors.New("log-ins haven't expired three times yet")
				}
				return nil
			})
			for _, l := range loads {
				l.Stop()
			}
			in.WaitCaughtUp(time.Minute)
			kafkatest.WaitEqual(t, source.RealCluster, mirror.RealCluster, topic, time.Minute, kafkatest.SameOffsets())
			testbed.WaitLive(t, in, topic, 3)
			access, err := os.ReadFile(accessLog)
			if err != nil {
				t.Fatal(err)
			}
			for _, client := range mechanisms {
				again := strings.Count(string(access), fmt.Sprintf(`"mechanism":%q`, client))
				if again < 3 {
					t.Errorf("the access log tells of %d log-ins with %s, want at least 3: in mid-connection too", again, client)
				}
			}
			wantNoSecret(t, in.Log()+string(access))
		})
	}
}

// TestChangedPassword: a password file that changes is read at the next log-in.
func TestChangedPassword(t *testing.T) {
	source := startSecured(t)
	_, mirror := kafkatest.Shared(t)
	file := filepath.Join(t.TempDir(), "password")
	write := func(secret string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(secret+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("wr0ng")
	kafkatest.CreateTopic(t, source, "changed", 1, 1)
	in := testbed.New(t, source, mirror, "--topics", "changed", "--source.sasl.mechanism", "SCRAM-SHA-256", "--source.sasl.username", user,
		"--source.sasl.password_file", file)
	if err := in.Launch(); err != nil {
		t.Fatal(err)
	}
	kafkatest.Eventually(t, 30*time.Second, func() error {
		if !strings.Contains(in.Log(), "SASL_AUTHENTICATION_FAILED") {
			return errors.New("no log line about the log-in that failed")
		}
		return nil
	})
	write(password)
	kafkatest.Eventually(t, 30*time.Second, in.Ready)
	testbed.WaitLive(t, in, "changed", 1)
	wantNoSecret(t, in.Log())
}

// attempt produces one record and returns the error, in words that don't depend on the address.
func attempt(t *testing.T, seeds []string, opts ...kgo.Opt) string {
	t.Helper()
	cl := testbed.NewWriter(t, seeds, "refused", append([]kgo.Opt{kgo.RetryTimeout(time.Second), kgo.RecordDeliveryTimeout(3 * time.Second), kgo.RequestRetries(1)}, opts...)...)
	defer cl.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, err := cl.Request(ctx, &kmsg.MetadataRequest{Version: 9, Topics: []kmsg.MetadataRequestTopic{}})
	switch {
	case err == nil:
		return "served"
	case errors.Is(err, io.EOF):
		return "closed"
	}
	text := err.Error()
	for _, seed := range seeds {
		text = strings.ReplaceAll(text, seed, "BROKER")
	}
	return text
}

// TestRefusals is case C29: what a broker refuses, it refuses through the proxy in the same words.
func TestRefusals(t *testing.T) {
	source := startSecured(t)
	broker := source.Broker(1)
	expired := kgo.SASL(oauthOf(token(user, time.Now().Add(-time.Minute))))
	for _, listener := range []string{"SASL", "FEW", "PLAINTEXT"} {
		t.Run(listener, func(t *testing.T) {
			direct := []string{broker.Listener(listener)}
			if listener == "PLAINTEXT" {
				direct = []string{broker.Addr}
			}
			in := testbed.New(t, seedsOf{source, direct}, source, "--roles", "proxy", "--log.level", "debug")
			if err := in.Launch(); err != nil {
				t.Fatal(err)
			}
			kafkatest.Eventually(t, 30*time.Second, func() error {
				c, err := net.Dial("tcp", in.Seeds()[0])
				if err == nil {
					c.Close()
				}
				return err
			})
			for name, opts := range map[string][]kgo.Opt{
				"no log-in": nil, "right": {kgo.SASL(login("PLAIN", user, password))},
				"wrong PLAIN": {kgo.SASL(login("PLAIN", user, "wr0ng"))}, "wrong SCRAM": {kgo.SASL(login("SCRAM-SHA-256", user, "wr0ng"))},
				"unknown user": {kgo.SASL(login("SCRAM-SHA-512", "mallory", "wr0ng"))}, "expired token": {expired},
			} {
				want, got := attempt(t, direct, opts...), attempt(t, in.Seeds(), opts...)
				if got != want {
					t.Errorf("%s: through the proxy %q, directly %q", name, got, want)
				} else {
					t.Logf("%s: %s", name, got)
				}
			}
			wantNoSecret(t, in.Log())
			kafkatest.Eventually(t, 30*time.Second, func() error {
				if n := in.Metrics()["kmirror_proxy_connections"]; n != 0 {
					return fmt.Errorf("%v connections are left", n)
				}
				return nil
			})
		})
	}
}

// seedsOf is a cluster that is reached at other addresses.
type seedsOf struct {
	kafkatest.Cluster
	seeds []string
}

func (c seedsOf) Seeds() []string { return c.seeds }
