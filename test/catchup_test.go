package test

import (
	"fmt"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// TestCatchUp: what did not pass the proxy as an acknowledged acks=all record is read from the source's log, in order and once, and
// afterwards mirroring is live again by itself.
func TestCatchUp(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	const partitions = 3
	kafkatest.CreateTopic(t, source, topic, partitions, 1)
	equal := func(t *testing.T) {
		t.Helper()
		kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
	}

	testbed.Write(t, source.Seeds(), topic, "before", 5000)
	testbed.Write(t, source.Seeds(), topic, "before-acks1", 1000, testbed.WithAcks(kgo.LeaderAck())...)
	testbed.Write(t, source.Seeds(), topic, "before-acks0", 1000, testbed.WithAcks(kgo.NoAck())...)
	behind := testbed.Relayed(t, source)
	in := testbed.Start(t, behind, mirror, "--topics", topic)
	t.Run("before the start", equal)
	testbed.WaitLive(t, in, topic, partitions)

	t.Run("acks 0 and 1 through the proxy", func(t *testing.T) {
		testbed.Write(t, in.Seeds(), topic, "acks1", 2000, testbed.WithAcks(kgo.LeaderAck())...)
		testbed.Write(t, in.Seeds(), topic, "acks0", 2000, testbed.WithAcks(kgo.NoAck())...)
		equal(t)
	})
	t.Run("bypassing writers beside the proxy's", func(t *testing.T) {
		l := testbed.StartLoad(t, in.Seeds(), topic, 2, 500, 100)
		for i := range 10 {
			testbed.Write(t, source.Seeds(), topic, fmt.Sprintf("bypass%d", i), 100)
			l.WaitAcked(50)
		}
		l.Stop()
		equal(t)
	})
	t.Run("kmirror down", func(t *testing.T) {
		in.Stop()
		testbed.Write(t, source.Seeds(), topic, "down", 5000)
		in.Start()
		equal(t)
	})
	t.Run("live by itself", func(t *testing.T) {
		// Writers on the proxy alone: a stream that followed the source's log notices.
		l := testbed.StartLoad(t, in.Seeds(), topic, 2, 500, 100)
		testbed.WaitLive(t, in, topic, partitions)
		served := behind.Total(kmsg.Fetch)
		l.WaitAcked(1000)
		l.Stop()
		equal(t)
		if got := behind.Total(kmsg.Fetch) - served; got != 0 {
			t.Errorf("the source served %d Fetch requests after the streams were live, want 0", got)
		}
	})
}

// TestRolesApart: one process proxies, another mirrors; nothing passes between them but Kafka.
func TestRolesApart(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 3, 1)
	proxy := testbed.Start(t, source, mirror, "--topics", topic, "--roles", "proxy")
	in := testbed.Start(t, source, mirror, "--topics", topic, "--roles", "mirror")
	for round := range 3 {
		l := testbed.StartLoad(t, proxy.Seeds(), topic, 2, 500, 100)
		testbed.Write(t, source.Seeds(), topic, fmt.Sprintf("bypass%d", round), 100)
		l.WaitAcked(500)
		l.Stop()
		in.WaitCaughtUp(30 * time.Second)
		kafkatest.Equal(t, source, mirror, topic, kafkatest.SameOffsets())
		in.Kill()
		in.Start()
	}
	if status := proxy.Status().Mirror; status != nil {
		t.Errorf("the proxy alone has a mirror: %+v", status)
	}
}
