package peers

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"golang.org/x/sync/errgroup"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// tlsHello is what a client that speaks TLS begins with.
func tlsHello(t testing.TB) []byte {
	t.Helper()
	ours, theirs := net.Pipe()
	go func() {
		_ = tls.Client(theirs, &tls.Config{ServerName: "kafka.example.com", InsecureSkipVerify: true}).Handshake() // it ends with the pipe
	}()
	b := make([]byte, 16<<10)
	n, err := ours.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	ours.Close()
	theirs.Close()
	return b[:n]
}

const crowd = 200 // connections of a kind

// peersSay opens a crowd of connections that each say b, and returns them.
func peersSay(t testing.TB, address string, b []byte) []net.Conn {
	t.Helper()
	conns := make([]net.Conn, crowd)
	var g errgroup.Group
	g.SetLimit(20)
	for i := range conns {
		g.Go(func() (err error) {
			if conns[i], err = net.Dial("tcp", address); err == nil {
				_, err = conns[i].Write(b)
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, c := range conns {
			c.Close()
		}
	})
	return conns
}

// wantClosed fails unless the proxy closes each within a time.
func wantClosed(t testing.TB, what string, conns []net.Conn, within time.Duration) {
	t.Helper()
	var g errgroup.Group
	until := time.Now().Add(within)
	for _, c := range conns {
		g.Go(func() error {
			if err := c.SetReadDeadline(until); err != nil {
				return err
			}
			if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				return fmt.Errorf("%s: a connection isn't closed within %v: %v", what, within, err)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}

// warnedOf counts the log's lines about closed connections that name a cause.
func warnedOf(log, cause string) (n int) {
	for line := range strings.Lines(log) {
		if strings.Contains(line, "connection closed") && strings.Contains(line, cause) && strings.Contains(line, "127.0.0.1") {
			n++
		}
	}
	return n
}

// TestWrongBytes is case C05: crowds of clients that aren't Kafka's, beside a producer that notices nothing.
func TestWrongBytes(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 3, 1)
	const frameTime = 3 * time.Second
	in := testbed.Start(t, source, mirror, "--topics", topic, "--proxy.limits.frame_time", frameTime.String())
	testbed.WaitLive(t, in, topic, 3)
	load := testbed.StartLoad(t, in.Seeds(), topic, 1, 1000, 100)
	load.WaitAcked(2000)
	before, rss := stateOf(in), in.RSS()
	stop, most := watchMemory(in)
	for _, kind := range []struct {
		name   string
		bytes  []byte
		within time.Duration
		cause  string
	}{
		{"TLS", tlsHello(t), time.Second, "the client speaks TLS"},
		{"HTTP", []byte("GET / HTTP/1.1\r\nHost: kafka\r\n\r\n"), time.Second, "an HTTP request"},
		{"junk", []byte("blah"), time.Second, "larger than the limit"},
		{"giant", []byte{0x7f, 0xff, 0xff, 0xff}, time.Second, ""}, // the same cause
		{"negative", []byte{0x80, 0, 0, 0}, time.Second, "smaller than a request header"},
		{"half a frame", frameOf(versionsRequest(), 1)[:10], 2 * frameTime, "stopped midway"},
		// 100 KiB each: a broker allocates what a length says, and has 700 MB.
		{"half of a large Fetch", append([]byte{0, 1, 0x90, 0, 0, 1, 0, 9, 0, 0, 0, 1}, make([]byte, 40<<10)...), 2 * frameTime, ""},
		{"half of a large Produce", append([]byte{0, 1, 0x90, 0, 0, 0, 0, 8, 0, 0, 0, 1, 0, 0, 0xff, 0xff, 0xff, 0xff}, make([]byte, 40<<10)...), 2 * frameTime, ""},
	} {
		mark := load.Mark()
		conns := peersSay(t, in.Seeds()[0], kind.bytes)
		wantClosed(t, kind.name, conns, kind.within)
		if kind.cause != "" {
			kafkatest.Eventually(t, 5*time.Second, func() error {
				if n := warnedOf(in.Log(), kind.cause); n != 1 {
					return fmt.Errorf("%s: %d log lines, want one that names the peer and %q", kind.name, n, kind.cause)
				}
				return nil
			})
		}
		t.Logf("%s: beside it, acknowledgements took %s", kind.name, load.Since(mark))
	}
	stop()
	if rise := most.Load() - rss; rise > 50<<20 {
		t.Errorf("the resident memory rose by %d MiB, want less than 50", rise>>20)
	} else {
		t.Logf("the resident memory rose by %d MiB", rise>>20)
	}
	load.Stop()
	wantBack(t, in, before)
	kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
}

// watchMemory notes the most resident memory until stop is called.
func watchMemory(in *testbed.Instance) (stop func(), most *atomic.Int64) {
	most = new(atomic.Int64)
	ended, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ended:
				return
			case <-tick.C:
				most.Store(max(most.Load(), in.RSS()))
			}
		}
	}()
	return func() { close(ended); <-stopped }, most
}

// TestAbortedConnections: connections that end in every unseemly way leave neither goroutines, descriptors nor half-closed sockets behind.
func TestAbortedConnections(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 1, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	testbed.WaitLive(t, in, topic, 1)
	const rounds, atOnce = 10_000, 16
	versions := frameOf(versionsRequest(), 1)
	fetch := frameOf(heldFetch(topic, 3*time.Second), 2)
	ways := []func(*net.TCPConn) error{
		func(c *net.TCPConn) error { return nil },
		func(c *net.TCPConn) error { _, err := c.Write(versions[:9]); return err },
		func(c *net.TCPConn) error { _, err := c.Write(versions); return err },
		func(c *net.TCPConn) error { _, err := c.Write(append(versions, fetch...)); return err }, // the broker holds it
		func(c *net.TCPConn) error { _, err := ask(c, versionsRequest(), 10*time.Second); return err },
		func(c *net.TCPConn) error { // ends its stream, and takes the answer
			_, err := c.Write(versions)
			if err == nil {
				err = c.CloseWrite()
			}
			if err == nil {
				_, err = io.Copy(io.Discard, c)
			}
			return err
		},
	}
	run := func(n int) {
		t.Helper()
		var g errgroup.Group
		g.SetLimit(atOnce)
		for i := range n {
			g.Go(func() error {
				c, err := net.Dial("tcp", in.BrokerAddr(1))
				if err != nil {
					return err
				}
				defer c.Close()
				if i%2 == 0 { // reset
					if err := c.(*net.TCPConn).SetLinger(0); err != nil {
						return err
					}
				}
				return ways[i%len(ways)](c.(*net.TCPConn))
			})
		}
		if err := g.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	run(200) // what is made once
	before := settledState(t, in)
	begun := time.Now()
	run(rounds)
	t.Logf("%d rounds took %v", rounds, time.Since(begun).Round(time.Millisecond))
	wantBack(t, in, before)
	t.Logf("before %+v, after %+v", before, stateOf(in))
	testbed.Write(t, in.Seeds(), topic, "afterwards", 100)
	kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
}

// heldFetch is a Fetch at the beginning of an empty log, which the broker holds for wait.
func heldFetch(topic string, wait time.Duration) kmsg.Request {
	req := kmsg.NewPtrFetchRequest()
	req.Version = 11 // the last that names topics and isn't flexible
	req.ReplicaID, req.MinBytes, req.MaxBytes, req.MaxWaitMillis, req.SessionEpoch = -1, 1, 1<<20, int32(wait.Milliseconds()), -1
	of := kmsg.NewFetchRequestTopic()
	of.Topic = topic
	p := kmsg.NewFetchRequestTopicPartition()
	p.CurrentLeaderEpoch, p.PartitionMaxBytes = -1, 1<<20
	of.Partitions = append(of.Partitions, p)
	req.Topics = append(req.Topics, of)
	return req
}

// TestAcksZeroForLong is case C07 (a): a producer that wants no answers, and asks for metadata on the same connection now and then, is never held up;
// nothing of it stays in memory.
func TestAcksZeroForLong(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 1, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	testbed.WaitLive(t, in, topic, 1)
	testbed.Write(t, in.Seeds(), topic, "first", 100, testbed.WithAcks(kgo.NoAck())...) // what is made once
	const records, first = 200_000, 100
	before, rss, asked := settledState(t, in), in.RSS(), in.Metrics()[`kmirror_proxy_requests_total{api="Metadata"}`]
	stop, most := watchMemory(in)
	out := kafkatest.Tool(t, "org.apache.kafka.tools.ProducerPerformance", "--topic", topic, "--num-records", fmt.Sprint(records), "--record-size", "1024",
		"--throughput", "50000", "--producer-props", "bootstrap.servers="+in.BrokerAddr(1), "acks=0", "enable.idempotence=false", "metadata.max.age.ms=500")
	stop()
	if !strings.Contains(out, fmt.Sprintf("%d records sent", records)) || strings.Contains(out, "Exception") {
		t.Errorf("ProducerPerformance printed\n%s", out)
	}
	if n := in.Metrics()[`kmirror_proxy_requests_total{api="Metadata"}`] - asked; n < 4 {
		t.Errorf("%v Metadata requests came among them, want some", n)
	}
	kafkatest.Eventually(t, 30*time.Second, func() error {
		if end := kafkatest.LogOffsets(t, source, topic)[0].End; end != records+first {
			return fmt.Errorf("the source has %d records, want %d", end, records+first)
		}
		return nil
	})
	wantBack(t, in, before)
	in.WaitCaughtUp(time.Minute)
	if rise := most.Load() - rss; rise > 100<<20 { // it is mirrored meanwhile, from the source's log
		t.Errorf("the resident memory rose by %d MiB", rise>>20)
	}
	if end := kafkatest.LogOffsets(t, mirror, topic)[0].End; end != records+first {
		t.Errorf("the mirror has %d records, want %d", end, records+first)
	}

	c := dial(t, in.BrokerAddr(1)) // one connection alone: records, then Metadata, whose answer is the only one
	one := frameOf(produceNothing(topic), 1)
	for range 10_000 {
		if _, err := c.Write(one); err != nil {
			t.Fatal(err)
		}
	}
	metadata := kmsg.NewPtrMetadataRequest()
	metadata.Version = 5
	if _, err := ask(c, metadata, 30*time.Second); err != nil {
		t.Errorf("Metadata after 10,000 requests without an answer: %v", err)
	}
	if n := in.Metrics()["kmirror_proxy_requests_in_flight"]; n != 0 {
		t.Errorf("%v requests in flight, want 0", n)
	}
}

// produceNothing is a Produce request with acks=0 that names no partition.
func produceNothing(topic string) kmsg.Request {
	req := kmsg.NewPtrProduceRequest()
	req.Version, req.Acks, req.TimeoutMillis = 8, 0, 1000
	of := kmsg.NewProduceRequestTopic()
	of.Topic = topic
	req.Topics = append(req.Topics, of)
	return req
}
