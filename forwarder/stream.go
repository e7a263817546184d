package forwarder

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"go.uber.org/zap"

	"kmirror/protocol"
)

// stream is one source partition on its way into one mirror partition. The loop owns it, but for the atomic fields, which the proxy's
// goroutines use too, and the first block, which never changes.
type stream struct {
	loop *loop
	topicPartition
	index         int32 // the partition again
	to            int32 // the mirror's
	topicID       protocol.TopicID
	mirrorTopic   string
	mirrorTopicID protocol.TopicID
	appeared      bool    // the source topic is younger than this process's first look at it
	partitions    int32   // of the source topic when the stream began
	spread        *spread // of a share, else nil

	accepting atomic.Bool  // offers are wanted
	grownTo   atomic.Int64 // the source log's end as the proxy saw it pass, for what wasn't offered
	grownSent atomic.Bool  // the loop was told
	offered   atomic.Int64 // records that the proxy saw acknowledged, wanted or not

	partition

	mirrorLeader leadership
	mirrorEpoch  int32 // leader epoch of the last session, in which mirrorEnd was seen
	sourceLeader leadership

	// A session (rule S1) is the time between two values of session; conn is nil between sessions.
	session    int64
	link       *link
	usual      *link // the link of its sessions at the present leader
	conn       *conn
	readyOn    *link // in whose ready list it is, nil: none
	unanswered int   // batches without an answer, of any session: they are waited for before the next
	recovering bool  // waiting for a link or being resolved
	wait       backoff
	retryAt    time.Time
	removed    bool   // no longer ours; nothing may start
	onDrained  func() // called once nothing is unanswered

	stored      checkpoint // as last read or committed
	haveStored  bool
	lastBatch   span  // our last acknowledged batch
	lastBatchAt int64 // its base offset on the mirror, -1: none
	uncommitted bool  // acked moved since the last commit

	// What an earlier session may have left on its way (rule S5).
	doubt       bool // this process's last session ended with an outcome unknown: W2
	askTwice    bool // the next recovery is to get two answers that agree
	foreign     bool // another process's session wasn't handed over cleanly: W3
	foreignFrom time.Time
	askGen      generationAsk

	wantFence   bool      // the next recovery is to fence the stream: its log has holes (rule N4)
	wantDense   bool      // the next recovery is to open a dense generation: the holes are passed
	covering    bool      // source offsets of what waits are being made durable
	sessionFrom time.Time // when the session began

	filler      *filler            // nil: nothing was filled yet
	stopFilling context.CancelFunc // of the filling under way
	fillSpent   time.Duration      // on filling, since the log's end was last reached
	shifted     bool               // offsets on the mirror aren't the source's any more

	segmenting  bool // segments are being written
	fetching    bool
	fetchAfter  time.Time
	linked      bool // catch-up has met the log's end once with offers on: the next end makes it live
	tail        bool
	tailFrom    time.Time
	tailRead    int64 // records read from the source since tailFrom, or since the hole was opened
	tailOffered int64 // offered at that time
	holeTimer   bool
	inHole      bool      // catching up on a hole in what was offered
	lookedEnd   int64     // the source's end as of lookedAt, to be reached by the next look
	lookedAt    time.Time // of a look, or of going live

	lineage  lineage // what the source's log had under which leader epoch
	marked   int64   // acked at markedAt
	markedAt time.Time
	asking   bool // the source is asked about the lineage; nothing is read meanwhile

	batchLimitUntil time.Time // batchLimit is forgotten then

	sourceEnd  int64 // committed end on the source as last seen, -1: unknown
	lost       int64
	lostRanges [][2]int64 // the last maxLostRanges
	reason     string
	blockedOn  string // last logged reason, so that a state is logged once
}

// generationAsk says that recovery is to open a new generation (rule N4).
type generationAsk struct {
	why    generationWhy
	source int64 // first source offset of it
}

// generationWhy says why a stream can't go on in its generation.
type generationWhy int8

const (
	noGeneration    generationWhy = iota
	afterRefusal                  // the broker wants a producer that it doesn't know to begin with sequence 0
	afterLoss                     // the source deleted what comes next
	afterDivergence               // the source truncated what was mirrored
)

func (l *loop) newStream(key streamKey, source, mirror *topicView) *stream {
	s := &stream{
		loop: l, topicPartition: key.topicPartition, index: key.partition, to: key.to, topicID: source.id, mirrorTopic: mirror.name, mirrorTopicID: mirror.id, appeared: source.appeared, partitions: int32(len(source.partitions)),
		sourceEnd: -1, lastBatchAt: -1, mirrorLeader: leadership{-1, -1}, sourceLeader: leadership{-1, -1},
		lineage: lineage{epoch: -1}, marked: -1,
		wait: newBackoff(100*time.Millisecond, 5*time.Second),
	}
	s.expireAge, s.mergeBytes = l.expireAge, l.opts.MergeBytes
	s.next, s.acked, s.mirrorEnd, s.holeFrom = -1, -1, -1, -1
	if l.opts.Repartition {
		l.join(s, int32(len(mirror.partitions)))
	}
	return s
}

// identity of the stream, in generation 0.
func (s *stream) identity() identity {
	id := identity{sourceCluster: s.loop.registry.source, topicID: s.topicID, partition: s.index, mirrorTopicID: s.mirrorTopicID}
	if s.spread != nil {
		id.to, id.of = s.to, s.spread.of
	}
	return id
}

func (s *stream) logFields(more ...zap.Field) []zap.Field {
	fields := []zap.Field{zap.String("topic", s.topic), zap.Int32("partition", s.index)}
	if s.spread != nil {
		fields = append(fields, zap.Int32("mirror_partition", s.to))
	}
	return append(fields, more...)
}

// setState changes the state and says so once.
func (l *loop) setState(s *stream, state State, reason string) {
	if s.state == state && s.reason == reason {
		return
	}
	if s.state != state {
		l.log.Debug("stream changed state", s.logFields(zap.Stringer("from", s.state), zap.Stringer("to", state), zap.String("reason", reason))...)
	}
	if (state == StateFailed || state == StatePaused) && reason != s.blockedOn {
		s.blockedOn = reason
		if state == StateFailed {
			l.log.Error("stream stopped", s.logFields(zap.String("reason", reason))...)
		}
	}
	if state == StateLive || state == StateTail {
		s.blockedOn = "" // in catch-up what is refused may be ahead still
	}
	s.state, s.reason = state, reason
}

// drop ends an entry's life.
func (l *loop) drop(e entry) {
	l.memory.free(e.charge)
	if e.memory != nil {
		e.memory.Release()
	}
}

// endSession ends a stream's session: what waits is let go, what is in flight is waited for, then the position is resolved anew.
func (l *loop) endSession(s *stream, err error) {
	if s.conn == nil {
		return
	}
	s.doubt = s.doubt || len(s.flight) > 0
	s.endFilling()
	s.conn, s.link, s.readyOn = nil, nil, nil
	s.session++
	s.accepting.Store(false)
	s.flight = nil
	s.release(l.drop)
	s.linked, s.fetching, s.covering, s.draining = false, false, false, false
	l.metrics.sessionEnds.Inc()
	l.retryLater(s, s.wait.next(), err)
}

// retryLater recovers a stream after a while.
func (l *loop) retryLater(s *stream, delay time.Duration, err error) {
	s.recovering = false
	if s.removed {
		return
	}
	reason := ""
	if err != nil {
		reason = err.Error()
	}
	l.setState(s, StatePaused, reason)
	s.retryAt = l.now.Add(delay)
	l.timers.add(s.retryAt, func() { l.recover(s) })
}

// fail stops a stream until a person acts; it looks again now and then, so that what was mended goes on without a restart.
func (l *loop) fail(s *stream, err error, again time.Duration) {
	l.endSession(s, err)
	l.stopStream(s, err, again)
}

func (l *loop) stopStream(s *stream, err error, again time.Duration) {
	l.setState(s, StateFailed, err.Error())
	s.retryAt = l.now.Add(again)
	l.timers.add(s.retryAt, func() { l.recover(s) })
}

// drained goes on with what waits for a stream's last unanswered batch.
func (l *loop) drained(s *stream) {
	if s.unanswered > 0 {
		return
	}
	if do := s.onDrained; do != nil {
		s.onDrained = nil
		do()
		return
	}
	if s.removed || s.recovering || s.conn != nil {
		return
	}
	l.recover(s)
}

// acknowledged takes the mirror's success for a stream's oldest batch in flight.
func (l *loop) acknowledged(s *stream, e *entry, baseOffset int64) {
	expected := s.mirrorEnd
	span, at := s.acknowledge(baseOffset, l.now)
	if at == before {
		// Either another owner appended the same batch first, or the log lost its tail: the log knows (rules S4, R3).
		l.log.Warn("mirror answered with an offset below the expected one", s.logFields(
			zap.Int64("base_offset", baseOffset), zap.Int64("expected_offset", expected), zap.Int64("source_offset", e.base))...)
		l.endSession(s, errRepeated)
		l.checkStored(s, e, baseOffset)
		return
	}
	if at == behind {
		l.metrics.foreignRecords.Add(float64(baseOffset - expected))
		l.checkGap(s, expected, baseOffset)
	}
	s.lastBatch, s.lastBatchAt = span, baseOffset
	s.uncommitted = true
	s.wait.reset()
	s.blockedOn = ""
	l.metrics.mirroredRecords.Add(float64(span.records))
	l.metrics.mirroredBatches.Inc()
	l.metrics.mirroredBytes.Add(float64(e.sizeBytes()))
	switch {
	case s.onDrained != nil && s.unanswered == 0:
		l.drained(s)
	case s.draining && len(s.flight) == 0:
		l.again(s, errRefence)
	default:
		l.makeReady(s)
		l.fillBehind(s)
	}
}

var (
	errRepeated = errors.New("the mirror has this batch already or lost its tail")
	errLeader   = errors.New("the mirror partition's leader changed")
)

// mendable are refusals that a person mends at the mirror; the stream looks again after a while.
var mendable = []*kerr.Error{
	kerr.InvalidRecord, kerr.CorruptMessage,
	kerr.TopicAuthorizationFailed, kerr.ClusterAuthorizationFailed, kerr.PolicyViolation, kerr.UnsupportedCompressionType,
	kerr.UnsupportedForMessageFormat, kerr.InvalidRequiredAcks,
}

// refusedByMirror ends the session on an answer other than success.
func (l *loop) refusedByMirror(s *stream, e *entry, a produceAnswer) {
	err := kerr.ErrorForCode(a.code)
	l.metrics.refusals.Inc()
	// An error before any success, while nothing is known of us, is how a broker that wants sequence 0 first speaks (N2, N4).
	strict := s.solo && (errors.Is(err, kerr.OutOfOrderSequenceNumber) || errors.Is(err, kerr.UnknownProducerID))
	switch {
	case errors.Is(err, kerr.MessageTooLarge), errors.Is(err, kerr.RecordListTooLarge):
		l.tooLarge(s, e, err)
		return
	case errors.Is(err, kerr.InvalidTimestamp):
		l.badTimestamp(s, e, a)
		return
	case slices.ContainsFunc(mendable, func(m *kerr.Error) bool { return errors.Is(err, m) }):
		l.fail(s, described(fmt.Errorf("mirror refused the batch at source offsets [%d, %d) of %d bytes: %w", e.base, e.end, len(e.batch), err), &a.message), refusalRetry)
		return
	}
	if errors.Is(err, kerr.NotLeaderForPartition) || errors.Is(err, kerr.UnknownTopicOrPartition) || errors.Is(err, kerr.UnknownTopicID) ||
		errors.Is(err, kerr.LeaderNotAvailable) || errors.Is(err, kerr.KafkaStorageError) {
		l.refreshSoon()
	}
	l.endSession(s, fmt.Errorf("mirror broker: %w", err))
	if strict {
		s.askGen = generationAsk{why: afterRefusal, source: e.base}
	}
}
