package protocol

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
)

// Layout of a record batch, magic 2 (KIP-98, Kafka's DefaultRecordBatch). Offsets in bytes, integers big endian.
//
//	 0 base offset          int64  | 21 attributes           int16  | 43 producer ID     int64
//	 8 batch length         int32  | 23 last offset delta    int32  | 51 producer epoch  int16
//	12 partition leader ep. int32  | 27 base timestamp, ms   int64  | 53 base sequence   int32
//	16 magic                int8   | 35 max timestamp, ms    int64  | 57 record count    int32
//	17 CRC32C of [21, end)  uint32 |                                | 61 records
const (
	atBaseOffset      = 0
	atLength          = 8
	atLeaderEpoch     = 12
	atMagic           = 16
	atCRC             = 17
	atAttributes      = 21
	atLastOffsetDelta = 23
	atBaseTimestamp   = 27
	atMaxTimestamp    = 35
	atProducerID      = 43
	atProducerEpoch   = 51
	atBaseSequence    = 53
	atRecordCount     = 57

	// BatchHeaderSize is the size of a record batch without its records, in bytes.
	BatchHeaderSize = 61
	lengthPrefix    = 12 // bytes that the batch length doesn't count
)

// Attribute bits of a record batch.
const (
	AttrCodecMask     = 0x07 // 0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd
	AttrLogAppendTime = 0x08
	AttrTransactional = 0x10
	AttrControl       = 0x20
	AttrDeleteHorizon = 0x40 // KIP-534: base timestamp is the delete horizon
)

var (
	// ErrIncomplete says that the bytes end before the batch does: ask for more.
	ErrIncomplete = errors.New("record batch is incomplete")
	// ErrCorrupt says that the bytes can't be a record batch.
	ErrCorrupt = errors.New("record batch is corrupt")
	// ErrOldMagic says that the bytes are a message set of format v0 or v1.
	ErrOldMagic = errors.New("message format v0 or v1")
)

// Batch is a view of one record batch, magic 2. It aliases the memory it came from.
type Batch []byte

// ParseBatch splits the first batch off b. All bounds are checked here; the accessors trust a Batch. It doesn't verify the CRC.
func ParseBatch(b []byte) (batch Batch, rest []byte, err error) {
	if len(b) < lengthPrefix+5 {
		return nil, b, ErrIncomplete
	}
	length := int32(binary.BigEndian.Uint32(b[atLength:]))
	if magic := b[atMagic]; magic < 2 {
		return nil, b, fmt.Errorf("magic %d: %w", magic, ErrOldMagic)
	} else if magic > 2 {
		return nil, b, fmt.Errorf("magic %d: %w", magic, ErrCorrupt)
	}
	if length < BatchHeaderSize-lengthPrefix {
		return nil, b, fmt.Errorf("batch length %d: %w", length, ErrCorrupt)
	}
	n := int(length) + lengthPrefix
	if n > len(b) {
		return nil, b, ErrIncomplete
	}
	return Batch(b[:n:n]), b[n:], nil
}

func (b Batch) BaseOffset() int64      { return int64(binary.BigEndian.Uint64(b[atBaseOffset:])) }
func (b Batch) LeaderEpoch() int32     { return int32(binary.BigEndian.Uint32(b[atLeaderEpoch:])) }
func (b Batch) CRC() uint32            { return binary.BigEndian.Uint32(b[atCRC:]) }
func (b Batch) Attributes() int16      { return int16(binary.BigEndian.Uint16(b[atAttributes:])) }
func (b Batch) LastOffsetDelta() int32 { return int32(binary.BigEndian.Uint32(b[atLastOffsetDelta:])) }
func (b Batch) BaseTimestamp() int64   { return int64(binary.BigEndian.Uint64(b[atBaseTimestamp:])) }
func (b Batch) MaxTimestamp() int64    { return int64(binary.BigEndian.Uint64(b[atMaxTimestamp:])) }
func (b Batch) ProducerID() int64      { return int64(binary.BigEndian.Uint64(b[atProducerID:])) }
func (b Batch) ProducerEpoch() int16   { return int16(binary.BigEndian.Uint16(b[atProducerEpoch:])) }
func (b Batch) BaseSequence() int32    { return int32(binary.BigEndian.Uint32(b[atBaseSequence:])) }
func (b Batch) RecordCount() int32     { return int32(binary.BigEndian.Uint32(b[atRecordCount:])) }
func (b Batch) Records() []byte        { return b[BatchHeaderSize:] }

// EndOffset is the offset after the batch's last: base offset + last offset delta + 1.
func (b Batch) EndOffset() int64 { return b.BaseOffset() + int64(b.LastOffsetDelta()) + 1 }

// Codec is the compression codec, 0 to 7; see AttrCodecMask.
func (b Batch) Codec() int { return int(b.Attributes() & AttrCodecMask) }

// Transactional reports whether the batch belongs to a transaction.
func (b Batch) Transactional() bool { return b.Attributes()&AttrTransactional != 0 }

// Control reports whether the batch is a control batch (a transaction marker, KIP-98).
func (b Batch) Control() bool { return b.Attributes()&AttrControl != 0 }

// Dense reports whether the batch has as many records as offsets, and at least one: what a broker accepts from a producer.
func (b Batch) Dense() bool { return b.RecordCount() > 0 && b.RecordCount() == b.LastOffsetDelta()+1 }

// VerifyCRC computes the CRC32C over the whole batch and compares.
func (b Batch) VerifyCRC() bool { return crc32.Checksum(b[atAttributes:], castagnoli) == b.CRC() }

// SetBaseOffset changes the base offset, which the CRC doesn't cover.
func (b Batch) SetBaseOffset(offset int64) {
	binary.BigEndian.PutUint64(b[atBaseOffset:], uint64(offset))
}

// SetLeaderEpoch changes the partition leader epoch, which the CRC doesn't cover.
func (b Batch) SetLeaderEpoch(epoch int32) {
	binary.BigEndian.PutUint32(b[atLeaderEpoch:], uint32(epoch))
}

// Stamp makes b a batch of an idempotent producer, as a mirror broker takes it: base offset 0, leader epoch -1, the given producer
// ID, epoch and base sequence, transactional and delete-horizon bits off. It patches the CRC for what changed: a batch whose
// CRC was wrong stays wrong, so the producer's own checksum guards the records up to the mirror's disk. No allocation; the cost
// doesn't depend on the size.
func (b Batch) Stamp(producerID int64, epoch int16, baseSequence int32) {
	var diff [BatchHeaderSize - atAttributes]byte // old XOR new of the header bytes that the CRC covers
	copy(diff[:], b[atAttributes:BatchHeaderSize])
	binary.BigEndian.PutUint64(b[atBaseOffset:], 0)
	binary.BigEndian.PutUint32(b[atLeaderEpoch:], 0xffffffff)
	attrs := b.Attributes() &^ (AttrTransactional | AttrDeleteHorizon)
	binary.BigEndian.PutUint16(b[atAttributes:], uint16(attrs))
	binary.BigEndian.PutUint64(b[atProducerID:], uint64(producerID))
	binary.BigEndian.PutUint16(b[atProducerEpoch:], uint16(epoch))
	binary.BigEndian.PutUint32(b[atBaseSequence:], uint32(baseSequence))
	for i := range diff {
		diff[i] ^= b[atAttributes+i]
	}
	binary.BigEndian.PutUint32(b[atCRC:], b.CRC()^crcShift(crcRaw(diff[:]), len(b)-BatchHeaderSize))
}

// putLength writes the batch length of a batch built in place.
func putLength(b Batch) {
	binary.BigEndian.PutUint32(b[atLength:], uint32(len(b)-lengthPrefix))
}

// reseal computes the CRC anew, for batches that kmirror built itself.
func reseal(b Batch) {
	binary.BigEndian.PutUint32(b[atCRC:], crc32.Checksum(b[atAttributes:], castagnoli))
}
