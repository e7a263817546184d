package scripted

import (
	"encoding/binary"
	"hash/crc32"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"

	"kmirror/protocol"
)

// partition is one log, shared by all its replicas: a hook that needs replicas to differ says so (Freeze, UncleanElection).
//
// Invariant: batches are immutable once stored, ordered by offset, and logStart <= highWatermark <= logEnd.
type partition struct {
	topic       *topic
	index       int32
	leader      int32 // node ID, -1: none
	leaderEpoch int32
	replicas    []int32
	deleted     bool

	batches       []protocol.Batch
	logStart      int64
	logEnd        int64
	highWatermark int64
	held          bool // the high watermark stays where it is
	epochs        []epochStart

	producers  producers
	openTxns   map[int64]int64 // producer ID -> first offset, -1: added to the transaction, nothing written yet
	aborted    []abortedTxn
	strict     bool
	expiration time.Duration

	clones map[int32]*partition // what a woken broker still believes, by node ID
}

type epochStart struct {
	epoch int32
	start int64
}

type abortedTxn struct {
	producerID              int64
	firstOffset, lastOffset int64
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// stored is where an append went, in words of ProduceResponse.
type stored struct {
	baseOffset, logAppendTime, end int64
}

// appendClient is a leader's append of a client's records, as UnifiedLog.append does with LogValidator's checks.
func (p *partition) appendClient(records []byte, now time.Time) (stored, *kerr.Error) {
	b, err := p.validate(records, now)
	if err != nil {
		return stored{}, err
	}
	b.SetBaseOffset(p.logEnd)
	b.SetLeaderEpoch(p.leaderEpoch)
	if b.ProducerID() >= 0 {
		if m, ok := p.producers.duplicate(b); ok {
			return stored{m.firstOffset, m.timestamp, m.lastOffset + 1}, nil
		}
		if err := p.producers.check(b, p.strict); err != nil {
			return stored{}, err
		}
		if _, added := p.openTxns[b.ProducerID()]; b.Transactional() && !added {
			return stored{}, kerr.InvalidTxnState
		}
	}
	s := stored{b.BaseOffset(), -1, b.EndOffset()}
	if b.Attributes()&protocol.AttrLogAppendTime != 0 {
		s.logAppendTime = b.MaxTimestamp()
	}
	p.store(b)
	return s, nil
}

// validate checks what a client may write and returns a private copy of its batch.
func (p *partition) validate(records []byte, now time.Time) (protocol.Batch, *kerr.Error) {
	view, rest, err := protocol.ParseBatch(records)
	switch {
	case err != nil && len(records) >= 17 && records[16] < 2, len(records) == 0, err == nil && len(rest) > 0:
		return nil, kerr.InvalidRecord // old format, no batch, or more than one batch
	case err != nil:
		return nil, kerr.CorruptMessage
	}
	b := protocol.Batch(slices.Clone(view))
	count := b.RecordCount()
	switch {
	case b.BaseOffset() != 0:
		return nil, kerr.InvalidRecord
	case len(b) > p.topic.intConfig("max.message.bytes", 1048588):
		return nil, kerr.MessageTooLarge
	case !b.VerifyCRC():
		return nil, kerr.CorruptMessage
	case count <= 0 || count != b.LastOffsetDelta()+1 || b.Control() || b.ProducerID() >= 0 && b.BaseSequence() < 0:
		return nil, kerr.InvalidRecord
	}
	appendTime := p.topic.configs["message.timestamp.type"] == "LogAppendTime"
	newest := now.UnixMilli() + int64(p.topic.intConfig("message.timestamp.after.max.ms", 3600000))
	oldest := now.UnixMilli() - int64(p.topic.intConfig("message.timestamp.before.max.ms", 1<<62))
	bit := b.Attributes()&protocol.AttrLogAppendTime != 0
	switch {
	case appendTime && bit, !appendTime && b.MaxTimestamp() >= 0 && (b.MaxTimestamp() > newest || b.BaseTimestamp() < oldest):
		return nil, kerr.InvalidTimestamp
	case appendTime:
		setTimestampType(b, true, now.UnixMilli())
	case bit:
		setTimestampType(b, false, b.MaxTimestamp())
	}
	return b, nil
}

// setTimestampType rewrites what DefaultRecordBatch.setMaxTimestamp does, and the CRC.
func setTimestampType(b protocol.Batch, appendTime bool, maxTimestamp int64) {
	attrs := b.Attributes() &^ protocol.AttrLogAppendTime
	if appendTime {
		attrs |= protocol.AttrLogAppendTime
	}
	binary.BigEndian.PutUint16(b[21:], uint16(attrs))
	binary.BigEndian.PutUint64(b[35:], uint64(maxTimestamp))
	binary.BigEndian.PutUint32(b[17:], crc32.Checksum(b[21:], castagnoli))
}

// store puts a batch at the log's end as it is; the batch has its offsets.
func (p *partition) store(b protocol.Batch) {
	p.batches = append(p.batches, b)
	p.logEnd = b.EndOffset()
	if last := p.epochs[len(p.epochs)-1]; b.LeaderEpoch() > last.epoch {
		p.epochs = append(p.epochs, epochStart{b.LeaderEpoch(), b.BaseOffset()})
	}
	p.producers.add(b)
	p.trackTxn(b)
	if !p.held {
		p.highWatermark = p.logEnd
	}
}

func (p *partition) trackTxn(b protocol.Batch) {
	id := b.ProducerID()
	first, open := p.openTxns[id]
	switch {
	case b.Control():
		if open && first >= 0 && !markerCommits(b) {
			p.aborted = append(p.aborted, abortedTxn{id, first, b.BaseOffset()})
		}
		delete(p.openTxns, id)
	case b.Transactional() && (!open || first < 0):
		p.openTxns[id] = b.BaseOffset()
	}
}

// lastStableOffset is the first offset of the oldest open transaction, or the high watermark.
func (p *partition) lastStableOffset() int64 {
	lso := p.highWatermark
	for _, first := range p.openTxns {
		if first >= 0 {
			lso = min(lso, first)
		}
	}
	return lso
}

// replay makes the log be batches, ending at end, and builds epochs and transactions from them; producer state too if keep.
func (p *partition) replay(batches []protocol.Batch, end int64, keep bool) {
	epochs, held := p.epochs, p.held
	p.batches, p.epochs, p.aborted, p.held = nil, nil, nil, true
	p.producers, p.openTxns = producers{}, map[int64]int64{}
	for _, e := range epochs {
		if e.start < end || len(p.epochs) == 0 {
			p.epochs = append(p.epochs, e)
		}
	}
	for _, b := range batches {
		p.store(b)
	}
	if p.logEnd = end; !keep {
		p.producers = producers{}
	}
	p.highWatermark, p.held = min(p.highWatermark, end), held
	p.logStart = min(p.logStart, end)
}

// become starts a new leader epoch.
func (p *partition) become(leader int32) {
	p.leader, p.leaderEpoch = leader, p.leaderEpoch+1
	for len(p.epochs) > 0 && p.epochs[len(p.epochs)-1].start >= p.logEnd { // an epoch without a batch gives way
		p.epochs = p.epochs[:len(p.epochs)-1]
	}
	p.epochs = append(p.epochs, epochStart{p.leaderEpoch, p.logEnd})
}

// endOffsetFor is Kafka's LeaderEpochFileCache.endOffsetFor: -1, -1 if the epoch is newer than all.
func (p *partition) endOffsetFor(epoch int32) (int32, int64) {
	if epoch < 0 {
		return -1, -1
	}
	if latest := p.epochs[len(p.epochs)-1]; epoch == latest.epoch {
		return epoch, p.logEnd
	}
	i := slices.IndexFunc(p.epochs, func(e epochStart) bool { return e.epoch > epoch })
	switch {
	case i < 0:
		return -1, -1
	case i == 0:
		return epoch, p.epochs[0].start
	}
	return p.epochs[i-1].epoch, p.epochs[i].start
}

// epochAt is the leader epoch of the batch at offset, or of the leader at the log's end.
func (p *partition) epochAt(offset int64) int32 {
	for _, e := range slices.Backward(p.epochs) {
		if e.start <= offset {
			return e.epoch
		}
	}
	return p.epochs[0].epoch
}

// fence compares a client's leader epoch with this replica's and refuses replicas that don't lead, as Partition.getLocalLog does.
func (p *partition) fence(node, clientEpoch int32) *kerr.Error {
	switch {
	case clientEpoch >= 0 && clientEpoch < p.leaderEpoch:
		return kerr.FencedLeaderEpoch
	case clientEpoch > p.leaderEpoch:
		return kerr.UnknownLeaderEpoch
	case p.leader != node:
		return kerr.NotLeaderForPartition
	}
	return nil
}

func (p *partition) deleteRecords(offset int64) {
	p.logStart = max(p.logStart, offset)
	p.batches = slices.DeleteFunc(slices.Clone(p.batches), func(b protocol.Batch) bool { return b.EndOffset() <= p.logStart })
}

// clone is this replica's view at one moment; later appends to either are not seen by the other.
func (p *partition) clone() *partition {
	c := *p
	c.batches, c.epochs, c.aborted = slices.Clone(p.batches), slices.Clone(p.epochs), slices.Clone(p.aborted)
	c.producers, c.openTxns, c.clones = p.producers.clone(), maps.Clone(p.openTxns), nil
	c.held = true // nobody replicates from it any more
	return &c
}

func (t *topic) intConfig(key string, fallback int) int {
	if v, err := strconv.Atoi(t.configs[key]); err == nil {
		return v
	}
	return fallback
}
