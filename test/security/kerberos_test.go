package security

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/sasl"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

const (
	realm       = "KMIRROR.TEST"
	toolTimeout = time.Minute
	clockSkew   = 15 * time.Second // for which brokers still take a ticket that expired
	ticketLife  = 5 * time.Second  // of the principal mayfly
)

// kdc is MIT's key distribution centre (Debian's krb5-kdc), on loopback, with a database of its own.
type kdc struct {
	t      testing.TB
	dir    string
	config string // krb5.conf, for brokers and clients
	env    []string
}

// startKDC is skipped where `make deps` didn't install it, but not on CI.
func startKDC(t testing.TB) *kdc {
	t.Helper()
	for _, program := range []string{"krb5kdc", "kdb5_util", "kadmin.local"} {
		if _, err := exec.LookPath(program); err != nil {
			if os.Getenv("CI") != "" {
				t.Fatal(err)
			}
			t.Skipf("%v; `make deps` installs it", err)
		}
	}
	k := &kdc{t: t, dir: t.TempDir()}
	k.config = filepath.Join(k.dir, "krb5.conf")
	at := testbed.Loopback(kafkatest.PortBlock(t, 1))
	k.write("krb5.conf", `[libdefaults]
  default_realm = %[1]s
  dns_lookup_kdc = false
  dns_lookup_realm = false
  dns_canonicalize_hostname = false
  rdns = false
  udp_preference_limit = 1
  clockskew = %[3]d
[realms]
  %[1]s = {
    kdc = %[2]s
  }
`, realm, at, int(clockSkew.Seconds()))
	k.write("kdc.conf", `[kdcdefaults]
  kdc_listen = ""
  kdc_tcp_listen = %[2]s
[realms]
  %[1]s = {
    database_name = %[3]s/principal
    key_stash_file = %[3]s/stash
    acl_file = %[3]s/acl
    supported_enctypes = aes256-cts-hmac-sha1-96:normal
  }
`, realm, at, k.dir)
	k.env = append(os.Environ(), "KRB5_CONFIG="+k.config, "KRB5_KDC_PROFILE="+filepath.Join(k.dir, "kdc.conf"))
	k.run("kdb5_util", "create", "-r", realm, "-s", "-P", "master")
	server := k.command("krb5kdc", "-n", "-r", realm, "-P", filepath.Join(k.dir, "pid"))
	log, err := os.Create(filepath.Join(k.dir, "log"))
	if err == nil {
		server.Stdout, server.Stderr = log, log
		err = kafkatest.Spawn(server)
	}
	if err != nil {
		t.Fatal(err)
	}
	log.Close()
	t.Cleanup(func() {
		_ = server.Process.Kill()
		_ = server.Wait() // how it ended doesn't matter
	})
	kafkatest.Eventually(t, 10*time.Second, func() error {
		c, err := net.Dial("tcp", at)
		if err == nil {
			c.Close()
		}
		return err
	})
	return k
}

func (k *kdc) write(name, format string, args ...any) {
	k.t.Helper()
	if err := os.WriteFile(filepath.Join(k.dir, name), fmt.Appendf(nil, format, args...), 0o600); err != nil {
		k.t.Fatal(err)
	}
}

func (k *kdc) command(program string, args ...string) *exec.Cmd {
	cmd := exec.Command(program, args...)
	cmd.Env = k.env
	return cmd
}

func (k *kdc) run(program string, args ...string) {
	k.t.Helper()
	if out, err := k.command(program, args...).CombinedOutput(); err != nil {
		k.t.Fatalf("%s %q: %v\n%s", program, args, err, out)
	}
}

// keytab adds a principal, with options of kadmin's, and returns the file of its keys.
func (k *kdc) keytab(principal string, options ...string) string {
	k.t.Helper()
	file := filepath.Join(k.dir, strings.ReplaceAll(principal, "/", "_")+".keytab")
	k.run("kadmin.local", "-r", realm, "-q", "addprinc -randkey "+strings.Join(append(options, principal), " "))
	k.run("kadmin.local", "-r", realm, "-q", "ktadd -k "+file+" "+principal)
	return file
}

// login is a login module's configuration in Java.
func (k *kdc) login(principal, keytab string) string {
	return fmt.Sprintf(`com.sun.security.auth.module.Krb5LoginModule required useKeyTab=true storeKey=true keyTab="%s" principal="%s@%s";`, keytab, principal, realm)
}

// jvmFlag tells a JVM of the realm.
func (k *kdc) jvmFlag() string { return "-Djava.security.krb5.conf=" + k.config }

// kerberized is a cluster of one broker that takes GSSAPI alone: on KRB, with re-authentication, and on OLD, without.
type kerberized struct {
	*kdc
	*kafkatest.RealCluster
	host string // as Java's clients name the broker
}

func startKerberized(t *testing.T) kerberized {
	t.Helper()
	k := kerberized{kdc: startKDC(t), host: "127.0.0.1"}
	if names, err := net.LookupAddr(k.host); err == nil && len(names) > 0 {
		k.host = strings.TrimSuffix(names[0], ".")
	}
	broker := "kafka/" + k.host
	k.keytab("other/" + k.host) // whose keys the broker doesn't have
	login := k.login(broker, k.keytab(broker))
	options := []kafkatest.Option{kafkatest.JVM(k.jvmFlag()), kafkatest.Config("listener.name.krb.connections.max.reauth.ms", fmt.Sprint(reauthentication.Milliseconds()))}
	for _, listener := range []string{"KRB", "OLD"} {
		prefix := "listener.name." + strings.ToLower(listener) + "."
		options = append(options, kafkatest.Listener(listener, "SASL_PLAINTEXT"), kafkatest.Config(prefix+"sasl.enabled.mechanisms", "GSSAPI"),
			kafkatest.Config(prefix+"sasl.kerberos.service.name", "kafka"), kafkatest.Config(prefix+"gssapi.sasl.jaas.config", login))
	}
	k.RealCluster = kafkatest.Real(t, options...)
	return k
}

// proxied starts a proxy before a listener.
func (k kerberized) proxied(t *testing.T, listener string, args ...string) *testbed.Instance {
	t.Helper()
	in := testbed.New(t, seedsOf{k, []string{k.Broker(1).Listener(listener)}}, k, append([]string{"--roles", "proxy", "--name", strings.ToLower(listener)}, args...)...)
	if err := in.Launch(); err != nil {
		t.Fatal(err)
	}
	kafkatest.Eventually(t, 30*time.Second, func() error { _, err := in.AskStatus(); return err })
	return in
}

// run runs a Java program that knows the realm.
func (k kerberized) run(cmd *exec.Cmd) (string, error) {
	cmd.Args = slices.Insert(cmd.Args, 1, k.jvmFlag())
	timer := time.AfterFunc(toolTimeout, func() { cmd.Process.Kill() })
	defer timer.Stop()
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// TestKerberos: Java clients log in with GSSAPI through the proxy, as they do directly, and again in mid-connection. A client with a ticket for another
// service is refused as directly. So it is with SaslHandshake v0, where GSSAPI's tokens have no headers, and the last one no answer (KIP-43): clients of
// Kafka 0.11 do it so, and a client of our own, which is refused with a ticket for another service or one that has expired, as directly.
func TestKerberos(t *testing.T) {
	k := startKerberized(t)
	alice := k.keytab("alice")
	tokens := kafkatest.CompileJava(t, filepath.Join(kafkatest.Root(t), "test", "security", "java"))
	mayfly := k.keytab("mayfly", "-maxlife", fmt.Sprintf(`"%d seconds"`, int(ticketLife.Seconds())))
	var expiring [2]*gssSession
	for i := range expiring {
		expiring[i] = k.begin(t, tokens, "kafka", "mayfly", mayfly)
	}
	expired := time.Now().Add(ticketLife + clockSkew + time.Second)
	t.Run("handshake v1", func(t *testing.T) { k.handshakeV1(t, alice) })
	t.Run("handshake v0", func(t *testing.T) {
		in := k.proxied(t, "OLD", "--log.level", "debug")
		ways := [2]string{k.Broker(1).Listener("OLD"), in.Seeds()[0]}
		k.oldClients(t, ways, alice)
		kafkatest.Eventually(t, time.Minute, func() error { // waits for nothing but the time, if the above didn't take it
			if left := time.Until(expired); left > 0 {
				return fmt.Errorf("the ticket expires in %v", left)
			}
			return nil
		})
		for name, begin := range map[string]func(i int) *gssSession{
			"good":            func(int) *gssSession { return k.begin(t, tokens, "kafka", "alice", alice) },
			"another service": func(int) *gssSession { return k.begin(t, tokens, "other", "alice", alice) },
			"expired":         func(i int) *gssSession { return expiring[i] },
		} {
			var outcomes [2]string
			for i, address := range ways {
				outcomes[i] = logInV0With(t, address, nil, "GSSAPI", func() (sasl.Session, []byte, error) { s := begin(i); return s, s.first, nil })
			}
			if outcomes[0] != outcomes[1] || strings.HasPrefix(outcomes[0], "served") != (name == "good") {
				t.Errorf("%s ticket: through the proxy %q, directly %q", name, outcomes[1], outcomes[0])
			}
			t.Logf("%s ticket: %s", name, outcomes[0])
		}
		kafkatest.Eventually(t, 30*time.Second, func() error {
			if m := in.Metrics(); m["kmirror_proxy_connections"] != 0 || m["kmirror_proxy_requests_in_flight"] != 0 {
				return fmt.Errorf("%v connections and %v requests are left", m["kmirror_proxy_connections"], m["kmirror_proxy_requests_in_flight"])
			}
			return nil
		})
	})
}

func (k kerberized) handshakeV1(t *testing.T, alice string) {
	const topic = "kerberos"
	kafkatest.CreateTopic(t, k, topic, 1, 1)
	accessLog := filepath.Join(t.TempDir(), "access.log")
	in := k.proxied(t, "KRB", "--log.access", accessLog)
	direct := k.Broker(1).Listener("KRB")
	properties := filepath.Join(k.dir, "client.properties")
	k.write("client.properties", "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=GSSAPI\nsasl.kerberos.service.name=kafka\nsasl.jaas.config=%s\n", k.login("alice", alice))
	k.write("wrong.properties", "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=GSSAPI\nsasl.kerberos.service.name=other\nsasl.jaas.config=%s\n"+
		"request.timeout.ms=10000\ndefault.api.timeout.ms=20000\n", k.login("alice", alice))
	const records = 3000 // at 400 a second they outlive two log-ins
	for _, bootstrap := range []string{direct, in.Seeds()[0]} {
		out, err := k.run(kafkatest.ToolCommand(t, "org.apache.kafka.tools.ProducerPerformance", "--topic", topic, "--num-records", fmt.Sprint(records), "--record-size", "100",
			"--throughput", "400", "--command-config", properties, "--bootstrap-server", bootstrap))
		if err != nil || !strings.Contains(out, fmt.Sprintf("%d records sent", records)) || strings.Contains(out, "Exception") {
			t.Errorf("a producer with GSSAPI at %s: %v\n%s", bootstrap, err, out)
		}
	}
	if end := kafkatest.LogOffsets(t, k, topic)[0].End; end != 2*records {
		t.Errorf("the source has %d records, want %d", end, 2*records)
	}
	access, err := os.ReadFile(accessLog)
	if n := strings.Count(string(access), `"mechanism":"GSSAPI"`); err != nil || n < 3 {
		t.Errorf("the access log tells of %d log-ins with GSSAPI (%v), want at least 3: in mid-connection too\n%s", n, err, access)
	}
	refusals := map[string]string{}
	for _, bootstrap := range []string{direct, in.Seeds()[0]} {
		out, err := k.run(kafkatest.ToolCommand(t, "org.apache.kafka.tools.TopicCommand", "--bootstrap-server", bootstrap, "--command-config", filepath.Join(k.dir, "wrong.properties"), "--list"))
		if err == nil {
			t.Errorf("a client with a ticket for another service is served at %s:\n%s", bootstrap, out)
		}
		found := javaErrors.FindAllString(addresses.ReplaceAllString(out, "BROKER"), -1)
		slices.Sort(found)
		refusals[bootstrap] = strings.Join(slices.Compact(found), "\n")
	}
	if got, want := refusals[in.Seeds()[0]], refusals[direct]; got != want || want == "" {
		t.Errorf("refused through the proxy with %q, directly with %q", got, want)
	}
}

// oldClients: Kafka's own clients of 0.11 produce, consume and commit.
func (k kerberized) oldClients(t *testing.T, ways [2]string, alice string) {
	old := kafkatest.OldKafkas["0.11"].CompileJava(t, filepath.Join(kafkatest.Root(t), "test", "matrix", "old"))
	var transcripts [2]string
	for i, bootstrap := range ways {
		topic := fmt.Sprint("old-kerberos-", i)
		kafkatest.CreateTopic(t, k, topic, 3, 1, "retention.ms", "-1") // the records are of 1970
		out, err := k.run(old.Command(t, "OldClient", bootstrap, topic, "security.protocol=SASL_PLAINTEXT", "sasl.mechanism=GSSAPI", "sasl.kerberos.service.name=kafka",
			"sasl.jaas.config="+k.login("alice", alice)))
		if err != nil {
			t.Errorf("a client of Kafka 0.11 at %s: %v\n%s", bootstrap, err, out)
		}
		transcripts[i] = strings.ReplaceAll(out, topic, "TOPIC")
	}
	if transcripts[0] != transcripts[1] || strings.Contains(transcripts[0], "Exception") || strings.Count(transcripts[0], "\n") < 100 {
		t.Errorf("Kafka 0.11 with GSSAPI: directly\n%s\nthrough the proxy\n%s", transcripts[0], transcripts[1])
	}
}

// gssSession is a client's side of a log-in, which test/security/java/Tokens plays.
type gssSession struct {
	first  []byte // token
	cmd    *exec.Cmd
	stdin  io.Writer
	stdout *bufio.Scanner
	stderr bytes.Buffer
}

// begin has the first token of a log-in made.
func (k kerberized) begin(t *testing.T, program kafkatest.JavaProgram, service, principal, keytab string) *gssSession {
	t.Helper()
	s := &gssSession{cmd: program.Command(t, "Tokens", service, k.host, principal, keytab)}
	s.cmd.Args = slices.Insert(s.cmd.Args, 1, k.jvmFlag())
	s.cmd.Stderr = &s.stderr
	stdin, err := s.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := s.cmd.StdoutPipe()
	if err == nil {
		err = kafkatest.Spawn(s.cmd)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.cmd.Wait() }) // it's killed when the test ends
	s.stdin, s.stdout = stdin, bufio.NewScanner(stdout)
	if _, s.first, err = s.Challenge(nil); err != nil {
		t.Fatal(err)
	}
	return s
}

// Challenge implements sasl.Session.
func (s *gssSession) Challenge(challenge []byte) (done bool, token []byte, err error) {
	if _, err := fmt.Fprintln(s.stdin, base64.StdEncoding.EncodeToString(challenge)); err != nil {
		return false, nil, err
	}
	if !s.stdout.Scan() {
		return false, nil, fmt.Errorf("no token: %w\n%s", s.cmd.Wait(), s.stderr.String())
	}
	which, text, _ := strings.Cut(s.stdout.Text(), " ")
	token, err = base64.StdEncoding.DecodeString(text)
	return which == "last", token, err
}
