package forwarder

import (
	"context"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"go.uber.org/zap"

	"kmirror/internal/bufpool"
	"kmirror/protocol"
)

const (
	// linksPerBroker is how many connections the appends to one mirror broker are spread over: it handles one request of a
	// connection at a time.
	linksPerBroker = 2
	// maxProducing bounds the Produce requests of a link without an answer.
	maxProducing = 5
)

// link is one place in the set of connections to a mirror broker. Its connection is dialled when a stream needs it; sessions hold the
// connection itself and end with it.
type link struct {
	broker int32
	conn   *conn // nil: not connected
	dials  bool  // a dial is under way
	wait   backoff
	down   bool // the last attempt failed, said once

	waiting    []*stream // for recovery on this link
	recovering [2]bool   // of dense streams, of fenced ones: a transaction coordinator that doesn't answer holds up its own alone
	ready      []*stream // with something to send, fair by turns
	producing  int
	mutedUntil time.Time // throttled by the broker, or the group membership isn't confirmed
	muted      bool      // a timer ends it
}

// brokerLinks are the links to one mirror broker.
type brokerLinks struct {
	links [linksPerBroker]*link
	turn  int // which link the next stream gets
}

// linkFor returns the link that a stream's sessions use: the same one while its leader stays, and each broker's links in turn.
func (l *loop) linkFor(s *stream) *link {
	if k := s.usual; k != nil && k.broker == s.mirrorLeader.leader {
		return k
	}
	slots := l.links[s.mirrorLeader.leader]
	if slots == nil {
		slots = &brokerLinks{}
		for i := range slots.links {
			slots.links[i] = &link{broker: s.mirrorLeader.leader, wait: newBackoff(200*time.Millisecond, 5*time.Second)}
		}
		l.links[s.mirrorLeader.leader] = slots
	}
	s.usual = slots.links[slots.turn%linksPerBroker]
	slots.turn++
	return s.usual
}

// connect dials a link unless it is connected or being dialled.
func (l *loop) connect(k *link) {
	if k.conn != nil || k.dials {
		return
	}
	addr, ok := l.mirrorView.brokers[k.broker]
	if !ok {
		l.failWaiting(k, fmt.Errorf("mirror broker %d isn't in the mirror's metadata", k.broker))
		return
	}
	k.dials = true
	l.spawn(func(ctx context.Context) {
		c, err := dialConn(ctx, addr, l.clientID, l.opts.Mirror)
		l.inbox.call(func() { l.connected(k, c, err) })
	})
}

func (l *loop) connected(k *link, c *conn, err error) {
	k.dials = false
	if l.stopping && err == nil {
		c.close(errConnClosed)
		return
	}
	if err != nil {
		l.metrics.dialErrors.Inc()
		if !k.down {
			k.down = true
			l.log.Warn("mirror broker can't be reached, trying again", zap.Int32("broker", k.broker), zap.Error(err))
		}
		l.failWaiting(k, err)
		return
	}
	if k.down {
		k.down = false
		l.log.Info("mirror broker reached again", zap.Int32("broker", k.broker))
		l.recoverOn(k.broker)
	}
	k.conn = c
	l.conns[c] = true
	l.dirty[k] = true
	l.spawn(func(context.Context) {
		<-c.finished
		l.inbox.call(func() { l.disconnected(k, c) })
	})
}

// recoverOn recovers at once what was put off for a broker that is reached again.
func (l *loop) recoverOn(broker int32) {
	for _, s := range l.streams {
		if s.mirrorLeader.leader == broker && s.state == StatePaused && s.conn == nil && !s.foreignPending(l.now, l.takeoverWait) {
			s.wait.reset()
			s.retryAt = l.now
			l.recover(s)
		}
	}
}

// failWaiting puts off the streams that wait for a link; the link itself backs off by them.
func (l *loop) failWaiting(k *link, err error) {
	delay := k.wait.next()
	for _, s := range k.waiting {
		l.retryLater(s, delay, err)
	}
	k.waiting = nil
}

// disconnected ends every session of a connection.
func (l *loop) disconnected(k *link, c *conn) {
	delete(l.conns, c)
	if k.conn == c {
		k.conn = nil
		k.ready = nil
		k.producing = 0
	}
	err := fmt.Errorf("connection to mirror broker %d: %w", k.broker, c.err)
	if !l.stopping {
		l.log.Info("connection to mirror broker ended", zap.Int32("broker", k.broker), zap.Error(c.err))
	}
	for _, s := range l.streams {
		if s.conn == c {
			l.endSession(s, err)
		}
	}
	for s := range l.leaving {
		if s.conn == c {
			l.endSession(s, err)
		}
	}
}

// makeReady queues a stream for sending.
func (l *loop) makeReady(s *stream) {
	if s.queueUp() {
		l.dirty[s.link] = true
	}
}

// queueUp puts a stream at the end of its link's turn, unless it has nothing to send.
func (s *stream) queueUp() bool {
	if s.conn == nil || s.readyOn == s.link || len(s.queue) == 0 {
		return false
	}
	s.readyOn = s.link
	s.link.ready = append(s.link.ready, s)
	return true
}

// pump sends what a link's streams have and may send: one batch of each in a request, in turn.
func (l *loop) pump(k *link) {
	if k.conn == nil || len(k.ready) == 0 {
		return
	}
	if !l.now.Before(k.mutedUntil) && !l.group.mayAct() {
		k.mutedUntil = l.now.Add(100 * time.Millisecond)
	}
	if l.now.Before(k.mutedUntil) {
		if !k.muted {
			k.muted = true
			l.timers.add(k.mutedUntil, func() { k.muted, l.dirty[k] = false, true })
		}
		return
	}
	for k.producing < maxProducing && len(k.ready) > 0 {
		if !l.produce(k) {
			return
		}
	}
}

// produce builds and sends one request; false if no stream had anything that it may send.
func (l *loop) produce(k *link) bool {
	p := &producing{link: k, sent: l.now}
	size := int64(0)
	for n := len(k.ready); n > 0 && size < maxRequestBytes; n-- {
		s := k.ready[0]
		k.ready = append(k.ready[:0], k.ready[1:]...)
		if s.readyOn != k {
			continue // of a session that ended
		}
		s.readyOn = nil
		if p.holds(s) {
			s.queueUp()
			continue
		}
		switch s.maySend(l.now) {
		case ready:
			l.merge(s)
			if size > 0 && size+s.queue[0].sizeBytes() > maxRequestBytes {
				s.queueUp()
				n = 1
				continue
			}
			e := s.send()
			s.unanswered++
			size += e.sizeBytes()
			p.parts = append(p.parts, sending{stream: s, session: s.session, entry: e})
			s.queueUp()
		case unquiet:
			l.seekQuiet(s)
		case uncovered:
			l.coverQueue(s)
		case unfilled:
			l.fillBefore(s)
		}
	}
	if len(p.parts) == 0 {
		return false
	}
	k.producing++
	l.send(k, p, size)
	return true
}

// merge makes one batch of what may go together at the head of a stream's queue. What can't be merged goes as it is: the mirror checks it.
func (l *loop) merge(s *stream) {
	n := s.mergeable(l.now)
	if n < 2 {
		return
	}
	batches, room := make([]protocol.Batch, n), 0
	for i := range n {
		batches[i] = s.queue[i].batch
		room += len(batches[i]) + 8*int(batches[i].RecordCount()) // deltas may take a few bytes more
	}
	buf := bufpool.Get(room)
	merged, err := protocol.Merge(buf.B, batches, l.codec)
	if err != nil || int64(len(merged)) > s.mergeBytes {
		buf.Release()
		return
	}
	first, last := &s.queue[0], &s.queue[n-1]
	e := entry{
		base: first.base, end: last.end, crc: merged.CRC(), maxTimestamp: merged.MaxTimestamp(), batch: merged, memory: buf,
		charge: int64(bufpool.Footprint(room)), merged: true,
	}
	l.memory.force(e.charge)
	l.metrics.merged.Add(float64(n))
	for _, was := range s.replace(n, e) {
		l.drop(was)
	}
}

func (l *loop) send(k *link, p *producing, size int64) {
	c := k.conn
	version, ok := c.version(0, maxProduceVersion)
	if !ok || version < 3 {
		c.close(fmt.Errorf("mirror broker %d takes Produce up to version %d, record batches need 3: %w", k.broker, version, kerr.UnsupportedVersion))
	}
	l.metrics.produceRequests.Inc()
	l.metrics.producedBytes.Add(float64(size))
	c.send(p.sent.Add(answerTimeout), version >= flexibleProduce, func(correlationID int32) outgoing {
		return p.frame(version, l.clientID, correlationID)
	}, func(body []byte, buf *bufpool.Buf, err error) {
		var answers []produceAnswer
		var throttle time.Duration
		if err == nil {
			answers, throttle, err = p.readAnswers(version, body)
			buf.Release()
			c.throttled(throttle)
		}
		l.inbox.call(func() { l.produced(c, p, answers, throttle, err) })
	})
}

// produced takes a Produce answer, or the news that none will come: then the outcome isn't known.
func (l *loop) produced(c *conn, p *producing, answers []produceAnswer, throttle time.Duration, err error) {
	k := p.link
	if k.conn == c {
		k.producing--
		l.dirty[k] = true
		if throttle > 0 {
			k.mutedUntil = l.now.Add(throttle)
		}
	}
	if err == nil {
		k.wait.reset()
	}
	for i := range p.parts {
		part := &p.parts[i]
		s := part.stream
		s.unanswered--
		e := part.entry
		part.entry = entry{}
		switch {
		case part.session != s.session || s.conn == nil:
			l.drained(s)
		case err != nil:
			l.endSession(s, err)
		case !answers[i].known:
			l.endSession(s, fmt.Errorf("mirror broker %d didn't answer for the partition", k.broker))
		case answers[i].code != 0:
			l.refusedByMirror(s, &e, answers[i])
		default:
			l.acknowledged(s, &e, answers[i].baseOffset)
		}
		if s.removed {
			l.drained(s) // also where the last answer was a broken connection
		}
		l.drop(e)
	}
}
