package topics

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// TestTopicsGrowAndAppear is case C19: new partitions and new topics are mirrored from their first record, each record in its partition.
func TestTopicsGrowAndAppear(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	in := testbed.Start(t, source, mirror, "--topics", "/grow\\..*/")
	for _, way := range []struct {
		name  string
		seeds []string
	}{{"proxy", in.Seeds()}, {"bypass", source.Seeds()}} {
		t.Run(way.name, func(t *testing.T) {
			adm := kadm.NewClient(testbed.NewWriter(t, way.seeds, ""))
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			first, second := "grow."+way.name+"1", "grow."+way.name+"2"
			kafkatest.CreateTopic(t, source, first, 2, 1)
			keyed := testbed.StartLoad(t, way.seeds, first, 2, 500, 50, kgo.MetadataMinAge(100*time.Millisecond), kgo.MetadataMaxAge(500*time.Millisecond))
			keyed.WaitAcked(200)
			if _, err := adm.UpdatePartitions(ctx, 6, first); err != nil {
				t.Fatal(err)
			}
			if _, err := adm.CreateTopic(ctx, 3, 1, nil, second); err != nil {
				t.Fatal(err)
			}
			testbed.Write(t, way.seeds, second, "at-once", 1000)
			writeUnkeyed(t, way.seeds, first, 500)
			keyed.WaitAcked(2000)
			keyed.Stop()
			kafkatest.Eventually(t, 30*time.Second, func() error { // the new topic and partitions are on the mirror
				details, err := kadm.NewClient(mirror.Client(t)).ListTopics(ctx, first, second)
				if err != nil {
					return err
				}
				if a, b := len(details[first].Partitions), len(details[second].Partitions); a != 6 || b != 3 {
					return fmt.Errorf("the mirror has %d and %d partitions, want 6 and 3", a, b)
				}
				return nil
			})
			kafkatest.WaitEqual(t, source, mirror, first, time.Minute, kafkatest.SameOffsets())
			kafkatest.WaitEqual(t, source, mirror, second, time.Minute, kafkatest.SameOffsets())
			for p, o := range kafkatest.LogOffsets(t, source, first) {
				if o.End == 0 {
					t.Errorf("partition %d of %s got no record: the test shows less than it says", p, first)
				}
			}
		})
	}
}

func writeUnkeyed(t testing.TB, seeds []string, topic string, n int) {
	t.Helper()
	cl := testbed.NewWriter(t, seeds, topic, kgo.RecordPartitioner(kgo.RoundRobinPartitioner()))
	defer cl.Close()
	for i := range n {
		cl.Produce(t.Context(), &kgo.Record{Value: fmt.Appendf(nil, "unkeyed-%d", i)}, func(_ *kgo.Record, err error) {
			if err != nil {
				t.Errorf("unkeyed record: %v", err)
			}
		})
	}
	if err := cl.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// watchWindow is how long deleted topics are watched: several of kmirror's refresh intervals.
const watchWindow = 8 * time.Second

// TestDeletedTopics is case C21: deletion is followed quietly, and nothing brings a deleted topic back with default settings, though both
// clusters create topics that are asked for.
func TestDeletedTopics(t *testing.T) {
	auto := kafkatest.Config("auto.create.topics.enable", "true")
	source, mirror := kafkatest.Real(t, auto), kafkatest.Real(t, auto)
	in := testbed.Start(t, source, mirror, "--topics", "/del.*/", "--timing.refresh", "1s")
	ctx := t.Context()
	onSource, onMirror := kadm.NewClient(source.Client(t)), kadm.NewClient(mirror.Client(t))
	kafkatest.CreateTopic(t, source, "del1", 3, 1)
	kafkatest.CreateTopic(t, source, "del2", 3, 1)
	testbed.Write(t, in.Seeds(), "del1", "first", 300)
	testbed.Write(t, in.Seeds(), "del2", "first", 300)
	in.WaitCaughtUp(30 * time.Second)

	t.Run("on the source", func(t *testing.T) {
		if _, err := kadm.NewClient(testbed.NewWriter(t, in.Seeds(), "")).DeleteTopics(ctx, "del1"); err != nil {
			t.Fatal(err)
		}
		kafkatest.Eventually(t, 30*time.Second, func() error {
			for name := range in.Metrics() {
				if strings.Contains(name, `topic="del1"`) {
					return fmt.Errorf("metric series %s is still there", name)
				}
			}
			return nil
		})
		before := strings.Count(in.Log(), "\n")
		stays(t, watchWindow, func() error {
			if got := topicNames(ctx, t, onSource); slices.Contains(got, "del1") {
				return fmt.Errorf("the source's topics are %v, del1 is back", got)
			}
			return nil
		})
		if lines := strings.Count(in.Log(), "\n") - before; lines > 3 {
			t.Errorf("%d log lines while nothing happens:\n%s", lines, in.Log())
		}
		if n := testbed.CountLines(in.Log(), "topic is gone", "del1"); n == 0 || n > 3 {
			t.Errorf("%d log lines say that the topic is gone, want one for each partition at most:\n%s", n, in.Log())
		}
		if got := kafkatest.LogOffsets(t, mirror, "del1"); len(got) != 3 || got[0].End+got[1].End+got[2].End != 300 {
			t.Errorf("the mirror's copy has offsets %v, want all of its 300 records in 3 partitions", got)
		}
	})
	t.Run("then on the mirror", func(t *testing.T) {
		if _, err := onMirror.DeleteTopics(ctx, "del1"); err != nil {
			t.Fatal(err)
		}
		stays(t, watchWindow, func() error {
			if got := topicNames(ctx, t, onMirror); slices.Contains(got, "del1") {
				return fmt.Errorf("the mirror's topics are %v, del1 is back", got)
			}
			return nil
		})
	})
	t.Run("on the mirror under writes", func(t *testing.T) {
		l := testbed.StartLoad(t, in.Seeds(), "del2", 2, 500, 50)
		l.WaitAcked(200)
		if _, err := onMirror.DeleteTopics(ctx, "del2"); err != nil {
			t.Fatal(err)
		}
		l.WaitAcked(2000)
		l.Stop()
		// It is made again with the source's partitions, and filled as the start policy says: from the earliest record.
		kafkatest.WaitEqual(t, source, mirror, "del2", time.Minute, kafkatest.SameOffsets())
	})
}

// TestRecreatedTopics: a topic that is deleted and made again is a new stream, whose records follow the old ones on the mirror.
func TestRecreatedTopics(t *testing.T) {
	source, mirror := kafkatest.Real(t), kafkatest.Real(t)
	in := testbed.Start(t, source, mirror, "--topics", "again", "--timing.refresh", "1s")
	kafkatest.CreateTopic(t, source, "again", 3, 1)
	testbed.Write(t, in.Seeds(), "again", "first life", 300)
	in.WaitCaughtUp(30 * time.Second)

	t.Run("while kmirror runs", func(t *testing.T) {
		before := kafkatest.ReadTopic(t, mirror, "again")
		recreate(t, source, "again", 3)
		testbed.Write(t, in.Seeds(), "again", "second life", 300)
		in.WaitCaughtUp(time.Minute)
		follows(t, source, mirror, "again", before)
	})
	t.Run("while kmirror is down", func(t *testing.T) {
		before := kafkatest.ReadTopic(t, mirror, "again")
		in.Stop()
		recreate(t, source, "again", 3)
		testbed.Write(t, source.Seeds(), "again", "third life", 30_000) // longer than the old one: no offset is out of range
		in.Start()
		in.WaitCaughtUp(time.Minute)
		follows(t, source, mirror, "again", before)
	})
}

// follows fails unless the mirror holds what it held before and then all that the source's topic holds, in each partition.
func follows(t *testing.T, source, mirror kafkatest.Cluster, topic string, before [][]*kgo.Record) {
	t.Helper()
	recreated, copies := kafkatest.ReadTopic(t, source, topic), kafkatest.ReadTopic(t, mirror, topic)
	for p := range copies {
		want := append(values(before[p]), values(recreated[p])...)
		if got := values(copies[p]); !slices.Equal(got, want) {
			t.Errorf("partition %d: the mirror has %d records, want the %d of before and then the %d of the new topic",
				p, len(got), len(before[p]), len(recreated[p]))
		}
	}
}

func values(records []*kgo.Record) (values []string) {
	for _, r := range records {
		values = append(values, string(r.Value))
	}
	return values
}

// topicNames lists the topics; asking for all creates none.
func topicNames(ctx context.Context, t testing.TB, adm *kadm.Client) []string {
	t.Helper()
	details, err := adm.ListTopics(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return details.Names()
}

// stays fails unless check holds all the time for a while.
func stays(t testing.TB, length time.Duration, check func() error) {
	t.Helper()
	end := time.After(length)
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for {
		if err := check(); err != nil {
			t.Fatal(err)
		}
		select {
		case <-end:
			return
		case <-tick.C:
		}
	}
}

// TestRecordsDeletedBeforeTheyWereCopied is case C23: what the source deleted ahead of kmirror is named and counted, and all that is left
// is copied, once.
func TestRecordsDeletedBeforeTheyWereCopied(t *testing.T) {
	source, _ := kafkatest.Shared(t)
	mirror := kafkatest.Real(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 1, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	testbed.WaitLive(t, in, topic, 1)
	adm := kadm.NewClient(source.Client(t))
	purge := func(t *testing.T, to int64) {
		t.Helper()
		offsets := kadm.Offsets{}
		offsets.Add(kadm.Offset{Topic: topic, Partition: 0, At: to})
		if _, err := adm.DeleteRecords(t.Context(), offsets); err != nil {
			t.Fatal(err)
		}
	}
	var want []string // what the mirror must hold
	keep := func(prefix string, from, to int) {
		for i := from; i < to; i++ {
			want = append(want, fmt.Sprintf("%s-%d", prefix, i))
		}
	}
	equal := func(t *testing.T, lost float64) {
		t.Helper()
		in.WaitCaughtUp(time.Minute)
		if got := values(kafkatest.ReadAll(t, mirror, topic, 0)); !slices.Equal(got, want) {
			t.Fatalf("the mirror has %d records, want %d: first difference at %d", len(got), len(want), firstDifference(got, want))
		}
		if got := in.Metrics()["kmirror_forwarder_lost_records_total"]; got != lost {
			t.Errorf("kmirror_forwarder_lost_records_total = %v, want %v", got, lost)
		}
	}
	testbed.Write(t, in.Seeds(), topic, "first", 1000)
	keep("first", 0, 1000)
	equal(t, 0)

	t.Run("kmirror down", func(t *testing.T) {
		in.Stop()
		testbed.Write(t, source.Seeds(), topic, "purged", 9000)
		purge(t, 6000) // offsets [1000, 6000), of which purged-0 to purged-4999
		in.Start()
		keep("purged", 5000, 9000)
		equal(t, 5000)
		if n := testbed.CountLines(in.Log(), "deleted records before they were mirrored", topic, `"partition": 0`, `"from": 1000`, `"to": 6000`); n != 1 {
			t.Errorf("%d log lines name the range, want 1", n)
		}
	})
	t.Run("mirror down", func(t *testing.T) {
		testbed.Write(t, in.Seeds(), topic, "between", 100)
		keep("between", 0, 100)
		equal(t, 5000)
		mirror.Stop(t)
		testbed.Write(t, in.Seeds(), topic, "backlog", 2000)
		purge(t, 10_100+1500)
		mirror.Start(t)
		keep("backlog", 1500, 2000)
		equal(t, 6500)
	})
	t.Run("and restarts", func(t *testing.T) {
		for i := range 3 {
			in.Kill()
			testbed.Write(t, source.Seeds(), topic, fmt.Sprintf("after%d", i), 50)
			in.Start()
			testbed.Write(t, in.Seeds(), topic, fmt.Sprintf("live%d", i), 50)
			keep(fmt.Sprintf("after%d", i), 0, 50)
			keep(fmt.Sprintf("live%d", i), 0, 50)
			equal(t, 0) // counted by the process that met it
		}
	})
}

func firstDifference(a, b []string) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}
