package forwarder_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"

	"kmirror/forwarder"
	"kmirror/internal/scripted"
)

const (
	metadataKey       = 3
	initProducerIDKey = 22
	endTxnKey         = 26
)

// compacted fills the source with what a cleaner leaves: dense, a hole between batches, holes inside one, an emptied batch, dense again.
func (r *rig) compacted() {
	r.write(0, "a", "b")
	r.source.Append("orders", 0, scripted.Batch{BaseOffset: 5, Values: []string{"f"}})
	r.source.Append("orders", 0, scripted.Batch{BaseOffset: 6, Records: []scripted.Record{
		{Value: []byte("g")}, {Value: []byte("i"), OffsetDelta: 2}, {Value: []byte("l"), OffsetDelta: 5},
	}, LastOffsetDelta: 7})
	r.source.Append("orders", 0, scripted.Batch{BaseOffset: 20, ProducerID: 7, LastOffsetDelta: 1})
	r.write(0, "w", "x")
}

// all lists the values of all records on the mirror.
func (r *rig) all() string {
	var values []string
	for _, rec := range r.mirror.Records("orders", 0) {
		if !rec.Control {
			values = append(values, string(rec.Value))
		}
	}
	return strings.Join(values, " ")
}

// wantAll waits until nothing is left to mirror and compares.
func (r *rig) wantAll(f *forwarder.Forwarder, want string) {
	r.t.Helper()
	waitCaughtUp(r.t, f)
	if got := r.all(); got != want {
		r.t.Fatalf("the mirror holds %q, want %q", got, want)
	}
}

// N4: holes of a compacted log end the dense numbering; behind them it begins anew, and a restart at any place goes on where the log stands.
func TestN4HolesAreMirroredInAFencedSession(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.compacted()
	f, stop := r.start(nil)
	r.wantAll(f, "a b f g i l w x")
	r.await(f, forwarder.StateLive)
	r.write(0, "y")
	r.wantAll(f, "a b f g i l w x y")
	if log := r.mirror.Log("orders", 0); log[len(log)-1].ProducerID() < forwarder.ProducerIDBit {
		t.Error("behind the holes the stream isn't dense again")
	}
	stop()
	r.source.Append("orders", 0, scripted.Batch{BaseOffset: 40, Values: []string{"z"}})
	f, _ = r.start(nil)
	r.wantAll(f, "a b f g i l w x y z")
	fenced := 0
	for _, b := range r.mirror.Log("orders", 0) {
		if !b.Control() && b.ProducerID() < forwarder.ProducerIDBit {
			fenced++
		}
	}
	if fenced == 0 {
		t.Error("no batch on the mirror is of a fenced session")
	}
}

// fencedAppend matches appends of fenced sessions.
func (r *rig) fencedAppend(req *scripted.Request) bool {
	return r.appends(req) && r.batchOf(req, "orders").ProducerID() < forwarder.ProducerIDBit
}

// lateAppend breaks the connection of the first fenced append, which lands when land is called, after what before does. It lands at the latest just
// before the next one.
func (r *rig) lateAppend(before func()) (broken <-chan *scripted.Request, land func()) {
	late := make(chan struct{})
	broken = r.mirror.InterceptNext(1, produceKey, r.fencedAppend, func(*scripted.Request) scripted.Action { return scripted.ApplyLate(late) })
	land = sync.OnceFunc(func() {
		before()
		close(late)
		<-time.After(moment)
	})
	r.mirror.Intercept(func(req *scripted.Request) scripted.Action {
		if len(broken) > 0 && r.fencedAppend(req) {
			land()
		}
		return scripted.Pass()
	})
	return broken, land
}

// N6: without the empty transaction (fence.go: emptyTransaction after InitProducerId) the late append of the session before lands between reading the
// position and the first append.
func TestN6LateAppendsOfTheSessionBeforeAreRefused(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.compacted()
	r.lateAppend(func() {})
	f, _ := r.start(nil)
	r.wantAll(f, "a b f g i l w x")
}

// N6: EndTxn's answer comes before the marker (F7). Without waiting for it (resolve.go: askFenced) the position is read while the session before can
// still append.
func TestN6TheMarkerIsWaitedFor(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.compacted()
	broken, land := r.lateAppend(func() {})
	asked := 0
	r.mirror.Intercept(func(req *scripted.Request) scripted.Action {
		switch {
		case len(broken) == 0:
		case req.Key == endTxnKey && asked == 0:
			r.mirror.HoldMarkers()
		case req.Key == describeProducersKey:
			if asked++; asked == 3 {
				r.mirror.ReleaseMarkers()
			}
		case r.fencedAppend(req):
			land()
			r.mirror.ReleaseMarkers()
		}
		return scripted.Pass()
	})
	f, _ := r.start(nil)
	r.wantAll(f, "a b f g i l w x")
	if asked < 3 {
		t.Errorf("the mirror was asked for the marker %d times, want until it was there", asked)
	}
}

// N6: the source offsets of a batch are durable before it; without them (partition.go: maySend's uncovered) nobody could tell where a batch with holes
// ends, and a restart doubles or skips.
func TestN6RestartsInsideHolesGoOnWhereTheLogStands(t *testing.T) {
	r := newRig(t, scripted.Options{})
	for i := range 30 {
		base := int64(i * 10)
		r.source.Append("orders", 0, scripted.Batch{BaseOffset: base, Records: []scripted.Record{
			{Value: fmt.Append(nil, base)}, {Value: fmt.Append(nil, base+int64(i%7)+1), OffsetDelta: int32(i%7) + 1},
		}, LastOffsetDelta: 9})
	}
	var want []string
	for i := range 30 {
		want = append(want, fmt.Sprint(i*10), fmt.Sprint(i*10+i%7+1))
	}
	// Each session ends after one append, answered or not.
	for i := range 8 {
		kill := scripted.ApplyThenDrop()
		if i%2 == 1 {
			kill = scripted.Fail(kerr.NotEnoughReplicas)
		}
		done := r.mirror.InterceptNext(1, produceKey, r.appends, func(*scripted.Request) scripted.Action { return kill })
		_, stop := r.start(func(o *forwarder.Options) { o.MergeBytes = 150 })
		<-done
		stop()
	}
	f, _ := r.start(nil)
	r.wantAll(f, strings.Join(want, " "))
}

// N6, F8: a mirror that forgot the transactional ID gives another producer ID, which fences nobody. Without waiting out what the last owner sent
// (births.go: session's settled) its append lands between reading the position and the first append.
func TestN6ANewProducerIDWaitsOutTheOld(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.compacted()
	broken, land := r.lateAppend(func() {})
	r.mirror.InterceptNext(1, initProducerIDKey, func(*scripted.Request) bool { return len(broken) > 0 }, func(*scripted.Request) scripted.Action {
		r.mirror.ForgetTransactionalIDs()
		return scripted.Pass()
	})
	r.landAtAnswer(3, broken, land) // once to find that it must wait, then the two that must agree
	f, _ := r.start(nil)
	r.wantAll(f, "a b f g i l w x")
}

// landAtAnswer lets the late append land before the nth question for the position.
func (r *rig) landAtAnswer(n int, broken <-chan *scripted.Request, land func()) {
	asked := 0
	r.mirror.Intercept(func(req *scripted.Request) scripted.Action {
		if len(broken) > 0 && req.Key == describeProducersKey {
			if asked++; asked == n {
				land()
			}
		}
		return scripted.Pass()
	})
}

// N6, F3: old data lets the mirror forget the fence, and with it which sessions are over. Without waiting them out (partition.go: maySend's old) the late
// append is taken between reading the position and the first append, since no producer is known any more.
func TestN6OldDataWaitsOutTheSessionBefore(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(threeDays, "a", "b")
	for i, v := range []string{"f", "i", "l"} {
		r.source.Append("orders", 0, scripted.Batch{BaseOffset: int64(5 + 3*i), Values: []string{v}, Timestamp: time.Now().Add(-threeDays)})
	}
	broken, land := r.lateAppend(func() { r.mirror.ForgetProducers("orders", 0) })
	r.landAtAnswer(3, broken, land)
	f, _ := r.start(func(o *forwarder.Options) { o.MergeBytes = 0 })
	r.wantAll(f, "a b f i l")
}

// A transaction coordinator that doesn't answer holds up fenced streams alone (recover.go: startRecovery's two batches).
func TestACoordinatorThatHangsHoldsUpItsStreamsAlone(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.compacted()
	plain := []string{"plain-1", "plain-2", "plain-3"}
	for _, topic := range plain {
		r.source.CreateTopic(topic, 1)
	}
	f, _ := r.start(nil)
	r.wantAll(f, "a b f g i l w x")
	asked := make(chan struct{}, 1000)
	r.mirror.Intercept(func(req *scripted.Request) scripted.Action {
		if req.Key == initProducerIDKey {
			asked <- struct{}{}
			return scripted.HoldForever()
		}
		return scripted.Pass()
	})
	r.source.Append("orders", 0, scripted.Batch{BaseOffset: 90, Values: []string{"z"}})
	<-asked
	for _, topic := range plain { // its session ends, on the link of the one that hangs too
		r.mirror.InterceptNext(1, produceKey, func(req *scripted.Request) bool { return r.batchOf(req, topic) != nil },
			func(*scripted.Request) scripted.Action { return scripted.Fail(kerr.NotEnoughReplicas) })
		r.source.AppendForeign(topic, 0, "x")
		r.mirror.Await(t, topic, func() bool { return len(r.mirror.Records(topic, 0)) == 1 })
		for _, s := range f.Status().Streams {
			if s.Topic == "orders" && s.State != forwarder.StateRecover.String() {
				t.Errorf("%s went on only when the fenced stream was %s", topic, s.State)
			}
		}
	}
}

// A mirror that doesn't tell of its topics holds up nothing that has its session: a new leader on the source is learnt of all the same (topics.go: startRefresh, which
// doesn't wait for the mirror).
func TestASilentMirrorDoesNotHideANewSourceLeader(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.source = scripted.New(t, scripted.Options{Brokers: 2})
	r.source.CreateTopic("orders", 1)
	r.write(0, "a")
	f, _ := r.start(func(o *forwarder.Options) { o.NoOffers = true })
	r.wantAll(f, "a")
	asked := make(chan struct{}, 1000)
	r.mirror.Intercept(func(req *scripted.Request) scripted.Action {
		if req.Key == metadataKey {
			asked <- struct{}{}
			return scripted.HoldForever()
		}
		return scripted.Pass()
	})
	<-asked
	r.source.MoveLeader("orders", 0, 2)
	r.write(0, "b")
	r.mirror.Await(t, "b", func() bool { return r.all() == "a b" })
}
