package forwarder

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/zap"

	"kmirror/internal/bufpool"
	"kmirror/protocol"
)

const (
	maxFetchVersion   = 13 // topics by ID, so that a recreated topic is never read as the old one
	lastStableVersion = 4  // the answer has the last stable offset (KIP-98)
	fetchBytes        = 4<<20 - 64<<10
	fetchPartBytes    = 1 << 20
	// maxQueuedBytes of one stream: past it, it is not fetched for, so that a slow partition doesn't fill the memory of all.
	maxQueuedBytes = 2 << 20

	tailWait    = 500 * time.Millisecond // how long a fetch at the log's end waits for more
	catchUpWait = 100 * time.Millisecond
	// tailTrial is how long a tail stream's offers must cover what is read before it goes live again.
	tailTrial = 5 * time.Second
)

// lane separates fetches that wait at the log's end from those that have work to do.
type lane int8

const (
	laneCatchUp lane = iota
	laneTail
)

type fetcherKey struct {
	broker int32
	lane   lane
}

// fetcher reads from one source broker, one Fetch at a time, for all streams that need it.
type fetcher struct {
	fetcherKey
	conn    *conn
	dials   bool
	busy    bool
	wait    backoff
	retryAt time.Time
	turn    int // where the next fetch begins, so that none starves
	streams []*stream
}

func (l *loop) fetcherFor(s *stream) *fetcher {
	key := fetcherKey{s.sourceLeader.leader, laneCatchUp}
	if s.tail {
		key.lane = laneTail
	}
	f := l.fetchers[key]
	if f == nil {
		f = &fetcher{fetcherKey: key, wait: newBackoff(200*time.Millisecond, 5*time.Second)}
		l.fetchers[key] = f
	}
	return f
}

// catchUp makes a stream read the source log from next on.
func (l *loop) catchUp(s *stream) {
	l.setState(s, StateCatchUp, "")
	s.linked = false
	l.wantFetch(s)
}

// becomeTail makes a stream follow the source log's end: its writers bypass the proxy.
func (l *loop) becomeTail(s *stream) {
	s.tail = true
	s.accepting.Store(false)
	s.dropEarly(l.drop)
	s.tailFrom, s.tailRead, s.tailOffered = l.now, 0, s.offered.Load()
	l.setState(s, StateTail, "")
	l.wantFetch(s)
}

func (l *loop) wantFetch(s *stream) { l.fetchWanted[s] = true }

// startFetches sends a Fetch to each source broker that has work and none under way.
func (l *loop) startFetches() {
	if l.stopping {
		return
	}
	for s := range l.fetchWanted {
		if s.removed || s.conn == nil || s.state != StateCatchUp && s.state != StateTail {
			delete(l.fetchWanted, s)
			continue
		}
		if s.sourceLeader.leader < 0 || s.fetching || s.segmenting || s.asking || s.queuedBytes > maxQueuedBytes || l.now.Before(s.fetchAfter) {
			continue
		}
		f := l.fetcherFor(s)
		if !f.busy && !l.now.Before(f.retryAt) {
			f.streams = append(f.streams, s)
		}
	}
	for _, f := range l.fetchers {
		if len(f.streams) > 0 {
			l.fetch(f)
			clear(f.streams)
			f.streams = f.streams[:0]
		}
	}
}

func (l *loop) fetch(f *fetcher) {
	if f.conn == nil {
		l.connectFetcher(f)
		return
	}
	if !l.memory.reserve(fetchBytes) {
		return // an answer from the mirror frees some and comes back here
	}
	version, _ := f.conn.version(int16(kmsg.Fetch), maxFetchVersion)
	req, asked := f.request(version)
	for _, a := range asked {
		a.stream.fetching = true
	}
	f.busy = true
	l.metrics.fetches.Inc()
	c := f.conn
	c.send(l.now.Add(answerTimeout), req.IsFlexible(), func(correlationID int32) outgoing {
		return outgoing{pieces: [][]byte{c.format.AppendRequest(nil, req, correlationID)}}
	}, func(body []byte, buf *bufpool.Buf, err error) {
		resp := kmsg.NewPtrFetchResponse()
		resp.Version = version
		if err == nil {
			if err = resp.ReadFrom(body); err == nil {
				c.throttled(time.Duration(resp.ThrottleMillis) * time.Millisecond)
				err = kerr.ErrorForCode(resp.ErrorCode)
			}
			if err != nil {
				buf.Release()
				buf = nil
			}
		}
		l.inbox.call(func() { l.fetched(f, c, asked, resp, buf, err) })
	})
}

// fetchAsked is one stream's part in a Fetch. An answer counts only in the session that asked: a later one may stand below it.
type fetchAsked struct {
	stream  *stream
	session int64
}

// request asks for each stream's log from next on, starting with another stream each time.
func (f *fetcher) request(version int16) (*kmsg.FetchRequest, []fetchAsked) {
	req := kmsg.NewPtrFetchRequest()
	req.Version = version
	req.ReplicaID, req.MinBytes, req.MaxBytes, req.IsolationLevel, req.SessionEpoch = -1, 1, fetchBytes, 1, -1
	req.MaxWaitMillis = int32(catchUpWait.Milliseconds())
	if f.lane == laneTail {
		req.MaxWaitMillis = int32(tailWait.Milliseconds())
	}
	f.turn++
	n := len(f.streams)
	asked := make([]fetchAsked, 0, n)
	at := map[string]int{}
	shared := map[topicPartition]bool{}
	for k := range n {
		s := f.streams[(k+f.turn)%n]
		asked = append(asked, fetchAsked{s, s.session})
		if s.spread != nil {
			if shared[s.topicPartition] {
				continue // one read for all shares, from the first of them on
			}
			shared[s.topicPartition] = true
		}
		i, ok := at[s.topic]
		if !ok {
			i = len(req.Topics)
			at[s.topic] = i
			t := kmsg.NewFetchRequestTopic()
			t.Topic, t.TopicID = s.topic, s.topicID
			req.Topics = append(req.Topics, t)
		}
		p := kmsg.NewFetchRequestTopicPartition()
		p.Partition, p.FetchOffset, p.PartitionMaxBytes = s.index, f.readFrom(s), fetchPartBytes
		req.Topics[i].Partitions = append(req.Topics[i].Partitions, p)
	}
	return req, asked
}

// readFrom is the least offset that a stream, or the shares that are read with it, want.
func (f *fetcher) readFrom(s *stream) int64 {
	from := s.next
	if s.spread != nil {
		for _, other := range f.streams {
			if other.topicPartition == s.topicPartition {
				from = min(from, other.next)
			}
		}
	}
	return from
}

func (l *loop) connectFetcher(f *fetcher) {
	if f.dials {
		return
	}
	addr, ok := l.sourceView.brokers[f.broker]
	if !ok {
		f.retryAt = l.now.Add(f.wait.next())
		l.timers.add(f.retryAt, func() {})
		l.refreshSoon()
		return
	}
	f.dials = true
	l.spawn(func(ctx context.Context) {
		c, err := dialConn(ctx, addr, l.clientID, l.opts.Source)
		l.inbox.call(func() {
			f.dials = false
			if l.sourceLost(err) {
				f.retryAt = l.now.Add(f.wait.next())
				l.timers.add(f.retryAt, func() {})
				return
			}
			if l.stopping {
				c.close(errConnClosed)
				return
			}
			f.conn = c
			l.conns[c] = true
			l.spawn(func(context.Context) {
				<-c.finished
				l.inbox.call(func() {
					delete(l.conns, c)
					if f.conn == c {
						f.conn = nil
					}
				})
			})
		})
	})
}

// fetchMemory counts a fetched buffer against the memory bound until the last batch in it is let go.
type fetchMemory struct {
	buf    *bufpool.Buf
	refs   atomic.Int32
	budget *budget
	size   int64
}

func (m *fetchMemory) Release() {
	if m.refs.Add(-1) == 0 {
		m.buf.Release()
		m.budget.free(m.size)
	}
}

// fetched takes a Fetch answer.
func (l *loop) fetched(f *fetcher, c *conn, asked []fetchAsked, resp *kmsg.FetchResponse, buf *bufpool.Buf, err error) {
	f.busy = false
	streams := make(map[fetchPart][]*stream, len(asked))
	for _, a := range asked {
		if s := a.stream; s.session == a.session && s.conn != nil && !s.removed {
			s.fetching = false
			key := fetchPart{topic: s.topic, partition: s.index}
			if resp.Version >= 13 {
				key = fetchPart{id: s.topicID, partition: s.index}
			}
			streams[key] = append(streams[key], s)
		}
	}
	if err != nil {
		l.memory.free(fetchBytes)
		c.close(err)
		if f.conn == c {
			f.conn = nil
		}
		f.retryAt = l.now.Add(f.wait.next())
		l.timers.add(f.retryAt, func() {})
		l.sourceLost(err)
		if isLeadership(err) {
			l.refreshSoon()
		}
		return
	}
	f.wait.reset()
	l.sourceLost(nil)
	size := int64(bufpool.Footprint(len(buf.B)))
	l.memory.free(fetchBytes)
	l.memory.force(size)
	l.metrics.fetchedBytes.Add(float64(size))
	memory := &fetchMemory{buf: buf, budget: &l.memory, size: size}
	memory.refs.Store(1)
	defer memory.Release()
	for i := range resp.Topics {
		t := &resp.Topics[i]
		for j := range t.Partitions {
			p := &t.Partitions[j]
			for _, s := range streams[fetchPart{t.Topic, t.TopicID, p.Partition}] {
				l.fetchedPartition(s, p, resp.Version, memory)
			}
		}
	}
}

// fetchPart names a partition as a Fetch answer does: by topic name below v13, by ID from there on.
type fetchPart struct {
	topic     string
	id        protocol.TopicID
	partition int32
}

// fetchedPartition takes what a Fetch brought for one stream.
func (l *loop) fetchedPartition(s *stream, p *kmsg.FetchResponseTopicPartition, version int16, memory *fetchMemory) {
	if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
		l.fetchRefused(s, err)
		return
	}
	if s.state != StateCatchUp && s.state != StateTail {
		return
	}
	if version < lastStableVersion {
		p.LastStableOffset = p.HighWatermark // a broker without transactions
	}
	s.sourceEnd = max(s.sourceEnd, p.LastStableOffset)
	plan, err := readFetched(p.RecordBatches, p.AbortedTransactions, s.next, p.LastStableOffset, s.fence != nil, l.codec)
	if begins := len(plan) > 0 && plan[0].batch == nil; p.LogStartOffset > s.next && (begins || errors.Is(err, errHoles)) {
		s.fetchAfter = l.now.Add(time.Hour) // until the check has answered
		l.checkRange(s)                     // deleted, not compacted
		return
	}
	if errors.Is(err, errHoles) {
		l.goFenced(s)
		return
	}
	if err != nil {
		l.fail(s, fmt.Errorf("source log at offset %d: %w", s.next, err), 30*time.Second)
		return
	}
	if missing := plan.missingSegments(&s.partition); s.fence == nil && len(missing) > 0 {
		l.writeSegments(s, missing)
		return // the same is fetched again, then with the segments known
	}
	if err := l.consume(s, plan, memory); err != nil {
		l.fail(s, err, 30*time.Second)
		return
	}
	l.reachedEnd(s, p.LastStableOffset)
}

// reachedEnd hands a stream over to live once it has all that is committed. The first time it starts to take offers and reads once
// more, so that nothing acknowledged meanwhile is missed; the second time it is live.
func (l *loop) reachedEnd(s *stream, end int64) {
	s.linkUp(l.drop)
	l.makeReady(s)
	if s.next >= end && len(s.queue)+len(s.flight) == 0 && !s.filling {
		s.fillSpent = 0
		l.fillBehind(s)
	}
	switch {
	case s.tail:
		l.tryTail(s)
	case s.next < end:
	case s.spread != nil:
		l.becomeTail(s)
	case s.fence != nil:
		l.leaveFence(s)
	case s.linked && l.closeHole(s):
	case s.linked:
		l.goLive(s)
		if len(s.early) > 0 {
			l.awaitHole(s, holeGrace)
		}
	default:
		s.linked = true
		s.accepting.Store(true)
	}
}

func (l *loop) goLive(s *stream) {
	s.lookedEnd, s.lookedAt = s.next, l.now
	l.setState(s, StateLive, "")
}

// tryTail ends tail mode once all that was read for a while had passed the proxy.
func (l *loop) tryTail(s *stream) {
	if l.opts.NoOffers || s.spread != nil || l.now.Sub(s.tailFrom) < tailTrial {
		return
	}
	offered := s.offered.Load()
	if covered := offered-s.tailOffered >= s.tailRead; covered {
		s.tail, s.holes = false, nil
		s.accepting.Store(true)
		l.catchUp(s)
		s.linked = true
		return
	}
	s.tailFrom, s.tailRead, s.tailOffered = l.now, 0, offered
}

// fetchLater puts the next fetch off.
func (l *loop) fetchLater(s *stream, delay time.Duration) {
	s.fetchAfter = l.now.Add(delay)
	l.timers.add(s.fetchAfter, func() {})
}

// fetchRefused takes a partition's error in a Fetch answer.
func (l *loop) fetchRefused(s *stream, err error) {
	l.fetchLater(s, 200*time.Millisecond)
	switch {
	case errors.Is(err, kerr.OffsetOutOfRange):
		s.fetchAfter = l.now.Add(time.Hour) // until the check has answered
		l.checkRange(s)
	case isLeadership(err):
		l.refreshSoon()
	default:
		l.log.Warn("source refused a fetch", s.logFields(zap.Int64("offset", s.next), zap.Error(err))...)
		l.fetchLater(s, 5*time.Second)
	}
}

// checkRange finds out why a position isn't in the source log: deleted ahead of us, or truncated below us.
func (l *loop) checkRange(s *stream) {
	session, next := s.session, s.next
	l.spawn(func(ctx context.Context) {
		starts, err := listSource(ctx, l.source, []topicPartition{s.topicPartition}, earliestOffset)
		var ends map[topicPartition]offsetAnswer
		if err == nil {
			ends, err = listSource(ctx, l.source, []topicPartition{s.topicPartition}, latestOffset)
		}
		start, end := starts[s.topicPartition], ends[s.topicPartition]
		err = errors.Join(err, start.err, end.err)
		l.inbox.call(func() {
			l.fetchLater(s, 200*time.Millisecond)
			if err != nil || s.session != session || s.removed || s.next != next {
				return
			}
			switch {
			case next < start.offset:
				l.lostGround(s, start.offset)
			case next > end.offset:
				l.diverged(s, &divergedError{end.offset, next})
			}
		})
	})
}

// lostGround goes on behind what the source deleted before it was mirrored, in a new generation (rule N4), or stops as the policy says.
func (l *loop) lostGround(s *stream, start int64) {
	err := fmt.Errorf("source deleted offsets [%d, %d) before they were mirrored", s.next, start)
	if l.opts.StopOnDataLoss {
		l.fail(s, err, time.Minute)
		return
	}
	l.endSession(s, err)
	s.askGen = generationAsk{why: afterLoss, source: start}
}
