package forwarder

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/zap"

	"kmirror/protocol"
)

// Status is a snapshot; before and after Run it is empty but for the name.
func (f *Forwarder) Status() Status {
	status := Status{Name: f.opts.Name, Group: "kmirror." + f.opts.Name, Streams: []StreamStatus{}}
	l := f.loop.Load()
	if l == nil {
		return status
	}
	done := make(chan Status, 1)
	f.inbox.call(func() {
		l.fillStatus(&status)
		done <- status
	})
	select {
	case status = <-done:
		return status
	case <-f.ended:
		return Status{Name: f.opts.Name, Group: status.Group, Streams: []StreamStatus{}}
	}
}

func (l *loop) fillStatus(status *Status) {
	status.Member = l.group.mayAct()
	status.SourceID, status.MirrorID = l.sourceView.clusterID, l.mirrorView.clusterID
	everyTopic := l.shared != nil && maps.Equal(l.shared, *l.groupTopics.Load())
	status.CaughtUp = status.Member && everyTopic && len(l.sourceView.brokers) > 0 && !l.sourceReach.failing && len(l.unmet) == 0 && len(l.streams) == l.wanted
	for _, s := range l.streams {
		x := s.status()
		status.CaughtUp = status.CaughtUp && x.LagRecords == 0 && s.acked >= 0 // the checkpoint says what the mirror had, not what it has
		status.Streams = append(status.Streams, x)
	}
	for tp, why := range l.unmet {
		status.Streams = append(status.Streams, StreamStatus{
			Topic: tp.topic, Partition: tp.partition, State: StatePaused.String(), Reason: why, SourceEnd: -1, Next: -1, MirrorOffset: -1, LagRecords: -1,
		})
	}
	for _, topic := range slices.Sorted(maps.Keys(l.hazards)) {
		status.Topics = append(status.Topics, TopicStatus{topic, l.hazards[topic]})
	}
	slices.SortFunc(status.Streams, func(a, b StreamStatus) int {
		return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition), cmp.Compare(a.mirrorPartition(), b.mirrorPartition()))
	})
}

func (s *stream) status() StreamStatus {
	x := StreamStatus{
		Topic: s.topic, Partition: s.index, State: s.state.String(), Reason: s.reason,
		SourceEnd: s.sourceEnd, Next: s.acked, MirrorOffset: s.mirrorEnd, LagRecords: -1, LostRecords: s.lost,
		LostRanges: slices.Clone(s.lostRanges),
	}
	if s.mirrorTopic != s.topic {
		x.MirrorTopic = s.mirrorTopic
	}
	if s.spread != nil {
		to := s.to
		x.MirrorPartition = &to
	}
	if s.acked < 0 && s.haveStored {
		x.Next, x.MirrorOffset = s.stored.next, s.stored.mirrorEnd
	}
	if x.SourceEnd >= 0 && x.Next >= 0 {
		x.LagRecords = max(0, x.SourceEnd-x.Next)
	}
	return x
}

// fetchCheckpoints reads all that the group committed. It runs beside the loop.
func (g *group) fetchCheckpoints(ctx context.Context) (map[topicPartition]checkpoint, error) {
	req := kmsg.NewPtrOffsetFetchRequest()
	req.Group, req.RequireStable = g.name, true
	of := kmsg.NewOffsetFetchRequestGroup()
	of.Group = g.name
	req.Groups = append(req.Groups, of)
	resp, err := req.RequestWith(ctx, g.client)
	if err != nil {
		return nil, fmt.Errorf("OffsetFetch: %w", err)
	}
	if err := kerr.ErrorForCode(resp.ErrorCode); err != nil {
		return nil, fmt.Errorf("OffsetFetch: %w", err)
	}
	stored := map[topicPartition]checkpoint{}
	keep := func(topic string, partition int32, offset int64, metadata *string, code int16) error {
		if err := kerr.ErrorForCode(code); err != nil {
			return fmt.Errorf("OffsetFetch: topic %s partition %d: %w", topic, partition, err)
		}
		if metadata == nil || offset < 0 {
			return nil
		}
		c, ok := parseCheckpoint(offset, *metadata)
		if ok {
			stored[topicPartition{topic, partition}] = c
		} else {
			g.log.Warn("committed offset isn't a checkpoint of kmirror's; ignored", zap.String("topic", topic), zap.Int32("partition", partition))
		}
		return nil
	}
	for _, t := range resp.Topics {
		for _, p := range t.Partitions {
			if err := keep(t.Topic, p.Partition, p.Offset, p.Metadata, p.ErrorCode); err != nil {
				return nil, err
			}
		}
	}
	for _, of := range resp.Groups {
		if err := kerr.ErrorForCode(of.ErrorCode); err != nil {
			return nil, fmt.Errorf("OffsetFetch: %w", err)
		}
		for _, t := range of.Topics {
			for _, p := range t.Partitions {
				if err := keep(t.Topic, p.Partition, p.Offset, p.Metadata, p.ErrorCode); err != nil {
					return nil, err
				}
			}
		}
	}
	return stored, nil
}

// checkGap reads the headers of what lies between two appends of ours: others' writes are left alone, ours would mean that another
// owner numbered differently (rule S4).
func (l *loop) checkGap(s *stream, from, to int64) {
	c, q, session := s.conn, l.questionOf(s), s.session
	l.spawn(func(ctx context.Context) {
		st := standing{logStart: from, logEnd: to}
		err := (&resolver{conn: c}).scan(ctx, q, from, &st)
		if err != nil || !st.found {
			return // what can't be read is gone, or the session with it
		}
		l.inbox.call(func() {
			if s.session == session && !s.removed {
				l.log.Error("a batch of this stream stands where none was sent", s.logFields(zap.Int64("mirror_from", from), zap.Int64("mirror_to", to))...)
				l.fail(s, fmt.Errorf("a batch of this stream stands at mirror offsets [%d, %d), where none was sent", from, to), time.Minute)
			}
		})
	})
}

// checkStored looks at a batch that the mirror says it already had (rule S4): a repeat has the bytes that were sent and stands right behind
// the batch before it; else a rival sent other bytes, or the log lost its tail and took the batch over the hole.
func (l *loop) checkStored(s *stream, e *entry, baseOffset int64) {
	c, q, crc, base := l.connOf(s), l.questionOf(s), e.batch.CRC(), e.base
	from, behind := max(s.stored.mirrorOffset, 0), s.rightBehind(e)
	if c == nil {
		return
	}
	q.epoch = -1 // a log that lost its tail is one of a new epoch
	l.spawn(func(ctx context.Context) {
		r := &resolver{conn: c}
		differs := false
		err := r.batchAt(ctx, q, baseOffset, func(b protocol.Batch) {
			differs = q.isOurs(b) && b.CRC() != crc
		})
		below := standing{logEnd: baseOffset}
		if err == nil && from < baseOffset {
			err = r.scan(ctx, q, from, &below)
		}
		hole := !behind(&below)
		switch {
		case err != nil: // what can't be read is gone, or the connection with it
		case differs:
			l.inbox.call(func() { l.failStored(s, base, baseOffset, "other bytes than") })
		case hole:
			l.inbox.call(func() {
				l.failStored(s, base, baseOffset, "after a loss of its log's tail, not right behind what came before")
			})
		}
	})
}

// rightBehind returns what tells whether the log's end below a batch is where the batch belongs.
func (s *stream) rightBehind(e *entry) func(below *standing) bool {
	base, birth, position := e.base, s.birth(), int64(0)
	if s.fence != nil {
		first := landmark{s.fence.producerID, s.fence.epoch, int64(e.batch.BaseSequence())}
		return func(below *standing) bool { return first.end == 0 || below.found && below.last == first }
	}
	position = s.position(base)
	producerID := s.producerID
	return func(below *standing) bool {
		if below.found && below.last.producerID == producerID {
			return below.position >= position
		}
		return base <= birth
	}
}

func (l *loop) failStored(s *stream, sourceOffset, mirrorOffset int64, what string) {
	if s.removed {
		return
	}
	l.log.Error("mirror holds what it shouldn't", s.logFields(zap.Int64("source_offset", sourceOffset), zap.Int64("mirror_offset", mirrorOffset), zap.String("holds", what))...)
	l.fail(s, fmt.Errorf("mirror offset %d holds %s source offset %d", mirrorOffset, what, sourceOffset), time.Minute)
}

func (l *loop) questionOf(s *stream) question {
	return question{topic: s.mirrorTopic, topicID: s.mirrorTopicID, partition: s.to, epoch: s.mirrorLeader.epoch, producerID: s.producerID, ours: s.fencers}
}

// connOf returns a connection to the stream's mirror leader, nil if there is none now.
func (l *loop) connOf(s *stream) *conn { return l.linkFor(s).conn }
