package forwarder_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"kmirror/forwarder"
	"kmirror/internal/scripted"
	"kmirror/protocol"
)

const spreadOver = 3

// newSpreadRig has two partitions of orders on the source and three on the mirror.
func newSpreadRig(t *testing.T, mirror scripted.Options) *rig {
	r := newRig(t, mirror)
	r.source.AddPartitions("orders", 2)
	r.mirror.CreateTopic("orders", spreadOver)
	return r
}

func repartition(o *forwarder.Options) { o.Repartition = true }

// writeKeyed appends n batches of a few records each to both partitions, one record in three without a key.
func (r *rig) writeKeyed(prefix string, n int) {
	for i := range n {
		for partition := range int32(2) {
			var records []scripted.Record
			for j := range 1 + i%4 {
				rec := scripted.Record{Value: fmt.Append(nil, prefix, partition, "-", i, "-", j)}
				if (i+j)%3 != 0 {
					rec.Key = fmt.Append(nil, "key-", (7*i+j)%23)
				}
				records = append(records, rec)
			}
			r.source.Append("orders", partition, scripted.Batch{Records: records})
		}
	}
}

// spreadEqual checks that every record of the source is once on the mirror, where it belongs, in the order of its source partition.
func (r *rig) spreadEqual(f *forwarder.Forwarder) {
	r.t.Helper()
	waitCaughtUp(r.t, f)
	var want [spreadOver][2][]string
	total := 0
	for partition := range int32(2) {
		for _, rec := range r.source.Records("orders", partition) {
			if rec.Control || rec.Aborted {
				continue
			}
			to := int32((rec.Offset + int64(partition)) % spreadOver)
			if rec.Key != nil {
				to = protocol.KeyPartition(rec.Key, spreadOver)
			}
			want[to][partition] = append(want[to][partition], string(rec.Value))
			total++
		}
	}
	for to := range int32(spreadOver) {
		var got [2][]string
		for _, rec := range r.mirror.Records("orders", to) {
			if rec.Control {
				continue
			}
			from := 0
			if strings.Contains(string(rec.Value), "1-") && string(rec.Value)[1] == '1' {
				from = 1
			}
			got[from] = append(got[from], string(rec.Value))
		}
		for from := range 2 {
			if fmt.Sprint(got[from]) != fmt.Sprint(want[to][from]) {
				r.t.Fatalf("mirror partition %d has of source partition %d\n%v, want\n%v", to, from, got[from], want[to][from])
			}
		}
	}
	if total == 0 {
		r.t.Error("nothing was written")
	}
}

// A topic goes to one with another number of partitions: each record once, where Java's producer would send its key, in its partition's order; over restarts, lost answers and
// what is written meanwhile.
func TestRepartition(t *testing.T) {
	r := newSpreadRig(t, scripted.Options{})
	r.writeKeyed("a", 20)
	f, stop := r.start(repartition)
	r.spreadEqual(f)
	for _, s := range f.Status().Streams {
		if s.State != forwarder.StateTail.String() || s.MirrorPartition == nil {
			t.Errorf("stream %+v, want a share that follows the log", s)
		}
	}
	r.writeKeyed("b", 10)
	r.spreadEqual(f)
	if c, ok := r.source.Committed(group, "orders", 1); !ok || c.Offset > r.source.Offsets("orders", 1).LogEnd {
		t.Errorf("the checkpoint of partition 1 is %+v, %t", c, ok)
	}
	stop()
	if c, ok := r.source.Committed(group, "orders", 1); !ok || c.Offset != r.source.Offsets("orders", 1).LogEnd || !strings.Contains(c.Metadata, "released=true") {
		t.Errorf("the checkpoint after a clean end is %+v, %t, want the log's end %d, released", c, ok, r.source.Offsets("orders", 1).LogEnd)
	}
	r.writeKeyed("c", 10)
	for i := range 6 { // sessions end with the answer lost, before or after the append
		fault := scripted.ApplyThenDrop()
		if i%2 == 1 {
			fault = scripted.DropBefore()
		}
		done := r.mirror.InterceptNext(1, produceKey, r.appends, func(*scripted.Request) scripted.Action { return fault })
		_, stop := r.start(repartition)
		<-done
		stop()
	}
	f, _ = r.start(repartition)
	r.spreadEqual(f)
}

// Shares survive what dense streams do: old records, a mirror that forgot its producers, a compacted source.
func TestRepartitionOfOldAndSparseLogs(t *testing.T) {
	r := newSpreadRig(t, scripted.Options{})
	for i := range int64(10) {
		r.source.Append("orders", 0, scripted.Batch{BaseOffset: i * 7, Timestamp: time.Now().Add(-threeDays), Records: []scripted.Record{
			{Key: fmt.Append(nil, i), Value: fmt.Append(nil, "x0-", i, "-0")}, {Value: fmt.Append(nil, "x0-", i, "-1"), OffsetDelta: 3},
		}, LastOffsetDelta: 5})
	}
	f, stop := r.start(repartition)
	r.spreadEqual(f)
	stop()
	r.mirror.Expire()
	r.writeKeyed("y", 5)
	f, _ = r.start(repartition)
	r.spreadEqual(f)
}

// A topic that was mirrored otherwise isn't mixed up: it stops and says why.
func TestRepartitionOfATopicMirroredOtherwise(t *testing.T) {
	r := newSpreadRig(t, scripted.Options{})
	r.writeKeyed("a", 3)
	f, stop := r.start(nil)
	waitCaughtUp(t, f)
	stop()
	before := len(r.mirror.Records("orders", 0))
	r.writeKeyed("b", 3)
	f, stop = r.start(repartition)
	if s := r.await(f, forwarder.StateFailed); !strings.Contains(s.Reason, "partition to partition") {
		t.Errorf("failed with %q, want how it was mirrored", s.Reason)
	}
	stop()
	if n := len(r.mirror.Records("orders", 0)); n != before {
		t.Errorf("the mirror went from %d to %d records", before, n)
	}
}
