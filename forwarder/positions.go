package forwarder

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/zap"

	"kmirror/protocol"
)

// runsRecord is one record of the positions topic: which source offsets the sequences from BaseSequence on of a fenced session have (rule N6).
// It is durable before the first append that uses them. Only the session's owner writes under its producer ID and epoch.
//
// Runs are unsigned varints: a count of records whose offsets follow each other, the number of offsets missing behind them, the next count, and
// so on. The first run begins at Source.
type runsRecord struct {
	SourceCluster string `json:"source_cluster"`
	Topic         string `json:"topic"` // for people; the ID decides
	TopicID       string `json:"topic_id"`
	Partition     int32  `json:"partition"`
	MirrorTopicID string `json:"mirror_topic_id"`
	To            int32  `json:"mirror_partition,omitempty"`  // of a share
	Of            int32  `json:"mirror_partitions,omitempty"` // of a share
	ProducerID    int64  `json:"producer_id"`
	Epoch         int16  `json:"epoch"`
	BaseSequence  int64  `json:"base_sequence"`
	Source        int64  `json:"source_offset"`
	Runs          []byte `json:"runs"` // base64
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
	next := func(b []byte) (int64, []byte) {
		v, n := binary.Uvarint(b)
		if n <= 0 || v > 1<<62 {
			err = errBadRuns
			return 0, nil
		}
		return int64(v), b[n:]
	}
	at, rest := r.Source, r.Runs
	for err == nil {
		var count, gap int64
		if count, rest = next(rest); err != nil {
			break
		}
		runs = append(runs, protocol.Run{Source: at, Count: count})
		if len(rest) == 0 {
			return runs, nil
		}
		gap, rest = next(rest)
		at += count + gap
	}
	return nil, err
}

// sourceAt returns the source offset that a sequence has, false if it isn't in this record.
func (r *runsRecord) sourceAt(sequence int64) (offset int64, ok bool, err error) {
	left := sequence - r.BaseSequence
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
		records[i].SourceCluster = r.source
		value, err := json.Marshal(&records[i])
		if err != nil {
			return err
		}
		values[i] = value
	}
	return r.runs.append(ctx, values)
}

// runsEnd returns the end of the positions topic.
func (r *registry) runsEnd(ctx context.Context) (int64, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.runs.make(ctx); err != nil {
		return 0, err
	}
	end, err := r.runs.end(ctx)
	if err != nil {
		return 0, fmt.Errorf("topic %s: %w", r.runs.topic, err)
	}
	return end, nil
}

// runsLookup asks for the source offset of the last record below a landmark.
type runsLookup struct {
	of     landmark
	from   int64 // offset in the positions topic
	found  bool
	source int64
}

// lookUpRuns answers all in one pass over the topic.
func (r *registry) lookUpRuns(ctx context.Context, lookups []*runsLookup) error {
	r.mu.Lock()
	defer r.mu.Unlock()
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
	_, err := r.runs.read(ctx, from, func(rec *kgo.Record) {
		var runs runsRecord
		err := json.Unmarshal(rec.Value, &runs)
		for _, x := range lookups {
			if err != nil || x.found || x.of.producerID != runs.ProducerID || x.of.epoch != runs.Epoch {
				continue
			}
			x.source, x.found, err = runs.sourceAt(x.of.end - 1)
		}
		if err != nil {
			r.log.Warn("record that isn't kmirror's in its positions topic; ignored", zap.String("topic", rec.Topic), zap.Int64("offset", rec.Offset), zap.Error(err))
		}
	})
	return err
}

// runsRecords are what makes runs durable, from a record's sequence on.
func (s *stream) runsRecords(runs []protocol.Run, sequence int64) (records []runsRecord) {
	id := s.identity()
	for len(runs) > 0 {
		n := min(len(runs), maxRunsPerRecord)
		records = append(records, runsRecord{
			Topic: s.topic, TopicID: hex.EncodeToString(s.topicID[:]), Partition: s.index, MirrorTopicID: hex.EncodeToString(s.mirrorTopicID[:]),
			To: id.to, Of: id.of, ProducerID: s.fence.producerID, Epoch: s.fence.epoch, BaseSequence: sequence, Source: runs[0].Source, Runs: encodeRuns(runs[:n]),
		})
		for _, run := range runs[:n] {
			sequence += run.Count
		}
		runs = runs[n:]
	}
	return records
}
