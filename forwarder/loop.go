package forwarder

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/zap"

	"kmirror/protocol"
)

// loop is the one goroutine that owns the streams. Its methods run on it, unless they say otherwise; what they spawn comes back through
// the inbox.
//
// Shutdown: streams are let go and drained, their checkpoints committed, the group left, connections closed, tasks awaited.
type loop struct {
	*Forwarder
	source, mirror *kgo.Client
	clientID       string
	self           process
	spawn          func(func(context.Context)) // the task's context ends after the loop
	now            time.Time

	registry  *registry // nil until the source's cluster ID is known
	group     *group
	refresher refresher

	streams map[topicPartition]*stream
	leaving map[*stream]bool // let go, with batches unanswered
	owned   map[topicPartition]bool
	losses  int
	unmet   map[topicPartition]string // owned, but without a stream: why

	sourceView  *clusterView
	mirrorView  *clusterView
	topicErrors map[string]error
	groupTopics atomic.Pointer[map[string]int32]

	links       map[int32]*brokerLinks
	fetchers    map[fetcherKey]*fetcher
	conns       map[*conn]bool
	dirty       map[*link]bool
	fetchWanted map[*stream]bool
	looking     looking
	lookedAt    time.Time
	sourceWait  backoff
	sourceDown  bool
	mirrorDown  bool
	timers      timers
	refreshing  refreshing
	committing  bool
	releases    []commit

	expireAge    time.Duration
	takeoverWait time.Duration

	stalledSince time.Time // zero: not stalled

	stopping bool
	left     bool
	done     bool
}

// refreshing is the state of the topic refresh: one at a time, sooner when asked.
type refreshing struct {
	running bool
	wanted  bool
	waiters []func()
}

const (
	drainTimeout = 8 * time.Second
	// defaultExpiry is the mirror's producer.id.expiration.ms unless it tells another (F3); an hour is kept from it.
	defaultExpiry = 24 * time.Hour
)

func (f *Forwarder) newLoop(source, mirror *kgo.Client, clientID string, spawn func(func(context.Context))) *loop {
	l := &loop{
		Forwarder: f, source: source, mirror: mirror, clientID: clientID, self: thisProcess(), spawn: spawn, now: time.Now(),
		refresher: refresher{source: source, mirror: mirror, selector: selector{f.opts.Include, f.opts.Exclude}, rf: f.opts.ReplicationFactor, log: f.log},
		streams:   map[topicPartition]*stream{}, leaving: map[*stream]bool{}, owned: map[topicPartition]bool{}, unmet: map[topicPartition]string{},
		sourceView: &clusterView{}, mirrorView: &clusterView{},
		links: map[int32]*brokerLinks{}, fetchers: map[fetcherKey]*fetcher{}, conns: map[*conn]bool{}, dirty: map[*link]bool{},
		fetchWanted: map[*stream]bool{}, looking: looking{wanted: map[*stream]bool{}},
		sourceWait: newBackoff(200*time.Millisecond, 3*time.Second),
		expireAge:  defaultExpiry - time.Hour, takeoverWait: f.opts.TakeoverWait,
	}
	l.groupTopics.Store(&map[string]int32{})
	l.group = &group{
		client: source, name: "kmirror." + f.opts.Name, instanceID: instanceID(f.opts), sessionTimeout: f.opts.SessionTimeout, log: f.log,
		topics:  func() map[string]int32 { return *l.groupTopics.Load() },
		changed: make(chan struct{}, 1),
		assigned: func(owned map[topicPartition]bool, losses int) {
			l.inbox.call(func() { l.assigned(owned, losses) })
		},
	}
	return l
}

func (l *loop) run(ctx context.Context) {
	var offers []offering
	var calls []func()
	l.refreshSoon()
	l.every(l.opts.RefreshEvery, l.refreshSoon)
	l.every(l.opts.LookEvery, l.lookAll)
	l.every(l.opts.CheckpointEvery, l.commit)
	l.every(time.Second, l.tellStalls)
	stop := ctx.Done()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for !l.done {
		select {
		case <-l.inbox.wake:
		case <-timer.C:
		case <-stop:
			stop = nil
			l.now = time.Now()
			l.stop()
		}
		l.now = time.Now()
		offers, calls = l.inbox.take(offers, calls)
		for i, call := range calls {
			call()
			calls[i] = nil
		}
		for i := range offers {
			l.offered(&offers[i])
			offers[i] = offering{}
		}
		l.timers.run(l.now)
		l.act()
		if len(l.timers) > 0 {
			timer.Reset(max(0, time.Until(l.timers[0].at)))
		}
	}
}

// act starts what the events made possible.
func (l *loop) act() {
	for len(l.dirty) > 0 {
		for k := range l.dirty {
			delete(l.dirty, k)
			l.startRecovery(k)
			l.pump(k)
		}
	}
	l.startFetches()
	l.startLook()
	l.startRefresh()
	if l.stopping {
		l.finish()
	}
}

// every repeats do.
func (l *loop) every(interval time.Duration, do func()) {
	l.timers.add(l.now.Add(interval), func() {
		do()
		l.every(interval, do)
	})
}

// tellStalls logs when streams stop and when all follow the source again, a line each however many there are.
func (l *loop) tellStalls() {
	stopped, following, reason := 0, 0, ""
	for _, s := range l.streams {
		switch s.state {
		case StatePaused, StateFailed:
			stopped++
			reason = s.reason
		case StateLive, StateTail:
			following++
		}
	}
	switch {
	case l.stalledSince.IsZero() && stopped > 0:
		l.stalledSince = l.now
		l.log.Warn("mirroring has stopped", zap.Int("partitions", stopped), zap.Int("of", len(l.streams)), zap.String("reason", reason))
	case !l.stalledSince.IsZero() && following == len(l.streams):
		l.log.Info("mirroring has caught up", zap.Int("partitions", following), zap.Duration("after", l.now.Sub(l.stalledSince)))
		l.stalledSince = time.Time{}
	}
}

// offered takes one offer.
func (l *loop) offered(o *offering) {
	s, b := o.stream, o.batch
	e := entry{
		base: b.BaseOffset, end: b.BaseOffset + int64(b.Batch.LastOffsetDelta()) + 1, crc: b.Batch.CRC(),
		maxTimestamp: b.Batch.MaxTimestamp(), batch: b.Batch, memory: b.Memory, charge: int64(len(b.Batch)),
	}
	s.sourceEnd = max(s.sourceEnd, e.end) // acks=all: committed
	if s.removed || s.conn == nil || !s.accepting.Load() {
		l.drop(e)
		return
	}
	switch s.offer(e) {
	case taken:
		s.linkUp(l.drop)
		l.makeReady(s)
	case held:
		switch {
		case s.holeFrom >= 0 && e.base == s.next:
			l.writeSegments(s, []segment{{s.next, s.position(s.holeFrom)}})
		case s.state == StateLive:
			l.awaitHole(s)
		}
	case duplicate:
		l.drop(e)
	case doubtful:
		l.drop(e)
		l.doubted(s)
	case refused:
		l.drop(e)
		s.dropEarly(l.drop)
		if s.state == StateLive {
			l.catchUp(s)
		}
	}
}

// doubted holds a stream's offers until the source was read again (rule T1): by topic ID, so a recreated topic isn't taken for it.
func (l *loop) doubted(s *stream) {
	if s.removed || s.conn == nil {
		return
	}
	l.metrics.doubts.Inc()
	s.accepting.Store(false)
	s.dropEarly(l.drop)
	if s.state == StateLive || s.state == StateCatchUp {
		l.catchUp(s)
	}
}

// grew takes word of growth that wasn't offered.
func (l *loop) grew(s *stream) {
	s.grownSent.Store(false)
	if !s.removed && s.conn != nil && s.state == StateLive && s.next < s.grownTo.Load() {
		l.awaitHole(s)
	}
}

// assigned takes the partitions that the group gave this instance.
func (l *loop) assigned(owned map[topicPartition]bool, losses int) {
	if losses != l.losses {
		// Others may have owned these meanwhile: begin anew, with what the last owner committed.
		l.losses = losses
		for _, s := range l.streams {
			l.letStreamGo(s, false)
		}
	}
	l.log.Info("partitions assigned", zap.Int("count", len(owned)), zap.Int("before", len(l.owned)))
	l.owned = owned
	l.reconcile()
}

// reconcile makes the streams what the assignment and both clusters' topics say.
func (l *loop) reconcile() {
	if l.stopping || l.registry == nil {
		return
	}
	clear(l.unmet)
	leaving := map[topicPartition]bool{}
	for s := range l.leaving {
		leaving[s.topicPartition] = true
	}
	var fresh []*stream
	for tp := range l.owned {
		s, why := l.streams[tp], ""
		source, mirror := l.sourceView.topics[tp.topic], l.mirrorView.topics[tp.topic]
		switch {
		case source == nil || int(tp.partition) >= len(source.partitions):
			why = "the source topic is gone"
		case l.topicErrors[tp.topic] != nil:
			why = l.topicErrors[tp.topic].Error()
		case mirror == nil || mirror.err != nil || int(tp.partition) >= len(mirror.partitions):
			why = "the mirror partition isn't there yet"
		case s != nil && s.topicID != source.id:
			l.log.Warn("source topic was recreated: its records follow the old ones on the mirror", s.logFields()...)
			l.letStreamGo(s, false)
			s, leaving[tp] = nil, l.leaving[s]
		case s != nil && s.mirrorTopicID != mirror.id:
			l.log.Warn("mirror topic was recreated: mirroring starts as the start policy says", s.logFields()...)
			l.letStreamGo(s, false)
			s, leaving[tp] = nil, l.leaving[s]
		}
		if why != "" {
			l.unmet[tp] = why
			if s != nil && source == nil {
				l.log.Warn("source topic is gone", s.logFields()...)
				l.letStreamGo(s, false)
			}
			continue
		}
		if s == nil {
			if leaving[tp] {
				continue // once its last batch is answered
			}
			s = l.newStream(tp, source.id, mirror.name, mirror.id)
			l.streams[tp] = s
			fresh = append(fresh, s)
		}
		l.setLeaders(s, source.partitions[tp.partition], mirror.partitions[tp.partition])
	}
	for tp, s := range l.streams {
		if !l.owned[tp] {
			l.letStreamGo(s, true)
		}
	}
	l.publish()
	if len(fresh) > 0 {
		l.loadCheckpoints(fresh)
	}
}

func (l *loop) setLeaders(s *stream, source, mirror leadership) {
	moved := source != s.sourceLeader && s.sourceLeader.leader >= 0
	if s.sourceLeader = source; moved {
		l.sourceMoved(s)
	}
	if mirror == s.mirrorLeader {
		return
	}
	s.mirrorLeader = mirror
	if s.conn != nil {
		l.endSession(s, errLeader)
	}
}

// publish lets the proxy find the streams.
func (l *loop) publish() {
	d := &directory{byName: map[string][]*stream{}, byID: map[protocol.TopicID][]*stream{}}
	for tp, s := range l.streams {
		of := d.byName[tp.topic]
		if of == nil {
			of = make([]*stream, len(l.sourceView.topics[tp.topic].partitions))
			d.byName[tp.topic], d.byID[s.topicID] = of, of
		}
		if int(s.index) < len(of) {
			of[s.index] = s
		}
	}
	l.directory.Store(d)
}

// letStreamGo ends a stream: nothing new is sent, what is in flight is waited for, and handed over with a last checkpoint if hand is true.
func (l *loop) letStreamGo(s *stream, hand bool) {
	s.removed = true
	s.accepting.Store(false)
	s.release(l.drop)
	delete(l.streams, s.topicPartition)
	delete(l.looking.wanted, s)
	l.leaving[s] = true
	s.onDrained = func() {
		delete(l.leaving, s)
		if hand && s.haveStored {
			c := s.checkpoint(l.self)
			c.released = !s.doubt
			l.releases = append(l.releases, commit{s.topicPartition, s.topicID, c})
			l.commit()
		}
		s.conn, s.link, s.readyOn = nil, nil, nil
		l.reconcile()
	}
	l.drained(s)
}

// checkpoint is what is to be committed for a stream.
func (s *stream) checkpoint(self process) checkpoint {
	c := s.stored
	if s.acked >= 0 {
		c.next, c.position, c.mirrorOffset, c.mirrorEnd = s.acked, s.ackedPosition(), s.lastBatchAt, s.mirrorEnd
		c.lineage = s.lineage
	}
	c.sourceTopicID, c.mirrorTopicID, c.owner, c.released = s.topicID, s.mirrorTopicID, self, false
	return c
}

// loadCheckpoints reads what was committed for new streams, then recovers them.
func (l *loop) loadCheckpoints(fresh []*stream) {
	l.spawn(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, mirrorTimeout)
		defer cancel()
		stored, err := l.group.fetchCheckpoints(ctx)
		l.inbox.call(func() {
			if err != nil {
				l.sourceLost(err)
				l.timers.add(l.now.Add(l.sourceWait.next()), func() {
					alive := fresh[:0]
					for _, s := range fresh {
						if !s.removed {
							alive = append(alive, s)
						}
					}
					if len(alive) > 0 && !l.stopping {
						l.loadCheckpoints(alive)
					}
				})
				return
			}
			for _, s := range fresh {
				c, ok := stored[s.topicPartition]
				l.inherit(s, c, ok)
				l.recover(s)
			}
		})
	})
}

// inherit takes the last owner's checkpoint and what it says of requests that may still be on their way (rule S5).
func (l *loop) inherit(s *stream, c checkpoint, ok bool) {
	s.stored = c
	if s.haveStored = ok && c.sourceTopicID == s.topicID && c.mirrorTopicID == s.mirrorTopicID; s.haveStored {
		s.lineage = c.lineage
	}
	switch {
	case !s.haveStored || c.released:
	case c.owner == l.self, c.owner.knownDead(l.self):
		s.doubt = true // W2
	default:
		s.foreign, s.foreignFrom = true, l.now // W3
	}
}

// commit stores the checkpoints that moved, and those of streams that were handed over.
func (l *loop) commit() {
	if l.committing || l.left {
		return
	}
	releases := l.releases
	l.releases = nil
	var commits []commit
	var streams []*stream
	for _, s := range l.streams {
		if s.uncommitted && s.conn != nil {
			commits = append(commits, commit{s.topicPartition, s.topicID, s.checkpoint(l.self)})
			streams = append(streams, s)
			s.uncommitted = false
		}
	}
	if len(commits)+len(releases) == 0 {
		return
	}
	l.committing = true
	l.spawn(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, mirrorTimeout)
		defer cancel()
		err := l.release(ctx, releases)
		if err == nil {
			err = l.group.commit(ctx, commits)
		}
		l.inbox.call(func() {
			l.committing = false
			l.committed(streams, commits, err)
		})
	})
}

func (l *loop) committed(streams []*stream, commits []commit, err error) {
	for i, s := range streams {
		if err != nil {
			s.uncommitted = true
		} else {
			s.stored = commits[i].checkpoint
		}
	}
	if err != nil {
		l.metrics.checkpointErrors.Inc()
		if !isRebalance(err) {
			l.sourceLost(err)
		}
	}
	if len(l.releases) > 0 || l.stopping && err == nil {
		l.commit()
	}
}

// release commits that streams were handed over, where the next owner hasn't committed yet: its word must not be covered. It runs beside the
// loop.
func (l *loop) release(ctx context.Context, releases []commit) error {
	if len(releases) == 0 {
		return nil
	}
	stored, err := l.group.fetchCheckpoints(ctx)
	if err != nil {
		return err
	}
	releases = slices.DeleteFunc(releases, func(c commit) bool {
		last, ok := stored[c.topicPartition]
		return ok && last.owner != l.self
	})
	return l.group.commit(ctx, releases)
}

// stop begins the shutdown.
func (l *loop) stop() {
	l.stopping = true
	for _, s := range l.streams {
		l.letStreamGo(s, true)
	}
	l.directory.Store(&directory{})
	l.timers.add(l.now.Add(drainTimeout), func() {
		l.log.Warn("shutdown: not everything was drained in time; the next start resolves it", zap.Int("streams", len(l.leaving)))
		l.done = true
	})
	l.commit()
}

// finish leaves the group once all streams are drained and committed, and then ends the loop.
func (l *loop) finish() {
	if len(l.leaving) > 0 || l.committing || len(l.releases) > 0 || l.left {
		return
	}
	l.left = true
	l.spawn(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
		defer cancel()
		if err := l.group.leave(ctx); err != nil {
			l.log.Warn("group not left; others wait for the session timeout", zap.Error(err))
		}
		l.inbox.call(func() { l.done = true })
	})
}

// closeConns ends all connections, after the loop.
func (l *loop) closeConns() {
	for c := range l.conns {
		c.close(errConnClosed)
	}
}

// letGo frees what came in after the loop had ended; all tasks are done.
func (l *loop) letGo() {
	l.directory.Store(&directory{})
	offers, _ := l.inbox.take(nil, nil)
	for _, o := range offers {
		o.batch.Memory.Release()
	}
}

// sourceLost notes that the source can't be reached, or can again, and says so once. It reports whether err is one.
func (l *loop) sourceLost(err error) bool {
	if err != nil && !l.sourceDown && !l.stopping {
		l.log.Warn("source can't be reached, trying again", zap.Error(err))
	} else if err == nil && l.sourceDown {
		l.log.Info("source reached again")
	}
	l.sourceDown = err != nil
	return err != nil
}

func (l *loop) mirrorLost(err error) bool {
	if err != nil && !l.mirrorDown && !l.stopping {
		l.log.Warn("mirror can't be reached, trying again", zap.Error(err))
	} else if err == nil && l.mirrorDown {
		l.log.Info("mirror reached again")
	}
	l.mirrorDown = err != nil
	return err != nil
}

// refreshSoon asks both clusters for their topics again.
func (l *loop) refreshSoon() { l.refreshing.wanted = true }

func (l *loop) startRefresh() {
	if !l.refreshing.wanted || l.refreshing.running || l.stopping {
		return
	}
	l.refreshing.wanted, l.refreshing.running = false, true
	waiters := l.refreshing.waiters
	l.refreshing.waiters = nil
	l.spawn(func(ctx context.Context) {
		source, err := l.refresher.askSource(ctx)
		l.inbox.call(func() { l.sourceRefreshed(source, err) })
		if err == nil {
			mirror, err := l.refresher.askMirror(ctx, source)
			l.inbox.call(func() { l.mirrorRefreshed(mirror, err) })
		}
		sleep(ctx, 200*time.Millisecond) // however often it is asked for
		l.inbox.call(func() {
			l.refreshing.running = false
			for _, done := range waiters {
				done()
			}
		})
	})
}

func (l *loop) sourceRefreshed(view *clusterView, err error) {
	if l.sourceLost(err) || l.stopping {
		return
	}
	first := l.registry == nil
	if first {
		writer := fmt.Sprintf("%s %s", l.clientID, l.self)
		l.registry = newRegistry(l.mirror, l.opts.Name, view.clusterID, writer, l.opts.ReplicationFactor, l.log)
	}
	for _, s := range l.streams {
		s.ageLineage(view.leadership(s.topic, s.index).epoch, l.now)
	}
	l.sourceView = view
	topics := make(map[string]int32, len(view.topics))
	for name, t := range view.topics {
		topics[name] = int32(len(t.partitions))
	}
	l.groupTopics.Store(&topics)
	if first {
		l.spawn(l.group.run)
	} else {
		select {
		case l.group.changed <- struct{}{}:
		default:
		}
	}
	l.reconcile()
}

func (l *loop) mirrorRefreshed(found *mirrorTopics, err error) {
	if l.mirrorLost(err) || l.stopping {
		return
	}
	for topic, err := range found.failed {
		if l.topicErrors[topic] == nil || l.topicErrors[topic].Error() != err.Error() {
			l.log.Error("mirror topic", zap.String("topic", topic), zap.Error(err))
		}
	}
	l.mirrorView, l.topicErrors = found.view, found.failed
	l.reconcile()
}

// lookFor closes looked after topics were refreshed and then the source's ends were looked at.
func (l *loop) lookFor(looked chan struct{}) {
	l.refreshing.waiters = append(l.refreshing.waiters, func() {
		l.lookAll()
		l.looking.waiters = append(l.looking.waiters, looked)
	})
	l.refreshSoon()
}
