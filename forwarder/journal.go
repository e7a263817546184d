package forwarder

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// journal is a topic of kmirror's own on the mirror: one partition, never cleaned up, written with acks=all and read from a given offset to the
// end. It isn't safe for concurrent use, but for append.
type journal struct {
	client *kgo.Client
	topic  string
	rf     int16
	made   bool
}

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
	if j.made {
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
	j.made = true
	return nil
}

// read visits the records from an offset to the end as of now, and returns that end.
func (j *journal) read(ctx context.Context, from int64, visit func(*kgo.Record)) (end int64, err error) {
	if end, err = j.end(ctx); err != nil {
		return from, fmt.Errorf("topic %s: %w", j.topic, err)
	}
	if from >= end {
		return from, nil
	}
	j.client.AddConsumePartitions(map[string]map[int32]kgo.Offset{j.topic: {0: kgo.NewOffset().At(from)}})
	defer j.client.RemoveConsumePartitions(map[string][]int32{j.topic: {0}})
	for from < end {
		fetches := j.client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return from, fmt.Errorf("topic %s: %w", j.topic, err)
		}
		fetches.EachRecord(func(rec *kgo.Record) {
			if rec.Topic == j.topic && rec.Offset >= from {
				from = rec.Offset + 1
				visit(rec)
			}
		})
	}
	return from, nil
}

// end returns the topic's high watermark. A topic just created may have no leader yet: ask again.
func (j *journal) end(ctx context.Context) (int64, error) {
	for {
		req := kmsg.NewPtrListOffsetsRequest()
		topic := kmsg.NewListOffsetsRequestTopic()
		topic.Topic = j.topic
		part := kmsg.NewListOffsetsRequestTopicPartition()
		part.Timestamp = -1
		topic.Partitions = append(topic.Partitions, part)
		req.Topics = append(req.Topics, topic)
		resp, err := req.RequestWith(ctx, j.client)
		if err == nil && len(resp.Topics) == 1 && len(resp.Topics[0].Partitions) == 1 {
			p := resp.Topics[0].Partitions[0]
			if err = kerr.ErrorForCode(p.ErrorCode); err == nil {
				return p.Offset, nil
			}
		}
		if err != nil && !kerr.IsRetriable(err) {
			return 0, err
		}
		select {
		case <-ctx.Done():
			return 0, errors.Join(err, context.Cause(ctx))
		case <-time.After(100 * time.Millisecond):
		}
	}
}
