package forwarder

import (
	"slices"
	"time"

	"go.uber.org/zap"
)

func (l *loop) openSession(s *stream, k *link, r *recovered) {
	s.link, s.conn = k, k.conn
	s.session++
	s.numbering, s.mirrorEpoch = r.numbering, r.job.ask.epoch
	s.next, s.acked, s.mirrorEnd, s.holeFrom = r.next, r.next, r.standing.logEnd, -1
	s.solo = true
	s.sent, s.covered, s.sessionFrom = 0, 0, l.now
	s.wantFence, s.wantDense = false, false
	s.fills, s.fillData = l.opts.Offsets != OffsetsMapped && !s.shifted && s.fence == nil, l.opts.Offsets == OffsetsIdentical
	if start := s.holeBefore(s.next); s.fills && start <= s.mirrorEnd && s.mirrorEnd < s.next {
		s.next, s.acked = start, start // read again what is to be filled
	}
	if !l.now.Before(s.batchLimitUntil) {
		s.batchLimit, s.mergeBytes = 0, l.opts.MergeBytes
	}
	s.lastOld = r.standing.found && s.old(r.standing.timestamp, l.now)
	s.stateFresh = r.fresh || r.standing.known && !s.lastOld
	if r.job.twice {
		s.doubt, s.askTwice = false, false
	}
	s.quiet = !s.doubt && !s.foreignPending(l.now, l.takeoverWait)
	switch {
	case s.fence != nil:
		s.lastOld, s.stateFresh = false, r.fence.settled // the marker is young
		l.reportLoss(s, r)
	case r.opened:
		s.stateFresh = false // a late request of the generation before would not be refused (S5)
		l.reportLoss(s, r)
	}
	s.askGen = generationAsk{}
	s.stored, s.haveStored = r.stored, true
	s.uncommitted, s.lastBatchAt = false, r.stored.mirrorOffset
	s.recent, s.recentAt = nil, 0
	s.linked, s.tail, s.inHole, s.holes = false, false, false, nil
	l.setState(s, StateRecover, "")
	s.accepting.Store(s.fence == nil && s.spread == nil)
	if s.spread != nil && s.fence == nil {
		s.wantFence = true // it was only born
		l.again(s, errHoles)
		return
	}
	l.look(s)
}

// foreignPending reports whether another process's requests may still arrive (W3).
func (s *stream) foreignPending(now time.Time, wait time.Duration) bool {
	return s.foreign && now.Sub(s.foreignFrom) < wait
}

// seekQuiet makes a stream wait until nothing of an earlier session can arrive (rule S5). Only what has no compare-and-append waits.
func (l *loop) seekQuiet(s *stream) {
	if s.foreignPending(l.now, l.takeoverWait) {
		until := s.foreignFrom.Add(l.takeoverWait)
		l.endSession(s, nil)
		l.setState(s, StatePaused, "old records taken over without a hand-over; waiting until "+until.UTC().Format(time.RFC3339)+
			", when no request of the last owner can arrive any more")
		s.retryAt = until
		l.timers.add(until, func() { l.recover(s) })
		return
	}
	l.endSession(s, nil)
	s.askTwice = true // W2
	l.setState(s, StateRecover, "")
	s.retryAt = l.now
	l.recover(s)
}

// maxLostRanges is how many losses of a stream its status names.
const maxLostRanges = 10

// reportLoss says which source offsets a new generation left out, once.
func (l *loop) reportLoss(s *stream, r *recovered) {
	if r.job.gen.why != afterLoss || r.next <= r.behind {
		return
	}
	l.log.Error("source deleted records before they were mirrored",
		s.logFields(zap.Int64("from", r.behind), zap.Int64("to", r.next), zap.Int64("records", r.next-r.behind))...)
	if s.spread == nil || s.to == 0 { // all shares lose the same
		l.metrics.lostRecords.Add(float64(r.next - r.behind))
	}
	s.lost += r.next - r.behind
	s.lostRanges = append(s.lostRanges, [2]int64{r.behind, r.next})
	if len(s.lostRanges) > maxLostRanges {
		s.lostRanges = slices.Delete(s.lostRanges, 0, 1)
	}
}
