package security

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

const (
	realm       = "KMIRROR.TEST"
	toolTimeout = time.Minute
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
[realms]
  %[1]s = {
    kdc = %[2]s
  }
`, realm, at)
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

// keytab adds a principal and returns the file of its keys.
func (k *kdc) keytab(principal string) string {
	k.t.Helper()
	file := filepath.Join(k.dir, strings.ReplaceAll(principal, "/", "_")+".keytab")
	k.run("kadmin.local", "-r", realm, "-q", "addprinc -randkey "+principal)
	k.run("kadmin.local", "-r", realm, "-q", "ktadd -k "+file+" "+principal)
	return file
}

// login is a login module's configuration in Java.
func (k *kdc) login(principal, keytab string) string {
	return fmt.Sprintf(`com.sun.security.auth.module.Krb5LoginModule required useKeyTab=true storeKey=true keyTab="%s" principal="%s@%s";`, keytab, principal, realm)
}

// jvmFlag tells a JVM of the realm.
func (k *kdc) jvmFlag() string { return "-Djava.security.krb5.conf=" + k.config }

// TestKerberos: Java clients log in with GSSAPI through the proxy, as they do directly, and again in mid-connection. A client with a ticket for another
// service is refused as directly.
func TestKerberos(t *testing.T) {
	k := startKDC(t)
	host := "127.0.0.1"
	if names, err := net.LookupAddr(host); err == nil && len(names) > 0 { // as Java's clients do
		host = strings.TrimSuffix(names[0], ".")
	}
	broker := "kafka/" + host
	k.keytab("other/" + host) // whose keys the broker doesn't have
	source := kafkatest.Real(t, kafkatest.Listener("KRB", "SASL_PLAINTEXT"), kafkatest.JVM(k.jvmFlag()),
		kafkatest.Config("listener.name.krb.sasl.enabled.mechanisms", "GSSAPI"), kafkatest.Config("listener.name.krb.sasl.kerberos.service.name", "kafka"),
		kafkatest.Config("listener.name.krb.gssapi.sasl.jaas.config", k.login(broker, k.keytab(broker))),
		kafkatest.Config("listener.name.krb.connections.max.reauth.ms", fmt.Sprint(reauthentication.Milliseconds())))
	const topic = "kerberos"
	kafkatest.CreateTopic(t, source, topic, 1, 1)
	direct := source.Broker(1).Listener("KRB")
	accessLog := filepath.Join(t.TempDir(), "access.log")
	in := testbed.New(t, seedsOf{source, []string{direct}}, source, "--roles", "proxy", "--log.access", accessLog)
	if err := in.Launch(); err != nil {
		t.Fatal(err)
	}
	kafkatest.Eventually(t, 30*time.Second, func() error { _, err := in.AskStatus(); return err })

	properties := filepath.Join(k.dir, "client.properties")
	k.write("client.properties", "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=GSSAPI\nsasl.kerberos.service.name=kafka\nsasl.jaas.config=%s\n",
		k.login("alice", k.keytab("alice")))
	k.write("wrong.properties", "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=GSSAPI\nsasl.kerberos.service.name=other\nsasl.jaas.config=%s\n"+
		"request.timeout.ms=10000\ndefault.api.timeout.ms=20000\n", k.login("alice", filepath.Join(k.dir, "alice.keytab")))
	run := func(class string, args ...string) (string, error) {
		cmd := kafkatest.ToolCommand(t, class, args...)
		cmd.Args = slices.Insert(cmd.Args, 1, k.jvmFlag())
		timer := time.AfterFunc(toolTimeout, func() { cmd.Process.Kill() })
		defer timer.Stop()
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	const records = 3000 // at 400 a second they outlive two log-ins
	for _, bootstrap := range []string{direct, in.Seeds()[0]} {
		out, err := run("org.apache.kafka.tools.ProducerPerformance", "--topic", topic, "--num-records", fmt.Sprint(records), "--record-size", "100",
			"--throughput", "400", "--command-config", properties, "--bootstrap-server", bootstrap)
		if err != nil || !strings.Contains(out, fmt.Sprintf("%d records sent", records)) || strings.Contains(out, "Exception") {
			t.Errorf("a producer with GSSAPI at %s: %v\n%s", bootstrap, err, out)
		}
	}
	if end := kafkatest.LogOffsets(t, source, topic)[0].End; end != 2*records {
		t.Errorf("the source has %d records, want %d", end, 2*records)
	}
	access, err := os.ReadFile(accessLog)
	if n := strings.Count(string(access), `"mechanism":"GSSAPI"`); err != nil || n < 3 {
		t.Errorf("the access log tells of %d log-ins with GSSAPI (%v), want at least 3: in mid-connection too\n%s", n, err, access)
	}
	refusals := map[string]string{}
	for _, bootstrap := range []string{direct, in.Seeds()[0]} {
		out, err := run("org.apache.kafka.tools.TopicCommand", "--bootstrap-server", bootstrap, "--command-config", filepath.Join(k.dir, "wrong.properties"), "--list")
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
