package forwarder

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/zap"

	"kmirror/protocol"
)

// runsRecord is one record of the positions topic: which source offsets the sequences from base on of a fenced session have (rule N6). It is durable before the first append
// that uses them. Only the session's owner writes under its producer ID and epoch; the segments topic tells whose they are.
//
//	0 format   int8, 0
//	1 producer ID    int64
//	9 epoch    int16
//	11 base    uvarint, sequence of the first record
//	   source  uvarint, its source offset
//	   runs    uvarints to the end: a count of records whose offsets follow each other, the number of offsets missing behind them, the next count, and so on
type runsRecord struct {
	producerID int64
	epoch      int16
	base       int64
	source     int64
	runs       []byte
}

const (
	runsFormat   = 0
	runsHeadSize = 11
)

func (r *runsRecord) append(b []byte) []byte {
	b = append(b, runsFormat)
	b = binary.BigEndian.AppendUint64(b, uint64(r.producerID))
	b = binary.BigEndian.AppendUint16(b, uint16(r.epoch))
	b = binary.AppendUvarint(b, uint64(r.base))
	b = binary.AppendUvarint(b, uint64(r.source))
	return append(b, r.runs...)
}

func parseRunsRecord(b []byte) (r runsRecord, err error) {
	if len(b) < runsHeadSize || b[0] != runsFormat {
		return r, errBadRuns
	}
	r.producerID, r.epoch = int64(binary.BigEndian.Uint64(b[1:])), int16(binary.BigEndian.Uint16(b[9:]))
	if r.base, b, err = readUvarint(b[runsHeadSize:]); err == nil {
		r.source, r.runs, err = readUvarint(b)
	}
	return r, err
}

func readUvarint(b []byte) (v int64, rest []byte, err error) {
	x, n := binary.Uvarint(b)
	if n <= 0 || x > 1<<62 {
		return 0, nil, errBadRuns
	}
	return int64(x), b[n:], nil
}

// maxRunsPerRecord keeps a runsRecord well below the least max.message.bytes that anybody sets.
const maxRunsPerRecord = 64 << 10

func encodeRuns(runs []protocol.Run) []byte {
	b := binary.AppendUvarint(nil, uint64(runs[0].Count))
	for i := 1; i < len(runs); i++ {
		before := runs[i-1]
		b = binary.AppendUvarint(b, uint64(runs[i].Source-before.Source-before.Count))
		b = binary.AppendUvarint(b, uint64(runs[i].Count))
	}
	return b
}

var errBadRuns = errors.New("runs are damaged")

// decode returns the runs; their offsets ascend.
func (r *runsRecord) decode() (runs []protocol.Run, err error) {
	at, rest := r.source, r.runs
	for {
		var count, gap int64
		if count, rest, err = readUvarint(rest); err != nil {
			return nil, err
		}
		runs = append(runs, protocol.Run{Source: at, Count: count})
		if len(rest) == 0 {
			return runs, nil
		}
		if gap, rest, err = readUvarint(rest); err != nil {
			return nil, err
		}
		at += count + gap
	}
}

// sourceAt returns the source offset that a sequence has, false if it isn't in this record.
func (r *runsRecord) sourceAt(sequence int64) (offset int64, ok bool, err error) {
	left := sequence - r.base
	if left < 0 {
		return 0, false, nil
	}
	runs, err := r.decode()
	for _, run := range runs {
		if left < run.Count {
			return run.Source + left, true, nil
		}
		left -= run.Count
	}
	return 0, false, err
}

// appendRuns makes records durable. Safe for concurrent use, since nobody else writes of the same sessions; a fence was written before it, so that
// the topic is there.
func (r *registry) appendRuns(ctx context.Context, records []runsRecord) error {
	values := make([][]byte, len(records))
	for i := range records {
		values[i] = records[i].append(nil)
	}
	return r.runs.append(ctx, values)
}

// runsEnd returns the end of the positions topic.
func (r *registry) runsEnd(ctx context.Context) (int64, error) {
	if err := r.runs.make(ctx); err != nil {
		return 0, err
	}
	return r.runs.end(ctx)
}

// runsLookup asks for the source offset of the last record below a landmark.
type runsLookup struct {
	of     landmark
	from   int64 // offset in the positions topic
	found  bool
	source int64
}

// lookUpRuns answers all in one pass over the topic from the earliest hint on. Where that doesn't find all, the topic may have lost its end after the hint was taken, and what was written
// since lies below it: then it's read from its start.
func (r *registry) lookUpRuns(ctx context.Context, lookups []*runsLookup) error {
	if len(lookups) == 0 {
		return nil
	}
	if err := r.runs.make(ctx); err != nil {
		return err
	}
	from := lookups[0].from
	for _, x := range lookups {
		from = min(from, x.from)
	}
	find := func(rec *kgo.Record) {
		runs, err := parseRunsRecord(rec.Value)
		for _, x := range lookups {
			if err != nil || x.found || x.of.producerID != runs.producerID || x.of.epoch != runs.epoch {
				continue
			}
			x.source, x.found, err = runs.sourceAt(x.of.end - 1)
		}
		if err != nil {
			r.log.Warn("record that isn't kmirror's in its positions topic; ignored", zap.String("topic", rec.Topic), zap.Int64("offset", rec.Offset), zap.Error(err))
		}
	}
	_, err := r.runs.read(ctx, place{from, -1}, find)
	if err == nil && from > 0 && slices.ContainsFunc(lookups, func(x *runsLookup) bool { return !x.found }) {
		_, err = r.runs.read(ctx, place{0, -1}, find)
	}
	return err
}

// runsRecords are what makes runs durable, from a record's sequence on.
func (s *stream) runsRecords(runs []protocol.Run, sequence int64) (records []runsRecord) {
	for len(runs) > 0 {
		n := min(len(runs), maxRunsPerRecord)
		records = append(records, runsRecord{
			producerID: s.fence.producerID, epoch: s.fence.epoch, base: sequence, source: runs[0].Source, runs: encodeRuns(runs[:n]),
		})
		for _, run := range runs[:n] {
			sequence += run.Count
		}
		runs = runs[n:]
	}
	return records
}
