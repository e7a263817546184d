package scripted

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/protocol"
)

// Record is one record of a Batch.
type Record struct {
	Key, Value []byte
	Headers    []kmsg.Header
	// OffsetDelta places the record behind the base offset; 0 means the one after the record before it.
	OffsetDelta int32
	// Timestamp of the record, milliseconds; 0 means the Batch's.
	Timestamp int64
}

// Batch describes a record batch to build. Its zero value, with Values, is what a producer without idempotence sends.
type Batch struct {
	BaseOffset    int64
	ProducerID    int64 // 0 means -1, no producer ID
	ProducerEpoch int16
	BaseSequence  int32
	Timestamp     time.Time // of all records without one of their own; zero means now
	Attributes    int16     // transactional bit and the like; the codec comes from Codec
	Codec         kgo.CompressionCodec
	Values        []string // a record each, before Records
	Records       []Record
	// LastOffsetDelta overrides what the records say, for batches that compaction left with a hole at their end.
	LastOffsetDelta int32
}

// Bytes encodes the batch, with a right CRC. It panics where a codec fails.
func (spec Batch) Bytes() protocol.Batch {
	if spec.ProducerID == 0 {
		spec.ProducerID, spec.ProducerEpoch, spec.BaseSequence = -1, -1, -1
	}
	if spec.Timestamp.IsZero() {
		spec.Timestamp = time.Now()
	}
	base := spec.Timestamp.UnixMilli()
	list := spec.Records
	if len(spec.Values) > 0 {
		list = nil
		for _, v := range spec.Values {
			list = append(list, Record{Value: []byte(v)})
		}
		list = append(list, spec.Records...)
	}
	newest := base
	if len(list) > 0 && list[0].Timestamp != 0 {
		base = list[0].Timestamp
		newest = base
	}
	var records []kmsg.Record
	for i, in := range list {
		r := kmsg.NewRecord()
		r.Key, r.Value, r.Headers = in.Key, in.Value, in.Headers
		if r.OffsetDelta = in.OffsetDelta; r.OffsetDelta == 0 && i > 0 {
			r.OffsetDelta = records[i-1].OffsetDelta + 1
		}
		if in.Timestamp != 0 {
			r.TimestampDelta64 = in.Timestamp - base
			newest = max(newest, in.Timestamp)
		}
		records = append(records, r)
	}
	return encodeBatch(spec, records, base, newest)
}

func encodeBatch(spec Batch, records []kmsg.Record, base, newest int64) protocol.Batch {
	var body []byte
	for _, r := range records {
		r.Length = 0
		sized := r.AppendTo(nil)
		r.Length = int32(len(sized) - 1) // the length 0 took one byte
		body = r.AppendTo(body)
	}
	delta := spec.LastOffsetDelta
	if n := len(records); delta == 0 && n > 0 {
		delta = records[n-1].OffsetDelta
	}
	attributes := spec.Attributes
	if compressor, err := kgo.DefaultCompressor(spec.Codec); err != nil {
		panic(fmt.Sprintf("scripted: %v", err))
	} else if compressor != nil {
		compressed, codec := compressor.Compress(new(bytes.Buffer), body)
		body = bytes.Clone(compressed)
		attributes |= int16(codec)
	}
	raw := kmsg.RecordBatch{
		FirstOffset: spec.BaseOffset, Length: int32(protocol.BatchHeaderSize - 12 + len(body)), PartitionLeaderEpoch: -1, Magic: 2,
		Attributes: attributes, LastOffsetDelta: delta, FirstTimestamp: base, MaxTimestamp: newest,
		ProducerID: spec.ProducerID, ProducerEpoch: spec.ProducerEpoch, FirstSequence: spec.BaseSequence,
		NumRecords: int32(len(records)), Records: body,
	}
	b := raw.AppendTo(nil)
	binary.BigEndian.PutUint32(b[17:], crc32.Checksum(b[21:], castagnoli))
	return protocol.Batch(b)
}

// LogRecord is a record as it stands in a log.
type LogRecord struct {
	Offset     int64
	Timestamp  int64 // milliseconds
	Key, Value []byte
	Headers    []kmsg.Header
	ProducerID int64
	Control    bool
	Aborted    bool // of an aborted transaction; set by Cluster.Records
}

// Decode returns the records of a batch; it panics on one that no broker would store.
func Decode(b protocol.Batch) []LogRecord { return recordsOf(b) }

// recordsOf decodes a batch that passed the CRC check; it panics on records that don't parse.
func recordsOf(b protocol.Batch) []LogRecord {
	raw, err := kgo.DefaultDecompressor().Decompress(b.Records(), kgo.CompressionCodecType(b.Codec()))
	if err != nil {
		panic(fmt.Sprintf("scripted: batch at %d: %v", b.BaseOffset(), err))
	}
	var out []LogRecord
	for range b.RecordCount() {
		length, n := binary.Varint(raw)
		var r kmsg.Record
		if n <= 0 || length < 0 || int(length) > len(raw)-n {
			panic(fmt.Sprintf("scripted: batch at %d: truncated records", b.BaseOffset()))
		}
		if err := r.ReadFrom(raw[:n+int(length)]); err != nil {
			panic(fmt.Sprintf("scripted: batch at %d: %v", b.BaseOffset(), err))
		}
		raw = raw[n+int(length):]
		at := b.BaseTimestamp() + r.TimestampDelta64
		if b.Attributes()&protocol.AttrLogAppendTime != 0 {
			at = b.MaxTimestamp()
		}
		out = append(out, LogRecord{Offset: b.BaseOffset() + int64(r.OffsetDelta), Timestamp: at, Key: r.Key, Value: r.Value, Headers: r.Headers, ProducerID: b.ProducerID(), Control: b.Control()})
	}
	return out
}
