package forwarder

import (
	"context"
	"encoding/hex"
	"errors"
	"slices"
	"time"

	"go.uber.org/zap"

	"kmirror/protocol"
)

// errPositionUnknown says that neither the mirror's log nor the birth record tells where a stream stands (rule R4).
var errPositionUnknown = errors.New("position unknown: the mirror's log doesn't show where this stream stands; an operator must decide")

// recoverJob is what recovery needs of a stream, copied, so that it runs beside the loop.
type recoverJob struct {
	stream  *stream // a token here: only the loop looks inside
	tp      topicPartition
	id      identity
	ask     question
	stored  checkpoint
	have    bool // stored was read and is of this mirror topic
	twice   bool // W2: two answers two seconds apart must agree
	gen     generationAsk
	lineage lineage
	// appeared says that the source topic is younger than this process's first look at it.
	appeared   bool
	partitions int32 // of the source topic

	fence bool // the source log has holes: begin a fenced session (rule N4)
	dense bool // end the fenced generation: open a dense one
	quiet bool // nothing of an earlier session can arrive, if twice is done (rule S5)
}

// recovered is where a stream goes on.
type recovered struct {
	job       *recoverJob
	numbering numbering
	standing  standing
	next      int64  // source offset
	fresh     bool   // never appended anything: nothing can be on its way
	opened    bool   // in a generation that began with this recovery
	behind    int64  // where the generation before ended, or a fenced session that lost ground
	fence     *fence // made by this recovery, nil: none
	runs      *runsLookup
	stored    checkpoint
	err       error
	failed    bool // err needs a person
}

// recover queues a stream for recovery on its link. Safe to call at any time: it does nothing where recovery can't or needn't start.
func (l *loop) recover(s *stream) {
	if s.removed || s.recovering || s.conn != nil || s.unanswered > 0 || l.stopping || l.now.Before(s.retryAt) {
		return
	}
	if s.mirrorLeader.leader < 0 {
		l.setState(s, StatePaused, "the mirror partition has no leader")
		l.refreshSoon()
		s.retryAt = l.now.Add(time.Second)
		l.timers.add(s.retryAt, func() { l.recover(s) })
		return
	}
	s.recovering = true
	if s.state != StateFailed && s.state != StatePaused {
		l.setState(s, StateRecover, "")
	}
	k := l.linkFor(s)
	k.waiting = append(k.waiting, s)
	l.dirty[k] = true
}

// recoverAtOnce bounds the streams of one batch.
const recoverAtOnce = 500

// startRecovery resolves what waits for a link, dense and fenced streams in a batch each.
func (l *loop) startRecovery(k *link) {
	if len(k.waiting) == 0 || k.recovering[0] && k.recovering[1] {
		return
	}
	if k.conn == nil {
		l.connect(k)
		return
	}
	var jobs [2][]*recoverJob
	rest := k.waiting[:0]
	for _, s := range k.waiting {
		class := 0
		if s.wantFence || s.fence != nil {
			class = 1
		}
		switch {
		case s.removed:
			s.recovering = false
		case k.recovering[class] || len(jobs[class]) == recoverAtOnce:
			rest = append(rest, s)
		default:
			jobs[class] = append(jobs[class], l.recoverJob(s))
		}
	}
	clear(k.waiting[len(rest):])
	k.waiting = rest
	for class := range jobs {
		if len(jobs[class]) > 0 {
			l.startBatch(k, class, jobs[class])
		}
	}
}

func (l *loop) startBatch(k *link, class int, jobs []*recoverJob) {
	k.recovering[class] = true
	c := k.conn
	l.spawn(func(ctx context.Context) {
		results := l.recoverAll(ctx, c, jobs)
		l.inbox.call(func() {
			k.recovering[class] = false
			l.dirty[k] = true
			for i := range results {
				l.recovered(k, c, &results[i])
			}
		})
	})
}

func (l *loop) recoverJob(s *stream) *recoverJob {
	return &recoverJob{
		stream: s, tp: s.topicPartition, id: s.identity(), stored: s.stored,
		have:  s.haveStored,
		ask:   question{topic: s.mirrorTopic, topicID: s.mirrorTopicID, partition: s.to, epoch: s.mirrorLeader.epoch},
		twice: s.askTwice, gen: s.askGen, lineage: s.lineage, appeared: s.appeared, partitions: s.partitions,
		fence: s.wantFence, dense: s.wantDense,
		quiet: (!s.doubt || s.askTwice) && !s.foreignPending(l.now, l.takeoverWait),
	}
}

// recoverAll runs beside the loop: births read, positions resolved, new streams born, checkpoints written. One answer for each job.
func (l *loop) recoverAll(ctx context.Context, c *conn, jobs []*recoverJob) []recovered {
	ctx, cancel := context.WithTimeout(ctx, mirrorTimeout)
	defer cancel()
	results := make([]recovered, len(jobs))
	for i, job := range jobs {
		results[i].job = job
	}
	failAll := func(err error) []recovered {
		for i := range results {
			results[i].err = err
		}
		return results
	}
	if err := l.registry.refresh(ctx); err != nil {
		return failAll(err)
	}
	for i := range results {
		l.lookUp(&results[i])
	}
	if err := l.fence(ctx, results); err != nil {
		return failAll(err)
	}
	if err := l.resolveAll(ctx, c, results); err != nil {
		return failAll(err)
	}
	if err := l.checkLineage(ctx, results); err != nil {
		return failAll(err)
	}
	if err := l.bear(ctx, results); err != nil {
		return failAll(err)
	}
	if err := l.commitFirst(ctx, results); err != nil {
		return failAll(err)
	}
	return results
}

// lookUp finds a stream's numbering; without a birth record its producer ID is that of generation 0.
func (l *loop) lookUp(r *recovered) {
	n, ok := l.registry.lookUp(r.job.id)
	if !ok {
		n = numbering{producerID: r.job.id.producerID()}
	}
	r.numbering = n
	r.job.ask.producerID = n.producerID
	if of, born := l.registry.spreadOver(r.job.id.topicID, r.job.id.mirrorTopicID); born && of != r.job.id.of {
		r.err, r.failed = spreadError(of, r.job.id.of), true
	}
	if stored := &r.job.stored; r.job.have && stored.generation == n.generation && stored.mirrorOffset >= 0 {
		r.job.ask.stored = [2]int64{stored.mirrorOffset, stored.mirrorEnd}
	}
}

// fence fences what is to be fenced, and looks again how it stands: another owner may have been faster.
func (l *loop) fence(ctx context.Context, results []recovered) error {
	l.fenceAll(ctx, results)
	if !slices.ContainsFunc(results, func(r recovered) bool { return r.fence != nil }) {
		return nil
	}
	if err := l.registry.refresh(ctx); err != nil {
		return err
	}
	for i := range results {
		r := &results[i]
		if r.fence == nil {
			continue
		}
		generation := r.numbering.generation
		l.lookUp(r)
		if r.numbering.generation != generation || len(r.numbering.segments) == 0 {
			r.err = errOvertaken
			continue
		}
		r.job.ask.fence, r.job.ask.ours = r.fence, append(r.numbering.fencers, r.fence.producerID)
	}
	return nil
}

func (l *loop) resolveAll(ctx context.Context, c *conn, results []recovered) error {
	res := resolver{conn: c}
	questions := make([]question, len(results))
	twice := false
	for i := range results {
		questions[i] = results[i].job.ask
		twice = twice || results[i].job.twice
	}
	answers, err := res.askFenced(ctx, questions)
	if err != nil {
		return err
	}
	for i := range results {
		l.settle(ctx, &res, &results[i], answers[i])
	}
	if !twice {
		return l.lookUpRuns(ctx, results)
	}
	sleep(ctx, 2*time.Second) // W2
	if answers, err = res.ask(ctx, questions); err != nil {
		return err
	}
	for i := range results {
		r := &results[i]
		if !r.job.twice || r.err != nil {
			continue
		}
		first := r.standing
		l.settle(ctx, &res, r, answers[i])
		if r.err == nil && (first.found != r.standing.found || first.position != r.standing.position || first.last != r.standing.last) {
			r.err = errors.New("the position on the mirror still moves")
		}
	}
	return l.lookUpRuns(ctx, results)
}

// settle turns an answer into a position, scanning the log where the broker doesn't know our producer.
func (l *loop) settle(ctx context.Context, res *resolver, r *recovered, a answer) {
	if r.err != nil {
		return
	}
	r.standing, r.err = a.standing, a.err
	if r.err != nil || r.standing.known {
		return
	}
	from := l.scanFrom(ctx, res, r)
	if err := res.scan(ctx, r.job.ask, from, &r.standing); err != nil {
		r.err = err
	}
}

// scanFrom is where the scan starts (R2): the checkpoint's batch, if it is still there and ours, else the log's start.
func (l *loop) scanFrom(ctx context.Context, res *resolver, r *recovered) int64 {
	st, at := &r.standing, r.job.stored.mirrorOffset
	if f := r.numbering.fence; r.fence != nil && f != nil && at < 0 && st.logStart <= f.mirrorEnd && f.mirrorEnd <= st.logEnd {
		st.found, st.last = f.behind != noLandmark, f.behind // unless something newer is behind it
		return f.mirrorEnd
	}
	if !r.job.have || at < st.logStart || at >= st.logEnd || r.job.stored.generation != r.numbering.generation {
		return st.logStart
	}
	ours := false
	err := res.batchAt(ctx, r.job.ask, at, func(b protocol.Batch) {
		end := positionOf(int32(b.ProducerEpoch()), b.BaseSequence()) + offsetsOf(b)
		fenced := slices.Contains(r.job.ask.ours, b.ProducerID()) // any batch of ours will do, since the scan goes on to the end
		ours = b.BaseOffset() == at && (fenced || b.ProducerID() == r.job.ask.producerID && end <= r.job.stored.position)
	})
	if err == nil && ours {
		return at
	}
	return st.logStart
}

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
	f.source, f.behind, f.mirrorEnd = r.next, noLandmark, r.standing.logEnd
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
	case have && stored.mirrorOffset < st.logStart && st.logStart <= stored.mirrorEnd && stored.mirrorEnd <= st.logEnd:
		// Our last batch of the checkpoint was deleted, or there was none; all that was appended since is still in the log, and nothing
		// of it is ours. A batch that should be there and isn't was lost, whatever others wrote in its place.
		r.next, r.fresh = stored.next, stored.mirrorOffset < 0
	case st.logStart == 0 && r.numbering.generation > 0 && have && st.logEnd < stored.mirrorEnd:
		r.err, r.failed = errPositionUnknown, true // the mirror lost what was before this generation
	case st.logStart == 0:
		r.next, r.fresh = birth.source, !have // nothing was ever sent, or the mirror lost everything
	case have && stored.mirrorEnd == stored.next && st.logStart == st.logEnd:
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

// compactedAway reports whether our last batch by the checkpoint is gone because the mirror's own cleaner took it: the log reaches behind it,
// nobody else's batch is in its place, and what else of ours is there is older.
func (r *recovered) compactedAway() bool {
	at, st := r.job.ask.stored, &r.standing
	return at[1] > 0 && !st.known && at[0] >= st.logStart && at[1] <= st.logEnd && !st.foreign && (!st.found || st.lastEnd <= at[0])
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

// commitFirst writes the checkpoints before the first appends (R6).
func (l *loop) commitFirst(ctx context.Context, results []recovered) error {
	var commits []commit
	for i := range results {
		r := &results[i]
		if r.err != nil {
			continue
		}
		c := checkpoint{
			next: r.next, sourceTopicID: r.job.id.topicID, mirrorTopicID: r.job.id.mirrorTopicID, generation: r.numbering.generation,
			mirrorOffset: -1, mirrorEnd: r.standing.logEnd, lineage: r.job.lineage, owner: l.self,
		}
		switch old := r.job.stored; {
		case r.job.id.of > 0: // of all shares together
			c.generation, c.mirrorEnd = 0, -1
			if r.job.have {
				c.next = min(c.next, old.next)
			}
		case r.numbering.fence == nil:
			c.position = r.numbering.position(r.next)
		}
		if old := r.job.stored; r.job.have && old.generation == c.generation {
			c.mirrorOffset = old.mirrorOffset
		}
		if r.standing.found && c.mirrorOffset < 0 && r.job.id.of == 0 {
			c.mirrorOffset = r.standing.logStart // no batch of ours is known by its offset: a scan starts at the log's start
		}
		r.stored = c
		commits = append(commits, commit{topicPartition: r.job.tp, topicID: r.job.id.topicID, checkpoint: c})
	}
	return l.group.commit(ctx, commits)
}

// recovered starts a stream's session on the connection that resolved it.
func (l *loop) recovered(k *link, c *conn, r *recovered) {
	s := r.job.stream
	s.recovering = false
	if s.removed || l.stopping {
		l.drained(s)
		return
	}
	if gone, ok := errors.AsType[*divergedError](r.err); ok {
		if l.diverged(s, gone); !l.opts.StopOnDivergence {
			l.retryLater(s, s.wait.next(), r.err)
		}
		return
	}
	switch {
	case errors.Is(r.err, errOvertaken):
		s.wantFence, s.wantDense = false, false // as it stands now
	case r.err != nil && r.numbering.fence != nil:
		s.wantFence = true // it was, which a new process doesn't know before it asks
	}
	if r.err != nil {
		if isLeadership(r.err) {
			l.refreshSoon()
		}
		if r.failed {
			l.setState(s, StateFailed, r.err.Error())
			s.retryAt = l.now.Add(10 * time.Second)
			l.timers.add(s.retryAt, func() { l.recover(s) })
			return
		}
		l.retryLater(s, s.wait.next(), r.err)
		return
	}
	if k.conn != c || s.mirrorLeader.leader != k.broker || s.mirrorLeader.epoch != r.job.ask.epoch {
		l.retryLater(s, s.wait.next(), errLeader)
		return
	}
	l.openSession(s, k, r)
}

func (l *loop) openSession(s *stream, k *link, r *recovered) {
	s.link, s.conn = k, k.conn
	s.session++
	s.numbering = r.numbering
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
