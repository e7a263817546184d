package forwarder

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"

	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/protocol"
)

// piece is a run of source offsets as a Fetch brought it: one batch, or a hole that holds nothing for a reader.
type piece struct {
	base, end int64
	batch     protocol.Batch // nil: a marker or a batch of an aborted transaction; in a fenced session also what compaction took
	// leaderEpoch under which the source took it; the batch forgets it when it is stamped.
	leaderEpoch int32
	converted   bool // made of messages of an old format: it has memory of its own
	sparse      bool // has fewer records than offsets
	data        bool // of a hole: held records, of an aborted transaction or such as were compacted away
}

// plan is what a Fetch brought for a stream, from its next offset on, without a gap.
type plan []piece

// readFetched splits raw records into pieces from next on, below the last stable offset. Which batches were aborted is told as to any read_committed
// consumer (Kafka's CompletedFetch): a producer's batches are aborted from the listed first offset to its abort marker. Where compaction left holes, a
// dense stream's plan ends, and if it is empty so far the error is errHoles.
func readFetched(records []byte, aborted []kmsg.FetchResponseTopicPartitionAbortedTransaction, next, lastStable int64, fenced bool, codec protocol.Codec) (plan, error) {
	slices.SortFunc(aborted, func(a, b kmsg.FetchResponseTopicPartitionAbortedTransaction) int {
		return cmp.Compare(a.FirstOffset, b.FirstOffset)
	})
	aborting := map[int64]bool{} // producer ID
	var pieces plan
	for len(records) > 0 {
		b, rest, err := protocol.ParseBatch(records)
		converted := errors.Is(err, protocol.ErrOldMagic)
		if converted {
			b, rest, err = protocol.ConvertOld(records, codec)
		}
		if errors.Is(err, protocol.ErrIncomplete) {
			break // the answer was cut at its size
		}
		if err != nil {
			return pieces, err
		}
		records = rest
		base, end := b.BaseOffset(), b.EndOffset()
		if base >= lastStable {
			break
		}
		for len(aborted) > 0 && aborted[0].FirstOffset < end {
			aborting[aborted[0].ProducerID] = true
			aborted = aborted[1:]
		}
		hole := b.Control() || b.Transactional() && aborting[b.ProducerID()]
		if b.Control() && protocol.AbortMarker(b) {
			delete(aborting, b.ProducerID())
		}
		switch {
		case end <= next:
			continue
		case !fenced && (base > next || !hole && !b.Dense()):
			if len(pieces) == 0 {
				return nil, errHoles
			}
			return pieces, nil
		case hole, b.RecordCount() == 0:
			pieces = append(pieces, piece{base: next, end: end, data: !b.Control()})
		default:
			if base > next {
				pieces = append(pieces, piece{base: next, end: base, data: true})
			}
			pieces = append(pieces, piece{base: base, end: end, batch: b, leaderEpoch: b.LeaderEpoch(), converted: converted, sparse: !b.Dense()})
		}
		next = end
	}
	return pieces, nil
}

// missingSegments returns the segments that the numbering lacks for what follows holes (rule N3), to be made durable before the first
// append that uses them. In order.
func (pl plan) missingSegments(p *partition) (missing []segment) {
	holeFrom := p.holeFrom
	position := p.position(p.next)
	if holeFrom >= 0 {
		position = p.position(holeFrom)
	}
	at := p.next
	for _, x := range pl {
		if x.batch == nil {
			if holeFrom < 0 {
				holeFrom = x.base
			}
			at = x.end
			continue
		}
		base := max(x.base, at)
		if holeFrom >= 0 && !p.hasSegment(base) {
			missing = append(missing, segment{source: base, position: position})
		}
		holeFrom = -1
		position += x.end - base
		at = x.end
	}
	return missing
}

// writeSegments makes segments durable; the stream waits for them.
func (l *loop) writeSegments(s *stream, missing []segment) {
	if s.segmenting {
		return
	}
	s.segmenting = true
	session := s.session
	id := s.identity()
	records := make([]segmentRecord, len(missing))
	for i, m := range missing {
		records[i] = segmentRecord{
			Topic: s.topic, TopicID: hex.EncodeToString(s.topicID[:]), Partition: s.index, MirrorTopicID: hex.EncodeToString(s.mirrorTopicID[:]),
			Generation: s.generation, Source: m.source, Position: m.position,
		}
	}
	l.spawn(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, mirrorTimeout)
		defer cancel()
		err := l.registry.adopt(ctx, records)
		l.inbox.call(func() {
			s.segmenting = false
			if s.session != session || s.removed {
				return
			}
			n, ok := l.registry.lookUp(id)
			switch {
			case err != nil:
				l.endSession(s, err)
				return
			case !ok || n.generation != s.generation:
				l.endSession(s, errors.New("another owner opened a new generation"))
				return
			}
			s.numbering = n
			if s.hasSegment(s.next) {
				s.holeFrom = -1
			}
			s.linkUp(l.drop)
			l.makeReady(s)
			l.wantFetch(s)
		})
	})
}

// consume queues the batches of a plan.
func (l *loop) consume(s *stream, pl plan, memory *fetchMemory) error {
	for _, x := range pl {
		if x.batch == nil {
			if x.end > s.next {
				s.skip(x.end, x.data)
				s.uncommitted = true
			}
			continue
		}
		switch s.judgeFetched(x.base, x.end) {
		case duplicate:
			continue
		case overHole:
			return nil // an offer was taken meanwhile and then let go: fetch again
		}
		if err := l.queueFetched(s, x, memory); err != nil {
			return fmt.Errorf("batch at [%d, %d): %w", x.base, x.end, err)
		}
		s.tailRead += x.end - x.base
		s.lineage = lineage{x.leaderEpoch, x.end}
	}
	return nil
}

// queueFetched queues one batch from the source log, re-encoded where it can't go as it is: it begins below next (R5), crosses a producer
// epoch (N2), carries append time, is larger than the mirror takes, or was left with holes by compaction.
func (l *loop) queueFetched(s *stream, x piece, memory *fetchMemory) error {
	if s.holeFrom >= 0 && s.hasSegment(s.next) {
		s.holeFrom = -1
	}
	whole := s.next == x.base && !x.sparse && s.spread == nil && x.batch.Attributes()&protocol.AttrLogAppendTime == 0 && s.fitsMirror(len(x.batch))
	room, fits := s.mayQueue(x.end - s.next)
	e := entry{base: x.base, end: x.end, crc: x.batch.CRC(), maxTimestamp: x.batch.MaxTimestamp(), batch: x.batch}
	switch {
	case whole && fits && x.converted:
		l.takeMade(s, e)
	case whole && fits:
		memory.refs.Add(1)
		e.memory = memory
		s.take(e)
	default:
		for s.next < x.end {
			if err := l.queueRecoded(s, x, min(x.end-s.next, room)); err != nil {
				return err
			}
			room, _ = s.mayQueue(1)
		}
	}
	l.makeReady(s)
	return nil
}

// queueRecoded queues a batch made of the records of x at the next count offsets.
func (l *loop) queueRecoded(s *stream, x piece, count int64) error {
	e := entry{base: s.next, end: s.next + count, crc: x.batch.CRC()}
	var err error
	switch {
	case s.spread != nil:
		e.batch, e.runs, err = protocol.RecodeKept(x.batch, e.base, e.end, l.codec, s.keeps)
	case s.fence != nil:
		e.batch, e.runs, err = protocol.RecodeRuns(x.batch, e.base, e.end, l.codec)
	default:
		e.batch, err = protocol.Recode(x.batch, e.base, e.end, l.codec)
	}
	if s.fence != nil && errors.Is(err, protocol.ErrNoRecords) {
		s.skip(e.end, true)
		s.uncommitted = true
		return nil
	}
	if err != nil {
		return err
	}
	l.metrics.recoded.Inc()
	return l.takeParts(s, e)
}

// takeMade takes a batch that has memory of its own.
func (l *loop) takeMade(s *stream, e entry) {
	e.charge = e.sizeBytes()
	e.maxTimestamp = e.batch.MaxTimestamp()
	l.memory.force(e.charge)
	s.take(e)
}
