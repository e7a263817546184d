package forwarder_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/forwarder"
	"kmirror/internal/kafkatest"
	"kmirror/internal/scripted"
	"kmirror/protocol"
)

const group = "kmirror.test"

// asOurs is what a second owner would send for source offset position: one record under our producer ID.
func (r *rig) asOurs(position int64, values ...string) scripted.Batch {
	r.t.Helper()
	log := r.mirror.Log("orders", 0)
	if len(log) == 0 {
		r.t.Fatal("the mirror holds no batch of ours")
	}
	return scripted.Batch{ProducerID: log[0].ProducerID(), BaseSequence: int32(position), Values: values}
}

// S4: without checkGap (stream.go: acknowledged), a batch of ours that this owner didn't send stays between its own unnoticed.
func TestS4OursWhereNoneWasSentIsSaidAloud(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(0, "a")
	f := r.live()
	r.mirror.InterceptNext(1, produceKey, r.appends, func(*scripted.Request) scripted.Action {
		r.mirror.Append("orders", 0, r.asOurs(77, "stray"))
		r.mirror.ForgetProducers("orders", 0)
		return scripted.Pass()
	})
	r.write(0, "b")
	if s := r.await(f, forwarder.StateFailed); !strings.Contains(s.Reason, "where none was sent") {
		t.Errorf("failed with %q, want the stray batch named", s.Reason)
	}
}

// S4: others' writes before, between and after are left alone; without the new expectation after them (partition.go: acknowledge's mirrorEnd), or
// with a look past the gap (resolve.go: scan's end), our own batches look like strays.
func TestS4ForeignWritesAreLeftAlone(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.mirror.CreateTopic("orders", 1)
	r.mirror.AppendForeign("orders", 0, "x", "y")
	r.write(0, "a")
	f := r.live()
	asked := r.mirror.Count(describeProducersKey, "")
	for i := range 3 {
		r.mirror.InterceptNext(1, produceKey, r.appends, func(*scripted.Request) scripted.Action {
			r.mirror.AppendForeign("orders", 0, "z")
			return scripted.Pass()
		})
		r.write(0, fmt.Sprint("b", i))
		r.equal(f)
	}
	if all := len(r.mirror.Records("orders", 0)); all != 4+5 {
		t.Errorf("the mirror holds %d records, want 4 of ours and 5 of others", all)
	}
	if n := r.mirror.Count(describeProducersKey, ""); n != asked {
		t.Errorf("the mirror was asked for the position %d times more; others' writes ended the session", n-asked)
	}
}

// S4: a success at a lower offset that isn't a repeat shows that the log lost its tail under the session: without acting on it
// (partition.go: acknowledge's case before), the hole stays and nobody is told.
func TestS4LostTailUnderTheSessionIsSaidAloud(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(0, "a", "b", "c", "d", "e")
	f := r.live()
	r.mirror.InterceptNext(1, produceKey, r.appends, func(*scripted.Request) scripted.Action {
		r.mirror.UncleanElection("orders", 0, 1, 3, false)
		return scripted.Pass()
	})
	r.write(0, "f")
	if s := r.await(f, forwarder.StateFailed); s.Reason == "" {
		t.Error("failed without a reason")
	}
	if got := r.onMirror(); got != "a b c f" {
		t.Errorf("the mirror holds %q, want a b c f", got)
	}
}

// S5, W2: without two answers that agree (recover.go: resolveAll's second ask), the first answer is believed, and the late request doubles a batch
// that the mirror has forgotten by then.
func TestS5LateRequestAfterTheFirstAnswer(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(threeDays, "a", "b", "c")
	late := make(chan struct{})
	land := sync.OnceFunc(func() {
		before := r.mirror.Offsets("orders", 0).LogEnd
		close(late)
		r.mirror.Await(r.t, "the late request", func() bool { return r.mirror.Offsets("orders", 0).LogEnd > before })
		r.mirror.Expire()
	})
	isB := func(req *scripted.Request) bool {
		return r.appends(req) && r.batchOf(req, "orders").BaseSequence() == 1
	}
	broken := r.mirror.InterceptNext(1, produceKey, isB, func(*scripted.Request) scripted.Action { return scripted.ApplyLate(late) })
	asked := 0
	r.mirror.Intercept(func(req *scripted.Request) scripted.Action {
		if len(broken) == 0 {
			return scripted.Pass()
		}
		if req.Key == describeProducersKey {
			asked++ // once to find that W2 applies, then the two that must agree; all on one connection
		}
		if req.Key == describeProducersKey && asked == 3 || r.appends(req) {
			land()
		}
		return scripted.Pass()
	})
	f, _ := r.start(nil)
	r.equal(f)
}

// takenOver mirrors a, b and c, stops, and makes the checkpoint say that another host's process did it.
func (r *rig) takenOver(age time.Duration, released bool) {
	r.t.Helper()
	r.write(age, "a", "b", "c")
	f, stop := r.start(nil)
	r.equal(f)
	stop()
	c, _ := r.source.Committed(group, "orders", 0)
	fields := strings.Fields(c.Metadata)
	for i, field := range fields {
		switch {
		case strings.HasPrefix(field, "owner="):
			fields[i] = "owner=another-boot,4026531836,4711,815"
		case strings.HasPrefix(field, "released="):
			fields[i] = fmt.Sprint("released=", released)
		}
	}
	c.Metadata = strings.Join(fields, " ")
	r.source.Commit(group, "orders", 0, c)
}

// S5, W3: without the wait (inherit's foreign), old records go out while a request of the last owner may still arrive. Fresh ones and
// what was handed over never wait.
func TestS5TakeoverWaits(t *testing.T) {
	for _, row := range []struct {
		name     string
		age      time.Duration
		released bool
		waits    bool
	}{{"old", threeDays, false, true}, {"old, handed over", threeDays, true, false}, {"fresh", 0, false, false}} {
		t.Run(row.name, func(t *testing.T) {
			r := newRig(t, scripted.Options{})
			r.takenOver(row.age, row.released)
			r.write(row.age, "d")
			before := r.appendCount()
			f, _ := r.start(nil)
			if !row.waits {
				r.equal(f)
				return
			}
			kafkatest.Eventually(t, 20*time.Second, func() error {
				if s := f.Status().Streams; len(s) != 1 || !strings.Contains(s[0].Reason, "waiting until") {
					return fmt.Errorf("status %+v doesn't say until when it waits", s)
				}
				return nil
			})
			<-time.After(moment)
			if n := r.appendCount(); n != before {
				t.Errorf("%d appends within takeover_wait", n-before)
			}
		})
	}
}

// R1: if the error of ListOffsets doesn't void the answer of DescribeProducers (resolve.go: listOffsets sets err), the old figures of a
// replica that no longer leads are believed, and "b" and "c" are doubled once the mirror has forgotten them.
func TestR1AnswersOfTheLeaderOnly(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(threeDays, "a", "b", "c")
	f, stop := r.start(nil)
	r.equal(f)
	stop()
	r.write(threeDays, "d")
	stale := r.mirror.InterceptNext(1, describeProducersKey, nil, func(*scripted.Request) scripted.Action {
		return scripted.Edit(func(resp kmsg.Response) {
			for i := range resp.(*kmsg.DescribeProducersResponse).Topics[0].Partitions[0].ActiveProducers {
				resp.(*kmsg.DescribeProducersResponse).Topics[0].Partitions[0].ActiveProducers[i].LastSequence = 0
			}
		})
	})
	withEpoch := func(req *scripted.Request) bool {
		l := req.Body.(*kmsg.ListOffsetsRequest)
		return len(stale) > 0 && l.Topics[0].Topic == "orders" && l.Topics[0].Partitions[0].CurrentLeaderEpoch >= 0
	}
	r.mirror.InterceptNext(1, listOffsetsKey, withEpoch, func(*scripted.Request) scripted.Action { return scripted.Fail(kerr.FencedLeaderEpoch) })
	r.mirror.InterceptNext(1, produceKey, r.appends, func(*scripted.Request) scripted.Action {
		r.mirror.Expire()
		return scripted.Pass()
	})
	f, _ = r.start(nil)
	r.equal(f)
}

// R2: without the scan (standing.go: settle), a mirror that has forgotten the producer looks as if nothing had been appended since the checkpoint.
func TestR2ForgottenProducerIsFoundInTheLog(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(threeDays, "a")
	f := r.live()
	waitCheckpoint(r, 1)
	stuck := r.source.Intercept(func(req *scripted.Request) scripted.Action {
		if req.Key == offsetCommitKey {
			return scripted.Fail(kerr.CoordinatorNotAvailable)
		}
		return scripted.Pass()
	})
	r.write(threeDays, "b", "c")
	r.equal(f)
	r.mirror.AppendForeign("orders", 0, "x", "y")
	r.mirror.Expire()
	r.mirror.BreakConnections(1) // the session ends; what it had learnt is gone with it
	r.write(threeDays, "d")
	stuck()
	r.equal(f)
}

func waitCheckpoint(r *rig, next int64) {
	r.t.Helper()
	r.source.Await(r.t, fmt.Sprint("a checkpoint at ", next), func() bool {
		c, ok := r.source.Committed(group, "orders", 0)
		return ok && c.Offset >= next
	})
}

// R2, F6: if the scan ends at the high watermark (resolve.go: ask's replica ID -2), an append above it is missed, and sent again once the mirror
// has forgotten it.
func TestR2ScanReachesTheLogEnd(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(threeDays, "a")
	f := r.live()
	now := make(chan struct{})
	close(now)
	r.mirror.InterceptNext(1, produceKey, r.appends, func(*scripted.Request) scripted.Action {
		r.mirror.HoldHighWatermark("orders", 0)
		return scripted.ApplyLate(now)
	})
	r.write(threeDays, "b")
	r.mirror.Await(t, "the append above the high watermark", func() bool { return r.mirror.Offsets("orders", 0).LogEnd == 2 })
	r.mirror.Expire()
	before := r.mirror.Count(describeProducersKey, "")
	r.mirror.Await(t, "attempts to resolve", func() bool { return r.mirror.Count(describeProducersKey, "") >= before+4 })
	r.mirror.ReleaseHighWatermark("orders", 0)
	r.equal(f)
}

// R3: if the checkpoint is believed against the log (standing.go: goOn's case found), what an unclean election took from the mirror
// stays lost.
func TestR3MirrorThatLostItsTailIsRefilled(t *testing.T) {
	for _, row := range []struct {
		name    string
		end     int64
		keep    bool
		foreign int // records that others wrote over what was lost
	}{
		{"known", 3, true, 0},
		{"forgotten", 3, false, 0},
		{"forgotten, written over", 3, false, 9},
		{"all lost", 0, false, 0},
		{"all lost, written over", 0, false, 9},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := newRig(t, scripted.Options{Brokers: 2})
			r.write(0, "a", "b", "c", "d", "e")
			f, stop := r.start(nil)
			r.equal(f)
			stop()
			r.mirror.UncleanElection("orders", 0, 2, row.end, row.keep)
			for range row.foreign {
				r.mirror.AppendForeign("orders", 0, "x")
			}
			r.write(0, "f")
			f, _ = r.start(nil)
			r.equal(f)
		})
	}
}

// R4: without the birth record (recover.go: lookUp, and registry.go: insert's return for a second birth, either alone suffices), a restart before the
// first append asks the start policy again and skips "b" and "c".
func TestR4BirthOutlivesAProcess(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(0, "a")
	refuse := r.mirror.Intercept(func(req *scripted.Request) scripted.Action {
		if r.appends(req) {
			return scripted.DropBefore()
		}
		return scripted.Pass()
	})
	latest := func(o *forwarder.Options) { o.Start = forwarder.StartLatest }
	f, stop := r.start(latest)
	r.await(f, forwarder.StateLive)
	r.write(0, "b")
	r.mirror.Await(t, "an append on its way", func() bool { return r.appendCount() > 0 })
	stop()
	refuse()
	r.write(0, "c")
	r.source.Commit(group, "orders", 0, scripted.Committed{Offset: -1}) // crashed before it was stored
	f, _ = r.start(latest)
	waitCaughtUp(t, f)
	if got := r.onMirror(); got != "b c" {
		t.Errorf("the mirror holds %q, want b c", got)
	}
}

// R4: deleted on the mirror is not refilled, and a position that nothing tells isn't guessed (standing.go: goOn's last cases).
func TestR4DeletedOnTheMirror(t *testing.T) {
	for _, row := range []struct {
		name       string
		foreign    bool
		checkpoint bool
		failed     bool
	}{
		{"all ours deleted", false, true, false},
		{"all ours deleted, others behind", true, true, false},
		{"all deleted, no checkpoint", true, false, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := newRig(t, scripted.Options{})
			r.write(0, "a", "b", "c")
			f, stop := r.start(nil)
			r.equal(f)
			stop()
			r.mirror.DeleteRecords("orders", 0, 3)
			if row.foreign {
				r.mirror.AppendForeign("orders", 0, "x")
			}
			if !row.checkpoint {
				r.mirror.AppendForeign("orders", 0, "y")
				r.mirror.DeleteRecords("orders", 0, 4)
				r.source.Commit(group, "orders", 0, scripted.Committed{Offset: -1})
			}
			r.mirror.ForgetProducers("orders", 0)
			r.write(0, "d")
			f, _ = r.start(nil)
			if row.failed {
				if s := r.await(f, forwarder.StateFailed); !strings.Contains(s.Reason, "position unknown") {
					t.Errorf("failed with %q, want position unknown", s.Reason)
				}
				return
			}
			waitCaughtUp(t, f)
			if got := r.onMirror(); got != "d" {
				t.Errorf("the mirror holds %q of ours, want d alone", got)
			}
		})
	}
}

// R4: a checkpoint without a birth record means that the segments topic was lost: the log tells the position, else nothing does. Without the
// cases in births.go: birth, the stream stops though the log tells, or the start policy skips what came meanwhile.
func TestR4LostSegmentsTopic(t *testing.T) {
	for _, deleted := range []bool{false, true} {
		t.Run(fmt.Sprint("records deleted too: ", deleted), func(t *testing.T) {
			r := newRig(t, scripted.Options{})
			r.write(0, "a", "b", "c")
			f, stop := r.start(nil)
			r.equal(f)
			stop()
			r.mirror.DeleteTopic("__kmirror.test.segments")
			r.mirror.ForgetProducers("orders", 0)
			if deleted {
				r.mirror.DeleteRecords("orders", 0, 3)
			}
			r.write(0, "d")
			f, _ = r.start(func(o *forwarder.Options) { o.Start = forwarder.StartLatest })
			if !deleted {
				r.equal(f)
				return
			}
			if s := r.await(f, forwarder.StateFailed); !strings.Contains(s.Reason, "position unknown") {
				t.Errorf("failed with %q, want position unknown", s.Reason)
			}
		})
	}
}

// R5: without re-encoding (fetched.go: queueFetched), the rest of a batch that another owner split is never sent, or its head is sent twice.
func TestR5PositionInsideABatch(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(0, "a")
	f, stop := r.start(nil)
	r.equal(f)
	stop()
	at := time.Now()
	r.source.Append("orders", 0, scripted.Batch{Values: []string{"b", "c", "d", "e"}, Timestamp: at})
	half := r.asOurs(1, "b", "c")
	half.Timestamp = at
	r.mirror.Append("orders", 0, half)
	r.write(0, "f")
	f, _ = r.start(nil)
	r.equal(f)
}

// R6: without commitFirst (recover.go: recoverAll), a crash after the first append leaves no trace on the source.
func TestR6CheckpointBeforeTheFirstAppend(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(0, "a")
	r.mirror.InterceptNext(1, produceKey, r.appends, func(*scripted.Request) scripted.Action {
		if c, ok := r.source.Committed(group, "orders", 0); !ok || c.Offset != 0 || c.Metadata == "" {
			t.Errorf("before the first append the checkpoint is %+v, %v", c, ok)
		}
		return scripted.Pass()
	})
	f, _ := r.start(nil)
	r.equal(f)
	waitCheckpoint(r, 1)
}

// R6: the checkpoint never passes the mirror's high watermark (checkpoint.go: checkpoint uses acked, not next,
// and commit takes only streams whose acked moved; either alone suffices).
func TestR6CheckpointStaysBelowTheHighWatermark(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(0, "a")
	f := r.live()
	waitCheckpoint(r, 1)
	r.mirror.HoldHighWatermark("orders", 0)
	r.write(0, "b")
	r.mirror.Await(t, "the append above the high watermark", func() bool { return r.mirror.Offsets("orders", 0).LogEnd == 2 })
	<-time.After(moment)
	if c, _ := r.source.Committed(group, "orders", 0); c.Offset != 1 {
		t.Errorf("checkpoint at %d with the mirror's high watermark at 1", c.Offset)
	}
	r.mirror.ReleaseHighWatermark("orders", 0)
	r.equal(f)
	waitCheckpoint(r, 2)
}

// R7: without the mirror topic ID in the checkpoint (inherit), or with appends by name (produce.go: maxProduceVersion 12), a recreated
// mirror topic goes on in the middle.
func TestR7RecreatedMirrorTopicStartsAnew(t *testing.T) {
	for _, running := range []bool{false, true} {
		t.Run(fmt.Sprint("while kmirror runs: ", running), func(t *testing.T) {
			r := newRig(t, scripted.Options{})
			r.write(0, "a", "b", "c")
			f, stop := r.start(nil)
			r.equal(f)
			if running {
				r.await(f, forwarder.StateLive)
			} else {
				stop()
			}
			r.mirror.RecreateTopic("orders")
			r.write(0, "d")
			if !running {
				f, _ = r.start(nil)
			}
			r.equal(f)
		})
	}
}

// T1: without the doubt (loop.go: offered's case doubtful), the recreated topic's batch at offset 3 follows the old topic's records.
func TestT1OfferThatIsNotWhatWasMirrored(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(0, "a", "b", "c")
	f, _ := r.start(func(o *forwarder.Options) { o.RefreshEvery = time.Hour })
	waitCaughtUp(t, f)
	r.await(f, forwarder.StateLive)
	r.source.RecreateTopic("orders")
	for i, v := range []string{"d", "e", "f", "g"} {
		spec := scripted.Batch{Values: []string{v}, Timestamp: time.Now()}
		r.source.Append("orders", 0, spec)
		offer(f, int64(i), spec)
	}
	waitCaughtUp(t, f)
	if got := r.onMirror(); got != "a b c d e f g" {
		t.Errorf("the mirror holds %q, want a b c d e f g", got)
	}
}

// T1: without Doubt's effect (forwarder.go: Doubt), the same after the proxy saw UNKNOWN_TOPIC_OR_PARTITION, when the first offers of the
// recreated topic didn't pass this proxy.
func TestT1DoubtHoldsOffers(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(0, "a", "b", "c")
	f, _ := r.start(func(o *forwarder.Options) { o.RefreshEvery = time.Hour })
	waitCaughtUp(t, f)
	r.await(f, forwarder.StateLive)
	r.source.RecreateTopic("orders")
	f.Doubt("orders", protocol.TopicID{}, 0)
	for i, v := range []string{"d", "e", "f", "g"} {
		spec := scripted.Batch{Values: []string{v}, Timestamp: time.Now()}
		r.source.Append("orders", 0, spec)
		if i == 3 {
			offer(f, 3, spec)
		}
	}
	waitCaughtUp(t, f)
	if got := r.onMirror(); got != "a b c d e f g" {
		t.Errorf("the mirror holds %q, want a b c d e f g", got)
	}
}

// T1: a producer's retry, answered with its old offset, is offered again: it isn't mirrored twice, and where it is recognised (partition.go:
// judgeBelow's return of duplicate) the source isn't asked either.
func TestT1RetriesAreMirroredOnce(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(0, "first") // a partition's first record is read, whoever offers it by name
	f := r.live()
	fetches := r.source.Count(fetchKey, "")
	for i := range 5 {
		spec := scripted.Batch{ProducerID: 9, BaseSequence: int32(i), Values: []string{fmt.Sprint(i)}, Timestamp: time.Now()}
		r.source.Append("orders", 0, spec)
		for range 2 {
			if !offer(f, int64(i+1), spec) {
				t.Errorf("offer %d was not taken", i)
			}
		}
	}
	r.equal(f)
	if n := r.source.Count(fetchKey, ""); n != fetches {
		t.Errorf("the source served %d fetches for what was offered", n-fetches)
	}
}

// T1: the first record of an empty partition, offered by the topic's name, may be of a topic that was made again; without reading it by ID (loop.go: offered) it is
// mirrored as the old topic's, and once more as the new one's.
func TestT1FirstRecordOfATopicMadeAgain(t *testing.T) {
	r := newRig(t, scripted.Options{})
	f := r.live()
	r.source.RecreateTopic("orders")
	spec := scripted.Batch{Values: []string{"a"}, Timestamp: time.Now()}
	r.source.Append("orders", 0, spec)
	offer(f, 0, spec)
	r.mirror.Await(t, "the record", func() bool { return len(r.mirror.Records("orders", 0)) > 0 })
	r.equal(f)
	if got := r.onMirror(); got != "a" {
		t.Errorf("the mirror holds %q, want a once", got)
	}
}

// The checkpoint says what the mirror had when it was written. Without the question what it has (status.go: fillStatus's acked), an instance that hasn't read that yet is caught up.
func TestTheCheckpointAloneIsNotCaughtUp(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(0, "a", "b", "c")
	f, stop := r.start(nil)
	r.equal(f)
	stop()
	answer := r.mirror.Intercept(func(req *scripted.Request) scripted.Action {
		if req.Key == describeProducersKey {
			return scripted.Fail(kerr.NotLeaderForPartition)
		}
		return scripted.Pass()
	})
	f, _ = r.start(nil)
	r.mirror.Await(t, "a look at the source and at the checkpoint", func() bool {
		if f.Look(t.Context()) != nil {
			return false
		}
		s := f.Status()
		if s.CaughtUp {
			t.Fatalf("caught up before the mirror was read: %+v", s)
		}
		return len(s.Streams) == 1 && s.Streams[0].LagRecords == 0
	})
	answer()
	r.equal(f)
}
