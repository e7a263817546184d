package security

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"kmirror/internal/kafkatest"
	"kmirror/test/clients"
	"kmirror/test/testbed"
)

// logInCase is a log-in that a listener takes or refuses.
type logInCase struct {
	name, listener, mechanism, password string
	handshake                           int // of sarama: the version of SaslHandshake
}

var logInCases = []logInCase{
	{"right", "SASL", "SCRAM-SHA-512", password, 1},
	{"wrong PLAIN", "SASL", "PLAIN", "wr0ng", 1},
	{"wrong SCRAM", "SASL", "SCRAM-SHA-256", "wr0ng", 1},
	{"disabled mechanism", "FEW", "SCRAM-SHA-256", password, 1},
	{"listener without log-ins", "PLAINTEXT", "PLAIN", password, 1},
}

// saramaCases are without SCRAM, which sarama leaves to other libraries.
var saramaCases = []logInCase{
	{"right", "SASL", "PLAIN", password, 1},
	{"right, handshake v0", "SASL", "PLAIN", password, 0},
	{"wrong PLAIN", "SASL", "PLAIN", "wr0ng", 1},
	{"wrong PLAIN, handshake v0", "SASL", "PLAIN", "wr0ng", 0},
	{"expired token", "SASL", "OAUTHBEARER", token(user, time.Now().Add(-time.Minute)), 1},
	{"disabled mechanism", "FEW", "OAUTHBEARER", token(user, time.Now().Add(time.Hour)), 1},
	{"listener without log-ins", "PLAINTEXT", "PLAIN", password, 1},
}

// TestForeignClientsRefused is case C29 with clients of other makes: each sees the same error through the proxy as directly.
func TestForeignClientsRefused(t *testing.T) {
	source := startSecured(t)
	broker := source.Broker(1)
	at := map[string]string{"SASL": broker.Listener("SASL"), "FEW": broker.Listener("FEW"), "PLAINTEXT": broker.Addr}
	instances := map[string]*testbed.Instance{}
	for listener, addr := range at {
		in := testbed.New(t, seedsOf{source, []string{addr}}, source, "--roles", "proxy", "--name", strings.ToLower(listener), "--log.level", "debug")
		if err := in.Launch(); err != nil {
			t.Fatal(err)
		}
		kafkatest.Eventually(t, 30*time.Second, func() error { _, err := in.AskStatus(); return err })
		instances[listener] = in
	}
	programs := map[string]func(*testing.T, string, logInCase) *exec.Cmd{"java": javaLogIn, "confluent-kafka": pythonLogIn("confluent-kafka"), "kafka-python": pythonLogIn("kafka-python"), "sarama": saramaLogIn}
	for name, client := range programs {
		cases := logInCases
		if name == "sarama" {
			cases = saramaCases
		}
		for _, c := range cases {
			t.Run(name+"/"+c.name, func(t *testing.T) {
				direct, proxied := client(t, at[c.listener], c), client(t, instances[c.listener].Seeds()[0], c)
				var want, got string
				var wantTook, gotTook time.Duration
				begun := time.Now()
				var g errgroup.Group
				g.Go(func() error { want, wantTook = refusal(direct), time.Since(begun); return nil })
				g.Go(func() error { got, gotTook = refusal(proxied), time.Since(begun); return nil })
				_ = g.Wait() // the outcome is what is compared
				if got != want || want == "" {
					t.Errorf("through the proxy %q, directly %q", got, want)
				}
				t.Logf("%s; directly after %v, through the proxy after %v", want, wantTook, gotTook)
				if served := strings.Contains(want, "served"); served != strings.HasPrefix(c.name, "right") {
					t.Errorf("directly: %q", want)
				}
			})
		}
	}
	for _, in := range instances {
		wantNoSecret(t, in.Log())
		kafkatest.Eventually(t, 30*time.Second, func() error {
			if n := in.Metrics()["kmirror_proxy_connections"]; n != 0 {
				return fmt.Errorf("%v connections are left", n)
			}
			return nil
		})
	}
}

var (
	addresses  = regexp.MustCompile(`\S*127\.0\.0\.1\S*`)
	javaErrors = regexp.MustCompile(`org\.apache\.kafka\.\S*Exception.*`)
)

// refusal runs a client and returns the errors that it names, without addresses.
func refusal(cmd *exec.Cmd) string {
	out, err := cmd.CombinedOutput()
	text := addresses.ReplaceAllString(string(out), "BROKER")
	if !strings.HasSuffix(cmd.Path, "java") {
		return strings.TrimSpace(text)
	}
	if err == nil {
		return "served"
	}
	found := javaErrors.FindAllString(text, -1)
	slices.Sort(found)
	return strings.Join(slices.Compact(found), "\n")
}

func javaLogIn(t *testing.T, bootstrap string, c logInCase) *exec.Cmd {
	module := "scram.ScramLoginModule"
	if c.mechanism == "PLAIN" {
		module = "plain.PlainLoginModule"
	}
	file := filepath.Join(t.TempDir(), "client.properties")
	text := fmt.Sprintf("security.protocol=SASL_PLAINTEXT\nsasl.mechanism=%s\nrequest.timeout.ms=15000\ndefault.api.timeout.ms=30000\n"+
		"sasl.jaas.config=org.apache.kafka.common.security.%s required username=\"%s\" password=\"%s\";\n", c.mechanism, module, user, c.password)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return kafkatest.ToolCommand(t, "org.apache.kafka.tools.TopicCommand", "--bootstrap-server", bootstrap, "--command-config", file, "--list")
}

func saramaLogIn(t *testing.T, bootstrap string, c logInCase) *exec.Cmd {
	return clients.SaramaLogIn(t, bootstrap, c.mechanism, c.handshake, user, c.password)
}

// pythonLogIn runs a client of Python's, skipped where `make deps` didn't install it, but not on CI.
func pythonLogIn(library string) func(*testing.T, string, logInCase) *exec.Cmd {
	return func(t *testing.T, bootstrap string, c logInCase) *exec.Cmd {
		root := kafkatest.Root(t)
		python := filepath.Join(root, ".cache", "venv", "bin", "python")
		if _, err := os.Stat(python); err != nil && os.Getenv("CI") == "" {
			t.Skipf("%v; `make deps` installs it", err)
		}
		return exec.CommandContext(t.Context(), python, "-B", filepath.Join(root, "test", "security", "refused.py"), library, bootstrap, c.mechanism, user, c.password)
	}
}
