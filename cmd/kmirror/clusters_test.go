package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/scram"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kmirror/config"
	"kmirror/internal/kafkatest"
)

// writePair writes a self-signed certificate for 127.0.0.1 and its key, and returns the certificate.
func writePair(t *testing.T, certFile, keyFile, name string) *x509.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	writePEM(t, certFile, "CERTIFICATE", der)
	writePEM(t, keyFile, "PRIVATE KEY", keyDER)
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return certificate
}

func writePEM(t *testing.T, file, kind string, der []byte) {
	t.Helper()
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}

// commonName is that of a pair's certificate now.
func commonName(t *testing.T, pair *watched[*tls.Certificate]) string {
	t.Helper()
	certificate, err := x509.ParseCertificate(pair.current().Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	return certificate.Subject.CommonName
}

func TestKeyPairFollowsItsFiles(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	writePair(t, certFile, keyFile, "first")
	log, logs := observedLog()
	report := newFileReports(log, prometheus.NewRegistry())
	pair, err := newKeyPair(report, certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	recheck := func() { pair.checked = time.Time{} } // as if a second had passed
	if got := commonName(t, pair); got != "first" {
		t.Errorf("name = %s, want first", got)
	}
	later := time.Now().Add(time.Minute)
	writePair(t, certFile, filepath.Join(dir, "new-key.pem"), "second")
	if err := os.Chtimes(certFile, later, later); err != nil {
		t.Fatal(err)
	}
	if recheck(); commonName(t, pair) != "first" {
		t.Error("a certificate that doesn't match the key is in use")
	}
	if err := os.Rename(filepath.Join(dir, "new-key.pem"), keyFile); err != nil {
		t.Fatal(err)
	}
	if recheck(); commonName(t, pair) != "second" {
		t.Errorf("name = %s, want the new pair once both files match", commonName(t, pair))
	}
	if err := os.Remove(keyFile); err != nil {
		t.Fatal(err)
	}
	if recheck(); commonName(t, pair) != "second" {
		t.Error("an unreadable key took the pair out of use")
	}
	recheck()
	pair.current() // says nothing more: the files are as they were
	if n := logs.FilterMessage("TLS files aren't usable, the ones before stay in use").Len(); n != 2 {
		t.Errorf("%d log lines about unusable files, want one for each of 2 changes", n)
	}
	if n := testutil.ToFloat64(report.errors); n != 2 {
		t.Errorf("%v errors counted, want 2", n)
	}
}

func observedLog() (*zap.Logger, *observer.ObservedLogs) {
	core, logs := observer.New(zap.DebugLevel)
	return zap.New(core), logs
}

// TestAuthoritiesFollowTheirFile: a broker's and a client's certificate are checked against the authorities as they are now.
func TestAuthoritiesFollowTheirFile(t *testing.T) {
	dir := t.TempDir()
	file := func(name string) string { return filepath.Join(dir, name) }
	old := writePair(t, file("old.pem"), file("old-key.pem"), "old")
	writePair(t, file("new.pem"), file("new-key.pem"), "new")
	use := func(name string, at time.Time) {
		b, err := os.ReadFile(file(name))
		if err == nil {
			err = os.WriteFile(file("ca.pem"), b, 0o600)
		}
		if err == nil {
			err = os.Chtimes(file("ca.pem"), at, at)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	use("old.pem", time.Now())
	pool, err := newCertPool(quietReports(), file("ca.pem"))
	if err != nil {
		t.Fatal(err)
	}
	verify := verifyWith(pool)
	shown := tls.ConnectionState{ServerName: "127.0.0.1", PeerCertificates: []*x509.Certificate{old}}
	if err := verify(shown); err != nil {
		t.Errorf("verify = %v, want the old authority's certificate taken", err)
	}
	shown.ServerName = "127.0.0.2"
	if err := verify(shown); err == nil {
		t.Error("a certificate for another address is taken")
	}
	shown.ServerName = "127.0.0.1"
	use("new.pem", time.Now().Add(time.Minute))
	pool.checked = time.Time{}
	if err := verify(shown); err == nil {
		t.Error("a certificate of an authority that isn't in the file any more is taken")
	}
}

func TestSecretsComeFromFiles(t *testing.T) {
	file := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(file, []byte("first\r\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	auth := config.SASL{Mechanism: "SCRAM-SHA-256", Username: "u", PasswordFile: file}
	if got, err := scramAuth(auth); err != nil || got.Pass != "first" {
		t.Errorf("scramAuth = %q, %v, want first", got.Pass, err)
	}
	if err := os.WriteFile(file, []byte("second"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := scramAuth(auth); err != nil || got.Pass != "second" {
		t.Errorf("scramAuth = %q, %v, want the file's new content", got.Pass, err)
	}
}

func TestClustersWithTLSAndSASL(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile, password := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem"), filepath.Join(dir, "password")
	certificate := writePair(t, certFile, keyFile, "kafka")
	if err := os.WriteFile(password, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	secure := kafkatest.FakeOpts(kfake.TLS(&tls.Config{Certificates: []tls.Certificate{pair}}), kfake.EnableSASL(),
		kfake.Superuser("SCRAM-SHA-512", "kmirror", "secret"), kfake.Superuser("SCRAM-SHA-256", "client", "other"), kfake.SeedTopics(2, "orders"))
	source, mirror := kafkatest.Fake(t, secure), kafkatest.Fake(t, secure)
	listen, admin := freePort(t), freePort(t)
	args := []string{"proxy", "--listen", listen, "--admin", admin, "--source", source.Seeds()[0], "--mirror", mirror.Seeds()[0],
		"--proxy.tls.cert_file", certFile, "--proxy.tls.key_file", keyFile}
	for _, cluster := range []string{"source", "mirror"} {
		args = append(args, "--"+cluster+".tls.enabled=true", "--"+cluster+".tls.ca_file", certFile, "--"+cluster+".sasl.mechanism=SCRAM-SHA-512",
			"--"+cluster+".sasl.username=kmirror", "--"+cluster+".sasl.password_file", password)
	}
	p := start(t, args...)
	waitReady(t, admin)
	roots := x509.NewCertPool()
	roots.AddCert(certificate)
	client, err := kgo.NewClient(kgo.SeedBrokers(listen), kgo.DialTLSConfig(&tls.Config{RootCAs: roots}), kgo.DefaultProduceTopic("orders"),
		kgo.SASL(scram.Auth{User: "client", Pass: "other"}.AsSha256Mechanism()))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for range 20 {
		if err := client.ProduceSync(ctx, &kgo.Record{Value: []byte("x")}).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	if code, output := run(t, "status", "--admin", admin, "--until-caught-up", "--timeout", "30s"); code != 0 {
		t.Errorf("status = exit code %d: %s, want 0", code, output)
	}
	if strings.Contains(p.output.String(), "secret") {
		t.Error("the log shows the password")
	}
}
