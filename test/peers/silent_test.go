package peers

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// TestSilentAndDeafClients: clients that connect and say nothing, and clients that ask for much and read nothing of it, are let go in the time that the limits
// say; they cost bounded memory, and a producer beside them notices nothing.
func TestSilentAndDeafClients(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic, large := testbed.TopicName(t), testbed.TopicName(t)+"-large"
	kafkatest.CreateTopic(t, source, topic, 1, 1)
	kafkatest.CreateTopic(t, source, large, 1, 1)
	const firstRequest, unread = 2 * time.Second, 3 * time.Second
	in := testbed.Start(t, source, mirror, "--topics", topic, "--proxy.limits.first_request", firstRequest.String(), "--proxy.limits.unread", unread.String())
	testbed.WaitLive(t, in, topic, 1)
	writeLarge(t, source, large)
	load := testbed.StartLoad(t, in.Seeds(), topic, 1, 500, 100)
	load.WaitAcked(1000)
	before, rss := stateOf(in), in.RSS()
	stop, most := watchMemory(in)

	wantClosed(t, "a silent client", peersSay(t, in.Seeds()[0], nil), 3*firstRequest)
	kafkatest.Eventually(t, time.Minute, func() error { // the line comes behind the close
		if n := strings.Count(in.Log(), "no request came"); n != 1 {
			return fmt.Errorf("%d log lines about silent clients, want one", n)
		}
		return nil
	})
	const deaf, requests = 30, 20
	fetch := frameOf(heldFetch(large, 0), 1)
	var g errgroup.Group
	for range deaf {
		c := dial(t, in.BrokerAddr(1))
		if err := c.SetReadBuffer(4 << 10); err != nil {
			t.Fatal(err)
		}
		g.Go(func() error { return untilLetGo(c, bytes.Repeat(fetch, requests), fetch, 10*unread) })
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	kafkatest.Eventually(t, time.Minute, func() error {
		if n := warnedOf(in.Log(), "took nothing of its answers"); n != 1 {
			return fmt.Errorf("%d log lines about deaf clients, want one", n)
		}
		return nil
	})
	stop()
	if rise := most.Load() - rss; rise > 50<<20 {
		t.Errorf("the resident memory rose by %d MiB, want less than 50", rise>>20)
	}
	load.Stop()
	wantBack(t, in, before)
	kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
}

// untilLetGo writes requests, reads nothing, and waits until its connection is ended, which a write tells.
func untilLetGo(c net.Conn, requests, request []byte, within time.Duration) error {
	if err := c.SetWriteDeadline(time.Now().Add(within)); err != nil {
		return err
	}
	begun := time.Now()
	_, err := c.Write(requests)
	for tick := time.NewTicker(200 * time.Millisecond); err == nil && time.Since(begun) < within; <-tick.C {
		_, err = c.Write(request)
	}
	if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("a deaf client isn't let go within %v: %v", within, err)
	}
	return nil
}

// writeLarge writes 20 MiB, so that a Fetch gets 1 MiB.
func writeLarge(t testing.TB, source kafkatest.Cluster, topic string) {
	t.Helper()
	cl := testbed.NewWriter(t, source.Seeds(), topic)
	value := bytes.Repeat([]byte("large "), 100<<10/6)
	for range 200 {
		cl.Produce(t.Context(), &kgo.Record{Value: value}, func(_ *kgo.Record, err error) {
			if err != nil {
				t.Errorf("large record: %v", err)
			}
		})
	}
	if err := cl.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	cl.Close()
}
