package scripted

import (
	"math"
	"slices"

	"github.com/twmb/franz-go/pkg/kerr"

	"kmirror/protocol"
)

const (
	noEpoch         = -1
	noSequence      = -1
	retainedBatches = 5 // ProducerStateEntry.NUM_BATCHES_TO_RETAIN
)

// producers is what a partition knows about producer IDs: Kafka's ProducerStateManager.
type producers map[int64]*producerEntry

// producerEntry is Kafka's ProducerStateEntry.
type producerEntry struct {
	epoch            int16
	coordinatorEpoch int32
	batches          []batchMeta // the last data batches of this epoch, oldest first
	lastTimestamp    int64
	txnStart         int64 // first offset of the open transaction, -1 without one
}

type batchMeta struct {
	firstSequence, lastSequence int32
	firstOffset, lastOffset     int64
	timestamp                   int64
}

// lastSequenceOf is the sequence of the batch's last record; sequences go from 2^31-1 to 0.
func lastSequenceOf(b protocol.Batch) int32 {
	first, delta := b.BaseSequence(), b.LastOffsetDelta()
	if first > math.MaxInt32-delta {
		return delta - (math.MaxInt32 - first) - 1
	}
	return first + delta
}

func (e *producerEntry) lastSequence() int32 {
	if len(e.batches) == 0 {
		return noSequence
	}
	return e.batches[len(e.batches)-1].lastSequence
}

// duplicate finds the retained batch that b repeats exactly: same epoch, first and last sequence.
func (ps producers) duplicate(b protocol.Batch) (batchMeta, bool) {
	e := ps[b.ProducerID()]
	if e == nil || e.epoch != b.ProducerEpoch() {
		return batchMeta{}, false
	}
	for _, m := range e.batches {
		if m.firstSequence == b.BaseSequence() && m.lastSequence == lastSequenceOf(b) {
			return m, true
		}
	}
	return batchMeta{}, false
}

// check is what a leader asks of a client's data batch that isn't a duplicate: Kafka's ProducerAppendInfo.maybeValidateDataBatch.
func (ps producers) check(b protocol.Batch, strict bool) *kerr.Error {
	e := ps[b.ProducerID()]
	if e == nil {
		if strict && b.BaseSequence() != 0 {
			return kerr.OutOfOrderSequenceNumber
		}
		return nil
	}
	switch epoch := b.ProducerEpoch(); {
	case epoch < e.epoch:
		return kerr.InvalidProducerEpoch
	case epoch > e.epoch:
		if b.BaseSequence() != 0 {
			return kerr.OutOfOrderSequenceNumber
		}
	default:
		last, next := e.lastSequence(), b.BaseSequence()
		if int64(next) != int64(last)+1 && (next != 0 || last != math.MaxInt32) {
			return kerr.OutOfOrderSequenceNumber
		}
	}
	return nil
}

// add takes a stored batch into the state, without a check.
func (ps producers) add(b protocol.Batch) {
	if b.ProducerID() < 0 {
		return
	}
	e := ps[b.ProducerID()]
	if e == nil {
		e = &producerEntry{epoch: noEpoch, txnStart: -1}
		ps[b.ProducerID()] = e
	}
	if e.epoch != b.ProducerEpoch() {
		e.epoch, e.batches = b.ProducerEpoch(), nil
	}
	e.lastTimestamp = b.MaxTimestamp()
	if b.Control() {
		e.txnStart = -1
		return
	}
	if b.Transactional() && e.txnStart < 0 {
		e.txnStart = b.BaseOffset()
	}
	e.batches = append(e.batches, batchMeta{b.BaseSequence(), lastSequenceOf(b), b.BaseOffset(), b.EndOffset() - 1, b.MaxTimestamp()})
	if n := len(e.batches); n > retainedBatches {
		e.batches = e.batches[n-retainedBatches:]
	}
}

// expire forgets producers whose last batch is older than the expiration, both in milliseconds.
func (ps producers) expire(now, expiration int64) {
	for id, e := range ps {
		if e.txnStart < 0 && now-e.lastTimestamp >= expiration {
			delete(ps, id)
		}
	}
}

// reload is what a broker restart leaves: of each producer the last batch alone, and no expired producer.
func (ps producers) reload(now, expiration int64) {
	for _, e := range ps {
		if n := len(e.batches); n > 1 {
			e.batches = e.batches[n-1:]
		}
	}
	ps.expire(now, expiration)
}

func (ps producers) clone() producers {
	out := producers{}
	for id, e := range ps {
		entry := *e
		entry.batches = slices.Clone(e.batches)
		out[id] = &entry
	}
	return out
}
