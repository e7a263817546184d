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

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/scram"

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

// name is the common name of the pair's certificate now.
func (k *keyPair) name(t *testing.T) string {
	t.Helper()
	certificate, err := x509.ParseCertificate(k.current().Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	return certificate.Subject.CommonName
}

func TestKeyPairFollowsItsFiles(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	writePair(t, certFile, keyFile, "first")
	pair, err := newKeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	recheck := func() { pair.checked = time.Time{} } // as if a second had passed
	if got := pair.name(t); got != "first" {
		t.Errorf("name = %s, want first", got)
	}
	later := time.Now().Add(time.Minute)
	writePair(t, certFile, filepath.Join(dir, "new-key.pem"), "second")
	if err := os.Chtimes(certFile, later, later); err != nil {
		t.Fatal(err)
	}
	if recheck(); pair.name(t) != "first" {
		t.Error("a certificate that doesn't match the key is in use")
	}
	if err := os.Rename(filepath.Join(dir, "new-key.pem"), keyFile); err != nil {
		t.Fatal(err)
	}
	if recheck(); pair.name(t) != "second" {
		t.Errorf("name = %s, want the new pair once both files match", pair.name(t))
	}
	if err := os.Remove(keyFile); err != nil {
		t.Fatal(err)
	}
	if recheck(); pair.name(t) != "second" {
		t.Error("an unreadable key took the pair out of use")
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
