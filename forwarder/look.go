package forwarder

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Timestamps of ListOffsets that aren't times.
const (
	latestOffset   = -1
	earliestOffset = -2
)

// offsetAnswer is a partition's answer to ListOffsets.
type offsetAnswer struct {
	offset int64
	err    error
}

// listSource asks the source, each leader once, for an offset of each partition; committed ends are last stable offsets.
func listSource(ctx context.Context, client *kgo.Client, tps []topicPartition, timestamp int64) (map[topicPartition]offsetAnswer, error) {
	req := kmsg.NewPtrListOffsetsRequest()
	req.ReplicaID, req.IsolationLevel = -1, 1
	at := make(map[string]int)
	for _, tp := range tps {
		i, ok := at[tp.topic]
		if !ok {
			i = len(req.Topics)
			at[tp.topic] = i
			t := kmsg.NewListOffsetsRequestTopic()
			t.Topic = tp.topic
			req.Topics = append(req.Topics, t)
		}
		p := kmsg.NewListOffsetsRequestTopicPartition()
		p.Partition, p.Timestamp = tp.partition, timestamp
		req.Topics[i].Partitions = append(req.Topics[i].Partitions, p)
	}
	answers := make(map[topicPartition]offsetAnswer, len(tps))
	var failed error
	for _, shard := range client.RequestSharded(ctx, req) {
		if shard.Err != nil {
			failed = errors.Join(failed, shard.Err)
			continue
		}
		for _, t := range shard.Resp.(*kmsg.ListOffsetsResponse).Topics {
			for _, p := range t.Partitions {
				answers[topicPartition{t.Topic, p.Partition}] = offsetAnswer{p.Offset, kerr.ErrorForCode(p.ErrorCode)}
			}
		}
	}
	if len(answers) == 0 && failed != nil {
		return nil, fmt.Errorf("ListOffsets on the source: %w", failed)
	}
	return answers, nil
}

// startOffsets asks for the first offsets of the streams among results that were never born: by the start policy, but a partition that is new
// in a topic already mirrored, or of a topic that appeared while kmirror watched, always starts at its beginning.
func (l *loop) startOffsets(ctx context.Context, results []recovered) (map[topicPartition]int64, error) {
	var policy, beginning []topicPartition
	asked := map[topicPartition]bool{} // shares ask for the same
	for i := range results {
		r := &results[i]
		if r.err != nil || len(r.numbering.segments) > 0 || r.standing.found || asked[r.job.tp] {
			continue
		}
		asked[r.job.tp] = true
		was := l.registry.bornWith(r.job.id.topicID, r.job.id.mirrorTopicID)
		if r.job.appeared || was > 0 && r.job.tp.partition >= was {
			beginning = append(beginning, r.job.tp)
		} else {
			policy = append(policy, r.job.tp)
		}
	}
	timestamp := int64(earliestOffset)
	switch l.opts.Start {
	case StartLatest:
		timestamp = latestOffset
	case StartTimestamp:
		timestamp = l.opts.StartTimestamp.UnixMilli()
	}
	starts := make(map[topicPartition]int64, len(results))
	if err := l.addStarts(ctx, starts, beginning, earliestOffset); err != nil {
		return nil, err
	}
	return starts, l.addStarts(ctx, starts, policy, timestamp)
}

// addStarts adds the offsets at a timestamp; where no record is that young, the end.
func (l *loop) addStarts(ctx context.Context, starts map[topicPartition]int64, tps []topicPartition, timestamp int64) error {
	if len(tps) == 0 {
		return nil
	}
	answers, err := listSource(ctx, l.source, tps, timestamp)
	if err != nil {
		return err
	}
	var behindAll []topicPartition
	for tp, a := range answers {
		switch {
		case a.err != nil: // birth reports it
		case a.offset < 0:
			behindAll = append(behindAll, tp)
		default:
			starts[tp] = a.offset
		}
	}
	return l.addStarts(ctx, starts, behindAll, latestOffset)
}

// looking is a look at the source's ends: one at a time, for all streams that want it.
type looking struct {
	wanted  map[*stream]bool
	running bool
	waiters []chan struct{} // closed after the next look of all streams
}

// look asks for a look at one stream's end.
func (l *loop) look(s *stream) { l.looking.wanted[s] = true }

func (l *loop) lookAll() {
	for _, s := range l.streams {
		l.look(s)
	}
}

// startLook asks the source for the committed ends of the streams that want it.
func (l *loop) startLook() {
	if l.looking.running || len(l.looking.wanted) == 0 && len(l.looking.waiters) == 0 || l.stopping {
		return
	}
	byTP := make(map[topicPartition][]*stream, len(l.looking.wanted))
	tps := make([]topicPartition, 0, len(l.looking.wanted))
	for s := range l.looking.wanted {
		if !s.removed {
			if byTP[s.topicPartition] == nil {
				tps = append(tps, s.topicPartition)
			}
			byTP[s.topicPartition] = append(byTP[s.topicPartition], s)
		}
	}
	waiters := l.looking.waiters
	l.looking.waiters = nil
	clear(l.looking.wanted)
	l.looking.running = true
	l.spawn(func(ctx context.Context) {
		var answers map[topicPartition]offsetAnswer
		var err error
		if len(tps) > 0 {
			answers, err = listSource(ctx, l.source, tps, latestOffset)
		}
		l.inbox.call(func() {
			l.looking.running = false
			l.looked(byTP, answers, err)
			for _, w := range waiters {
				close(w)
			}
		})
	})
}

func (l *loop) looked(byTP map[topicPartition][]*stream, answers map[topicPartition]offsetAnswer, err error) {
	if l.sourceLost(err) {
		l.timers.add(l.now.Add(l.sourceWait.next()), func() {
			for _, streams := range byTP {
				l.lookAgain(streams)
			}
		})
		return
	}
	l.sourceWait.reset()
	l.lookedAt = l.now
	for tp, streams := range byTP {
		a, ok := answers[tp]
		if !ok || a.err != nil {
			if a.err != nil && isLeadership(a.err) {
				l.refreshSoon()
			}
			l.timers.add(l.now.Add(200*time.Millisecond), func() { l.lookAgain(streams) })
			continue
		}
		for _, s := range streams {
			if !s.removed {
				l.sawEnd(s, a.offset)
			}
		}
	}
}

// lookAgain asks once more for those of streams that can't go on without.
func (l *loop) lookAgain(streams []*stream) {
	for _, s := range streams {
		if !s.removed && s.conn != nil && s.state == StateRecover {
			l.look(s)
		}
	}
}

// sawEnd takes the committed end of a stream's source log.
func (l *loop) sawEnd(s *stream, end int64) {
	s.sourceEnd = max(s.sourceEnd, end)
	if s.conn == nil {
		return
	}
	switch {
	case s.state == StateRecover && s.fence != nil:
		l.catchUp(s) // to the end, where it becomes dense
	case s.state == StateRecover && l.opts.NoOffers:
		l.becomeTail(s)
	case s.state == StateRecover && s.next >= end:
		s.linked = true
		l.goLive(s)
	case s.state == StateRecover:
		l.catchUp(s)
	case s.state == StateLive:
		l.sawGrowth(s, end)
	}
}

// sawGrowth judges what a look alone tells of a live stream. The offer may be on its way, for as long as the machine is busy: only what the
// look before knew already, and is still missing, is a hole.
func (l *loop) sawGrowth(s *stream, end int64) {
	switch {
	case l.now.Sub(s.lookedAt) < l.opts.LookEvery/2: // somebody asked for looks in quick succession
	case s.next < s.lookedEnd:
		l.openHole(s)
	default:
		s.lookedEnd, s.lookedAt = end, l.now
	}
}

const (
	// holeGrace is how long a hole below offered batches may stay before it is read from the source.
	holeGrace = 250 * time.Millisecond
	// growthGrace is the same for a batch that passed the proxy and won't be offered, so that several are read at once.
	growthGrace = 20 * time.Millisecond
)

// awaitHole gives the offers that close a hole a moment to arrive.
func (l *loop) awaitHole(s *stream, grace time.Duration) {
	if s.holeTimer {
		return
	}
	s.holeTimer = true
	next := s.next
	l.timers.add(l.now.Add(grace), func() {
		s.holeTimer = false
		switch {
		case s.removed || s.conn == nil || s.state != StateLive || s.next >= s.grownTo.Load() && len(s.early) == 0:
		case s.next > next: // it closed; another may have opened
			l.awaitHole(s, holeGrace)
		default:
			l.openHole(s)
		}
	})
}

// openHole reads a hole in what was offered from the source.
func (l *loop) openHole(s *stream) {
	l.metrics.gaps.Inc()
	s.inHole, s.tailRead, s.tailOffered = true, 0, s.offered.Load()
	l.catchUp(s)
}

// closeHole judges a hole that was read: where what was read hadn't been offered meanwhile, somebody writes round the proxy. It reports
// whether the stream follows the log from now on.
func (l *loop) closeHole(s *stream) bool {
	if !s.inHole {
		return false
	}
	s.inHole = false
	if s.tailRead <= s.offered.Load()-s.tailOffered || !s.sawHole(l.now) {
		return false
	}
	l.becomeTail(s)
	return true
}

// isLeadership reports whether an error says that the metadata is old.
func isLeadership(err error) bool {
	for _, e := range []error{kerr.NotLeaderForPartition, kerr.LeaderNotAvailable, kerr.FencedLeaderEpoch, kerr.UnknownLeaderEpoch,
		kerr.UnknownTopicOrPartition, kerr.UnknownTopicID, kerr.InconsistentTopicID, kerr.KafkaStorageError, kerr.ReplicaNotAvailable} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
