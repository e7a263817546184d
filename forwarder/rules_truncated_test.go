package forwarder_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/forwarder"
	"kmirror/internal/scripted"
	"kmirror/protocol"
)

// The tests of mirrors that lost their log's end in an unclean election and grew past it before kmirror looked: what stands at an offset now isn't what
// stood there.

const addPartitionsToTxnKey = 24

// sharesOf returns the transactional IDs of a source partition's shares.
func (r *rig) sharesOf(partition int32) map[string]bool {
	r.t.Helper()
	of := map[int64]bool{}
	for _, rec := range r.mirror.Records("__kmirror.test.segments", 0) {
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
	for _, rec := range r.mirror.Records("__kmirror.test.segments", 0) {
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
