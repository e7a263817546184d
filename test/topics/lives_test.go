package topics

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// recreate deletes a topic and makes it again at once, with other partitions.
func recreate(t *testing.T, c kafkatest.Cluster, topic string, partitions int32) {
	t.Helper()
	if _, err := admin(t, c).DeleteTopics(t.Context(), topic); err != nil {
		t.Fatal(err)
	}
	kafkatest.Eventually(t, soon, func() error {
		_, err := admin(t, c).CreateTopic(t.Context(), partitions, 1, nil, topic)
		return err
	})
}

// TestRecreatedTopicStops: with topics.on_recreate: stop nothing of the new topic is mirrored, before and after a restart, until the mirror's topic is
// deleted.
func TestRecreatedTopicStops(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 2, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic, "--topics.on_recreate", "stop", "--timing.refresh", "500ms")
	testbed.Write(t, in.Seeds(), topic, "first life", 200)
	in.WaitCaughtUp(soon)
	before := kafkatest.ReadTopic(t, mirror, topic)
	stopped := func() error {
		for _, s := range in.Status().Mirror.Streams {
			if !strings.Contains(s.Reason, "deleted and made again") {
				return fmt.Errorf("partition %d: reason %q", s.Partition, s.Reason)
			}
		}
		return nil
	}
	recreate(t, source, topic, 2)
	testbed.Write(t, in.Seeds(), topic, "second life", 5000)
	kafkatest.Eventually(t, soon, stopped)
	in.Kill()
	in.Start()
	kafkatest.Eventually(t, soon, func() error {
		if len(in.Status().Mirror.Streams) != 2 {
			return fmt.Errorf("no streams yet")
		}
		return stopped()
	})
	for p, records := range kafkatest.ReadTopic(t, mirror, topic) {
		if len(records) != len(before[p]) {
			t.Errorf("partition %d has %d records on the mirror, want the %d of the first life", p, len(records), len(before[p]))
		}
	}
	if _, err := admin(t, mirror).DeleteTopics(t.Context(), topic); err != nil {
		t.Fatal(err)
	}
	kafkatest.WaitEqual(t, source, mirror, topic, soon, kafkatest.SameOffsets())
}

// TestRecreatedTopicIsMadeAnew: with topics.on_recreate: recreate the mirror's topic becomes what the source's is, whether kmirror watched or was down.
func TestRecreatedTopicIsMadeAnew(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 3, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic, "--topics.on_recreate", "recreate", "--timing.refresh", "500ms")
	testbed.Write(t, in.Seeds(), topic, "first life", 300)
	in.WaitCaughtUp(soon)

	recreate(t, source, topic, 2)
	testbed.Write(t, in.Seeds(), topic, "second life", 2000) // longer than the first
	kafkatest.WaitEqual(t, source, mirror, topic, soon, kafkatest.SameOffsets())

	in.Stop()
	recreate(t, source, topic, 1)
	testbed.Write(t, source.Seeds(), topic, "third life", 100)
	in.Start()
	kafkatest.WaitEqual(t, source, mirror, topic, soon, kafkatest.SameOffsets())
	testbed.WaitLive(t, in, topic, 1)
	testbed.Write(t, in.Seeds(), topic, "more", 100)
	kafkatest.WaitEqual(t, source, mirror, topic, soon, kafkatest.SameOffsets())
}

// TestNewPartitionsStartAtTheirBeginning: topics.start: latest is for what was there when kmirror came; what appears later is mirrored whole.
func TestNewPartitionsStartAtTheirBeginning(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	old, young := testbed.TopicName(t)+"-old", testbed.TopicName(t)+"-young"
	kafkatest.CreateTopic(t, source, old, 2, 1)
	testbed.Write(t, source.Seeds(), old, "skipped", 100)
	in := testbed.Start(t, source, mirror, "--topics", old+","+young, "--topics.start", "latest", "--timing.refresh", "2s")
	testbed.WaitLive(t, in, old, 2)
	if _, err := admin(t, source).UpdatePartitions(t.Context(), 4, old); err != nil {
		t.Fatal(err)
	}
	kafkatest.CreateTopic(t, source, young, 2, 1)
	writeEach(t, source.Seeds(), old, 4)
	writeEach(t, source.Seeds(), young, 2)
	testbed.WaitLive(t, in, old, 4)
	testbed.WaitLive(t, in, young, 2)
	in.Stop()
	if _, err := admin(t, source).UpdatePartitions(t.Context(), 6, old); err != nil { // while kmirror is down
		t.Fatal(err)
	}
	writeEach(t, source.Seeds(), old, 6)
	in.Start()
	testbed.WaitLive(t, in, old, 6)
	in.WaitCaughtUp(soon)
	for p, records := range kafkatest.ReadTopic(t, source, old) {
		values := func(records []*kgo.Record) (values []string) {
			for _, r := range records {
				if !strings.HasPrefix(string(r.Value), "skipped") {
					values = append(values, string(r.Value))
				}
			}
			return values
		}
		got := values(kafkatest.ReadAll(t, mirror, old, int32(p)))
		if want := values(records); !slices.Equal(got, want) {
			t.Errorf("%s partition %d has %v on the mirror, want %v", old, p, got, want)
		}
	}
	kafkatest.WaitEqual(t, source, mirror, young, soon, kafkatest.SameOffsets())
}

// writeEach writes a record to each of the first n partitions.
func writeEach(t *testing.T, seeds []string, topic string, n int32) {
	t.Helper()
	cl := testbed.NewWriter(t, seeds, topic, kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.MetadataMinAge(100*time.Millisecond))
	defer cl.Close()
	for p := range n {
		kafkatest.Eventually(t, soon, func() error { // a partition just made has no leader at first
			return cl.ProduceSync(t.Context(), &kgo.Record{Partition: p, Value: fmt.Appendf(nil, "of %d", n)}).FirstErr()
		})
	}
}
