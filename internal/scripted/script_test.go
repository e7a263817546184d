package scripted_test

import (
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/scripted"
	"kmirror/protocol"
)

const produceKey = 0

// one is a cluster of one topic "t" with a connection to its leader.
func one(t *testing.T, opts scripted.Options) (*scripted.Cluster, *wire) {
	t.Helper()
	c := scripted.New(t, opts)
	c.CreateTopic("t", 1)
	return c, dial(t, c.Seeds()[0])
}

func values(c *scripted.Cluster) string {
	var list []string
	for _, r := range c.Records("t", 0) {
		list = append(list, string(r.Value))
	}
	return strings.Join(list, " ")
}

func TestActions(t *testing.T) {
	release := make(chan struct{})
	close(release)
	for _, row := range []struct {
		name     string
		action   scripted.Action
		answered bool
		code     int16
		values   string // in the log once the request is done with
	}{
		{"pass", scripted.Pass(), true, 0, "x"},
		{"delay", scripted.Delay(release), true, 0, "x"},
		{"apply then delay", scripted.ApplyThenDelay(release), true, 0, "x"},
		{"apply then drop", scripted.ApplyThenDrop(), false, 0, "x"},
		{"drop before", scripted.DropBefore(), false, 0, ""},
		{"late", scripted.ApplyLate(release), false, 0, "x"},
		{"fail", scripted.Fail(kerr.NotEnoughReplicas), true, kerr.NotEnoughReplicas.Code, ""},
		{"fail another partition", scripted.FailPartition("t", 1, kerr.NotEnoughReplicas), true, 0, "x"},
		{"edit", scripted.Edit(func(r kmsg.Response) { r.(*kmsg.ProduceResponse).Topics[0].Partitions[0].ErrorCode = 7 }), true, 7, "x"},
	} {
		t.Run(row.name, func(t *testing.T) {
			c, w := one(t, scripted.Options{})
			c.InterceptNext(1, produceKey, nil, func(*scripted.Request) scripted.Action { return row.action })
			req := produceRequest("t", -1, scripted.Batch{Values: []string{"x"}}.Bytes())
			w.send(req)
			if resp, err := w.tryReceive(req); (err == nil) != row.answered {
				t.Errorf("answer: %v, want one: %v", err, row.answered)
			} else if err == nil && produced(resp).ErrorCode != row.code {
				t.Errorf("error %d, want %d", produced(resp).ErrorCode, row.code)
			}
			c.Await(t, "the log", func() bool { return values(c) == row.values })
		})
	}
}

func TestDelayHoldsItsConnectionAlone(t *testing.T) {
	c, held := one(t, scripted.Options{})
	release := make(chan struct{})
	seen := c.InterceptNext(1, produceKey, nil, func(*scripted.Request) scripted.Action { return scripted.Delay(release) })
	first, second := produceRequest("t", -1, scripted.Batch{Values: []string{"1"}}.Bytes()), produceRequest("t", -1, scripted.Batch{Values: []string{"2"}}.Bytes())
	held.send(first)
	held.send(second)
	<-seen
	dial(t, c.Seeds()[0]).produce("t", scripted.Batch{Values: []string{"other"}})
	if got := values(c); got != "other" {
		t.Errorf("log while held = %q, want other alone", got)
	}
	close(release)
	held.receive(first)
	held.receive(second)
	if got := values(c); got != "other 1 2" {
		t.Errorf("log = %q, want other 1 2", got)
	}
}

func TestWokenLeaderActsOnWhatItKnew(t *testing.T) {
	c, old := one(t, scripted.Options{Brokers: 2})
	old.produce("t", sequenced("t", 0, 0, 1))
	before := c.Offsets("t", 0)
	c.Freeze(1)
	c.MoveLeader("t", 0, 2)
	current := dial(t, c.Seeds()[1])
	appended(t, "append at the new leader", current.produce("t", sequenced("t", 0, 1, 1)), 1, nil)
	c.Thaw(1)
	if p, _ := old.producer("t", ours("t")); p.LastSequence != 0 {
		t.Errorf("old leader's last sequence = %d, want the old figure 0", p.LastSequence)
	}
	if got := old.listOffset("t", -1, before.LeaderEpoch+1, -1).ErrorCode; got != kerr.UnknownLeaderEpoch.Code {
		t.Errorf("ListOffsets at the old leader with the new epoch: error %d, want %d", got, kerr.UnknownLeaderEpoch.Code)
	}
	lost := produceRequest("t", -1, sequenced("t", 0, 1, 1).Bytes())
	old.send(lost)
	c.Await(t, "the append at the old leader", func() bool { return c.Count(produceKey, "wire") == 3 })
	c.CatchUp(1)
	if got := produced(old.receive(lost)).ErrorCode; got != kerr.NotLeaderForPartition.Code {
		t.Errorf("append at the old leader: error %d, want %d", got, kerr.NotLeaderForPartition.Code)
	}
	if end := c.Offsets("t", 0).LogEnd; end != 2 {
		t.Errorf("log end = %d, want 2", end)
	}
}

func TestUncleanElections(t *testing.T) {
	for _, keep := range []bool{true, false} {
		c, w := one(t, scripted.Options{Brokers: 2})
		for i := range int32(4) {
			w.produce("t", sequenced("t", 0, i, 1))
		}
		c.UncleanElection("t", 0, 2, 2, keep)
		w = dial(t, c.Seeds()[1])
		o := c.Offsets("t", 0)
		if o.LogEnd != 2 || o.Leader != 2 || o.LeaderEpoch != 1 {
			t.Fatalf("offsets = %+v, want log end 2, leader 2, epoch 1", o)
		}
		if got := w.endForEpoch("t", 1, 0); got.LeaderEpoch != 0 || got.EndOffset != 2 {
			t.Errorf("end of epoch 0 = %d in epoch %d, want 2", got.EndOffset, got.LeaderEpoch)
		}
		want := kerr.OutOfOrderSequenceNumber
		if !keep {
			want = nil
		}
		appended(t, "sequence 4", w.produce("t", sequenced("t", 0, 4, 1)), 2, want)
	}
}

func TestReplacedReplicaForgetsDeletedBatches(t *testing.T) {
	c, w := one(t, scripted.Options{Brokers: 2})
	w.produce("t", sequenced("t", 0, 0, 3))
	c.DeleteRecords("t", 0, 3)
	if _, known := c.Producer("t", 0, ours("t")); !known {
		t.Error("DeleteRecords took the producer state")
	}
	c.ReplaceReplica("t", 0, 2)
	if _, known := c.Producer("t", 0, ours("t")); known {
		t.Error("a replica built after DeleteRecords knows the producer")
	}
}

func TestStrictBrokersWantSequence0(t *testing.T) {
	_, w := one(t, scripted.Options{StrictSequence: true})
	appended(t, "sequence 5", w.produce("t", sequenced("t", 0, 5, 1)), 0, kerr.OutOfOrderSequenceNumber)
	appended(t, "sequence 0", w.produce("t", sequenced("t", 0, 0, 1)), 0, nil)
}

func TestKilledBrokerComesBackOnItsPort(t *testing.T) {
	c, w := one(t, scripted.Options{})
	w.produce("t", sequenced("t", 0, 0, 1))
	w.produce("t", sequenced("t", 0, 1, 1))
	c.Kill(1)
	w.closed()
	c.Restart(1)
	if p, known := c.Producer("t", 0, ours("t")); !known || p.RetainedBatches != 1 {
		t.Errorf("after a restart: %+v, known %v; want one batch", p, known)
	}
	appended(t, "after the restart", dial(t, c.Seeds()[0]).produce("t", sequenced("t", 0, 2, 1)), 2, nil)
}

func TestRecreatedTopicsHaveNewIDs(t *testing.T) {
	c, w := one(t, scripted.Options{})
	w.produce("t", scripted.Batch{Values: []string{"old"}})
	req := kmsg.NewPtrFetchRequest()
	req.Version, req.SessionEpoch, req.MaxBytes = 13, -1, 1<<20
	id := c.RecreateTopic("t")
	for _, row := range []struct {
		id   protocol.TopicID
		want int16
	}{{id, 0}, {protocol.TopicID{1}, kerr.UnknownTopicID.Code}} {
		req.Topics = []kmsg.FetchRequestTopic{{TopicID: row.id, Partitions: []kmsg.FetchRequestTopicPartition{fetchAt(0)}}}
		if got := w.ask(req).(*kmsg.FetchResponse).Topics[0].Partitions[0].ErrorCode; got != row.want {
			t.Errorf("Fetch by topic ID: error %d, want %d", got, row.want)
		}
	}
	if values(c) != "" {
		t.Errorf("the recreated topic holds %q", values(c))
	}
}

func TestVersionsAreLowered(t *testing.T) {
	_, w := one(t, scripted.Options{MaxVersions: map[int16]int16{0: 9, 61: -1}})
	req := kmsg.NewPtrApiVersionsRequest()
	for _, k := range w.ask(req).(*kmsg.ApiVersionsResponse).ApiKeys {
		if k.ApiKey == 61 || k.ApiKey == 0 && k.MaxVersion != 9 {
			t.Errorf("offered: %+v", k)
		}
	}
	req.Version = 5
	unsupported := kmsg.NewPtrApiVersionsRequest() // the answer comes in version 0
	w.send(req)
	if got := w.receive(unsupported).(*kmsg.ApiVersionsResponse); got.ErrorCode != kerr.UnsupportedVersion.Code || len(got.ApiKeys) != 1 {
		t.Errorf("answer to ApiVersions v5 = %+v", got)
	}
}

func TestCheckMirrorPrefix(t *testing.T) {
	at := time.UnixMilli(1700000000000)
	fill := func(batches ...scripted.Batch) []scripted.LogRecord {
		c := scripted.New(t, scripted.Options{})
		c.CreateTopic("t", 1)
		for _, b := range batches {
			b.Timestamp = at
			c.Append("t", 0, b)
		}
		return c.Records("t", 0)
	}
	source := fill(scripted.Batch{Values: []string{"a", "b", "c"}})
	for _, row := range []struct {
		name   string
		mirror []scripted.LogRecord
		ok     bool
	}{
		{"empty", nil, true},
		{"prefix", fill(scripted.Batch{Values: []string{"a"}}, scripted.Batch{Values: []string{"b"}}), true},
		{"all", source, true},
		{"doubled", fill(scripted.Batch{Values: []string{"a", "a"}}), false},
		{"lost", fill(scripted.Batch{Values: []string{"a", "c"}}), false},
		{"beyond", fill(scripted.Batch{Values: []string{"a", "b", "c", "d"}}), false},
		{"another key", fill(scripted.Batch{Records: []scripted.Record{{Key: []byte{}, Value: []byte("a")}}}), false},
	} {
		if err := scripted.CheckMirrorPrefix(source, row.mirror, nil); (err == nil) != row.ok {
			t.Errorf("%s: %v, want prefix: %v", row.name, err, row.ok)
		}
	}
}
