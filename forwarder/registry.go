package forwarder

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/zap"
)

// segmentRecord is one record of the segments topic: source offsets from Source on have the positions from Position on, in that
// generation of that stream (rules N3 to N5). Of several births of a stream and generation, and of several segments at one source
// offset, the first in the log counts, whoever wrote it.
type segmentRecord struct {
	SourceCluster string `json:"source_cluster"`
	Topic         string `json:"topic"` // for people; the ID decides
	TopicID       string `json:"topic_id"`
	Partition     int32  `json:"partition"`
	MirrorTopicID string `json:"mirror_topic_id"`
	Generation    int32  `json:"generation"`
	Source        int64  `json:"source_offset"`
	Position      int64  `json:"position"`
	Birth         bool   `json:"birth"`  // else a hole's end
	Writer        string `json:"writer"` // for people
}

func (r *segmentRecord) identity() (id identity, err error) {
	id = identity{sourceCluster: r.SourceCluster, partition: r.Partition, generation: r.Generation}
	if id.topicID, err = parseTopicID(r.TopicID); err == nil {
		id.mirrorTopicID, err = parseTopicID(r.MirrorTopicID)
	}
	return id, err
}

// registry is the segments topic on the mirror, read to its end whenever asked.
type registry struct {
	client *kgo.Client // on the mirror
	topic  string
	source string // source cluster ID
	writer string
	rf     int16
	log    *zap.Logger

	mu       sync.Mutex // held for a whole read or write: they are rare and batched
	known    map[identity]*numbering
	latest   map[identity]int32 // identity of generation 0 -> highest generation seen
	position int64              // offset up to which the topic was read
	made     bool
}

func newRegistry(client *kgo.Client, name, source, writer string, rf int16, log *zap.Logger) *registry {
	return &registry{
		client: client, topic: "__kmirror." + name + ".segments", source: source, writer: writer, rf: rf, log: log,
		known: map[identity]*numbering{}, latest: map[identity]int32{},
	}
}

// refresh reads the topic to its end. Every session does so before it starts.
func (r *registry) refresh(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.make(ctx); err != nil {
		return err
	}
	return r.readToEnd(ctx)
}

// lookUp returns a copy of the numbering of the stream's latest generation; false if it was never born. id's generation is ignored.
func (r *registry) lookUp(id identity) (numbering, bool) {
	id.generation = 0
	r.mu.Lock()
	defer r.mu.Unlock()
	generation, ok := r.latest[id]
	if !ok {
		return numbering{}, false
	}
	id.generation = generation
	n := *r.known[id]
	n.segments = append([]segment(nil), n.segments...)
	return n, true
}

// adopt writes the segments, reads to the end and leaves in force, for each stream and source offset, what stands first.
func (r *registry) adopt(ctx context.Context, segments []segmentRecord) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.make(ctx); err != nil {
		return err
	}
	records := make([]*kgo.Record, len(segments))
	for i := range segments {
		segments[i].SourceCluster, segments[i].Writer = r.source, r.writer
		value, err := json.Marshal(&segments[i])
		if err != nil {
			return err
		}
		records[i] = &kgo.Record{Topic: r.topic, Value: value}
	}
	if err := r.client.ProduceSync(ctx, records...).FirstErr(); err != nil {
		return fmt.Errorf("topic %s: %w", r.topic, err)
	}
	return r.readToEnd(ctx)
}

// make creates the topic once a process.
func (r *registry) make(ctx context.Context) error {
	if r.made {
		return nil
	}
	req := kmsg.NewPtrCreateTopicsRequest()
	req.TimeoutMillis = 10_000
	topic := kmsg.NewCreateTopicsRequestTopic()
	topic.Topic, topic.NumPartitions, topic.ReplicationFactor = r.topic, 1, r.rf
	for _, kv := range [][2]string{{"cleanup.policy", "delete"}, {"retention.ms", "-1"}, {"retention.bytes", "-1"}} {
		c := kmsg.NewCreateTopicsRequestTopicConfig()
		c.Name, c.Value = kv[0], kmsg.StringPtr(kv[1])
		topic.Configs = append(topic.Configs, c)
	}
	req.Topics = append(req.Topics, topic)
	resp, err := req.RequestWith(ctx, r.client)
	if err != nil {
		return fmt.Errorf("create topic %s: %w", r.topic, err)
	}
	for _, t := range resp.Topics {
		if err := kerr.ErrorForCode(t.ErrorCode); err != nil && !errors.Is(err, kerr.TopicAlreadyExists) {
			return fmt.Errorf("create topic %s: %w", r.topic, err)
		}
	}
	r.made = true
	return nil
}

func (r *registry) readToEnd(ctx context.Context) error {
	end, err := r.end(ctx)
	if err != nil {
		return fmt.Errorf("topic %s: %w", r.topic, err)
	}
	if r.position >= end {
		return nil
	}
	r.client.AddConsumePartitions(map[string]map[int32]kgo.Offset{r.topic: {0: kgo.NewOffset().At(r.position)}})
	defer r.client.RemoveConsumePartitions(map[string][]int32{r.topic: {0}})
	for r.position < end {
		fetches := r.client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return fmt.Errorf("topic %s: %w", r.topic, err)
		}
		fetches.EachRecord(func(rec *kgo.Record) {
			if rec.Offset >= r.position {
				r.position = rec.Offset + 1
				r.apply(rec)
			}
		})
	}
	return nil
}

// end returns the topic's high watermark. A topic just created may have no leader yet: ask again.
func (r *registry) end(ctx context.Context) (int64, error) {
	for {
		req := kmsg.NewPtrListOffsetsRequest()
		topic := kmsg.NewListOffsetsRequestTopic()
		topic.Topic = r.topic
		part := kmsg.NewListOffsetsRequestTopicPartition()
		part.Timestamp = -1
		topic.Partitions = append(topic.Partitions, part)
		req.Topics = append(req.Topics, topic)
		resp, err := req.RequestWith(ctx, r.client)
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

// apply takes one record. What isn't kmirror's was written by somebody who had no business here; it decides nothing.
func (r *registry) apply(rec *kgo.Record) {
	var s segmentRecord
	err := json.Unmarshal(rec.Value, &s)
	if err == nil {
		var id identity
		if id, err = s.identity(); err == nil {
			r.insert(id, segment{s.Source, s.Position}, s.Birth)
			return
		}
	}
	r.log.Warn("record that isn't kmirror's in its segments topic; ignored", zap.String("topic", r.topic), zap.Int64("offset", rec.Offset), zap.Error(err))
}

// insert keeps a segment unless an earlier record decided it.
func (r *registry) insert(id identity, s segment, birth bool) {
	n := r.known[id]
	switch {
	case n == nil && !birth:
		return // its birth was never written: nothing was appended by it
	case n == nil:
		n = &numbering{generation: id.generation, producerID: id.producerID()}
		r.known[id] = n
	case birth || s.source <= n.segments[len(n.segments)-1].source:
		return
	}
	n.segments = append(n.segments, s)
	first := id
	first.generation = 0
	r.latest[first] = max(r.latest[first], id.generation)
}
