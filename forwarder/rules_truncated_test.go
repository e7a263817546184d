package forwarder_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/forwarder"
	"kmirror/internal/kafkatest"
	"kmirror/internal/scripted"
	"kmirror/protocol"
)

// The tests of mirrors that lost their log's end in an unclean election and grew past it before kmirror looked: what stands at an offset now isn't what
// stood there.

const (
	addPartitionsToTxnKey = 24
	segmentsTopic         = "__kmirror.test.segments"
)

// sharesOf returns the transactional IDs of a source partition's shares.
func (r *rig) sharesOf(partition int32) map[string]bool {
	r.t.Helper()
	of := map[int64]bool{}
	for _, rec := range r.mirror.Records(segmentsTopic, 0) {
		var seg struct {
			Partition int32 `json:"partition"`
			Fence     *struct {
				ProducerID int64 `json:"producer_id"`
			} `json:"fence"`
		}
		if err := json.Unmarshal(rec.Value, &seg); err != nil {
			r.t.Fatal(err)
		}
		if seg.Fence != nil && seg.Partition == partition {
			of[seg.Fence.ProducerID] = true
		}
	}
	ids := map[string]bool{}
	for _, req := range r.mirror.Requests(addPartitionsToTxnKey, nil) {
		if add := req.Body.(*kmsg.AddPartitionsToTxnRequest); of[add.ProducerID] {
			ids[add.TransactionalID] = true
		}
	}
	return ids
}

// writeTo appends n batches of one record to a source partition, all of which belong to mirror partition 0.
func (r *rig) writeTo(prefix string, partition int32, n int) {
	key := 0
	for protocol.KeyPartition(fmt.Append(nil, key), spreadOver) != 0 {
		key++
	}
	for i := range n {
		r.source.Append("orders", partition, scripted.Batch{Records: []scripted.Record{{Key: fmt.Append(nil, key), Value: fmt.Append(nil, prefix, partition, "-", i)}}})
	}
}

// R3: a share's session begins behind its last batch. Without asking whether the mirror's log still holds what it held then (standing.go: scanFrom's keeps), a share whose last
// batches were lost while another share grew the log past them goes on as if they were there.
func TestR3ASharesLostTailIsRefilled(t *testing.T) {
	for _, row := range []struct {
		name string
		keep int // batches of share 0 that the election left
	}{{"some left", 4}, {"none left", 0}} {
		t.Run(row.name, func(t *testing.T) {
			r := newSpreadRig(t, scripted.Options{})
			small := func(o *forwarder.Options) { o.Repartition, o.MergeBytes = true, 0 }
			r.writeTo("a", 0, 10)
			f, stop := r.start(small)
			r.spreadEqual(f)
			stop()
			_, stop = r.start(small) // the shares' sessions begin behind their last batches
			r.awaitFences(2 * 2 * spreadOver)
			stop()
			r.truncate(row.keep)
			before := r.mirror.Offsets("orders", 0).LogEnd
			shares := r.sharesOf(0)
			if len(shares) != spreadOver {
				t.Fatalf("%d shares of partition 0, want %d", len(shares), spreadOver)
			}
			var late atomic.Bool
			r.mirror.Intercept(func(req *scripted.Request) scripted.Action {
				if req.Key == initProducerIDKey && !late.Load() {
					if id := req.Body.(*kmsg.InitProducerIDRequest).TransactionalID; id != nil && shares[*id] {
						return scripted.Fail(kerr.NotCoordinator)
					}
				}
				return scripted.Pass()
			})
			r.writeTo("b", 1, 40)
			f, _ = r.start(small)
			r.mirror.Await(t, "the other share's growth", func() bool { return r.mirror.Offsets("orders", 0).LogEnd >= before+40 })
			late.Store(true)
			r.spreadEqual(f)
		})
	}
}

// awaitFences waits until n fenced sessions have begun.
func (r *rig) awaitFences(n int) {
	r.t.Helper()
	r.mirror.Await(r.t, fmt.Sprint(n, " fenced sessions"), func() bool { return len(r.fences()) >= n })
}

// fences are the records in the segments topic that begin fenced sessions.
func (r *rig) fences() (values []string) {
	for _, rec := range r.mirror.Records(segmentsTopic, 0) {
		if strings.Contains(string(rec.Value), `"fence"`) {
			values = append(values, string(rec.Value))
		}
	}
	return values
}

// truncate makes a replica lead mirror partition 0 that has only the first n of the batches with records.
func (r *rig) truncate(n int) {
	r.t.Helper()
	end := int64(0)
	for _, b := range r.mirror.Log("orders", 0) {
		if b.Control() {
			continue
		}
		if n--; n < 0 {
			break
		}
		end = b.EndOffset()
	}
	r.mirror.UncleanElection("orders", 0, 1, end, false)
}

// R4: "our last batch by the checkpoint was deleted" is only believed of a log that still held it then. Without the bound of what is intact (standing.go: goOn), what an unclean election
// took from the mirror, others wrote over and DeleteRecords then removed is skipped in silence; with it the operator is asked.
func TestR4WhatWasWrittenOverIsNotTakenForDeleted(t *testing.T) {
	for _, row := range []struct {
		name          string
		over, deleted int64 // log end once others wrote, log start then
	}{{"up to the checkpoint", 9, 5}, {"all", 9, 9}} {
		t.Run(row.name, func(t *testing.T) {
			r := newRig(t, scripted.Options{})
			r.write(0, "a", "b", "c", "d", "e")
			f, stop := r.start(nil)
			r.equal(f)
			stop()
			r.mirror.UncleanElection("orders", 0, 1, 3, false)
			for r.mirror.Offsets("orders", 0).LogEnd < row.over {
				r.mirror.AppendForeign("orders", 0, "x")
			}
			r.mirror.DeleteRecords("orders", 0, row.deleted)
			r.mirror.ForgetProducers("orders", 0)
			r.write(0, "f")
			f, _ = r.start(nil)
			if s := r.await(f, forwarder.StateFailed, forwarder.StateLive); !strings.Contains(s.Reason, "position unknown") {
				t.Errorf("state %s (%s) with %q on the mirror, want position unknown", s.State, s.Reason, r.onMirror())
			}
		})
	}
}

// R3: the mirror's cleaner may take our last batch, which isn't a loss. Without the bound of what is intact (standing.go: compactedAway), neither is what an unclean election took, once what
// others wrote in its place is cleaned too.
func TestR3WhatWasWrittenOverIsNotTakenForCompacted(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(0, "a", "b", "c", "d", "e")
	f, stop := r.start(nil)
	r.equal(f)
	stop()
	r.mirror.UncleanElection("orders", 0, 1, 3, false)
	r.mirror.AppendHole("orders", 0, 7)
	r.mirror.AppendForeign("orders", 0, "x")
	r.write(0, "f")
	f, _ = r.start(nil)
	r.equal(f)
}

// R3: a checkpoint that follows a lost tail doesn't name the batch that was lost. If it does (recover.go: commitFirst), what was appended since seems to have been there before, and is
// doubled once the mirror forgets it.
func TestR3TheLostBatchIsForgotten(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(threeDays, "a", "b", "c", "d", "e", "f", "g", "h", "i")
	one := func(o *forwarder.Options) { o.MergeBytes = 0 }
	f, stop := r.start(one)
	r.equal(f)
	stop()
	r.mirror.UncleanElection("orders", 0, 1, 5, false)
	// The first append of the next session is its last, and after the checkpoint before it none is written.
	ended := make(chan struct{})
	commits := func() {}
	r.mirror.Intercept(func(req *scripted.Request) scripted.Action {
		if !r.appends(req) {
			return scripted.Pass()
		}
		if r.mirror.Offsets("orders", 0).LogEnd == 5 {
			commits = r.source.Intercept(func(req *scripted.Request) scripted.Action {
				if req.Key == offsetCommitKey {
					return scripted.Fail(kerr.CoordinatorNotAvailable)
				}
				return scripted.Pass()
			})
			return scripted.Pass()
		}
		select {
		case <-ended:
			return scripted.Pass()
		default:
			close(ended)
			return scripted.DropBefore()
		}
	})
	_, stop = r.start(one)
	<-ended
	stop()
	commits()
	r.mirror.ForgetProducers("orders", 0)
	f, _ = r.start(one)
	r.equal(f)
}

// N5: which record stands first in the segments topic is judged by all owners alike, also after that topic lost its end. Without asking whether it did (registry.go: readAnew), what
// was written where this process had read already isn't seen: here a rival's birth.
func TestN5TheSegmentsTopicIsReadAnewOnceItWasTruncated(t *testing.T) {
	for _, grown := range []int{0, 20} {
		t.Run(fmt.Sprint("grown by ", grown), func(t *testing.T) {
			r := newRig(t, scripted.Options{})
			r.write(0, "a", "b")
			f := r.live()
			isBirth := func(req *scripted.Request) bool {
				b := r.batchOf(req, segmentsTopic)
				return b != nil && bytes.Contains(scripted.Decode(b)[0].Value, []byte(`"topic":"more"`)) && bytes.Contains(scripted.Decode(b)[0].Value, []byte(`"birth":true`))
			}
			r.mirror.InterceptNext(1, produceKey, isBirth, func(req *scripted.Request) scripted.Action {
				r.mirror.UncleanElection(segmentsTopic, 0, 1, 0, false)
				own := scripted.Decode(r.batchOf(req, segmentsTopic))[0].Value
				rival := bytes.Replace(own, []byte(`"source_offset":0,"position":0`), []byte(`"source_offset":2,"position":2`), 1)
				r.mirror.Append(segmentsTopic, 0, scripted.Batch{Records: []scripted.Record{{Value: rival}}})
				for range grown {
					r.mirror.AppendForeign(segmentsTopic, 0, "{}")
				}
				return scripted.Pass()
			})
			r.source.CreateTopic("more", 1)
			r.source.AppendForeign("more", 0, "a", "b", "c", "d", "e")
			r.mirror.Await(t, "the topic's last record", func() bool {
				if r.mirror.TopicID("more") == (protocol.TopicID{}) {
					return false
				}
				records := r.mirror.Records("more", 0)
				return len(records) > 0 && string(records[len(records)-1].Value) == "e"
			})
			if records := r.mirror.Records("more", 0); string(records[0].Value) != "c" {
				t.Errorf("the mirror begins with %q, want the first birth's %q", records[0].Value, "c")
			}
			r.write(0, "c") // what was born before goes on
			r.equal(f)
		})
	}
}

// N6: where the runs of a fenced session begin in the positions topic is a hint. Without reading all of it where they aren't behind that (positions.go: lookUpRuns), runs that were
// written after the topic had lost its end are missed, and the stream fails.
func TestN6RunsAreFoundOnceThePositionsTopicWasTruncated(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.compacted()
	f, stop := r.start(nil)
	r.wantAll(f, "a b f g i l w x")
	stop()
	r.source.Append("orders", 0, scripted.Batch{BaseOffset: 40, Values: []string{"z"}})
	r.source.Append("orders", 0, scripted.Batch{BaseOffset: 50, Values: []string{"zz"}})
	const positions = "__kmirror.test.positions"
	r.mirror.InterceptNext(1, produceKey, func(req *scripted.Request) bool { return r.batchOf(req, positions) != nil }, func(*scripted.Request) scripted.Action {
		r.mirror.UncleanElection(positions, 0, 1, 0, false)
		return scripted.Pass()
	})
	broken := r.mirror.InterceptNext(1, produceKey, r.fencedAppend, func(*scripted.Request) scripted.Action { return scripted.ApplyThenDrop() })
	f, _ = r.start(func(o *forwarder.Options) { o.MergeBytes = 0 })
	r.wantAll(f, "a b f g i l w x z zz")
	if len(broken) == 0 {
		t.Error("no fenced append lost its answer")
	}
}

// T1: a source that truncated its log ends lower than before. Without letting go of the end that was seen (epochs.go: diverged), a partition that goes on seems to lag, by what doesn't
// exist, until the source has grown past it.
func TestT1TheTruncatedSourceEndsLower(t *testing.T) {
	r := newRig(t, scripted.Options{})
	r.write(0, "a", "b", "c", "d", "e", "f")
	f := r.live()
	r.source.UncleanElection("orders", 0, 1, 3, true)
	kafkatest.Eventually(t, time.Minute, func() error {
		if s := f.Status().Streams[0]; s.Next != 3 {
			return fmt.Errorf("not behind the truncation yet: %+v", s)
		}
		return nil
	})
	waitCaughtUp(t, f)
	if s := f.Status().Streams[0]; s.SourceEnd != 3 || s.LagRecords != 0 {
		t.Errorf("the source ends at %d with a lag of %d, want 3 and 0", s.SourceEnd, s.LagRecords)
	}
}
