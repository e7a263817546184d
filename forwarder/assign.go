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
	leaving := map[topicPartition]bool{}
	for s := range l.leaving {
		leaving[s.topicPartition] = true
	}
	var fresh []*stream
	for tp := range l.owned {
		s, why := l.streams[tp], ""
		source, mirror := l.sourceView.topics[tp.topic], l.mirrorView.topics[l.refresher.rename.mirrorName(tp.topic)]
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
			if l.judged[tp.topic] != source.id {
				l.unmet[tp] = "the mirror topic isn't looked at yet"
				continue // a topic made again may have to stop, or its mirror topic to go
			}
			s = l.newStream(tp, source, mirror)
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
	s.endFilling()
	s.release(l.drop)
	delete(l.streams, s.topicPartition)
	delete(l.looking.wanted, s)
	l.leaving[s] = true
	s.onDrained = func() {
		delete(l.leaving, s)
		if hand && s.haveStored {
			c := s.checkpoint(l.self)
			c.released = !s.doubt && !s.foreignPending(l.now, l.takeoverWait)
			l.releases = append(l.releases, commit{s.topicPartition, s.topicID, c})
			l.commit()
		}
		s.conn, s.link, s.readyOn = nil, nil, nil
		l.reconcile()
	}
	l.drained(s)
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
