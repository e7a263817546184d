package forwarder

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/protocol"
)

// journal is a topic of kmirror's own on the mirror: one partition, never cleaned up, written with acks=all and read from a given offset to the
// end. Safe for concurrent use: readers don't wait for each other.
type journal struct {
	client *kgo.Client
	topic  string
	rf     int16
	made   atomic.Bool
}

// journalFetchBytes is what one Fetch of a journal brings, or one batch.
const journalFetchBytes = 1 << 20

// append writes values in one request, a record each.
func (j *journal) append(ctx context.Context, values [][]byte) error {
	records := make([]*kgo.Record, len(values))
	for i, value := range values {
		records[i] = &kgo.Record{Topic: j.topic, Value: value}
	}
	if err := j.client.ProduceSync(ctx, records...).FirstErr(); err != nil {
		return fmt.Errorf("topic %s: %w", j.topic, err)
	}
	return nil
}

// make creates the topic once a process.
func (j *journal) make(ctx context.Context) error {
	if j.made.Load() {
		return nil
	}
	req := kmsg.NewPtrCreateTopicsRequest()
	req.TimeoutMillis = 10_000
	topic := kmsg.NewCreateTopicsRequestTopic()
	topic.Topic, topic.NumPartitions, topic.ReplicationFactor = j.topic, 1, j.rf
	for _, kv := range [][2]string{{"cleanup.policy", "delete"}, {"retention.ms", "-1"}, {"retention.bytes", "-1"}} {
		c := kmsg.NewCreateTopicsRequestTopicConfig()
		c.Name, c.Value = kv[0], kmsg.StringPtr(kv[1])
		topic.Configs = append(topic.Configs, c)
	}
	req.Topics = append(req.Topics, topic)
	resp, err := req.RequestWith(ctx, j.client)
	if err != nil {
		return fmt.Errorf("create topic %s: %w", j.topic, err)
	}
	for _, t := range resp.Topics {
		if err := kerr.ErrorForCode(t.ErrorCode); err != nil && !errors.Is(err, kerr.TopicAlreadyExists) {
			return fmt.Errorf("create topic %s: %w", j.topic, err)
		}
	}
	j.made.Store(true)
	return nil
}

// journalLeader is the broker that leads a journal's partition.
type journalLeader struct {
	broker int32
	epoch  int32
	id     protocol.TopicID
}

// place is an offset up to which a journal was read, and the leader epoch of that, -1: not known.
type place struct {
	offset int64
	epoch  int32
}

// read visits the records from a place to the end as of now, and returns that end. With errCutOff the topic lost records below the place in an unclean election, or got a new leader
// while they were read, so that nobody knows; nothing was visited.
func (j *journal) read(ctx context.Context, from place, visit func(*kgo.Record)) (next place, err error) {
	next = from
	end, cut := int64(-1), false
	err = j.try(ctx, func(at journalLeader) (err error) {
		if end < 0 {
			if cut, err = j.cutOff(ctx, at, from); cut || err != nil {
				return err
			}
			if end, err = j.offset(ctx, at, latestOffset); err != nil {
				return err
			}
			next.epoch = at.epoch
		}
		next.epoch = min(next.epoch, at.epoch) // what a later leader took away shows by an earlier end of this epoch
		for next.offset < end && err == nil {
			if next.offset, err = j.fetch(ctx, at, next.offset, visit); errors.Is(err, kerr.OffsetOutOfRange) { // somebody deleted records
				var begin int64
				begin, err = j.offset(ctx, at, earliestOffset)
				next.offset = max(next.offset, begin)
			}
		}
		return err
	})
	if err == nil && cut {
		err = fmt.Errorf("topic %s: %w", j.topic, errCutOff)
	}
	return next, err
}

var errCutOff = errors.New("the topic no longer holds what was read of it")

// cutOff reports whether the topic no longer holds, up to a place, what it held in that leader epoch (KIP-101).
func (j *journal) cutOff(ctx context.Context, at journalLeader, from place) (bool, error) {
	if from.epoch < 0 || from.offset == 0 {
		return false, nil
	}
	req := kmsg.NewPtrOffsetForLeaderEpochRequest()
	req.ReplicaID = -1
	p := kmsg.NewOffsetForLeaderEpochRequestTopicPartition()
	p.LeaderEpoch = from.epoch
	req.Topics = []kmsg.OffsetForLeaderEpochRequestTopic{{Topic: j.topic, Partitions: []kmsg.OffsetForLeaderEpochRequestTopicPartition{p}}}
	kresp, err := j.client.Broker(int(at.broker)).Request(ctx, req)
	if err != nil {
		return false, err
	}
	resp := kresp.(*kmsg.OffsetForLeaderEpochResponse)
	if len(resp.Topics) != 1 || len(resp.Topics[0].Partitions) != 1 {
		return false, errOtherPartition
	}
	answer := resp.Topics[0].Partitions[0]
	return answer.EndOffset < from.offset, kerr.ErrorForCode(answer.ErrorCode)
}

// end returns the topic's high watermark.
func (j *journal) end(ctx context.Context) (end int64, err error) {
	err = j.try(ctx, func(at journalLeader) (err error) {
		end, err = j.offset(ctx, at, latestOffset)
		return err
	})
	return end, err
}

// try has do ask the topic's leader, and looks for the leader again after an error that may pass: a topic just created may have none yet.
func (j *journal) try(ctx context.Context, do func(at journalLeader) error) error {
	wait := newBackoff(50*time.Millisecond, time.Second)
	for {
		at, err := j.leader(ctx)
		if err == nil {
			err = do(at)
		}
		if err == nil {
			return nil
		}
		if code, ok := errors.AsType[*kerr.Error](err); ok && !code.Retriable {
			return fmt.Errorf("topic %s: %w", j.topic, err)
		}
		if sleep(ctx, wait.next()); ctx.Err() != nil {
			return fmt.Errorf("topic %s: %w", j.topic, errors.Join(err, context.Cause(ctx)))
		}
	}
}

// journalMetadataTimeout bounds one question for the leader. The client asks any broker: after this time another one.
const journalMetadataTimeout = 3 * time.Second

// leader asks for it each time: one that was remembered could be a woken old leader, which tells of an older end (F5).
func (j *journal) leader(ctx context.Context) (at journalLeader, err error) {
	ctx, cancel := context.WithTimeout(ctx, journalMetadataTimeout)
	defer cancel()
	view, err := askView(ctx, j.client, []string{j.topic})
	if err != nil {
		return at, err
	}
	switch t := view.topics[j.topic]; {
	case t == nil:
		return at, kerr.UnknownTopicOrPartition
	case t.err != nil:
		return at, t.err
	default:
		led := view.leadership(j.topic, 0)
		at = journalLeader{led.leader, led.epoch, t.id}
	}
	if at.broker < 0 {
		return at, kerr.LeaderNotAvailable
	}
	return at, nil
}

// fetch reads once and returns the offset behind what it visited. It asks the broker and not through the client's consumer, which has one queue for
// all topics.
func (j *journal) fetch(ctx context.Context, at journalLeader, from int64, visit func(*kgo.Record)) (next int64, err error) {
	req := kmsg.NewPtrFetchRequest()
	req.MaxWaitMillis, req.MinBytes, req.MaxBytes, req.SessionEpoch = 500, 1, journalFetchBytes, -1
	p := kmsg.NewFetchRequestTopicPartition()
	p.FetchOffset, p.PartitionMaxBytes = from, journalFetchBytes
	t := kmsg.NewFetchRequestTopic()
	t.Topic, t.TopicID, t.Partitions = j.topic, at.id, []kmsg.FetchRequestTopicPartition{p}
	req.Topics = append(req.Topics, t)
	kresp, err := j.client.Broker(int(at.broker)).Request(ctx, req)
	if err != nil {
		return from, err
	}
	resp := kresp.(*kmsg.FetchResponse)
	if err := kerr.ErrorForCode(resp.ErrorCode); err != nil {
		return from, err
	}
	if len(resp.Topics) != 1 || len(resp.Topics[0].Partitions) != 1 {
		return from, errOtherPartition
	}
	found, next := kgo.ProcessFetchPartition(kgo.ProcessFetchPartitionOpts{Offset: from, Topic: j.topic}, &resp.Topics[0].Partitions[0], kgo.DefaultDecompressor(), nil)
	if found.Err != nil {
		return from, found.Err
	}
	for _, rec := range found.Records {
		visit(rec)
	}
	return next, nil
}

var errOtherPartition = errors.New("the answer isn't about the partition asked for")

// offset returns the topic's first offset or its high watermark.
func (j *journal) offset(ctx context.Context, at journalLeader, timestamp int64) (int64, error) {
	req := kmsg.NewPtrListOffsetsRequest()
	topic := kmsg.NewListOffsetsRequestTopic()
	topic.Topic = j.topic
	part := kmsg.NewListOffsetsRequestTopicPartition()
	part.Timestamp = timestamp
	topic.Partitions = append(topic.Partitions, part)
	req.Topics = append(req.Topics, topic)
	kresp, err := j.client.Broker(int(at.broker)).Request(ctx, req)
	if err != nil {
		return -1, err
	}
	resp := kresp.(*kmsg.ListOffsetsResponse)
	if len(resp.Topics) != 1 || len(resp.Topics[0].Partitions) != 1 {
		return -1, errOtherPartition
	}
	answer := resp.Topics[0].Partitions[0]
	if err := kerr.ErrorForCode(answer.ErrorCode); err != nil {
		return -1, err
	}
	return answer.Offset, nil
}
