package security

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// TestLogins: kmirror's own clients log in to both clusters with each mechanism, as clients of the proxy do with their own. All connections live longer
// than a log-in holds, so that clients log in again in mid-connection, and so does kmirror; producers see no error, and mirroring stays live.
func TestLogins(t *testing.T) {
	source, mirror := startSecured(t), startSecured(t)
	tests := map[string]func(*testing.T, secured, secured){
		"rotated password": rotatedPassword, "rotated token": rotatedToken, "changed password": changedPassword, "over TLS": loginsOverTLS,
	}
	for _, mechanism := range mechanisms {
		tests[mechanism] = func(t *testing.T, source, mirror secured) { loginsWith(t, source, mirror, mechanism) }
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) { t.Parallel(); test(t, source, mirror) })
	}
}

// loginsWith has kmirror itself log in with one mechanism, and its clients with every one. Flags tell its secret at the source, the environment that at the
// mirror.
func loginsWith(t *testing.T, source, mirror secured, mechanism string) {
	topic := "logins-" + strings.ToLower(mechanism)
	kafkatest.CreateTopic(t, source, topic, 3, 1)
	accessLog := filepath.Join(t.TempDir(), "access.log")
	in := testbed.New(t, source, mirror, append([]string{"--topics", topic, "--log.level", "debug", "--log.access", accessLog}, ownLogin("source", mechanism)...)...)
	in.Env = environment(ownLogin("mirror", mechanism))
	in.Start()
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
	wantVerified(t, topic, source.Seeds()[0], mirror.Seeds()[0], append(ownLogin("source", mechanism), ownLogin("mirror", mechanism)...)...)
	access, err := os.ReadFile(accessLog)
	if err != nil {
		t.Fatal(err)
	}
	again := loggedInAgain(t, string(access))
	for _, client := range mechanisms {
		if again[client] == 0 {
			t.Errorf("no connection logged in with %s a second time (KIP-368)", client)
		}
	}
	wantNoSecret(t, in.Log()+string(access))
}

// environment turns flags and their values into variables.
func environment(flags []string) (env []string) {
	for pair := range slices.Chunk(flags, 2) {
		env = append(env, "KMIRROR_"+strings.ToUpper(strings.ReplaceAll(strings.TrimPrefix(pair[0], "--"), ".", "_"))+"="+pair[1])
	}
	return env
}

// loggedInAgain tells how often the same connection logged in after its first time, at most, by mechanism.
func loggedInAgain(t *testing.T, access string) map[string]int {
	t.Helper()
	times, most := make(map[int]int), make(map[string]int)
	for line := range strings.Lines(access) {
		var e struct {
			Event, Mechanism, Principal, Outcome string
			Connection                           int
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("access log: %q: %v", line, err)
		}
		if e.Event != "authenticate" {
			continue
		}
		if e.Outcome != "ok" {
			t.Errorf("a client's log-in failed: %s", line)
		}
		if e.Principal != user {
			t.Errorf("a client's log-in names %q, want %s: %s", e.Principal, user, line)
		}
		most[e.Mechanism] = max(most[e.Mechanism], times[e.Connection])
		times[e.Connection]++
	}
	return most
}

// wantVerified runs `kmirror verify` on a topic, which must find both clusters equal, and can't tell with a wrong password.
func wantVerified(t *testing.T, topic, source, mirror string, logins ...string) {
	t.Helper()
	args := append([]string{"verify", "--source", source, "--mirror", mirror, "--topics", topic}, logins...)
	if code, out := testbed.Run(t, args...); code != 0 {
		t.Errorf("verify: exit code %d, want 0\n%s", code, out)
	}
	if i := slices.Index(args, "--mirror.sasl.password"); i >= 0 {
		args[i+1] = "wr0ng"
		if code, out := testbed.Run(t, args...); code != 2 || strings.Contains(out, "wr0ng") || !strings.Contains(out, "SASL_AUTHENTICATION_FAILED") {
			t.Errorf("verify with a wrong password: exit code %d, want 2 with the reason and without the password\n%s", code, out)
		}
	}
}

// rotatedPassword: the password of kmirror's own user changes on both clusters and in the file while it runs.
func rotatedPassword(t *testing.T, source, mirror secured) {
	const topic, name = "rotated-password", "rotator"
	kafkatest.CreateTopic(t, source, topic, 3, 1)
	file := filepath.Join(t.TempDir(), "password")
	rotate := func(secret string) {
		t.Helper()
		for _, c := range []secured{source, mirror} {
			c.setPassword(t, kadm.ScramSha512, name, secret)
		}
		replaceFile(t, file, secret+"\n")
	}
	rotate("first-s3cret")
	args := []string{"--topics", topic}
	for _, cluster := range []string{"source", "mirror"} {
		args = append(args, "--"+cluster+".sasl.mechanism", "SCRAM-SHA-512", "--"+cluster+".sasl.username", name, "--"+cluster+".sasl.password_file", file)
	}
	in := testbed.Start(t, source, mirror, args...)
	testbed.WaitLive(t, in, topic, 3)
	load := testbed.StartLoad(t, in.Seeds(), topic, 1, 100, 100, kgo.SASL(login("PLAIN", user, password)))
	for _, secret := range []string{"second-s3cret", "third-s3cret"} {
		rotate(secret)
		outlive(t)
		load.WaitAcked(100)
	}
	load.Stop()
	in.WaitCaughtUp(time.Minute)
	kafkatest.WaitEqual(t, source.RealCluster, mirror.RealCluster, topic, time.Minute, kafkatest.SameOffsets())
	if strings.Contains(in.Log(), "-s3cret") {
		t.Error("kmirror's log shows a password")
	}
}

// rotatedToken: tokens that hold for 8 s are replaced in their file in time, as an agent beside kmirror does it. kmirror lives longer than any of them.
func rotatedToken(t *testing.T, source, mirror secured) {
	const topic, valid = "rotated-token", 8 * time.Second
	kafkatest.CreateTopic(t, source, topic, 3, 1)
	file := filepath.Join(t.TempDir(), "token")
	rotate := func() { t.Helper(); replaceFile(t, file, token("kmirror", time.Now().Add(valid))) }
	rotate()
	in := testbed.Start(t, source, mirror, "--topics", topic, "--source.sasl.mechanism", "OAUTHBEARER", "--source.sasl.token_file", file,
		"--mirror.sasl.mechanism", "OAUTHBEARER", "--mirror.sasl.token_file", file)
	testbed.WaitLive(t, in, topic, 3)
	load := testbed.StartLoad(t, in.Seeds(), topic, 1, 100, 100, kgo.SASL(login("PLAIN", user, password)))
	for begun := time.Now(); time.Since(begun) < 2*valid; {
		rotate()
		load.WaitAcked(100) // takes a second
	}
	load.Stop()
	in.WaitCaughtUp(time.Minute)
	testbed.WaitLive(t, in, topic, 3)
	kafkatest.WaitEqual(t, source.RealCluster, mirror.RealCluster, topic, time.Minute, kafkatest.SameOffsets())
	if strings.Contains(in.Log(), "SASL_AUTHENTICATION_FAILED") {
		t.Error("a log-in failed, though the file always held a token that was good")
	}
	wantNoSecret(t, in.Log())
}

// loginsOverTLS has SASL over TLS on every connection: from clients, to the source, to the mirror, and of verify.
func loginsOverTLS(t *testing.T, source, mirror secured) {
	const topic = "logins-over-tls"
	kafkatest.CreateTopic(t, source, topic, 3, 1)
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	source.ca.issue(certFile, keyFile, 1, time.Hour)
	at := func(c secured) string { return c.Broker(1).Listener("SECURE") }
	own := append(ownLogin("source", "SCRAM-SHA-512"), ownLogin("mirror", "OAUTHBEARER")...)
	own = append(own, "--source.tls.enabled=true", "--source.tls.ca_file", source.ca.file, "--mirror.tls.enabled=true", "--mirror.tls.ca_file", mirror.ca.file)
	in := testbed.Start(t, seedsOf{source, []string{at(source)}}, seedsOf{mirror, []string{at(mirror)}},
		append([]string{"--topics", topic, "--proxy.tls.cert_file", certFile, "--proxy.tls.key_file", keyFile}, own...)...)
	testbed.WaitLive(t, in, topic, 3)
	trusting := in.TLS(source.ca.client(source.ca, 2))
	var loads []*testbed.Load
	for _, mechanism := range mechanisms {
		loads = append(loads, testbed.StartLoad(t, in.Seeds(), topic, 1, 100, 100, trusting, kgo.SASL(login(mechanism, user, password))))
	}
	outlive(t)
	for _, l := range loads {
		l.Stop()
	}
	in.WaitCaughtUp(time.Minute)
	kafkatest.WaitEqual(t, source.RealCluster, mirror.RealCluster, topic, time.Minute, kafkatest.SameOffsets())
	wantVerified(t, topic, at(source), at(mirror), own...)
	trusting = kgo.DialTLSConfig(source.ca.client(source.ca, 3)) // of both ways
	for name, opts := range map[string][]kgo.Opt{"wrong password": {trusting, kgo.SASL(login("SCRAM-SHA-256", user, "wr0ng"))}, "no log-in": {trusting}} {
		want := attempt(t, []string{at(source)}, opts...)
		if got := attempt(t, in.Seeds(), opts...); got != want || want == "served" {
			t.Errorf("%s: through the proxy %q, directly %q, want the same refusal", name, got, want)
		}
	}
	wantNoSecret(t, in.Log())
}

// outlive waits until every log-in has expired.
func outlive(t *testing.T) {
	t.Helper()
	begun := time.Now()
	kafkatest.Eventually(t, time.Minute, func() error {
		if time.Since(begun) < 2*reauthentication {
			return errors.New("log-ins haven't expired twice yet")
		}
		return nil
	})
}

// replaceFile changes a file as secrets are: by a rename.
func replaceFile(t *testing.T, file, text string) {
	t.Helper()
	err := os.WriteFile(file+".new", []byte(text), 0o600)
	if err == nil {
		err = os.Rename(file+".new", file)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// changedPassword: a password file that changes is read at the next log-in, also when none has succeeded yet.
func changedPassword(t *testing.T, source, mirror secured) {
	file := filepath.Join(t.TempDir(), "password")
	write := func(secret string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(secret+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("wr0ng")
	kafkatest.CreateTopic(t, source, "changed", 1, 1)
	in := testbed.New(t, source, mirror.RealCluster, "--topics", "changed", "--source.sasl.mechanism", "SCRAM-SHA-256", "--source.sasl.username", user,
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
			if want, got := refusedMechanism(t, direct[0]), refusedMechanism(t, in.Seeds()[0]); got != want {
				t.Errorf("a mechanism that isn't enabled: through the proxy %q, directly %q", got, want)
			} else {
				t.Logf("a mechanism that isn't enabled: %s", got)
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

// refusedMechanism is what SaslHandshake v1 says to a mechanism that no broker has: the error, and those that are enabled.
func refusedMechanism(t *testing.T, address string) string {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	handshake := kmsg.NewPtrSASLHandshakeRequest()
	handshake.Version, handshake.Mechanism = 1, "NONE"
	resp, err := exchange(c, handshake, 1)
	if err != nil {
		return outcome("handshake", err)
	}
	answer := resp.(*kmsg.SASLHandshakeResponse)
	return fmt.Sprintf("%v of %v", kerr.ErrorForCode(answer.ErrorCode), answer.SupportedMechanisms)
}

// seedsOf is a cluster that is reached at other addresses.
type seedsOf struct {
	kafkatest.Cluster
	seeds []string
}

func (c seedsOf) Seeds() []string { return c.seeds }
