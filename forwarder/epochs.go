package forwarder

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/zap"
)

// lineage is what is known of the leader epoch under which the source's log was mirrored: all below end was there while epoch was the newest.
// A source whose log has less of that epoch and those before it has truncated what was mirrored (KIP-320).
type lineage struct {
	epoch int32 // -1: not known
	end   int64
}

// lineageQuestion asks the source about one partition.
type lineageQuestion struct {
	tp topicPartition
	lineage
}

// askLineage returns, for the partitions whose log was truncated below what was mirrored, where it was. Partitions that can't be asked now are missing
// from checked. It runs beside the loop.
func askLineage(ctx context.Context, client *kgo.Client, questions []lineageQuestion) (truncated map[topicPartition]int64, checked map[topicPartition]bool, err error) {
	req := kmsg.NewPtrOffsetForLeaderEpochRequest()
	req.ReplicaID = -1
	at := map[string]int{}
	ends := map[topicPartition]int64{}
	for _, q := range questions {
		if q.epoch < 0 {
			continue
		}
		i, ok := at[q.tp.topic]
		if !ok {
			i = len(req.Topics)
			at[q.tp.topic] = i
			t := kmsg.NewOffsetForLeaderEpochRequestTopic()
			t.Topic = q.tp.topic
			req.Topics = append(req.Topics, t)
		}
		p := kmsg.NewOffsetForLeaderEpochRequestTopicPartition()
		p.Partition, p.LeaderEpoch = q.tp.partition, q.epoch
		req.Topics[i].Partitions = append(req.Topics[i].Partitions, p)
		ends[q.tp] = q.end
	}
	truncated, checked = map[topicPartition]int64{}, map[topicPartition]bool{}
	if len(req.Topics) == 0 {
		return truncated, checked, nil
	}
	for _, shard := range client.RequestSharded(ctx, req) {
		if shard.Err != nil {
			err = errors.Join(err, shard.Err)
			continue
		}
		for _, t := range shard.Resp.(*kmsg.OffsetForLeaderEpochResponse).Topics {
			for _, p := range t.Partitions {
				tp := topicPartition{t.Topic, p.Partition}
				if kerr.ErrorForCode(p.ErrorCode) != nil {
					continue
				}
				checked[tp] = true
				if p.EndOffset >= 0 && p.EndOffset < ends[tp] {
					truncated[tp] = p.EndOffset
				}
			}
		}
	}
	if err != nil {
		return truncated, checked, fmt.Errorf("OffsetForLeaderEpoch on the source: %w", err)
	}
	return truncated, checked, nil
}

// ageLineage takes the leader epoch that a refresh shows. Metadata may be late: what was mirrored before the epoch had been shown for metadataLag
// is of that epoch or an earlier one.
func (s *stream) ageLineage(epoch int32, now time.Time) {
	if epoch != s.sourceLeader.epoch || s.acked < 0 {
		s.marked, s.markedAt = s.acked, now
		return
	}
	if now.Sub(s.markedAt) >= metadataLag {
		if s.marked > s.lineage.end && epoch >= s.lineage.epoch {
			s.lineage = lineage{epoch, s.marked}
		}
		s.marked, s.markedAt = s.acked, now
	}
}

// sourceMoved checks a stream's lineage after its source leader changed; its offers are held meanwhile (rule T1).
func (l *loop) sourceMoved(s *stream) {
	if s.conn == nil || s.lineage.epoch < 0 {
		return
	}
	if s.accepting.Load() {
		s.accepting.Store(false)
		s.dropEarly(l.drop)
	}
	session, q := s.session, lineageQuestion{s.topicPartition, s.lineage}
	s.asking = true
	l.spawn(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, mirrorTimeout)
		defer cancel()
		truncated, checked, err := askLineage(ctx, l.source, []lineageQuestion{q})
		l.inbox.call(func() {
			if s.session != session || s.removed {
				return
			}
			s.asking = false
			end, bad := truncated[q.tp]
			switch {
			case bad:
				l.diverged(s, &divergedError{end, s.next})
			case err != nil || !checked[q.tp]:
				l.retryLineage(s)
			case s.tail:
				l.wantFetch(s)
			case s.state == StateLive || s.state == StateCatchUp:
				l.catchUp(s)
			}
		})
	})
}

// retryLineage asks again soon: the new leader may not know its epoch yet.
func (l *loop) retryLineage(s *stream) {
	s.asking = true
	session := s.session
	l.timers.add(l.now.Add(lineageRetry), func() {
		if s.session == session && !s.removed {
			l.sourceMoved(s)
		}
	})
}

const (
	metadataLag  = 10 * time.Second
	lineageRetry = 500 * time.Millisecond
	// divergedRetry is how often a stopped stream looks whether a person has mended it.
	divergedRetry = time.Minute
)

// checkLineage asks about all jobs that know their lineage, at the start of a session: a partition once at a time, since shares may know it differently.
func (l *loop) checkLineage(ctx context.Context, results []recovered) error {
	for from := 0; from < len(results); {
		seen, to := map[topicPartition]bool{}, from
		for to < len(results) && !seen[results[to].job.tp] {
			seen[results[to].job.tp] = true
			to++
		}
		if err := l.checkLineages(ctx, results[from:to]); err != nil {
			return err
		}
		from = to
	}
	return nil
}

func (l *loop) checkLineages(ctx context.Context, results []recovered) error {
	var questions []lineageQuestion
	for i := range results {
		if r := &results[i]; r.err == nil && r.job.lineage.epoch >= 0 {
			questions = append(questions, lineageQuestion{r.job.tp, r.job.lineage})
		}
	}
	truncated, checked, err := askLineage(ctx, l.source, questions)
	if err != nil {
		return err
	}
	for i := range results {
		r := &results[i]
		if r.err != nil || r.job.lineage.epoch < 0 {
			continue
		}
		if end, bad := truncated[r.job.tp]; bad {
			r.err = &divergedError{from: end, to: r.job.lineage.end}
		} else if !checked[r.job.tp] {
			r.err = errors.New("the source doesn't answer for the leader epoch yet")
		}
	}
	return nil
}

// divergedError says that the source truncated its log: it no longer has the offsets [from, to), at least, that are on the mirror.
type divergedError struct{ from, to int64 }

func (e *divergedError) Error() string {
	return fmt.Sprintf("diverged: offsets [%d, %d) are on the mirror, but the source truncated its log to %d", e.from, e.to, e.from)
}

// diverged stops a stream whose source truncated its log below what was mirrored, or lets it go on behind that, as the policy says.
func (l *loop) diverged(s *stream, err *divergedError) {
	if s.blockedOn != err.Error() {
		l.log.Error("source truncated its log below what was mirrored", s.logFields(zap.Int64("from", err.from), zap.Int64("to", err.to))...)
	}
	l.endSession(s, err)
	if !l.opts.StopOnDivergence {
		s.askGen = generationAsk{why: afterDivergence, source: err.from}
		s.lineage = lineage{epoch: -1}
		s.sourceEnd = -1 // it only rises otherwise
		return
	}
	l.stopStream(s, err, divergedRetry)
}
