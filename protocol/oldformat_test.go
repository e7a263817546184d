package protocol

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/klauspost/compress/s2"
	"github.com/pierrec/lz4/v4"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// realCodec reads and writes as producers before 0.11 did: gzip, raw snappy, lz4.
type realCodec struct{}

func (realCodec) Compress(codec int, records []byte) ([]byte, error) {
	var out bytes.Buffer
	var w io.WriteCloser
	switch codec {
	case 0:
		return records, nil
	case 1:
		w = gzip.NewWriter(&out)
	case 2:
		return s2.EncodeSnappy(nil, records), nil
	case 3:
		w = lz4.NewWriter(&out)
	default:
		return nil, fmt.Errorf("codec %d", codec)
	}
	if _, err := w.Write(records); err != nil {
		return nil, err
	}
	err := w.Close()
	return out.Bytes(), err
}

func (c realCodec) Decompress(codec int, records []byte) ([]byte, error) {
	if codec > 3 {
		return nil, fmt.Errorf("codec %d", codec)
	}
	return kgo.DefaultDecompressor().Decompress(records, kgo.CompressionCodecType(codec))
}

// oldMessageBytes encodes a message with kmsg.
func oldMessageBytes(magic int8, offset int64, attributes int8, timestamp int64, key, value []byte) []byte {
	var b []byte
	if magic == 0 {
		m := kmsg.MessageV0{Offset: offset, Attributes: attributes, Key: key, Value: value}
		b = m.AppendTo(nil)
	} else {
		m := kmsg.MessageV1{Offset: offset, Magic: 1, Attributes: attributes, Timestamp: timestamp, Key: key, Value: value}
		b = m.AppendTo(nil)
	}
	binary.BigEndian.PutUint32(b[8:], uint32(len(b)-12))
	binary.BigEndian.PutUint32(b[12:], crc32.ChecksumIEEE(b[16:]))
	return b
}

// breakLZ4Header computes the header checksum as producers before 0.10 did: with the frame's magic number in it.
func breakLZ4Header(frame []byte) []byte {
	end := 6
	if frame[4]&8 != 0 {
		end = 14
	}
	frame = bytes.Clone(frame)
	frame[end] = byte(xxh32(frame[:end]) >> 8)
	return frame
}

type oldRecord struct {
	offset, timestamp int64
	key, value        []byte
}

func randomOld(r *rand.Rand, magic int8, offset int64) oldRecord {
	field := func() []byte {
		switch r.Intn(4) {
		case 0:
			return nil
		case 1:
			return []byte{}
		}
		b := make([]byte, r.Intn(300))
		r.Read(b)
		return b
	}
	rec := oldRecord{offset: offset, timestamp: -1, key: field(), value: field()}
	if magic == 1 {
		rec.timestamp = []int64{-1, 0, 1000, 1_700_000_000_000 + r.Int63n(1e9)}[r.Intn(4)]
	}
	return rec
}

// randomOldSet is a message set of plain and compressed messages, with holes, and the records it holds.
func randomOldSet(t *testing.T, r *rand.Rand) (set []byte, want []oldRecord) {
	t.Helper()
	offset := r.Int63n(1 << 40)
	for range 1 + r.Intn(8) {
		magic, codec := int8(r.Intn(2)), int8(r.Intn(4))
		if r.Intn(4) == 0 {
			offset += r.Int63n(100)
		}
		if codec == 0 {
			rec := randomOld(r, magic, offset)
			attributes := int8(r.Intn(2) * AttrLogAppendTime * int(magic))
			set = append(set, oldMessageBytes(magic, offset, attributes, rec.timestamp, rec.key, rec.value)...)
			want = append(want, rec)
			offset++
			continue
		}
		var inside []byte
		base, appendTime := offset, r.Intn(2) == 0 && magic == 1
		wrapperTime := int64(1_800_000_000_000)
		for i := range 1 + r.Intn(20) {
			if i > 0 && r.Intn(10) == 0 {
				offset += r.Int63n(5)
			}
			rec := randomOld(r, magic, offset)
			at := offset
			if magic == 1 {
				at -= base
			}
			inside = append(inside, oldMessageBytes(magic, at, 0, rec.timestamp, rec.key, rec.value)...)
			if appendTime {
				rec.timestamp = wrapperTime
			}
			want = append(want, rec)
			offset++
		}
		packed, err := realCodec{}.Compress(int(codec), inside)
		if err != nil {
			t.Fatal(err)
		}
		if codec == 3 && magic == 0 {
			packed = breakLZ4Header(packed)
		}
		attributes := codec
		if appendTime {
			attributes |= AttrLogAppendTime
		}
		set = append(set, oldMessageBytes(magic, offset-1, attributes, wrapperTime, nil, packed)...)
	}
	return set, want
}

// readConverted decodes a batch through kmsg.
func readConverted(t *testing.T, b Batch) (out []oldRecord) {
	t.Helper()
	if !b.VerifyCRC() {
		t.Fatal("the batch's CRC is wrong")
	}
	records, err := realCodec{}.Decompress(b.Codec(), b.Records())
	if err != nil {
		t.Fatal(err)
	}
	latest := int64(-1)
	for range b.RecordCount() {
		length, n := binary.Varint(records)
		var x kmsg.Record
		if err := x.ReadFrom(records[:n+int(length)]); err != nil {
			t.Fatal(err)
		}
		records = records[n+int(length):]
		timestamp := b.BaseTimestamp() + x.TimestampDelta64
		latest = max(latest, timestamp)
		out = append(out, oldRecord{b.BaseOffset() + int64(x.OffsetDelta), timestamp, x.Key, x.Value})
	}
	if len(records) > 0 || latest != b.MaxTimestamp() || out[len(out)-1].offset != b.EndOffset()-1 {
		t.Fatalf("%d bytes left, max timestamp %d want %d, last offset %d want %d", len(records), b.MaxTimestamp(), latest, out[len(out)-1].offset, b.EndOffset()-1)
	}
	return out
}

func sameOld(a, b []oldRecord) bool { return fmt.Sprintf("%#v", a) == fmt.Sprintf("%#v", b) }

func convertAll(t *testing.T, set []byte) (got []oldRecord) {
	t.Helper()
	for len(set) > 0 {
		before := len(set)
		b, rest, err := ConvertOld(set, realCodec{})
		if err != nil {
			t.Fatal(err)
		}
		if len(rest) >= before {
			t.Fatal("no byte was taken")
		}
		if parsed, left, err := ParseBatch(b); err != nil || len(left) > 0 || len(parsed) != len(b) {
			t.Fatalf("ParseBatch of what was made: %v, %d bytes left", err, len(left))
		}
		got = append(got, readConverted(t, b)...)
		set = rest
	}
	return got
}

func TestConvertOldKeepsEveryRecord(t *testing.T) {
	r := rand.New(rand.NewSource(1))
	for range 300 {
		set, want := randomOldSet(t, r)
		if got := convertAll(t, set); !sameOld(got, want) {
			t.Fatalf("got %d records, want %d:\n%+v\n%+v", len(got), len(want), got, want)
		}
	}
}

// TestConvertOldOfPartsAndDamage: a part of a message is incomplete, a flipped bit is found.
func TestConvertOldOfPartsAndDamage(t *testing.T) {
	r := rand.New(rand.NewSource(2))
	for range 30 {
		whole := oldMessageBytes(int8(r.Intn(2)), 7, 0, 1000, []byte("key"), []byte("value"))
		for cut := range whole {
			if _, rest, err := ConvertOld(whole[:cut], realCodec{}); !errors.Is(err, ErrIncomplete) || len(rest) != cut {
				t.Fatalf("%d of %d bytes: %v", cut, len(whole), err)
			}
		}
		for at := 12; at < len(whole); at++ {
			bad := bytes.Clone(whole)
			bad[at] ^= 1 << r.Intn(8)
			if _, _, err := ConvertOld(bad, realCodec{}); !errors.Is(err, ErrCorrupt) {
				t.Fatalf("byte %d changed: %v, want %v", at, err, ErrCorrupt)
			}
		}
	}
}

func TestConvertOldRefuses(t *testing.T) {
	wrap := func(inside []byte, offset int64) []byte {
		packed, _ := realCodec{}.Compress(1, inside)
		return oldMessageBytes(1, offset, 1, 0, nil, packed)
	}
	plain := oldMessageBytes(1, 0, 0, 0, nil, []byte("v"))
	for name, set := range map[string][]byte{
		"a compressed message inside": wrap(wrap(plain, 0), 0),
		"nothing inside":              wrap(nil, 0),
		"a message cut off inside":    wrap(append(bytes.Clone(plain), plain[:20]...), 0),
		"offsets that don't grow":     wrap(append(bytes.Clone(plain), plain...), 0),
		"not compressed at all":       oldMessageBytes(1, 0, 1, 0, nil, []byte("plain")),
		"an unknown codec":            oldMessageBytes(1, 0, 5, 0, nil, []byte("plain")),
	} {
		if b, _, err := ConvertOld(set, realCodec{}); err == nil {
			t.Errorf("%s: no error, a batch of %d records", name, b.RecordCount())
		}
	}
}

// FuzzConvertOld: no panic, no byte lost, and what kgo reads as well is the same.
func FuzzConvertOld(f *testing.F) {
	r := rand.New(rand.NewSource(3))
	for range 20 {
		set, _ := randomOldSet(&testing.T{}, r)
		f.Add(set)
	}
	f.Fuzz(func(t *testing.T, set []byte) {
		for at := 0; at+16 <= len(set); { // right CRCs, so that the rest is looked at
			n := int(int32(binary.BigEndian.Uint32(set[at+8:])))
			if n < 5 || n > len(set)-at-12 {
				break
			}
			binary.BigEndian.PutUint32(set[at+12:], crc32.ChecksumIEEE(set[at+16:at+12+n]))
			at += 12 + n
		}
		b, rest, err := ConvertOld(set, realCodec{})
		if err != nil {
			if len(rest) != len(set) {
				t.Fatal("an error, and bytes taken")
			}
			return
		}
		got := readConverted(t, b)
		part := set[:len(set)-len(rest)]
		fp, _ := kgo.ProcessFetchPartition(kgo.ProcessFetchPartitionOpts{Offset: -1}, &kmsg.FetchResponseTopicPartition{RecordBatches: bytes.Clone(part), HighWatermark: 1 << 62},
			kgo.DefaultDecompressor(), nil)
		if fp.Err != nil || len(fp.Records) != len(got) {
			return // kgo is stricter about attributes and about lz4's header, and laxer about offsets
		}
		for i, x := range fp.Records {
			if !bytes.Equal(x.Key, got[i].key) || !bytes.Equal(x.Value, got[i].value) || x.Offset != got[i].offset {
				t.Fatalf("record %d: kgo reads offset %d key %q value %q, want %+v", i, x.Offset, x.Key, x.Value, got[i])
			}
		}
	})
}

// TestConvertOldOfKafkasOwnLogs reads log segments of Apache Kafka 0.10.2.1, written by its own console producer: k1 to k30 without compression,
// with gzip, snappy and lz4. zero is message format v0 (log.message.format.version=0.9.0), one and appendtime are v1.
//
// The append times are what DumpLogSegments of Kafka 4.3.1 says.
func TestConvertOldOfKafkasOwnLogs(t *testing.T) {
	appendTimes := []int64{1796119098059, 1796119099643, 1796119101157, 1796119102777}
	for _, name := range []string{"zero-0", "one-0", "appendtime-0"} {
		log, err := os.ReadFile(filepath.Join("testdata", "old", name+".log"))
		if err != nil {
			t.Fatal(err)
		}
		got := convertAll(t, log)
		fp, _ := kgo.ProcessFetchPartition(kgo.ProcessFetchPartitionOpts{Offset: -1}, &kmsg.FetchResponseTopicPartition{RecordBatches: log, HighWatermark: 1 << 62},
			kgo.DefaultDecompressor(), nil)
		seen := map[string]int{}
		for i, x := range got {
			if x.offset != int64(i) {
				t.Fatalf("%s: record %d has offset %d", name, i, x.offset)
			}
			if i < len(fp.Records) { // kgo stops at lz4 of format v0
				k := fp.Records[i]
				same := bytes.Equal(k.Key, x.key) && bytes.Equal(k.Value, x.value) && k.Offset == x.offset
				if !same || name == "one-0" && k.Timestamp.UnixMilli() != x.timestamp {
					t.Fatalf("%s: record %d: got %+v, kgo reads %+v", name, i, x, k)
				}
			}
			if name == "zero-0" && x.timestamp != -1 {
				t.Fatalf("%s: record %d has timestamp %d", name, i, x.timestamp)
			}
			if name == "appendtime-0" && appendTimes[i/30] != x.timestamp { // kgo knows no append time of compressed messages
				t.Fatalf("%s: record %d has timestamp %d, want %d", name, i, x.timestamp, appendTimes[i/30])
			}
			fields := strings.Fields(string(x.value))
			if len(fields) != 4 || "k"+fields[2] != string(x.key) {
				t.Fatalf("%s: record %d: key %q, value %q", name, i, x.key, x.value)
			}
			seen[fields[1]]++
		}
		want := 30
		if name == "one-0" {
			want = 18 // the others are in its partition 1
		}
		for _, codec := range []string{"none", "gzip", "snappy", "lz4"} {
			if seen[codec] != want {
				t.Errorf("%s: %d records of codec %s, want %d", name, seen[codec], codec, want)
			}
		}
	}
}
