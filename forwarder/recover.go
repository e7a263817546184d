package forwarder

import (
	"context"
	"errors"
	"slices"
	"time"
)

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
	// Without waiting for markers anew: one that the first answer saw is in that leader's log below the end at which the second stops, since a leader loses what it has
	// only with its epoch, which both answers check (R1). Where it wasn't there, the stream is put off already.
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
			mirrorOffset: -1, mirrorEnd: r.standing.logEnd, mirrorEpoch: r.job.ask.epoch, lineage: r.job.lineage, owner: l.self,
		}
		switch old := r.job.stored; {
		case r.job.id.of > 0: // of all shares together
			c.generation, c.mirrorEnd, c.mirrorEpoch = 0, -1, -1
			if r.job.have {
				c.next = min(c.next, old.next)
			}
		case r.numbering.fence == nil:
			c.position = r.numbering.position(r.next)
		}
		if old := r.job.stored; r.job.have && old.generation == c.generation && r.next >= old.next { // else that batch was lost
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
