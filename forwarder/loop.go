package forwarder

import (
	"cmp"
	"context"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/zap"

	"kmirror/internal/bufpool"
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

	streams map[streamKey]*stream
	spreads map[topicPartition]*spread
	wanted  int              // streams that there should be
	leaving map[*stream]bool // let go, with batches unanswered
	owned   map[topicPartition]bool
	losses  int
	shared  map[string]int32          // the topics that owned is a share of, nil before the first assignment
	unmet   map[topicPartition]string // owned, but without a stream: why

	sourceView  *clusterView
	mirrorView  *clusterView
	topicErrors map[string]error
	hazards     map[string][]string         // of mirror topics, by source topic
	judged      map[string]protocol.TopicID // source topics for which the mirror was last looked at
	groupTopics atomic.Pointer[map[string]int32]

	links        map[int32]*brokerLinks
	fetchers     map[fetcherKey]*fetcher
	conns        map[*conn]bool
	coordinators coordinators
	dirty        map[*link]bool
	fetchWanted  map[*stream]bool
	looking      looking
	lookedAt     time.Time
	sourceWait   backoff
	sourceReach  reach
	mirrorReach  reach
	timers       timers
	refreshing   refreshing
	committing   bool
	releases     []commit

	expireAge    time.Duration
	takeoverWait time.Duration

	stalledSince time.Time // zero: not stalled

	stopping bool
	left     bool
	done     bool
}

const (
	drainTimeout = 8 * time.Second
	// defaultExpiry is the mirror's producer.id.expiration.ms unless it tells another (F3).
	defaultExpiry = 24 * time.Hour
)

func (f *Forwarder) newLoop(source, mirror *kgo.Client, clientID string, spawn func(func(context.Context))) *loop {
	l := &loop{
		Forwarder: f, source: source, mirror: mirror, clientID: clientID, self: thisProcess(), spawn: spawn, now: time.Now(),
		refresher: newRefresher(f, source, mirror),
		streams:   map[streamKey]*stream{}, spreads: map[topicPartition]*spread{}, leaving: map[*stream]bool{}, owned: map[topicPartition]bool{}, unmet: map[topicPartition]string{},
		sourceView: &clusterView{}, mirrorView: &clusterView{},
		links: map[int32]*brokerLinks{}, fetchers: map[fetcherKey]*fetcher{}, conns: map[*conn]bool{}, dirty: map[*link]bool{},
		fetchWanted: map[*stream]bool{}, looking: looking{wanted: map[*stream]bool{}},
		sourceWait: newBackoff(200*time.Millisecond, 3*time.Second),
		expireAge:  safeAge(defaultExpiry), takeoverWait: f.opts.TakeoverWait,
	}
	l.groupTopics.Store(&map[string]int32{})
	l.group = &group{
		client: source, name: "kmirror." + f.opts.Name, instanceID: instanceID(f.opts), sessionTimeout: f.opts.SessionTimeout, log: f.log,
		topics:  func() map[string]int32 { return *l.groupTopics.Load() },
		changed: make(chan struct{}, 1),
		assigned: func(owned map[topicPartition]bool, losses int, topics map[string]int32) {
			l.inbox.call(func() { l.assigned(owned, losses, topics) })
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
	l.every(time.Second, l.refence)
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
		maxTimestamp: b.Batch.MaxTimestamp(), batch: b.Batch, memory: b.Memory, charge: int64(bufpool.Footprint(len(b.Batch))),
	}
	s.sourceEnd = max(s.sourceEnd, e.end) // acks=all: committed
	if s.removed || s.conn == nil || !s.accepting.Load() {
		l.drop(e)
		return
	}
	if s.next == 0 && b.TopicID == (protocol.TopicID{}) {
		// An empty partition's first record, of a topic by name: nothing tells it from that of a topic made again. It is read by ID.
		l.drop(e)
		l.doubted(s)
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
			l.awaitHole(s, holeGrace)
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
		l.awaitHole(s, growthGrace)
	}
}

// stop begins the shutdown.
func (l *loop) stop() {
	l.stopping = true
	for _, s := range l.streams {
		l.letStreamGo(s, true)
	}
	l.directory.Store(&directory{})
	l.timers.add(l.now.Add(cmp.Or(l.opts.DrainTimeout, drainTimeout)), func() {
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
	l.coordinators.close()
}

// letGo frees what came in after the loop had ended; all tasks are done.
func (l *loop) letGo() {
	l.directory.Store(&directory{})
	offers, _ := l.inbox.take(nil, nil)
	for _, o := range offers {
		o.batch.Memory.Release()
	}
}

// reach is whether a cluster answers, told in one log line each way: brokers come and go one by one while others answer.
type reach struct {
	failing   bool // the last answer was an error
	told      bool
	lastError time.Time
}

// reachQuiet is how long nothing must fail before a cluster is said to be reached again.
const reachQuiet = 5 * time.Second

func (l *loop) note(r *reach, cluster string, err error) bool {
	switch r.failing = err != nil; {
	case r.failing:
		r.lastError = l.now
		if !r.told && !l.stopping {
			r.told = true
			l.log.Warn(cluster+" doesn't answer in full, trying again", zap.Error(err))
		}
	case r.told && l.now.Sub(r.lastError) > reachQuiet:
		r.told = false
		l.log.Info(cluster + " answers again")
	}
	return r.failing
}

// sourceLost notes whether the source answered, and reports whether it failed.
func (l *loop) sourceLost(err error) bool { return l.note(&l.sourceReach, "source", err) }

// mirrorLost does the same for the mirror.
func (l *loop) mirrorLost(err error) bool { return l.note(&l.mirrorReach, "mirror", err) }
