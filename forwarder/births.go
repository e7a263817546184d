package forwarder

import (
	"context"
	"encoding/hex"
	"errors"
)

// bear gives new streams their birth, opens new generations and begins fenced sessions, all in one write, and computes where each stream goes on.
func (l *loop) bear(ctx context.Context, results []recovered) error {
	starts, err := l.startOffsets(ctx, results)
	if err != nil {
		return err
	}
	var records []segmentRecord
	for i := range results {
		r := &results[i]
		if r.err == nil && len(r.numbering.segments) > 0 {
			l.goOn(r)
		}
		if r.err != nil {
			continue
		}
		if r.fence != nil {
			records = append(records, r.session()...)
		} else if birth, ok := r.birth(starts); ok {
			records = append(records, birth)
			for to := range birth.Of { // all shares at once; their own come too late to count
				if birth.To = to; to != r.job.id.to {
					records = append(records, birth)
				}
			}
		}
	}
	if len(records) == 0 {
		return nil
	}
	if err := l.registry.adopt(ctx, records); err != nil {
		return err
	}
	for i := range results {
		if r := &results[i]; r.err == nil {
			l.adopted(r)
		}
	}
	return nil
}

// adopted takes what came back from the segments topic.
func (l *loop) adopted(r *recovered) {
	born, before := len(r.numbering.segments) > 0, r.numbering.generation
	r.numbering, _ = l.registry.lookUp(r.job.id)
	switch {
	case r.fence != nil && r.job.dense && r.numbering.generation == before+1 && r.numbering.birth() == r.next:
		// Nothing of it was sent, and what came before is shut out.
		r.standing.found, r.standing.known, r.fresh = false, false, r.fence.settled
	case r.fence != nil:
		if r.numbering.generation != before || !r.numbering.fence.same(r.fence) {
			r.err = errOvertaken
		}
	case r.numbering.fence != nil:
		r.err = errOvertaken
	case r.numbering.generation != before:
		r.opened, r.behind = true, r.next
		r.standing.found, r.standing.known = false, false
		l.goOn(r)
	case !born:
		l.goOn(r)
	}
}

// record returns a record of the segments topic for the stream, all but what it says.
func (r *recovered) record() segmentRecord {
	return segmentRecord{
		Topic: r.job.tp.topic, TopicID: hex.EncodeToString(r.job.id.topicID[:]), Partition: r.job.id.partition,
		MirrorTopicID: hex.EncodeToString(r.job.id.mirrorTopicID[:]), Generation: r.numbering.generation, To: r.job.id.to, Of: r.job.id.of,
	}
}

// session returns the records that a fenced session needs before its first append, or that end the fenced generation.
func (r *recovered) session() []segmentRecord {
	f := r.fence
	f.source, f.behind, f.mirrorEnd, f.mirrorEpoch = r.next, noLandmark, r.standing.logEnd, r.job.ask.epoch
	if r.standing.found {
		f.behind = r.standing.last
	}
	before := r.numbering.fence
	f.settled = r.job.quiet || before != nil && before.producerID == f.producerID && before.settled
	begins := r.record()
	begins.Source, begins.Fence = f.source, newFenceRecord(f)
	if !r.job.dense {
		return []segmentRecord{begins}
	}
	birth := r.record()
	birth.Generation++
	birth.Birth, birth.Source, birth.Fence = true, r.next, begins.Fence
	return []segmentRecord{begins, birth}
}

// birth returns the record that a stream needs before its first append: its birth, or that of a new generation. A new generation
// begins at position 0, since every broker takes sequence 0 of a producer that it doesn't know.
func (r *recovered) birth(starts map[topicPartition]int64) (segmentRecord, bool) {
	rec := r.record()
	rec.Birth, rec.Generation = true, 0
	if len(r.numbering.segments) == 0 {
		start, ok := starts[r.job.tp]
		switch {
		case r.standing.found && r.job.id.of > 0:
			r.err, r.failed = errPositionUnknown, true
			return rec, false
		case r.standing.found:
			// The segments topic was lost; the log speaks for a stream whose position is its source offset (N2, R4).
			start = r.standing.position
		case r.job.have:
			r.err, r.failed = errPositionUnknown, true
			return rec, false
		case !ok:
			r.err = errors.New("the source gave no start offset")
			return rec, false
		}
		rec.Source, rec.Position, rec.Partitions = start, start, r.job.partitions
		return rec, true
	}
	wanted := false
	switch r.job.gen.why {
	case afterRefusal:
		wanted = !r.standing.known && r.next == r.job.gen.source // else another owner went on
	case afterLoss:
		wanted = r.next < r.job.gen.source // else another owner did it
	case afterDivergence:
		wanted = true
	}
	rec.Generation, rec.Source, rec.Position = r.numbering.generation+1, r.job.gen.source, 0
	return rec, wanted
}
