package forwarder_test

import (
	"bytes"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/forwarder"
	"kmirror/internal/bufpool"
	"kmirror/internal/scripted"
	"kmirror/protocol"
)

// The tests of the rules of exactly once run the forwarder between two scripted clusters, under the schedule that breaks it without
// the rule. Each names the code whose removal makes it fail.

const (
	produceKey           = 0
	fetchKey             = 1
	heartbeatKey         = 12
	joinGroupKey         = 11
	offsetCommitKey      = 8
	listOffsetsKey       = 2
	describeProducersKey = 61
)

// rig is a source and a mirror with the topic "orders" of one partition on the source.
type rig struct {
	t              *testing.T
	source, mirror *scripted.Cluster
}

func newRig(t *testing.T, mirror scripted.Options) *rig {
	t.Helper()
	t.Parallel()
	r := &rig{t, scripted.New(t, scripted.Options{}), scripted.New(t, mirror)}
	r.source.CreateTopic("orders", 1)
	return r
}

// start runs a forwarder that looks around often.
func (r *rig) start(change func(*forwarder.Options)) (f *forwarder.Forwarder, stop func()) {
	r.t.Helper()
	return start(r.t, r.source.Seeds(), r.mirror.Seeds(), func(o *forwarder.Options) {
		o.RefreshEvery, o.LookEvery, o.CheckpointEvery = 100*time.Millisecond, 50*time.Millisecond, 50*time.Millisecond
		if change != nil {
			change(o)
		}
	})
}

// write appends batches of one record each to the source; old says how old their timestamps are.
func (r *rig) write(old time.Duration, values ...string) {
	for _, v := range values {
		r.source.Append("orders", 0, scripted.Batch{Values: []string{v}, Timestamp: time.Now().Add(-old)})
	}
}

const threeDays = 72 * time.Hour

func ours(rec scripted.LogRecord) bool { return rec.ProducerID >= forwarder.ProducerIDBit }

// onMirror lists the values of our records on the mirror.
func (r *rig) onMirror() string {
	var values []string
	for _, rec := range r.mirror.Records("orders", 0) {
		if ours(rec) {
			values = append(values, string(rec.Value))
		}
	}
	return strings.Join(values, " ")
}

// equal waits until the mirror holds all of the source, once, in order.
func (r *rig) equal(f *forwarder.Forwarder) {
	r.t.Helper()
	waitCaughtUp(r.t, f)
	source, mirror := r.source.Records("orders", 0), r.mirror.Records("orders", 0)
	if err := scripted.CheckMirrorPrefix(source, mirror, ours); err != nil {
		r.t.Fatal(err)
	}
	if err := scripted.CheckMirrorPrefix(mirror, source, nil); err != nil && strings.Count(r.onMirror(), " ")+1 != len(source) {
		r.t.Fatalf("the mirror holds less than the source: %v", err)
	}
}

// await waits until the stream of orders-0 is in a state.
func (r *rig) await(f *forwarder.Forwarder, states ...forwarder.State) (s forwarder.StreamStatus) {
	r.t.Helper()
	r.mirror.Await(r.t, fmt.Sprint("a state of ", states), func() bool {
		for _, s = range f.Status().Streams {
			for _, state := range states {
				if s.Topic == "orders" && s.State == state.String() {
					return true
				}
			}
		}
		return false
	})
	return s
}

// batchOf returns the batch for a topic in a Produce request; nil if there is none.
func (r *rig) batchOf(req *scripted.Request, topic string) protocol.Batch {
	for _, t := range req.Body.(*kmsg.ProduceRequest).Topics {
		if t.Topic == topic || t.TopicID != [16]byte{} && t.TopicID == r.mirror.TopicID(topic) {
			if b, _, err := protocol.ParseBatch(t.Partitions[0].Records); err == nil {
				return b
			}
		}
	}
	return nil
}

// appends matches Produce requests that write orders.
func (r *rig) appends(req *scripted.Request) bool {
	return req.Key == produceKey && r.batchOf(req, "orders") != nil
}

func (r *rig) appendCount() int { return len(r.mirror.Requests(produceKey, r.appends)) }

// a moment for a forwarder that breaks a rule to do so; one that keeps it does nothing.
const moment = 300 * time.Millisecond

// refuseAfterAMoment refuses a request, late enough for more to be sent on its connection.
func refuseAfterAMoment(err scripted.Action) scripted.Interceptor {
	return func(*scripted.Request) scripted.Action {
		<-time.After(moment)
		return err
	}
}

// live hands the stream to the proxy's offers.
func (r *rig) live() *forwarder.Forwarder {
	r.t.Helper()
	f, _ := r.start(nil)
	waitCaughtUp(r.t, f)
	r.await(f, forwarder.StateLive)
	return f
}

// offer offers a batch at a source offset, as the proxy saw it pass.
func offer(f *forwarder.Forwarder, baseOffset int64, spec scripted.Batch) bool {
	b := spec.Bytes()
	buf := bufpool.Get(len(b))
	copy(buf.B, b)
	if !f.Offer(protocol.AckedBatch{Topic: "orders", BaseOffset: baseOffset, Batch: protocol.Batch(buf.B), Memory: buf}) {
		buf.Release()
		return false
	}
	return true
}

// N1: without the topic ID in the producer ID's hash (numbering.go: identity.producerID), the records of the recreated topic
// are taken for repeats of the old ones and answered with success, unwritten.
func TestN1RecreatedSourceTopicIsANewStream(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(0, "a", "b", "c")
	f, stop := r.start(nil)
	r.equal(f)
	stop()
	r.source.RecreateTopic("orders")
	r.write(0, "d", "e", "f")
	f, _ = r.start(nil)
	waitCaughtUp(t, f)
	if got := r.onMirror(); got != "a b c d e f" {
		t.Errorf("the mirror holds %q, want a b c d e f", got)
	}
}

// N1 and N4: without the generation in the hash, or without a new one (catchup.go: lostGround's askGen), what follows a loss on the source has no
// legal next sequence and is refused for ever.
func TestN1LossOpensAGeneration(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(0, "a", "b")
	f, stop := r.start(nil)
	r.equal(f)
	stop()
	r.write(0, "c", "d", "e")
	r.source.DeleteRecords("orders", 0, 4)
	f, _ = r.start(nil)
	waitCaughtUp(t, f)
	if got := r.onMirror(); got != "a b e" {
		t.Errorf("the mirror holds %q, want a b e", got)
	}
	if lost := f.Status().Streams[0].LostRecords; lost != 2 {
		t.Errorf("lost records = %d, want 2", lost)
	}
}

const epochSize = 1 << 30

// nearEpochEnd fills the source up to a few offsets before position 2^30.
func (r *rig) nearEpochEnd(before int64) {
	r.source.AppendHole("orders", 0, epochSize-before)
	r.source.DeleteRecords("orders", 0, epochSize-before)
}

// N2: without the split (partition.go: mayQueue), the batch across the border has sequences that its epoch doesn't
// have, and what follows it doesn't start an epoch at 0.
func TestN2EpochsCountPositions(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.nearEpochEnd(3)
	r.source.Append("orders", 0, scripted.Batch{Values: []string{"a"}})
	r.source.Append("orders", 0, scripted.Batch{Values: []string{"b", "c", "d", "e"}, Codec: kgo.ZstdCompression()})
	r.write(0, "f")
	f, _ := r.start(nil)
	r.equal(f)
	next := int64(epochSize - 3)
	for _, b := range r.mirror.Log("orders", 0) {
		if epoch, sequence := int16(next>>30), int32(next%epochSize); b.ProducerEpoch() != epoch || b.BaseSequence() != sequence {
			t.Errorf("batch at mirror offset %d has epoch %d, sequence %d; want %d, %d", b.BaseOffset(), b.ProducerEpoch(), b.BaseSequence(), epoch, sequence)
		}
		next += int64(b.RecordCount())
	}
}

// N2: without the drain before a new epoch (partition.go: maySend's last condition), "b" is refused and "c", at sequence 0 of the
// next epoch, is accepted.
func TestN2NewEpochWaitsForTheOld(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.nearEpochEnd(2)
	r.write(0, "a")
	f := r.live()
	isB := func(req *scripted.Request) bool {
		return r.appends(req) && r.batchOf(req, "orders").BaseSequence() == epochSize-1
	}
	r.mirror.InterceptNext(1, produceKey, isB, refuseAfterAMoment(scripted.Fail(kerr.NotEnoughReplicas)))
	r.write(0, "b", "c", "d")
	r.equal(f)
}

// N5: if not the first record counts but the own (registry.go: insert's return for a second birth), this owner starts behind what the other
// would mirror, and its records are answered with success for the other's.
func TestN5FirstBirthCounts(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(0, "a", "b", "c", "d", "e")
	segments := "__kmirror.test.segments"
	isBirth := func(req *scripted.Request) bool {
		b := r.batchOf(req, segments)
		return b != nil && bytes.Contains(scripted.Decode(b)[0].Value, []byte(`"birth":true`))
	}
	r.mirror.InterceptNext(1, produceKey, isBirth, func(req *scripted.Request) scripted.Action {
		// The rival looked at the source earlier, when its log ended at 2, and wrote first.
		own := scripted.Decode(r.batchOf(req, segments))[0].Value
		rival := bytes.Replace(own, []byte(`"source_offset":5,"position":5`), []byte(`"source_offset":2,"position":2`), 1)
		if bytes.Equal(rival, own) {
			r.t.Errorf("the birth record %s doesn't start at 5", own)
		}
		r.mirror.Append(segments, 0, scripted.Batch{Records: []scripted.Record{{Value: rival}}})
		return scripted.Pass()
	})
	f, _ := r.start(func(o *forwarder.Options) { o.Start = forwarder.StartLatest })
	waitCaughtUp(t, f)
	if got := r.onMirror(); got != "c d e" {
		t.Errorf("the mirror holds %q, want c d e", got)
	}
}

// S1: what had no answer is resolved, never resent: with the position from memory, or without the scan (standing.go: settle), a batch is
// doubled or lost, since the mirror forgets the producer at once.
func TestS1NothingIsResentBlindly(t *testing.T) {
	for name, action := range map[string]scripted.Action{"applied": scripted.ApplyThenDrop(), "not applied": scripted.DropBefore()} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, scripted.Options{})
			r.write(threeDays, "a", "b", "c", "d")
			broken := r.mirror.InterceptNext(2, produceKey, r.appends, func(*scripted.Request) scripted.Action { return action })
			r.expireBeforeEachAnswer()
			f, _ := r.start(nil)
			r.equal(f)
			if len(broken) != 2 {
				t.Errorf("%d requests broke, want 2", len(broken))
			}
		})
	}
}

// expireBeforeEachAnswer makes the mirror forget old producers before every resolution and every append.
func (r *rig) expireBeforeEachAnswer() {
	r.mirror.Intercept(func(req *scripted.Request) scripted.Action {
		if req.Key == describeProducersKey || r.appends(req) {
			r.mirror.Expire()
		}
		return scripted.Pass()
	})
}

// S1: on each connection to the mirror, every append comes after a resolution on that connection. No single line carries this: a session holds the
// connection itself (stream.conn), which is never redialled.
func TestS1SessionsResolveOnTheirConnection(t *testing.T) {
	r := newRig(t, scripted.Options{Brokers: 2})
	r.write(0, "a", "b")
	f := r.live()
	for i := range 6 {
		switch i % 3 {
		case 0:
			r.mirror.InterceptNext(1, produceKey, r.appends, func(*scripted.Request) scripted.Action { return scripted.ApplyThenDrop() })
		case 1:
			r.mirror.MoveLeader("orders", 0, int32(1+i%2))
		case 2:
			r.mirror.BreakConnections(r.mirror.Offsets("orders", 0).Leader)
		}
		r.write(0, fmt.Sprint("c", i), fmt.Sprint("d", i))
		r.equal(f)
	}
	resolved := map[int64]bool{}
	for _, req := range r.mirror.Requests(-1, nil) {
		resolved[req.Conn] = resolved[req.Conn] || req.Key == describeProducersKey
		if r.appends(&req) && !resolved[req.Conn] {
			t.Errorf("an append on connection %d, which wasn't asked where the stream stands", req.Conn)
		}
	}
}

// S1: an unclean election of a replica that lacks the tail and the producer state: without resolving at the new leader (standing.go: settle's scan)
// the next records follow the lost ones' hole.
func TestS1LeaderChangeResolves(t *testing.T) {
	for _, keep := range []bool{true, false} {
		t.Run(fmt.Sprint("state kept: ", keep), func(t *testing.T) {
			r := newRig(t, scripted.Options{Brokers: 2})
			r.write(0, "a", "b", "c", "d", "e")
			f := r.live()
			r.mirror.UncleanElection("orders", 0, 2, 3, keep)
			r.write(0, "f", "g")
			r.equal(f)
		})
	}
}

// S2: without the condition in links.go: pump, a member that the group may have given up goes on appending.
func TestS2OnlyConfirmedMembersSend(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(0, "a")
	f, _ := r.start(func(o *forwarder.Options) { o.SessionTimeout = time.Second })
	waitCaughtUp(t, f)
	r.await(f, forwarder.StateLive)
	release := make(chan struct{})
	free := sync.OnceFunc(func() { close(release) })
	defer free()
	remove := r.source.Intercept(func(req *scripted.Request) scripted.Action {
		if req.Key == heartbeatKey || req.Key == joinGroupKey {
			return scripted.Delay(release)
		}
		return scripted.Pass()
	})
	r.mirror.Await(t, "the membership in doubt", func() bool { return !f.Status().Member })
	before := r.appendCount()
	spec := scripted.Batch{Values: []string{"b"}, Timestamp: time.Now()}
	r.source.Append("orders", 0, spec)
	if !offer(f, 1, spec) {
		t.Error("the offer was not taken, so nothing could be sent")
	}
	<-time.After(moment)
	if n := r.appendCount(); n != before || f.Status().Member {
		t.Errorf("%d appends without a confirmed membership (member: %v)", n-before, f.Status().Member)
	}
	remove()
	free()
	r.equal(f)
}

// S3: without solo (partition.go: maySend), "b" is in flight when "a" is refused, and taken at the head of the mirror's log.
func TestS3OneInFlightUntilTheFirstSuccess(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(0, "a", "b", "c")
	r.mirror.InterceptNext(1, produceKey, r.appends, refuseAfterAMoment(scripted.Fail(kerr.NotEnoughReplicas)))
	f, _ := r.start(nil)
	r.equal(f)
}

// S3: without lastOld and old (partition.go: maySend), "c" is in flight when "b" is refused, and taken: the mirror has forgotten the
// producer.
func TestS3OneInFlightForOldData(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(threeDays, "a", "b", "c", "d")
	isB := func(req *scripted.Request) bool {
		return r.appends(req) && r.batchOf(req, "orders").BaseSequence() == 1
	}
	r.mirror.InterceptNext(1, produceKey, isB, func(req *scripted.Request) scripted.Action {
		<-time.After(moment)
		r.mirror.Expire()
		return scripted.Fail(kerr.NotEnoughReplicas)
	})
	f, _ := r.start(nil)
	r.equal(f)
}
