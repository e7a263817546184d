package protocol

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand"
	"reflect"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// plainCodec knows no compression.
type plainCodec struct{}

func (plainCodec) Compress(_ int, b []byte) ([]byte, error)   { return b, nil }
func (plainCodec) Decompress(_ int, b []byte) ([]byte, error) { return b, nil }

// numberedBatch has count records whose value and header name their offset, at timestamps 1000, 1003, 1006, …
func numberedBatch(base int64, count int) Batch {
	var records []byte
	for i := range count {
		r := kmsg.Record{
			TimestampDelta64: int64(3 * i), OffsetDelta: int32(i), Value: fmt.Append(nil, base+int64(i)),
			Headers: []kmsg.Header{{Key: "offset", Value: fmt.Append(nil, base+int64(i))}},
		}
		body := r.AppendTo(nil)[1:] // its own length is a placeholder of one byte
		records = append(binary.AppendVarint(records, int64(len(body))), body...)
	}
	b := make(Batch, BatchHeaderSize, BatchHeaderSize+len(records))
	b = append(b, records...)
	b[atMagic] = 2
	b.SetBaseOffset(base)
	binary.BigEndian.PutUint32(b[atLastOffsetDelta:], uint32(count-1))
	binary.BigEndian.PutUint64(b[atBaseTimestamp:], 1000)
	binary.BigEndian.PutUint64(b[atMaxTimestamp:], uint64(1000+3*(count-1)))
	binary.BigEndian.PutUint32(b[atRecordCount:], uint32(count))
	putLength(b)
	reseal(b)
	return b
}

// readRecords decodes a batch's records through kmsg: value@timestamp of each, in order of their offset deltas.
func readRecords(t *testing.T, b Batch) (out []string) {
	t.Helper()
	rest := b.Records()
	for i := range b.RecordCount() {
		length, n := binary.Varint(rest)
		var r kmsg.Record
		if err := r.ReadFrom(rest[:n+int(length)]); err != nil {
			t.Fatalf("record %d: %v", i, err)
		}
		if r.OffsetDelta != i {
			t.Fatalf("record %d has offset delta %d", i, r.OffsetDelta)
		}
		if string(r.Headers[0].Value) != string(r.Value) {
			t.Fatalf("record %d: header %q, value %q", i, r.Headers[0].Value, r.Value)
		}
		out = append(out, fmt.Sprintf("%s@%d", r.Value, b.BaseTimestamp()+r.TimestampDelta64))
		rest = rest[n+int(length):]
	}
	if len(rest) != 0 {
		t.Fatalf("%d bytes behind the last record", len(rest))
	}
	return out
}

func TestRecodeKeepsTheRecordsInRange(t *testing.T) {
	r := rand.New(rand.NewSource(1))
	for range 500 {
		count := 1 + r.Intn(300)
		from := r.Intn(count)
		to := from + 1 + r.Intn(count-from)
		b := numberedBatch(5000, count)
		got, err := Recode(b, 5000+int64(from), 5000+int64(to), plainCodec{})
		if err != nil {
			t.Fatalf("Recode [%d, %d) of %d: %v", from, to, count, err)
		}
		if !got.VerifyCRC() || !got.Dense() || got.BaseOffset() != 0 || int(got.RecordCount()) != to-from {
			t.Fatalf("Recode [%d, %d) of %d: CRC right %v, %d records, base offset %d", from, to, count, got.VerifyCRC(), got.RecordCount(), got.BaseOffset())
		}
		if want, have := fmt.Sprint(readRecords(t, b)[from:to]), fmt.Sprint(readRecords(t, got)); have != want {
			t.Fatalf("Recode [%d, %d) of %d:\n got %s\nwant %s", from, to, count, have, want)
		}
		if want := int64(1000 + 3*(to-1)); got.MaxTimestamp() != want {
			t.Fatalf("max timestamp %d, want %d", got.MaxTimestamp(), want)
		}
		if _, rest, err := ParseBatch(got); err != nil || len(rest) != 0 {
			t.Fatalf("ParseBatch: %v, %d bytes left", err, len(rest))
		}
	}
}

func TestRecodeGivesAppendTimeToTheRecords(t *testing.T) {
	b := numberedBatch(0, 3)
	binary.BigEndian.PutUint16(b[atAttributes:], AttrLogAppendTime)
	binary.BigEndian.PutUint64(b[atMaxTimestamp:], 9999)
	reseal(b)
	got, err := Recode(b, 0, 3, plainCodec{})
	if err != nil {
		t.Fatal(err)
	}
	if want, have := "[0@9999 1@9999 2@9999]", fmt.Sprint(readRecords(t, got)); have != want || got.Attributes() != 0 {
		t.Fatalf("got %s attributes %x, want %s and none", have, got.Attributes(), want)
	}
}

func TestRecodeRefusesDamagedRecords(t *testing.T) {
	whole := numberedBatch(0, 5)
	for cut := 1; cut < len(whole)-BatchHeaderSize; cut++ {
		b := whole[:len(whole)-cut]
		if got, err := Recode(b, 0, 5, plainCodec{}); err == nil && int(got.RecordCount()) == 5 {
			t.Fatalf("Recode of a batch that lacks %d bytes gave all 5 records", cut)
		}
	}
}

func TestMergeJoinsBatches(t *testing.T) {
	r := rand.New(rand.NewSource(2))
	for range 200 {
		var batches []Batch
		var want []string
		base := int64(100)
		for range 1 + r.Intn(20) {
			b := numberedBatch(base, 1+r.Intn(200))
			binary.BigEndian.PutUint64(b[atBaseTimestamp:], uint64(r.Intn(1_000_000))) // later batches may be older
			reseal(b)
			batches = append(batches, b)
			want = append(want, readRecords(t, b)...)
			base += int64(b.RecordCount())
		}
		got, err := Merge(make([]byte, 0, 1<<10), batches, plainCodec{})
		if err != nil {
			t.Fatal(err)
		}
		if !got.VerifyCRC() || !got.Dense() || fmt.Sprint(readRecords(t, got)) != fmt.Sprint(want) {
			t.Fatalf("Merge of %d batches: CRC right %v, %d records, want %d in order", len(batches), got.VerifyCRC(), got.RecordCount(), len(want))
		}
	}
}

func TestMergeRefusesWhatItCantVouchFor(t *testing.T) {
	damaged := numberedBatch(5, 5)
	damaged[len(damaged)-1] ^= 1
	if _, err := Merge(nil, []Batch{numberedBatch(0, 5), damaged}, plainCodec{}); err == nil {
		t.Error("Merge took a batch whose CRC is wrong")
	}
	other := numberedBatch(5, 5)
	binary.BigEndian.PutUint16(other[atAttributes:], 3)
	reseal(other)
	if _, err := Merge(nil, []Batch{numberedBatch(0, 5), other}, plainCodec{}); err == nil {
		t.Error("Merge took two codecs")
	}
}

func BenchmarkMerge(b *testing.B) {
	batches := make([]Batch, 32)
	size := 0
	for i := range batches {
		batches[i] = numberedBatch(int64(150*i), 150)
		size += len(batches[i])
	}
	dst := make([]byte, 0, 2*size)
	b.SetBytes(int64(size))
	for b.Loop() {
		if _, err := Merge(dst, batches, plainCodec{}); err != nil {
			b.Fatal(err)
		}
	}
}

func TestRecodeRunsTellsWhereRecordsWere(t *testing.T) {
	// Of ten offsets from 100 on compaction left 0, 1, 4 and 8.
	var records []byte
	for _, delta := range []int32{0, 1, 4, 8} {
		value := fmt.Append(nil, 100+delta)
		r := kmsg.Record{OffsetDelta: delta, Value: value, Headers: []kmsg.Header{{Key: "offset", Value: value}}}
		body := r.AppendTo(nil)[1:]
		records = append(binary.AppendVarint(records, int64(len(body))), body...)
	}
	b := append(numberedBatch(100, 1)[:BatchHeaderSize:BatchHeaderSize], records...)
	binary.BigEndian.PutUint32(b[atLastOffsetDelta:], 9)
	binary.BigEndian.PutUint32(b[atRecordCount:], 4)
	putLength(b)
	reseal(b)
	for _, c := range []struct {
		from, to int64
		runs     []Run
	}{
		{100, 110, []Run{{100, 2}, {104, 1}, {108, 1}}},
		{101, 105, []Run{{101, 1}, {104, 1}}},
		{105, 108, nil},
	} {
		got, runs, err := RecodeRuns(b, c.from, c.to, plainCodec{})
		if c.runs == nil {
			if !errors.Is(err, ErrNoRecords) {
				t.Errorf("records of [%d, %d): %v, want none", c.from, c.to, err)
			}
			continue
		}
		if err != nil || !reflect.DeepEqual(runs, c.runs) || !got.Dense() || !got.VerifyCRC() {
			t.Fatalf("RecodeRuns of [%d, %d) = runs %v, %v; want %v", c.from, c.to, runs, err, c.runs)
		}
		var want []string
		for _, run := range c.runs {
			for i := range run.Count {
				want = append(want, fmt.Sprintf("%d@1000", run.Source+i))
			}
		}
		if records := readRecords(t, got); !reflect.DeepEqual(records, want) {
			t.Errorf("records of [%d, %d) = %v, want %v", c.from, c.to, records, want)
		}
	}
	b[len(b)-1] ^= 1
	if _, _, err := RecodeRuns(b, 100, 110, plainCodec{}); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a damaged batch: %v, want corrupt", err)
	}
}
