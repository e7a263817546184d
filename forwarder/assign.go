package forwarder

import (
	"context"

	"go.uber.org/zap"

	"kmirror/protocol"
)

// assigned takes the partitions that the group gave this instance.
func (l *loop) assigned(owned map[topicPartition]bool, losses int, topics map[string]int32) {
	if losses != l.losses {
		// Others may have owned these meanwhile: begin anew, with what the last owner committed.
		l.losses = losses
		for _, s := range l.streams {
			l.letStreamGo(s, false)
		}
	}
	l.log.Info("partitions assigned", zap.Int("count", len(owned)), zap.Int("before", len(l.owned)))
	l.owned, l.shared = owned, topics
	l.reconcile()
}

// reconcile makes the streams what the assignment and both clusters' topics say.
func (l *loop) reconcile() {
	if l.stopping || l.registry == nil {
		return
	}
	clear(l.unmet)
	leaving := map[streamKey]bool{}
	for s := range l.leaving {
		leaving[s.key()] = true
	}
	var fresh []*stream
	l.wanted = 0
	for tp := range l.owned {
		source, mirror := l.sourceView.topics[tp.topic], l.mirrorView.topics[l.refresher.rename.mirrorName(tp.topic)]
		if why := l.whyNot(tp, source, mirror); why != "" {
			l.wanted++
			l.unmet[tp] = why
			if source == nil {
				l.letTopicGo(tp)
			}
			continue
		}
		targets := l.targets(tp, mirror)
		l.wanted += len(targets)
		for _, to := range targets {
			if s := l.reconcileStream(streamKey{tp, to}, source, mirror, leaving); s != nil {
				fresh = append(fresh, s)
			}
		}
	}
	for key, s := range l.streams {
		if !l.owned[key.topicPartition] {
			l.letStreamGo(s, true)
		}
	}
	l.publish()
	if len(fresh) > 0 {
		l.loadCheckpoints(fresh)
	}
}

// whyNot says why an owned partition has no stream now, "": it may have.
func (l *loop) whyNot(tp topicPartition, source, mirror *topicView) string {
	switch {
	case source == nil || int(tp.partition) >= len(source.partitions):
		return "the source topic is gone"
	case l.topicErrors[tp.topic] != nil:
		return l.topicErrors[tp.topic].Error()
	case mirror == nil || mirror.err != nil || len(mirror.partitions) == 0 || !l.opts.Repartition && int(tp.partition) >= len(mirror.partitions):
		return "the mirror partition isn't there yet"
	}
	return ""
}

// letTopicGo ends the streams of a partition whose source topic is gone.
func (l *loop) letTopicGo(tp topicPartition) {
	for key, s := range l.streams {
		if key.topicPartition == tp {
			l.log.Warn("source topic is gone", s.logFields()...)
			l.letStreamGo(s, false)
		}
	}
}

// reconcileStream makes one stream what both clusters' topics say, and returns it if it is new.
func (l *loop) reconcileStream(key streamKey, source, mirror *topicView, leaving map[streamKey]bool) (fresh *stream) {
	s := l.streams[key]
	switch {
	case s != nil && s.topicID != source.id:
		l.log.Warn("source topic was recreated: its records follow the old ones on the mirror", s.logFields()...)
		l.letStreamGo(s, false)
		s, leaving[key] = nil, l.leaving[s]
	case s != nil && s.mirrorTopicID != mirror.id:
		l.log.Warn("mirror topic was recreated: mirroring starts as the start policy says", s.logFields()...)
		l.letStreamGo(s, false)
		s, leaving[key] = nil, l.leaving[s]
	}
	if s == nil {
		if leaving[key] {
			return nil // once its last batch is answered
		}
		if l.judged[key.topic] != source.id {
			l.unmet[key.topicPartition] = "the mirror topic isn't looked at yet"
			return nil // a topic made again may have to stop, or its mirror topic to go
		}
		s = l.newStream(key, source, mirror)
		l.streams[key] = s
		fresh = s
	}
	l.setLeaders(s, source.partitions[key.partition], mirror.partitions[key.to])
	return fresh
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
		if s.spread != nil {
			continue // reads the log
		}
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
	s.endFilling()
	s.release(l.drop)
	delete(l.streams, s.key())
	delete(l.looking.wanted, s)
	l.leaving[s] = true
	s.onDrained = func() {
		delete(l.leaving, s)
		if hand && s.haveStored {
			l.handOver(s)
		}
		s.conn, s.link, s.readyOn = nil, nil, nil
		l.reconcile()
	}
	l.drained(s)
}

// handOver commits that a stream, or the last share of a source partition, was let go.
func (l *loop) handOver(s *stream) {
	c, ok := s.checkpoint(l.self), true
	c.released = !s.doubt && !s.foreignPending(l.now, l.takeoverWait)
	if s.spread != nil {
		c, ok = s.spread.handOver(s, c.released, l.self)
	}
	if ok {
		l.releases = append(l.releases, commit{s.topicPartition, s.topicID, c})
		l.commit()
	}
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
