package test

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// isForeign tells what others wrote to the mirror.
func isForeign(r *kgo.Record) bool { return bytes.HasPrefix(r.Value, []byte("foreign-")) }

// TestForeignWritesOnTheMirror (guarantee G6): others write to the mirror's partitions before kmirror comes, between its batches and
// afterwards, while kmirror is killed now and then. All of ours arrives once and in order, all of theirs stays, nothing flows back.
func TestForeignWritesOnTheMirror(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	const topic, partitions = "foreign", 3
	for _, c := range []*kafkatest.RealCluster{source, mirror} {
		kafkatest.CreateTopic(t, c, topic, partitions, 1)
	}
	testbed.Write(t, mirror.Seeds(), topic, "foreign-before", 500)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	l := testbed.StartLedger(t, topic, testbed.LedgerOptions{Writers: 2, PerSecond: 1000, Size: 100, From: time.Now()}, in.Seeds())
	wrote := 500
	between := func(prefix string, opts ...kgo.Opt) {
		t.Helper()
		l.WaitAcks(1000)
		testbed.Write(t, mirror.Seeds(), topic, prefix, 500, opts...)
		wrote += 500
	}
	for i := range 3 {
		between(fmt.Sprintf("foreign-idempotent%d", i))
		between(fmt.Sprintf("foreign-one%d", i), append(testbed.WithAcks(kgo.LeaderAck()), kgo.MaxBufferedRecords(10))...)
		in.Kill()
		testbed.Write(t, mirror.Seeds(), topic, fmt.Sprintf("foreign-dead%d", i), 500)
		wrote += 500
		in.Start()
	}
	l.WaitAcks(1000)
	l.Stop()
	in.WaitCaughtUp(time.Minute)
	testbed.Write(t, mirror.Seeds(), topic, "foreign-after", 500)
	wrote += 500
	in.Kill()
	in.Start()
	in.WaitCaughtUp(time.Minute)
	l.Check(source, mirror, kafkatest.IgnoreForeign(isForeign))
	wantForeign(t, source, topic, 0)
	wantForeign(t, mirror, topic, wrote)
}

// wantForeign counts what others wrote to the mirror, in one cluster.
func wantForeign(t testing.TB, c kafkatest.Cluster, topic string, want int) {
	t.Helper()
	count := make(map[string]int)
	for _, records := range kafkatest.ReadTopic(t, c, topic) {
		for _, r := range records {
			if isForeign(r) {
				count[string(r.Value)]++
			}
		}
	}
	for value, n := range count {
		if n != 1 {
			t.Errorf("foreign record %q is there %d times", value, n)
		}
	}
	if len(count) != want {
		t.Errorf("%d foreign records, want %d", len(count), want)
	}
}

// TestDeletedOnTheMirrorIsNotRefilled (guarantee G6): what DeleteRecords removes on the mirror, all of a partition or a part, doesn't
// come back, however kmirror and the broker are restarted; what is written then follows at the same offsets as on the source.
func TestDeletedOnTheMirrorIsNotRefilled(t *testing.T) {
	source, _ := kafkatest.Shared(t)
	mirror := kafkatest.Real(t)
	const topic, partitions = "deleted", 3
	kafkatest.CreateTopic(t, source, topic, partitions, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	admin := kadm.NewClient(mirror.Client(t))
	starts := map[int32]int64{}
	restarts := map[string]func(){
		"no restart":        func() {},
		"kill kmirror":      func() { in.Kill(); in.Start() },
		"stop kmirror":      func() { in.Stop(); in.Start() },
		"stop the broker":   func() { mirror.Broker(1).Restart(t) }, // kill -9 may undelete: brokers store log starts once a minute
		"stop both":         func() { in.Kill(); mirror.Broker(1).Restart(t); in.Start() },
		"deleted when dead": nil,
	}
	for name, restart := range restarts {
		testbed.Write(t, in.Seeds(), topic, name, 900)
		in.WaitCaughtUp(time.Minute)
		if restart == nil {
			in.Kill()
		}
		deleteSome(t, admin, mirror, topic, starts)
		if restart == nil {
			in.Start()
		} else {
			restart()
		}
		in.WaitCaughtUp(time.Minute)
		wantSuffix(t, name+", before new records", source, mirror, topic, starts)
		testbed.Write(t, in.Seeds(), topic, name+" afterwards", 300)
		in.WaitCaughtUp(time.Minute)
		wantSuffix(t, name, source, mirror, topic, starts)
		if t.Failed() {
			return
		}
	}
}

// deleteSome deletes all of partition 0, half of what is left of partition 1 and nothing of the rest, and notes the new log starts.
func deleteSome(t testing.TB, admin *kadm.Client, mirror kafkatest.Cluster, topic string, starts map[int32]int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	offsets := kafkatest.LogOffsets(t, mirror, topic)
	starts[0], starts[1] = offsets[0].End, (offsets[1].Start+offsets[1].End)/2
	var to kadm.Offsets
	for p, start := range starts {
		to.Add(kadm.Offset{Topic: topic, Partition: p, At: start, LeaderEpoch: -1})
	}
	deleted, err := admin.DeleteRecords(ctx, to)
	if err == nil {
		err = deleted.Error()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// wantSuffix fails unless the mirror holds what the source holds from its log starts on, at the same offsets.
func wantSuffix(t testing.TB, when string, source, mirror kafkatest.Cluster, topic string, starts map[int32]int64) {
	t.Helper()
	got := kafkatest.ReadTopic(t, mirror, topic)
	for p, records := range kafkatest.ReadTopic(t, source, topic) {
		want, have := map[int64]string{}, map[int64]string{}
		for _, r := range records {
			if r.Offset >= starts[int32(p)] {
				want[r.Offset] = string(r.Value)
			}
		}
		for _, r := range got[p] {
			have[r.Offset] = string(r.Value)
		}
		if !maps.Equal(have, want) {
			t.Errorf("%s: partition %d, deleted below %d: the mirror has %d records, want %d: %v", when, p, starts[int32(p)], len(have), len(want),
				kafkatest.LogOffsets(t, mirror, topic))
		}
	}
}
