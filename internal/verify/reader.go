package verify

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/protocol"
)

var (
	errTopicRecreated = errors.New("the topic was deleted and made again meanwhile")
	errDeleted        = errors.New("records were deleted while they were read")
)

const (
	fetchBytes   = 512 << 10
	fetchTimeout = 30 * time.Second
	maxTries     = 20
	retryWait    = 500 * time.Millisecond
)

// item is a record and, where it came in a batch of kmirror, its position: the source offset of a log without holes
// (producer epoch and sequence, see docs/protocol.md); -1 otherwise.
type item struct {
	record   *kgo.Record
	position int64
}

// reader streams the committed records [next, end) of one partition.
//
// Invariant: items holds what was fetched and not yet taken, in order; at most one answer and what a window asked for.
type reader struct {
	cluster *cluster
	key     partitionKey
	ours    func(producerID int64) bool // nil: every record counts
	share   func(*kgo.Record) bool      // of a repartitioned topic, else nil: which records are compared
	other   func(*kgo.Record)           // nil, or told of those that aren't
	first   int64                       // the log's start
	next    int64                       // next offset to fetch
	end     int64
	items   []item
	foreign int64 // records that ours refused
	allowed *allowance
}

func newReader(c *cluster, key partitionKey, log Range, ours func(int64) bool, allowed *allowance) *reader {
	return &reader{cluster: c, key: key, ours: ours, first: log.Start, next: log.Start, end: log.End, allowed: allowed}
}

// clone returns a reader that begins anew at offset.
func (r *reader) clone(offset int64) *reader {
	c := newReader(r.cluster, r.key, Range{Start: offset, End: r.end}, r.ours, r.allowed)
	c.share = r.share
	return c
}

// window returns up to n items without taking them; fewer only at the end.
func (r *reader) window(ctx context.Context, n int) ([]item, error) {
	for len(r.items) < n && r.next < r.end {
		if err := r.fetch(ctx); err != nil {
			return nil, err
		}
	}
	return r.items[:min(n, len(r.items))], nil
}

// peek returns the next item without taking it, nil at the end.
func (r *reader) peek(ctx context.Context) (*item, error) {
	if len(r.items) == 0 {
		if _, err := r.window(ctx, 1); err != nil {
			return nil, err
		}
		if len(r.items) == 0 {
			return nil, nil
		}
	}
	return &r.items[0], nil
}

// take drops the item that peek returned.
func (r *reader) take() {
	r.items[0].record = nil // the rest of the slice mustn't hold it
	r.items = r.items[1:]
}

// fetch reads on at next and appends what counts to items.
func (r *reader) fetch(ctx context.Context) error {
	for try := 1; ; try++ {
		err := r.fetchOnce(ctx)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, kerr.OffsetOutOfRange):
			return errDeleted
		case errors.Is(err, errTooMuch) && r.allowed.extend():
			continue
		case ctx.Err() != nil, errors.Is(err, errTopicRecreated), errors.Is(err, errTooMuch), try == maxTries, !retriable(err):
			return fmt.Errorf("offset %d: %w", r.next, err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(retryWait):
		}
		if err := r.cluster.refreshLeader(ctx, r.key); errors.Is(err, errTopicRecreated) {
			return err
		}
	}
}

// retriable tells whether asking again may help: a moved leader, a broker that is down.
func retriable(err error) bool {
	var code *kerr.Error
	return !errors.As(err, &code) || code.Retriable
}

func (r *reader) fetchOnce(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	leader := r.cluster.leader(r.key)
	if leader < 0 {
		return errors.New("no leader")
	}
	resp, err := r.cluster.client.Broker(int(leader)).Request(ctx, r.request())
	if err != nil {
		return err
	}
	fetched := resp.(*kmsg.FetchResponse)
	if err := kerr.ErrorForCode(fetched.ErrorCode); err != nil {
		return err
	}
	if len(fetched.Topics) != 1 || len(fetched.Topics[0].Partitions) != 1 {
		return errors.New("the answer is not about the partition asked for")
	}
	return r.decode(&fetched.Topics[0].Partitions[0])
}

func (r *reader) request() *kmsg.FetchRequest {
	partition := kmsg.NewFetchRequestTopicPartition()
	partition.Partition = r.key.partition
	partition.FetchOffset = r.next
	partition.PartitionMaxBytes = fetchBytes
	topic := kmsg.NewFetchRequestTopic()
	topic.Topic, topic.TopicID = r.key.topic, r.cluster.topicIDs[r.key.topic]
	topic.Partitions = append(topic.Partitions, partition)
	req := kmsg.NewPtrFetchRequest()
	req.MaxWaitMillis, req.MinBytes, req.MaxBytes, req.IsolationLevel = 500, 1, fetchBytes, 1
	req.SessionEpoch = -1
	req.Topics = append(req.Topics, topic)
	return req
}

// decode appends the records of an answer that lie before end. Aborted and control records are left out.
func (r *reader) decode(answer *kmsg.FetchResponseTopicPartition) error {
	room := budget{left: r.allowed.bytes()}
	if answer.RecordBatches = room.fit(answer.RecordBatches); room.exceeded && len(answer.RecordBatches) == 0 {
		return errTooMuch
	}
	positions, times := batchPositions(answer.RecordBatches), findAppendTimes(answer.RecordBatches)
	partition, next := kgo.ProcessFetchPartition(kgo.ProcessFetchPartitionOpts{
		Offset: r.next, IsolationLevel: kgo.ReadCommitted(), Topic: r.key.topic, Partition: r.key.partition,
	}, answer, &room, nil)
	switch {
	case partition.Err == nil:
	case !room.exceeded:
		return partition.Err
	case next == r.next:
		return errTooMuch // the first batch alone
	}
	for _, record := range partition.Records {
		times.set(record)
		switch {
		case record.Offset >= r.end:
		case r.ours != nil && !r.ours(record.ProducerID):
			r.foreign++
		case r.share != nil && !r.share(record):
			if r.other != nil {
				r.other(record)
			}
		default:
			r.items = append(r.items, item{record, positions.of(record)})
		}
	}
	r.next = min(next, r.end) // what lies behind end is read again if end grows
	return nil
}

// batchPosition says where a batch lies and which position its first record has.
type batchPosition struct{ base, end, position int64 }

type positions []batchPosition

// batchPositions reads the headers of kmirror's batches.
func batchPositions(b []byte) (found positions) {
	for {
		batch, rest, err := protocol.ParseBatch(b)
		if err != nil { // the last batch is cut off, or the old format, which has no positions
			return found
		}
		b = rest
		if isOurs(batch.ProducerID()) && !batch.Control() {
			position := int64(batch.ProducerEpoch())<<30 | int64(batch.BaseSequence())
			found = append(found, batchPosition{batch.BaseOffset(), batch.EndOffset(), position})
		}
	}
}

// of returns the record's position; records are asked for in the order of their batches or not at all.
func (p *positions) of(record *kgo.Record) int64 {
	for len(*p) > 0 && (*p)[0].end <= record.Offset {
		*p = (*p)[1:]
	}
	if len(*p) == 0 || record.Offset < (*p)[0].base || !isOurs(record.ProducerID) {
		return -1
	}
	return (*p)[0].position + record.Offset - (*p)[0].base
}
