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
	"errors"
	"fmt"
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

// writePair writes a self-signed certificate for addresses, 127.0.0.1 unless others are given, and its key, and returns the certificate.
func writePair(t *testing.T, certFile, keyFile, name string, at ...net.IP) *x509.Certificate {
	t.Helper()
	if len(at) == 0 {
		at = []net.IP{net.IPv4(127, 0, 0, 1)}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name + ".example.com"}, IPAddresses: at,
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

// TestUnusableFilesAreToldOfWithoutAHandshake: also where nobody connects, and where a file is replaced by one that is as old.
func TestUnusableFilesAreToldOfWithoutAHandshake(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	writePair(t, certFile, keyFile, "kafka")
	was, err := os.Stat(keyFile)
	if err != nil {
		t.Fatal(err)
	}
	log, logs := observedLog()
	report := newFileReports(log, prometheus.NewRegistry())
	if _, err := newKeyPair(report, certFile, keyFile); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- report.run(ctx) }()
	writePair(t, filepath.Join(dir, "unused.pem"), filepath.Join(dir, "other.pem"), "other")
	if err := os.Chtimes(filepath.Join(dir, "other.pem"), was.ModTime(), was.ModTime()); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(dir, "other.pem"), keyFile); err != nil {
		t.Fatal(err)
	}
	kafkatest.Eventually(t, 10*time.Second, func() error {
		if n := testutil.ToFloat64(report.errors); n != 1 {
			return fmt.Errorf("%v errors counted, want 1", n)
		}
		return nil
	})
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if n := logs.FilterMessage("TLS files aren't usable, the ones before stay in use").Len(); n != 1 {
		t.Errorf("%d log lines about unusable files, want one", n)
	}
}

func observedLog() (*zap.Logger, *observer.ObservedLogs) {
	core, logs := observer.New(zap.DebugLevel)
	return zap.New(core), logs
}

// tlsServer serves handshakes with the certificate in a file, up to a version of TLS, and returns where.
func tlsServer(t *testing.T, certFile, keyFile string, newest uint16) string {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	config := &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS10, MaxVersion: newest}
	return serve(t, func(c net.Conn) { defer c.Close(); _ = tls.Server(c, config).Handshake() }) // how it ends is the client's to say
}

// TestBrokersCertificates: kmirror's own clients take a broker's certificate only from the authorities as they are now, and for the host that they dial, be it
// a name or an address.
func TestBrokersCertificates(t *testing.T) {
	dir := t.TempDir()
	file := func(name string) string { return filepath.Join(dir, name) }
	server := func(name string, at ...net.IP) string {
		writePair(t, file(name+".pem"), file(name+"-key.pem"), name, at...)
		return tlsServer(t, file(name+".pem"), file(name+"-key.pem"), tls.VersionTLS13)
	}
	old, renewed, elsewhere := server("old"), server("new"), server("elsewhere", net.IPv4(127, 0, 0, 2), net.IPv6loopback)
	made := time.Now()
	use := func(names ...string) {
		t.Helper()
		var all []byte
		for _, name := range names {
			b, err := os.ReadFile(file(name + ".pem"))
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, b...)
		}
		made = made.Add(time.Minute)
		if err := os.WriteFile(file("ca.pem"), all, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(file("ca.pem"), made, made); err != nil {
			t.Fatal(err)
		}
	}
	dial := func(settings config.ClientTLS) func(string) error {
		t.Helper()
		settings.Enabled, settings.CAFile = true, file("ca.pem")
		newConfig, err := clientTLS(quietReports(), settings)
		if err != nil {
			t.Fatal(err)
		}
		connect := withTLS((&net.Dialer{}).DialContext, newConfig)
		return func(address string) error {
			c, err := connect(t.Context(), "tcp", address)
			if err == nil {
				c.Close()
			}
			return err
		}
	}
	use("old", "elsewhere")
	byHost, named := dial(config.ClientTLS{}), dial(config.ClientTLS{ServerName: "elsewhere.example.com"})
	refuses := func(what string, err error) {
		t.Helper()
		if _, ok := errors.AsType[*tls.CertificateVerificationError](err); !ok {
			t.Errorf("%s: %v, want the certificate refused", what, err)
		}
	}
	if err := byHost(old); err != nil {
		t.Errorf("a certificate for the address that is dialled: %v", err)
	}
	refuses("a certificate for other addresses", byHost(elsewhere))
	refuses("a certificate of another authority", byHost(renewed))
	if err := named(elsewhere); err != nil {
		t.Errorf("a certificate for the name that the settings want: %v", err)
	}
	refuses("a certificate for another name than the settings want", named(old))
	if err := dial(config.ClientTLS{InsecureSkipVerify: true})(renewed); err != nil {
		t.Errorf("any certificate, where the settings say so: %v", err)
	}
	use("new")
	byHost(old) // looks at the file at last when a second has passed
	kafkatest.Eventually(t, 10*time.Second, func() error { return byHost(renewed) })
	refuses("a certificate of an authority that isn't in the file any more", byHost(old))
}

// TestClientAuthoritiesFollowTheirFile: a client's certificate is taken from the authorities that are in proxy.tls.client_ca_file now.
func TestClientAuthoritiesFollowTheirFile(t *testing.T) {
	dir := t.TempDir()
	file := func(name string) string { return filepath.Join(dir, name) }
	pairs := make(map[string]tls.Certificate)
	for _, name := range []string{"kafka", "old", "new"} {
		writePair(t, file(name+".pem"), file(name+"-key.pem"), name)
		var err error
		if pairs[name], err = tls.LoadX509KeyPair(file(name+".pem"), file(name+"-key.pem")); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Link(file("old.pem"), file("ca.pem")); err != nil {
		t.Fatal(err)
	}
	settings, err := serverTLS(quietReports(), config.ServerTLS{CertFile: file("kafka.pem"), KeyFile: file("kafka-key.pem"), ClientCAFile: file("ca.pem")})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	own := serve(t, func(c net.Conn) { defer c.Close(); ended <- tls.Server(c, settings).Handshake() })
	connect := func(name string) error {
		t.Helper()
		// The certificate is shown whatever authorities the server names.
		pair := pairs[name]
		c, err := tls.Dial("tcp", own, &tls.Config{InsecureSkipVerify: true, GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }})
		if err == nil {
			defer c.Close()
		}
		return <-ended
	}
	refuses := func(name string) {
		t.Helper()
		if _, ok := errors.AsType[*tls.CertificateVerificationError](connect(name)); !ok {
			t.Errorf("a client with the certificate of authority %s is served", name)
		}
	}
	if err := connect("old"); err != nil {
		t.Errorf("a client of the authority in the file: %v", err)
	}
	refuses("new")
	if err := os.Rename(file("new.pem"), file("ca.pem")); err != nil {
		t.Fatal(err)
	}
	kafkatest.Eventually(t, 10*time.Second, func() error { return connect("new") })
	refuses("old")
}

// TestOldTLSIsRefused: kmirror speaks TLS 1.2 or later, to brokers and to clients.
func TestOldTLSIsRefused(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	certificate := writePair(t, certFile, keyFile, "kafka")
	roots := x509.NewCertPool()
	roots.AddCert(certificate)
	newConfig, err := clientTLS(quietReports(), config.ClientTLS{Enabled: true, CAFile: certFile})
	if err != nil {
		t.Fatal(err)
	}
	settings, err := serverTLS(quietReports(), config.ServerTLS{CertFile: certFile, KeyFile: keyFile})
	if err != nil {
		t.Fatal(err)
	}
	own := serve(t, func(c net.Conn) { defer c.Close(); _ = tls.Server(c, settings).Handshake() })
	for version, served := range map[uint16]bool{tls.VersionTLS10: false, tls.VersionTLS11: false, tls.VersionTLS12: true, tls.VersionTLS13: true} {
		for side, connect := range map[string]func() (net.Conn, error){
			"a broker": func() (net.Conn, error) {
				return withTLS((&net.Dialer{}).DialContext, newConfig)(t.Context(), "tcp", tlsServer(t, certFile, keyFile, version))
			},
			"a client": func() (net.Conn, error) {
				return tls.Dial("tcp", own, &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS10, MaxVersion: version})
			},
		} {
			c, err := connect()
			switch {
			case err == nil:
				c.Close()
				if !served {
					t.Errorf("%s of %s is served", side, tls.VersionName(version))
				}
			case served || !strings.Contains(err.Error(), "protocol version"):
				t.Errorf("%s of %s: %v", side, tls.VersionName(version), err)
			}
		}
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
