package bench

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
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
	for _, rt := range startRoutes(t, w) {
		if rt.process == nil {
			continue
		}
		n := possibleConnections(t, kmirrorDescriptors)
		if rt.name == "relay" {
			n = possibleConnections(t, relayDescriptors)
		}
		before, _ := rt.process.memory(t)
		conns := openConnections(t, rt.bootstrap, n)
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

func openConnections(t *testing.T, address string, n int) []net.Conn {
	t.Helper()
	conns := make([]net.Conn, n)
	var g errgroup.Group
	g.SetLimit(openAtOnce)
	for i := range conns {
		g.Go(func() (err error) {
			if conns[i], err = net.Dial("tcp", address); err != nil {
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
