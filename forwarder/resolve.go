package forwarder

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/protocol"
)

// standing is what the mirror's log says of a stream.
type standing struct {
	logStart, logEnd int64
	known            bool  // the broker has producer state of ours
	found            bool  // known, or a batch of ours was found in the log
	position         int64 // behind our last batch, if found; nothing of a fenced session's
	timestamp        int64 // max timestamp of our last batch in ms, if found

	// Of a scan: our last batch, where it ends, and whether a batch that isn't ours lies where the checkpoint says that ours was.
	last    landmark
	lastEnd int64 // on the mirror
	foreign bool
	intact  int64 // the log below it is as it was at the checkpoint
}

// resolver asks one mirror broker, on one connection, where streams stand (rules R1, R2). It holds no state of its own.
type resolver struct {
	conn *conn
	// fetchBytes is how much one read of the log brings, 0: scanBytes.
	fetchBytes int32
}

// question names a mirror partition and the leader epoch that the answer must be of.
type question struct {
	topic      string
	topicID    protocol.TopicID
	partition  int32
	epoch      int32
	producerID int64
	// Of a fenced stream: the fence whose marker must be there, and all producer IDs that it ever had, dense ones too.
	fence *fence
	ours  []int64
	// stored are the mirror offsets of our last batch by the checkpoint, [0, 0): not known.
	stored [2]int64
}

// isOurs reports whether a batch is of the stream.
func (q *question) isOurs(b protocol.Batch) bool {
	return !b.Control() && (b.ProducerID() == q.producerID || slices.Contains(q.ours, b.ProducerID()))
}

type answer struct {
	standing
	committed bool // the high watermark has reached logEnd
	fenced    bool // the marker of the question's fence is there
	err       error
}

// ask resolves what producer state can tell: DescribeProducers first, then the log's ends at the known leader epoch, on the same
// connection (R1). F5: DescribeProducers alone is answered by any replica.
func (r *resolver) ask(ctx context.Context, questions []question) ([]answer, error) {
	answers := make([]answer, len(questions))
	if err := r.describe(ctx, questions, answers); err != nil {
		return nil, err
	}
	if err := r.listOffsets(ctx, questions, answers, -2, -1, func(a *answer, offset int64) { a.logStart = offset }); err != nil {
		return nil, err
	}
	// F6: replica ID -2 is told the log's end, a consumer the high watermark.
	if err := r.listOffsets(ctx, questions, answers, -1, -2, func(a *answer, offset int64) { a.logEnd = offset }); err != nil {
		return nil, err
	}
	return answers, r.awaitHighWatermark(ctx, questions, answers)
}

// askFenced asks until the markers of all fences are in their partitions (F7); where one doesn't come in time, the stream is put off.
func (r *resolver) askFenced(ctx context.Context, questions []question) (answers []answer, err error) {
	wait := newBackoff(5*time.Millisecond, 200*time.Millisecond)
	for deadline := time.Now().Add(markerTimeout); ; sleep(ctx, wait.next()) {
		if answers, err = r.ask(ctx, questions); err != nil {
			return nil, err
		}
		late := false
		for i := range answers {
			if questions[i].fence != nil && answers[i].err == nil && !answers[i].fenced {
				late, answers[i].err = true, errNoMarker
			}
		}
		if !late || time.Now().After(deadline) || ctx.Err() != nil {
			return answers, nil
		}
	}
}

// awaitHighWatermark waits a moment until the log ends that were seen are committed (R2); where they aren't, the stream is put off.
func (r *resolver) awaitHighWatermark(ctx context.Context, questions []question, answers []answer) error {
	for range 20 {
		behind := false
		err := r.listOffsets(ctx, questions, answers, -1, -1, func(a *answer, offset int64) {
			a.committed = offset >= a.logEnd
			behind = behind || !a.committed
		})
		if err != nil || !behind {
			return err
		}
		sleep(ctx, 50*time.Millisecond)
	}
	for i := range answers {
		if answers[i].err == nil && !answers[i].committed {
			answers[i].err = errBelowEnd
		}
	}
	return nil
}

var errBelowEnd = errors.New("the mirror's high watermark is below its log end: an append isn't replicated yet")

func (r *resolver) describe(ctx context.Context, questions []question, answers []answer) error {
	req := kmsg.NewPtrDescribeProducersRequest()
	at := map[string]int{}
	for _, q := range questions {
		i, ok := at[q.topic]
		if !ok {
			i = len(req.Topics)
			at[q.topic] = i
			req.Topics = append(req.Topics, kmsg.DescribeProducersRequestTopic{Topic: q.topic})
		}
		if !slices.Contains(req.Topics[i].Partitions, q.partition) {
			req.Topics[i].Partitions = append(req.Topics[i].Partitions, q.partition)
		}
	}
	kresp, buf, err := r.conn.request(ctx, req, 0)
	if errors.Is(err, kerr.UnsupportedVersion) {
		for i, q := range questions {
			if q.fence != nil {
				answers[i].err = errNoFence
			}
		}
		return nil // before Kafka 2.8: unknown, so the log is scanned
	}
	if err != nil {
		return err
	}
	defer buf.Release()
	find := indexQuestions(questions)
	for _, t := range kresp.(*kmsg.DescribeProducersResponse).Topics {
		for j := range t.Partitions {
			for _, i := range find[topicPartition{t.Topic, t.Partitions[j].Partition}] {
				answers[i].describe(&questions[i], &t.Partitions[j])
			}
		}
	}
	return nil
}

// describe takes what a partition's broker knows of the stream's producer, or of its fence.
func (a *answer) describe(q *question, p *kmsg.DescribeProducersResponseTopicPartition) {
	if a.err = kerr.ErrorForCode(p.ErrorCode); a.err != nil {
		return
	}
	for _, active := range p.ActiveProducers {
		switch {
		case q.fence != nil:
			a.fenced = a.fenced || active.ProducerID == q.fence.producerID && active.ProducerEpoch >= int32(q.fence.epoch)
		case active.ProducerID == q.producerID && active.LastSequence >= 0:
			a.known, a.found = true, true
			a.position = positionOf(active.ProducerEpoch, active.LastSequence) + 1
			a.timestamp = active.LastTimestamp
		}
	}
}

// indexQuestions finds the questions about a mirror partition: several where shares of several source partitions go there.
func indexQuestions(questions []question) map[topicPartition][]int {
	m := make(map[topicPartition][]int, len(questions))
	for i, q := range questions {
		tp := topicPartition{q.topic, q.partition}
		m[tp] = append(m[tp], i)
	}
	return m
}

func (r *resolver) listOffsets(ctx context.Context, questions []question, answers []answer, timestamp int64, replica int32, into func(*answer, int64)) error {
	req := kmsg.NewPtrListOffsetsRequest()
	req.ReplicaID = replica
	at := map[string]int{}
	for i, q := range questions {
		if answers[i].err != nil {
			continue
		}
		j, ok := at[q.topic]
		if !ok {
			j = len(req.Topics)
			at[q.topic] = j
			t := kmsg.NewListOffsetsRequestTopic()
			t.Topic = q.topic
			req.Topics = append(req.Topics, t)
		}
		if slices.ContainsFunc(req.Topics[j].Partitions, func(p kmsg.ListOffsetsRequestTopicPartition) bool { return p.Partition == q.partition }) {
			continue
		}
		p := kmsg.NewListOffsetsRequestTopicPartition()
		p.Partition, p.Timestamp, p.CurrentLeaderEpoch = q.partition, timestamp, q.epoch
		req.Topics[j].Partitions = append(req.Topics[j].Partitions, p)
	}
	if len(req.Topics) == 0 {
		return nil
	}
	kresp, buf, err := r.conn.request(ctx, req, 7) // 7: before that, nothing newer is needed
	if err != nil {
		return err
	}
	defer buf.Release()
	find := indexQuestions(questions)
	for _, t := range kresp.(*kmsg.ListOffsetsResponse).Topics {
		for _, p := range t.Partitions {
			for _, i := range find[topicPartition{t.Topic, p.Partition}] {
				switch err := kerr.ErrorForCode(p.ErrorCode); {
				case answers[i].err != nil:
				case err != nil:
					answers[i].err = err
				default:
					into(&answers[i], p.Offset)
				}
			}
		}
	}
	return nil
}

// scan looks for our last batch in [from, logEnd) of the mirror partition, through the batches' headers (R2).
func (r *resolver) scan(ctx context.Context, q question, from int64, st *standing) error {
	for offset := max(from, st.logStart); offset < st.logEnd; {
		next := offset
		err := r.fetch(ctx, q, offset, func(b protocol.Batch) {
			next = max(next, b.EndOffset())
			if b.BaseOffset() >= st.logEnd {
				return // a Fetch brings more than was asked for
			}
			if q.isOurs(b) {
				st.found, st.lastEnd = true, b.EndOffset()
				st.last = landmark{b.ProducerID(), b.ProducerEpoch(), int64(b.BaseSequence()) + offsetsOf(b)}
				st.position = positionOf(int32(b.ProducerEpoch()), b.BaseSequence()) + offsetsOf(b)
				st.timestamp = b.MaxTimestamp()
			} else if b.BaseOffset() < q.stored[1] && b.EndOffset() > q.stored[0] {
				st.foreign = true
			}
		})
		if err != nil {
			return err
		}
		if next == offset {
			return fmt.Errorf("mirror log of topic %s partition %d gives nothing at offset %d below its end %d", q.topic, q.partition, offset, st.logEnd)
		}
		offset = next
	}
	return nil
}

// offsetsOf is how many records a batch of ours had when it was appended; the mirror's own compaction may have taken some since.
func offsetsOf(b protocol.Batch) int64 { return int64(b.LastOffsetDelta()) + 1 }

// batchAt returns the base offset, CRC, producer ID and end position of the batch that holds offset, through visit; not called if nothing is
// there.
func (r *resolver) batchAt(ctx context.Context, q question, offset int64, visit func(protocol.Batch)) error {
	first := true
	return r.fetch(ctx, q, offset, func(b protocol.Batch) {
		if first && b.EndOffset() > offset {
			first = false
			visit(b)
		}
	})
}

// intactBelow returns the offset below which the partition's log is as it was in a leader epoch (KIP-101): an unclean election of a replica that lacked some of that begins a later epoch
// below it, whatever was appended or compacted since. A mirror that doesn't tell its epochs (before Kafka 2.1) is believed.
func (r *resolver) intactBelow(ctx context.Context, q question, epoch int32) (end int64, err error) {
	if epoch < 0 {
		return math.MaxInt64, nil
	}
	req := kmsg.NewPtrOffsetForLeaderEpochRequest()
	req.ReplicaID = -1
	p := kmsg.NewOffsetForLeaderEpochRequestTopicPartition()
	p.Partition, p.CurrentLeaderEpoch, p.LeaderEpoch = q.partition, q.epoch, epoch
	req.Topics = []kmsg.OffsetForLeaderEpochRequestTopic{{Topic: q.topic, Partitions: []kmsg.OffsetForLeaderEpochRequestTopicPartition{p}}}
	err = askOnce(ctx, r.conn, req, req.MaxVersion(), func(resp *kmsg.OffsetForLeaderEpochResponse) int16 {
		for _, t := range resp.Topics {
			for _, p := range t.Partitions {
				end = p.EndOffset
				return p.ErrorCode
			}
		}
		return kerr.UnknownServerError.Code
	})
	if err != nil {
		return 0, fmt.Errorf("OffsetForLeaderEpoch on the mirror: %w", err)
	}
	return end, nil
}

const scanBytes = 4 << 20

// fetch reads once from offset on and visits each whole batch.
func (r *resolver) fetch(ctx context.Context, q question, offset int64, visit func(protocol.Batch)) error {
	limit := cmp.Or(r.fetchBytes, scanBytes)
	req := kmsg.NewPtrFetchRequest()
	req.ReplicaID, req.MaxWaitMillis, req.MinBytes, req.MaxBytes, req.SessionEpoch = -1, int32((100 * time.Millisecond).Milliseconds()), 1, limit, -1
	p := kmsg.NewFetchRequestTopicPartition()
	p.Partition, p.FetchOffset, p.CurrentLeaderEpoch, p.PartitionMaxBytes = q.partition, offset, q.epoch, limit
	t := kmsg.NewFetchRequestTopic()
	t.Topic, t.TopicID, t.Partitions = q.topic, q.topicID, []kmsg.FetchRequestTopicPartition{p}
	req.Topics = append(req.Topics, t)
	kresp, buf, err := r.conn.request(ctx, req, maxFetchVersion)
	if err != nil {
		return err
	}
	defer buf.Release()
	resp := kresp.(*kmsg.FetchResponse)
	if err := kerr.ErrorForCode(resp.ErrorCode); err != nil {
		return err
	}
	for _, t := range resp.Topics {
		for _, p := range t.Partitions {
			if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
				return err
			}
			for rest := p.RecordBatches; len(rest) > 0; {
				var b protocol.Batch
				if b, rest, err = protocol.ParseBatch(rest); errors.Is(err, protocol.ErrIncomplete) {
					break
				} else if err != nil {
					return err
				}
				visit(b)
			}
		}
	}
	return nil
}
