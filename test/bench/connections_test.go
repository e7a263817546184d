package bench

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"
	"golang.org/x/sync/errgroup"
)

const (
	idleConnections = 5000
	// kmirror holds two sockets for one; the relay, which splices all the time, two pipes beside them.
	kmirrorDescriptors, relayDescriptors = 2, 6
	// openAtOnce is how many of them are being opened at a time.
	openAtOnce = 32
	// idleWait is how long they have been idle when memory is read.
	idleWait = 5 * time.Second
)

// benchConnections measures what connections cost that have asked for versions and metadata, as clients do, and then say nothing. Once for
// each process: a second time its memory is there already.
func benchConnections(t *testing.T, w *world, r *report) {
	for _, rt := range append(startRoutes(t, w), startTLSRoute(t, w)) {
		if rt.process == nil {
			continue
		}
		dial := net.Dial
		if rt.tls != nil {
			dial = func(network, address string) (net.Conn, error) { return tls.Dial(network, address, rt.tls) }
		}
		n := possibleConnections(t, kmirrorDescriptors)
		if rt.name == "relay" {
			n = possibleConnections(t, relayDescriptors)
		}
		before, _ := rt.process.memory(t)
		conns := openConnections(t, dial, rt.bootstrap, n)
		time.Sleep(idleWait)
		after, _ := rt.process.memory(t)
		for _, c := range conns { // none may have been lost
			if err := askVersionsAndMetadata(c); err != nil {
				t.Errorf("an idle connection through %s: %v", rt.name, err)
				break
			}
		}
		r.add("connections", fmt.Sprintf("up to %d, idle", idleConnections), rt.name, metric{"KiB each", (after - before) * 1024 / float64(n)},
			metric{"connections", float64(n)}, metric{"RSS MiB", after})
		for _, c := range conns {
			c.Close()
		}
		rt.process.stop(t)
	}
}

// possibleConnections is how many a process may hold open that needs perConnection descriptors for each.
func possibleConnections(t *testing.T, perConnection int) int {
	t.Helper()
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	return min(idleConnections, (int(limit.Cur)-1000)/perConnection)
}

// startTLSRoute starts a proxy that clients speak TLS to; no process if it isn't wanted.
func startTLSRoute(t *testing.T, w *world) (rt route) {
	t.Helper()
	const name = "kmirror, TLS"
	if len(wanted(t, []string{name}, func(s string) string { return s })) == 0 {
		return rt
	}
	server := httptest.NewTLSServer(nil) // for its certificate
	defer server.Close()
	cert := server.TLS.Certificates[0]
	key, err := x509.MarshalPKCS8PrivateKey(cert.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	file := func(kind string, der []byte) string {
		path := filepath.Join(t.TempDir(), "tls.pem")
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	k := startKmirror(t, w, mirroredTopic, "--roles", "proxy", "--proxy.tls.cert_file", file("CERTIFICATE", cert.Certificate[0]), "--proxy.tls.key_file", file("PRIVATE KEY", key))
	k.awaitReady(t)
	config := server.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
	config.ServerName = "example.com" // that the certificate is for
	return route{name: name, bootstrap: k.proxy, process: k.process, tls: config}
}

func openConnections(t *testing.T, dial func(network, address string) (net.Conn, error), address string, n int) []net.Conn {
	t.Helper()
	conns := make([]net.Conn, n)
	var g errgroup.Group
	g.SetLimit(openAtOnce)
	for i := range conns {
		g.Go(func() (err error) {
			if conns[i], err = dial("tcp", address); err != nil {
				return err
			}
			return askVersionsAndMetadata(conns[i])
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatalf("%d connections to %s: %v", n, address, err)
	}
	t.Cleanup(func() {
		for _, c := range conns {
			c.Close()
		}
	})
	return conns
}

// askVersionsAndMetadata sends the first two requests of a client and reads the answers.
func askVersionsAndMetadata(c net.Conn) error {
	versions := kmsg.NewPtrApiVersionsRequest()
	versions.Version, versions.ClientSoftwareName, versions.ClientSoftwareVersion = 3, "bench", "1"
	metadata := kmsg.NewPtrMetadataRequest()
	metadata.Version = 9
	format := kmsg.NewRequestFormatter(kmsg.FormatterClientID("bench"))
	if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		return err
	}
	for i, req := range []kmsg.Request{versions, metadata} {
		if _, err := c.Write(format.AppendRequest(nil, req, int32(i))); err != nil {
			return err
		}
		var size [4]byte
		if _, err := io.ReadFull(c, size[:]); err != nil {
			return err
		}
		if _, err := io.CopyN(io.Discard, c, int64(binary.BigEndian.Uint32(size[:]))); err != nil {
			return err
		}
	}
	return nil
}
