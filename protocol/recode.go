package protocol

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// Codec compresses and decompresses the records of batches; the codec numbers are those of AttrCodecMask.
type Codec interface {
	Compress(codec int, records []byte) ([]byte, error)
	Decompress(codec int, records []byte) ([]byte, error)
}

// Recode builds a new batch of b's records with offsets in [from, to), which must hold at least one, with the same codec and attributes, as
// a producer would send it: base offset 0, record count and deltas anew, CRC anew. A batch with append time gets that time as each
// record's own, so that a mirror with create time shows the same (the attribute is gone afterwards). b isn't changed; a wrong CRC is an error,
// since the new batch gets its own.
func Recode(b Batch, from, to int64, codec Codec) (Batch, error) {
	return recode(nil, []Batch{b}, recoder{from: from - b.BaseOffset(), to: to - b.BaseOffset()}, codec)
}

// Run is a run of records whose source offsets follow each other.
type Run struct {
	Source int64 // offset of the first
	Count  int64
}

// AppendRun adds count records from offset source on to runs, which it may lengthen.
func AppendRun(runs []Run, source, count int64) []Run {
	if n := len(runs); n > 0 && runs[n-1].Source+runs[n-1].Count == source {
		runs[n-1].Count += count
		return runs
	}
	return append(runs, Run{source, count})
}

// ErrNoRecords says that a batch has no record in the range.
var ErrNoRecords = errors.New("no record in the range")

// RecodeRuns is Recode for a batch that compaction left with holes; it also tells the offsets that the records had. Where no record is left in
// the range it says ErrNoRecords.
func RecodeRuns(b Batch, from, to int64, codec Codec) (Batch, []Run, error) {
	return RecodeKept(b, from, to, codec, nil)
}

// RecodeKept is RecodeRuns of those records for which keep, called with each one's offset and key (nil: null), is true; a nil keep keeps all.
func RecodeKept(b Batch, from, to int64, codec Codec, keep func(offset int64, key []byte) bool) (Batch, []Run, error) {
	runs := []Run{}
	out, err := recode(nil, []Batch{b}, recoder{from: from - b.BaseOffset(), to: to - b.BaseOffset(), keep: keep, runs: &runs}, codec)
	for i := range runs {
		runs[i].Source += b.BaseOffset()
	}
	return out, runs, err
}

// Merge builds one batch of the records of several, in order, which must have the same codec. It appends to dst, which may be nil.
func Merge(dst []byte, batches []Batch, codec Codec) (Batch, error) {
	for _, b := range batches {
		if b.Codec() != batches[0].Codec() {
			return nil, fmt.Errorf("codecs %d and %d: can't be one batch", batches[0].Codec(), b.Codec())
		}
	}
	return recode(dst, batches, recoder{to: math.MaxInt64}, codec)
}

// recode builds the batch of the records that r takes.
func recode(dst []byte, batches []Batch, r recoder, codec Codec) (Batch, error) {
	first := batches[0]
	dst = append(dst[:0], first[:BatchHeaderSize]...)
	if first.Codec() == 0 {
		r.out = dst
	}
	for _, b := range batches {
		if !b.VerifyCRC() {
			return nil, fmt.Errorf("batch at offset %d: CRC is wrong: %w", b.BaseOffset(), ErrCorrupt)
		}
		records, err := codec.Decompress(b.Codec(), b.Records())
		if err != nil {
			return nil, fmt.Errorf("records: %w", err)
		}
		if err := r.add(b, records); err != nil {
			return nil, err
		}
	}
	if r.count == 0 {
		return nil, ErrNoRecords
	}
	out := Batch(r.out)
	if first.Codec() != 0 {
		packed, err := codec.Compress(first.Codec(), r.out)
		if err != nil {
			return nil, fmt.Errorf("records: %w", err)
		}
		out = append(dst, packed...)
	}
	putLength(out)
	out.SetBaseOffset(0)
	binary.BigEndian.PutUint16(out[atAttributes:], uint16(first.Attributes()&AttrCodecMask))
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
	from, to int64                               // takes records with offset deltas in [from, to)
	keep     func(offset int64, key []byte) bool // and of these those that it says, nil: all
	runs     *[]Run                              // gets their offset deltas, nil: not wanted

	count         int32
	baseTimestamp int64
	maxTimestamp  int64
	out           []byte
}

// recordKey reads the key that rest, a record from its key length on, begins with; nil: null.
func recordKey(rest []byte) ([]byte, error) {
	length, n := binary.Varint(rest)
	switch {
	case n <= 0 || length > int64(len(rest)-n):
		return nil, fmt.Errorf("key length: %w", ErrCorrupt)
	case length < 0:
		return nil, nil
	}
	return rest[n : n+int(length) : n+int(length)], nil
}

// add copies the records of one batch that are to be taken.
func (r *recoder) add(source Batch, records []byte) error {
	appendTime := source.Attributes()&AttrLogAppendTime != 0
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
		if offsetDelta < r.from || offsetDelta >= r.to {
			continue
		}
		if r.keep != nil {
			key, err := recordKey(record[1+tn+on:])
			if err != nil {
				return err
			}
			if !r.keep(source.BaseOffset()+offsetDelta, key) {
				continue
			}
		}
		if r.runs != nil {
			*r.runs = AppendRun(*r.runs, offsetDelta, 1)
		}
		timestamp := source.BaseTimestamp() + timestampDelta
		if appendTime {
			timestamp = source.MaxTimestamp()
		}
		r.put(record[0], timestamp, record[1+tn+on:])
	}
	return nil
}

func (r *recoder) put(attributes byte, timestamp int64, rest []byte) {
	if r.count == 0 {
		r.baseTimestamp, r.maxTimestamp = timestamp, timestamp
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

// Timestamps returns the records' timestamps in ms, in order.
func Timestamps(b Batch, codec Codec) (times []int64, err error) {
	records, err := codec.Decompress(b.Codec(), b.Records())
	if err != nil {
		return nil, fmt.Errorf("records: %w", err)
	}
	for len(records) > 0 {
		length, n := binary.Varint(records)
		if n <= 0 || length < 1 || length > int64(len(records)-n) {
			return nil, fmt.Errorf("record length: %w", ErrCorrupt)
		}
		delta, dn := binary.Varint(records[n+1 : n+int(length)])
		if dn <= 0 {
			return nil, fmt.Errorf("timestamp delta: %w", ErrCorrupt)
		}
		times = append(times, b.BaseTimestamp()+delta)
		records = records[n+int(length):]
	}
	return times, nil
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
