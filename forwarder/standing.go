package forwarder

import (
	"context"
	"errors"
	"slices"

	"go.uber.org/zap"

	"kmirror/protocol"
)

// errPositionUnknown says that neither the mirror's log nor the birth record tells where a stream stands (rule R4).
var errPositionUnknown = errors.New("position unknown: the mirror's log doesn't show where this stream stands; an operator must decide")

// settle turns an answer into a position, scanning the log where the broker doesn't know our producer.
func (l *loop) settle(ctx context.Context, res *resolver, r *recovered, a answer) {
	if r.err != nil {
		return
	}
	r.standing, r.err = a.standing, a.err
	if r.err != nil || r.standing.known {
		return
	}
	if r.job.have {
		if r.standing.intact, r.err = res.intactBelow(ctx, r.job.ask, r.job.stored.mirrorEpoch); r.err != nil {
			return
		}
	}
	from, err := l.scanFrom(ctx, res, r)
	if err == nil {
		err = res.scan(ctx, r.job.ask, from, &r.standing)
	}
	r.err = err
}

// scanFrom is where the scan starts (R2): the checkpoint's batch, if it is still there and ours; without one, where the fenced session began, if the log is still what it was there;
// else the log's start.
func (l *loop) scanFrom(ctx context.Context, res *resolver, r *recovered) (int64, error) {
	st, at := &r.standing, r.job.stored.mirrorOffset
	if f := r.numbering.fence; r.fence != nil && f != nil && at < 0 && st.logStart <= f.mirrorEnd && f.mirrorEnd <= st.logEnd {
		intact, err := res.intactBelow(ctx, r.job.ask, f.mirrorEpoch)
		if err != nil {
			return 0, err
		}
		if f.mirrorEnd <= intact {
			st.found, st.last = f.behind != noLandmark, f.behind // unless something newer is behind it
			return f.mirrorEnd, nil
		}
	}
	if !r.job.have || at < st.logStart || at >= st.logEnd || r.job.stored.generation != r.numbering.generation {
		return st.logStart, nil
	}
	ours := false
	err := res.batchAt(ctx, r.job.ask, at, func(b protocol.Batch) {
		end := positionOf(int32(b.ProducerEpoch()), b.BaseSequence()) + offsetsOf(b)
		fenced := slices.Contains(r.job.ask.ours, b.ProducerID()) // any batch of ours will do, since the scan goes on to the end
		ours = b.BaseOffset() == at && (fenced || b.ProducerID() == r.job.ask.producerID && end <= r.job.stored.position)
	})
	if err == nil && ours {
		return at, nil
	}
	return st.logStart, nil
}

// goOn computes the next source offset (rules R3, R4).
func (l *loop) goOn(r *recovered) {
	st := &r.standing
	if len(r.numbering.segments) == 0 {
		r.err = errors.New("the birth record didn't come back from the segments topic")
		return
	}
	birth, stored := r.numbering.segments[0], &r.job.stored
	have := r.job.have && stored.generation == r.numbering.generation
	switch {
	case r.compactedAway():
		r.next = stored.next
	case r.fence != nil && r.fenceTells():
	case st.found:
		r.next = r.numbering.offset(st.position)
	case r.job.have && !have:
		r.next, r.fresh = birth.source, true // a generation without a checkpoint: nothing of it was ever sent (R6)
	case have && stored.mirrorOffset < st.logStart && st.logStart <= stored.mirrorEnd && stored.mirrorEnd <= min(st.logEnd, st.intact):
		// Our last batch of the checkpoint was deleted, or there was none; all that was appended since is still in the log, and nothing
		// of it is ours. A batch that should be there and isn't was lost, whatever others wrote in its place.
		r.next, r.fresh = stored.next, stored.mirrorOffset < 0
	case st.logStart == 0 && r.numbering.generation > 0 && have && st.logEnd < stored.mirrorEnd:
		r.err, r.failed = errPositionUnknown, true // the mirror lost what was before this generation
	case st.logStart == 0:
		r.next, r.fresh = birth.source, !have // nothing was ever sent, or the mirror lost everything
	case have && stored.mirrorEnd == stored.next && st.logStart == st.logEnd && min(stored.mirrorEnd, st.logStart) <= st.intact:
		r.next = st.logStart // equal offsets, everything deleted
	default:
		r.err, r.failed = errPositionUnknown, true
	}
	if r.err == nil && st.found && r.job.have && r.next < r.job.stored.next && r.job.stored.generation == r.numbering.generation {
		l.log.Warn("the mirror lost its log's end; reading it from the source again", zap.String("topic", r.job.tp.topic),
			zap.Int32("partition", r.job.tp.partition), zap.Int64("from", r.next), zap.Int64("to", r.job.stored.next))
	}
	if r.err == nil && r.fence != nil {
		r.moveOn()
	}
}

// compactedAway reports whether our last batch by the checkpoint is gone because the mirror's own cleaner took it: the log reached behind it ever since,
// nobody else's batch is in its place, and what else of ours is there is older.
func (r *recovered) compactedAway() bool {
	at, st := r.job.ask.stored, &r.standing
	return at[1] > 0 && !st.known && at[0] >= st.logStart && at[1] <= min(st.logEnd, st.intact) && !st.foreign && (!st.found || st.lastEnd <= at[0])
}

// fenceTells computes next of a fenced stream whose last batch is of a fenced session, or stands where the newest session began.
func (r *recovered) fenceTells() bool {
	st, f := &r.standing, r.numbering.fence
	last := noLandmark
	if st.found {
		last = st.last
	}
	switch {
	case f != nil && last == f.behind:
		r.next = f.source
	case r.runs != nil && r.runs.found:
		r.next = r.runs.source + 1
	case r.runs != nil:
		r.err, r.failed = errPositionUnknown, true
	default:
		return false // of the dense generation
	}
	return true
}

// moveOn goes behind a loss, or back to where the source was truncated: in a fenced session the numbering doesn't forbid it.
func (r *recovered) moveOn() {
	gen := &r.job.gen
	r.behind = r.next
	if gen.why == afterLoss && r.next < gen.source || gen.why == afterDivergence {
		r.next = gen.source
	}
}

// lookUpRuns finds what the positions topic knows of fenced streams' last batches.
func (l *loop) lookUpRuns(ctx context.Context, results []recovered) error {
	var lookups []*runsLookup
	for i := range results {
		r := &results[i]
		last, f := r.standing.last, r.numbering.fence
		if r.err != nil || r.fence == nil || !r.standing.found || last.producerID == r.numbering.producerID || f != nil && last == f.behind {
			continue
		}
		r.runs = &runsLookup{of: last}
		if f != nil && f.producerID == last.producerID && f.epoch == last.epoch {
			r.runs.from = f.runsFrom
		}
		lookups = append(lookups, r.runs)
	}
	return l.registry.lookUpRuns(ctx, lookups)
}
