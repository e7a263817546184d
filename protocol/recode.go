package protocol

import (
	"encoding/binary"
	"fmt"
)

// Codec compresses and decompresses the records of batches; the codec numbers are those of AttrCodecMask.
type Codec interface {
	Compress(codec int, records []byte) ([]byte, error)
	Decompress(codec int, records []byte) ([]byte, error)
}

// Recode builds a new batch of b's records with offsets in [from, to), which must hold at least one, with the same codec and attributes, as
// a producer would send it: base offset 0, record count and deltas anew, CRC anew. A batch with append time gets that time as each
// record's own, so that a mirror with create time shows the same (the attribute is gone afterwards). b isn't changed.
func Recode(b Batch, from, to int64, codec Codec) (Batch, error) {
	records, err := codec.Decompress(b.Codec(), b.Records())
	if err != nil {
		return nil, fmt.Errorf("records: %w", err)
	}
	r := recoder{source: b, first: -1}
	if err := r.run(records, from-b.BaseOffset(), to-b.BaseOffset()); err != nil {
		return nil, err
	}
	if r.count == 0 {
		return nil, fmt.Errorf("no record in [%d, %d): %w", from, to, ErrCorrupt)
	}
	packed, err := codec.Compress(b.Codec(), r.out)
	if err != nil {
		return nil, fmt.Errorf("records: %w", err)
	}
	out := make(Batch, BatchHeaderSize, BatchHeaderSize+len(packed))
	copy(out, b[:BatchHeaderSize])
	out = append(out, packed...)
	putLength(out)
	out.SetBaseOffset(0)
	binary.BigEndian.PutUint16(out[atAttributes:], uint16(b.Attributes()&^(AttrLogAppendTime|AttrDeleteHorizon)))
	binary.BigEndian.PutUint32(out[atLastOffsetDelta:], uint32(r.count-1))
	binary.BigEndian.PutUint64(out[atBaseTimestamp:], uint64(r.baseTimestamp))
	binary.BigEndian.PutUint64(out[atMaxTimestamp:], uint64(r.maxTimestamp))
	binary.BigEndian.PutUint32(out[atRecordCount:], uint32(r.count))
	reseal(out)
	return out, nil
}

// recoder copies records and renumbers their deltas. A record (KIP-98): length, attributes, timestamp delta, offset delta, and the rest, which
// stays as it is.
type recoder struct {
	source        Batch
	first         int64 // offset delta of the first record kept, -1: none yet
	count         int32
	baseTimestamp int64
	maxTimestamp  int64
	out           []byte
}

func (r *recoder) run(records []byte, from, to int64) error {
	for len(records) > 0 {
		length, n := binary.Varint(records)
		if n <= 0 || length < 1 || length > int64(len(records)-n) {
			return fmt.Errorf("record length: %w", ErrCorrupt)
		}
		record := records[n : n+int(length)]
		records = records[n+int(length):]
		timestampDelta, tn := binary.Varint(record[1:])
		if tn <= 0 {
			return fmt.Errorf("timestamp delta: %w", ErrCorrupt)
		}
		offsetDelta, on := binary.Varint(record[1+tn:])
		if on <= 0 {
			return fmt.Errorf("offset delta: %w", ErrCorrupt)
		}
		if offsetDelta >= from && offsetDelta < to {
			r.keep(record[0], r.source.BaseTimestamp()+timestampDelta, offsetDelta, record[1+tn+on:])
		}
	}
	return nil
}

func (r *recoder) keep(attributes byte, timestamp, offsetDelta int64, rest []byte) {
	if r.source.Attributes()&AttrLogAppendTime != 0 {
		timestamp = r.source.MaxTimestamp()
	}
	if r.first < 0 {
		r.first, r.baseTimestamp, r.maxTimestamp = offsetDelta, timestamp, timestamp
	}
	r.maxTimestamp = max(r.maxTimestamp, timestamp)
	var head [1 + 2*binary.MaxVarintLen64]byte
	head[0] = attributes
	n := 1 + binary.PutVarint(head[1:], timestamp-r.baseTimestamp)
	n += binary.PutVarint(head[n:], int64(r.count))
	r.out = binary.AppendVarint(r.out, int64(n+len(rest)))
	r.out = append(r.out, head[:n]...)
	r.out = append(r.out, rest...)
	r.count++
}

// AbortMarker reports whether a control batch's marker is an abort (else a commit, or a kind this code doesn't know).
func AbortMarker(b Batch) bool {
	records := b.Records()
	length, n := binary.Varint(records)
	if n <= 0 || length < 1 || length > int64(len(records)-n) {
		return false
	}
	record := records[n : n+int(length)]
	rest := record[1:]
	for range 2 { // timestamp delta, offset delta
		_, n := binary.Varint(rest)
		if n <= 0 {
			return false
		}
		rest = rest[n:]
	}
	keyLength, n := binary.Varint(rest)
	if n <= 0 || keyLength < 4 || keyLength > int64(len(rest)-n) {
		return false
	}
	return binary.BigEndian.Uint16(rest[n+2:]) == 0 // key: version int16, type int16 (0 abort, 1 commit)
}
