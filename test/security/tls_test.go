package security

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// authority signs certificates into PEM files.
type authority struct {
	t    testing.TB
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	file string
}

func newAuthority(t testing.TB, name string) *authority {
	t.Helper()
	a := &authority{t: t, file: filepath.Join(t.TempDir(), name+".pem")}
	a.key = newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &a.key.PublicKey, a.key)
	if err == nil {
		a.cert, err = x509.ParseCertificate(der)
	}
	if err != nil {
		t.Fatal(err)
	}
	writePEM(t, a.file, "CERTIFICATE", der)
	return a
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// writePEM replaces a file as a certificate manager does: by a rename.
func writePEM(t testing.TB, file, kind string, der []byte) {
	t.Helper()
	err := os.WriteFile(file+".new", pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
	if err == nil {
		err = os.Rename(file+".new", file)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// issue writes a certificate for hosts and both loopback addresses, and its key.
func (a *authority) issue(certFile, keyFile string, serial int64, valid time.Duration, hosts ...string) {
	a.t.Helper()
	key := newKey(a.t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: fmt.Sprintf("number-%d", serial)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(valid), DNSNames: hosts, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	writePEM(a.t, keyFile, "PRIVATE KEY", keyDER)
	writePEM(a.t, certFile, "CERTIFICATE", der)
}

// client is a TLS configuration with a certificate of a's.
func (a *authority) client(trust *authority, serial int64) *tls.Config {
	a.t.Helper()
	dir := a.t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	a.issue(certFile, keyFile, serial, time.Hour)
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		a.t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(trust.cert)
	return &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: roots}
}

// brokerSettings are those of a broker's listener with a certificate of a's, which trusts a's.
func (a *authority) brokerSettings() map[string]string {
	a.t.Helper()
	dir := a.t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	a.issue(certFile, keyFile, 1000, time.Hour)
	store := filepath.Join(dir, "store.pem")
	var text []byte
	for _, file := range []string{keyFile, certFile, a.file} {
		part, err := os.ReadFile(file)
		if err != nil {
			a.t.Fatal(err)
		}
		text = append(text, part...)
	}
	if err := os.WriteFile(store, text, 0o600); err != nil {
		a.t.Fatal(err)
	}
	return map[string]string{"ssl.keystore.type": "PEM", "ssl.keystore.location": store, "ssl.truststore.type": "PEM", "ssl.truststore.location": a.file}
}

// startTLS starts a cluster whose listener TLS wants certificates of a's, and returns its address beside it.
func startTLS(t testing.TB, a *authority) (cluster *kafkatest.RealCluster, secure kafkatest.Cluster) {
	t.Helper()
	options := []kafkatest.Option{kafkatest.Listener("TLS", "SSL"), kafkatest.Config("listener.name.tls.ssl.client.auth", "required")}
	for key, value := range a.brokerSettings() {
		options = append(options, kafkatest.Config("listener.name.tls."+key, value))
	}
	cluster = kafkatest.Real(t, options...)
	return cluster, seedsOf{cluster, []string{cluster.Broker(1).Listener("TLS")}}
}

// TestTLSEverywhere is case C30: mutual TLS from clients to kmirror and from kmirror to both clusters. Certificates are replaced while it runs; a pair that
// doesn't match leaves the old one in use and is said; after the first certificates have expired everything still works. An untrusted client is refused.
func TestTLSEverywhere(t *testing.T) {
	ca, other := newAuthority(t, "ca"), newAuthority(t, "other")
	source, secureSource := startTLS(t, ca)
	mirror, secureMirror := startTLS(t, ca)
	dir := t.TempDir()
	file := func(name string) string { return filepath.Join(dir, name) }
	const valid = 45 * time.Second
	ca.issue(file("proxy.pem"), file("proxy-key.pem"), 1, valid)
	ca.issue(file("own.pem"), file("own-key.pem"), 2, valid)
	args := []string{"--topics", "secure", "--proxy.tls.cert_file", file("proxy.pem"), "--proxy.tls.key_file", file("proxy-key.pem"), "--proxy.tls.client_ca_file", ca.file}
	for _, cluster := range []string{"source", "mirror"} {
		args = append(args, "--"+cluster+".tls.enabled=true", "--"+cluster+".tls.ca_file", ca.file, "--"+cluster+".tls.cert_file", file("own.pem"),
			"--"+cluster+".tls.key_file", file("own-key.pem"))
	}
	kafkatest.CreateTopic(t, source, "secure", 3, 1)
	begun := time.Now()
	in := testbed.Start(t, secureSource, secureMirror, args...)
	testbed.WaitLive(t, in, "secure", 3)
	trusted := in.TLS(ca.client(ca, 3))
	load := testbed.StartLoad(t, in.Seeds(), "secure", 2, 200, 100, trusted)
	load.WaitAcked(500)

	ca.issue(file("own.pem"), file("unused-key.pem"), 10, time.Hour)                     // doesn't match the key of kmirror's own certificate
	kafkatest.Eventually(t, 10*time.Second, func() error { return reloadErrors(in, 2) }) // the source's and the mirror's, though nobody connects
	ca.issue(file("proxy.pem"), file("unused-key.pem"), 4, time.Hour)                    // doesn't match the key
	served := func() string {
		c, err := tls.Dial("tcp", in.Seeds()[0], ca.client(ca, 5))
		if err != nil {
			return err.Error()
		}
		defer c.Close()
		return c.ConnectionState().PeerCertificates[0].Subject.CommonName
	}
	wantOldPair(t, in, "a pair that doesn't match", 3, served)
	if err := os.Remove(file("proxy-key.pem")); err != nil {
		t.Fatal(err)
	}
	wantOldPair(t, in, "a key that can't be read", 4, served)
	if !strings.Contains(in.Log(), "the ones before stay in use") {
		t.Error("the log doesn't say that the files aren't usable")
	}
	ca.issue(file("proxy.pem"), file("proxy-key.pem"), 6, time.Hour)
	ca.issue(file("own.pem"), file("own-key.pem"), 7, time.Hour)
	kafkatest.Eventually(t, 10*time.Second, func() error {
		if got := served(); got != "number-6" {
			return fmt.Errorf("the proxy shows %s, want the new certificate", got)
		}
		return nil
	})
	kafkatest.Eventually(t, time.Minute, func() error {
		if time.Since(begun) < valid+time.Second {
			return fmt.Errorf("the first certificates haven't expired yet")
		}
		return nil
	})
	mirror.Broker(1).Restart(t) // every connection to it is made anew, with the new certificate
	load.WaitAcked(500)
	testbed.Write(t, in.Seeds(), "secure", "late", 100, trusted)
	load.Stop()
	in.WaitCaughtUp(time.Minute)
	kafkatest.WaitEqual(t, source, mirror, "secure", time.Minute, kafkatest.SameOffsets())
	wantRefused(t, in, ca, other)
}

// wantRefused fails unless a client of another authority than ca is refused, and one of an old TLS.
func wantRefused(t *testing.T, in *testbed.Instance, ca, other *authority) {
	t.Helper()
	untrusted := other.client(ca, 8)
	// By itself Go's client doesn't show a certificate of an authority that the server doesn't name.
	untrusted.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &untrusted.Certificates[0], nil }
	c, err := tls.Dial("tcp", in.Seeds()[0], untrusted)
	if err == nil { // TLS 1.3: the refusal comes behind the client's handshake
		_, err = c.Read(make([]byte, 1))
		c.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a client of another authority gets %v, want its certificate refused", err)
	}
	kafkatest.Eventually(t, 30*time.Second, func() error { // the line comes behind the close
		if n := testbed.CountLines(in.Log(), "connection closed", "127.0.0.1", "certificate signed by unknown authority"); n != 1 {
			return fmt.Errorf("%d log lines about the client whose certificate is refused, want one", n)
		}
		return nil
	})
	old := ca.client(ca, 9)
	old.MinVersion, old.MaxVersion = tls.VersionTLS10, tls.VersionTLS11
	if c, err := tls.Dial("tcp", in.Seeds()[0], old); err == nil || !strings.Contains(err.Error(), "remote error: tls: protocol version") {
		if err == nil {
			c.Close()
		}
		t.Errorf("a client of TLS 1.1: %v, want it refused by the proxy", err)
	}
}

// wantOldPair waits until the proxy has found its new files unusable, as errors counts; until then and then it shows the first pair.
func wantOldPair(t *testing.T, in *testbed.Instance, what string, errors float64, served func() string) {
	t.Helper()
	kafkatest.Eventually(t, 10*time.Second, func() error {
		if got := served(); got != "number-1" {
			t.Fatalf("with %s, the proxy shows %s, want the old one", what, got)
		}
		return reloadErrors(in, errors)
	})
}

func reloadErrors(in *testbed.Instance, want float64) error {
	if n := in.Metrics()["kmirror_tls_reload_errors_total"]; n != want {
		return fmt.Errorf("%v unusable files counted, want %v", n, want)
	}
	return nil
}

// TestServerNames: one port for two brokers, each reached under its own name, by a client that resolves these names to the proxy.
func TestServerNames(t *testing.T) {
	ca := newAuthority(t, "ca")
	source := kafkatest.Real(t, kafkatest.Brokers(3))
	_, mirror := kafkatest.Shared(t)
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	ca.issue(certFile, keyFile, 1, time.Hour, "kafka.example.com", "broker-1.example.com", "broker-2.example.com", "broker-3.example.com")
	kafkatest.CreateTopic(t, source, "names", 6, 3)
	in := testbed.Start(t, source, mirror, "--topics", "names", "--topics.replication_factor", "1", "--proxy.tls.cert_file", certFile, "--proxy.tls.key_file", keyFile,
		"--proxy.advertise", "kafka.example.com", "--proxy.sni.pattern", "broker-{id}.example.com", "--broker-port-base", "0")
	_, port, err := net.SplitHostPort(in.Seeds()[0])
	if err != nil {
		t.Fatal(err)
	}
	names := &dialedNames{port: port, tls: ca.client(ca, 2), watch: in.Watch}
	testbed.Write(t, []string{"kafka.example.com:" + port}, "names", "n", 600, kgo.Dialer(names.dial))
	in.WaitCaughtUp(time.Minute)
	kafkatest.WaitEqual(t, source, mirror, "names", time.Minute, kafkatest.SameOffsets())
	for id := range 3 {
		if name := fmt.Sprintf("broker-%d.example.com", id+1); !names.seen(name) {
			t.Errorf("the client never dialled %s", name)
		}
	}
}
