package forwarder

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/zap"

	"kmirror/protocol"
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
	Birth         bool   `json:"birth"` // else a hole's end
	// Partitions is how many the source topic had, with a birth: one above it is new in a topic that was mirrored before.
	Partitions int32  `json:"partitions,omitempty"`
	Writer     string `json:"writer"` // for people
}

func (r *segmentRecord) identity() (id identity, err error) {
	id = identity{sourceCluster: r.SourceCluster, partition: r.Partition, generation: r.Generation}
	if id.topicID, err = parseTopicID(r.TopicID); err == nil {
		id.mirrorTopicID, err = parseTopicID(r.MirrorTopicID)
	}
	return id, err
}

// settingsRecord says what kmirror last set on a mirror topic (null: back to the default). The last one in the log counts.
type settingsRecord struct {
	SourceCluster string             `json:"source_cluster"`
	Topic         string             `json:"topic"` // for people; the ID decides
	TopicID       string             `json:"topic_id"`
	MirrorTopicID string             `json:"mirror_topic_id"`
	Settings      map[string]*string `json:"settings"` // never null: it tells this kind of record from the others
	Writer        string             `json:"writer"`   // for people

	mirrorName string
}

func newSettingsRecord(source, mirror *topicView, settings map[string]*string) settingsRecord {
	return settingsRecord{
		Topic: source.name, TopicID: hex.EncodeToString(source.id[:]), MirrorTopicID: hex.EncodeToString(mirror.id[:]), Settings: settings,
		mirrorName: mirror.name,
	}
}

// topicPair is a source topic and its mirror topic.
type topicPair struct{ source, mirror protocol.TopicID }

// pairing is what is known of a topicPair.
type pairing struct {
	settings   map[string]*string // as kmirror left them, nil: it set none
	born       bool               // with a stream
	partitions int32              // of the source topic at the first birth, 0: not known
}

// pairing returns the entry of a pair, made if there is none. r.mu is held.
func (r *registry) pairing(pair topicPair) *pairing {
	p := r.pairs[pair]
	if p == nil {
		p = &pairing{}
		r.pairs[pair] = p
	}
	return p
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
	pairs    map[topicPair]*pairing
	position int64 // offset up to which the topic was read
	made     bool
}

func newRegistry(client *kgo.Client, name, source, writer string, rf int16, log *zap.Logger) *registry {
	return &registry{
		client: client, topic: "__kmirror." + name + ".segments", source: source, writer: writer, rf: rf, log: log,
		known: map[identity]*numbering{}, latest: map[identity]int32{}, pairs: map[topicPair]*pairing{},
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

// settings returns what kmirror last set on a mirror topic; false if it never set anything there.
func (r *registry) settings(source, mirror protocol.TopicID) (map[string]*string, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.pairs[topicPair{source, mirror}]
	if p == nil {
		return nil, false
	}
	return p.settings, p.settings != nil
}

// bornWith returns how many partitions a source topic had when its first stream into a mirror topic was born, 0 if that isn't known.
func (r *registry) bornWith(source, mirror protocol.TopicID) int32 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.pairs[topicPair{source, mirror}]; p != nil {
		return p.partitions
	}
	return 0
}

// lives tells of a mirror topic whether the source topic has a stream in it, and whether topics that had the same place before do.
func (r *registry) lives(source, mirror protocol.TopicID) (this, others bool) {
	if mirror == (protocol.TopicID{}) {
		return false, false // a mirror that is older than topic IDs
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for pair, p := range r.pairs {
		if pair.mirror == mirror && p.born {
			this, others = this || pair.source == source, others || pair.source != source
		}
	}
	return this, others
}

// adopt writes the segments, reads to the end and leaves in force, for each stream and source offset, what stands first.
func (r *registry) adopt(ctx context.Context, segments []segmentRecord) error {
	return r.write(ctx, len(segments), func(i int) any {
		segments[i].SourceCluster, segments[i].Writer = r.source, r.writer
		return &segments[i]
	})
}

// keepSettings writes what kmirror has set.
func (r *registry) keepSettings(ctx context.Context, records []settingsRecord) error {
	return r.write(ctx, len(records), func(i int) any {
		records[i].SourceCluster, records[i].Writer = r.source, r.writer
		return &records[i]
	})
}

// write appends n records in one request and reads to the end.
func (r *registry) write(ctx context.Context, n int, record func(i int) any) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.make(ctx); err != nil {
		return err
	}
	records := make([]*kgo.Record, n)
	for i := range records {
		value, err := json.Marshal(record(i))
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
	if err := r.applyValue(rec.Value); err != nil {
		r.log.Warn("record that isn't kmirror's in its segments topic; ignored", zap.String("topic", r.topic), zap.Int64("offset", rec.Offset), zap.Error(err))
	}
}

func (r *registry) applyValue(value []byte) error {
	var kept settingsRecord
	if err := json.Unmarshal(value, &kept); err != nil {
		return err
	}
	if kept.Settings != nil {
		return r.insertSettings(&kept)
	}
	var s segmentRecord
	if err := json.Unmarshal(value, &s); err != nil {
		return err
	}
	id, err := s.identity()
	if err == nil {
		r.insert(id, segment{s.Source, s.Position}, s.Birth)
		if s.Birth && s.SourceCluster == r.source {
			if p := r.pairing(topicPair{id.topicID, id.mirrorTopicID}); !p.born {
				p.born, p.partitions = true, s.Partitions
			}
		}
	}
	return err
}

func (r *registry) insertSettings(kept *settingsRecord) error {
	source, err := parseTopicID(kept.TopicID)
	if err != nil {
		return err
	}
	mirror, err := parseTopicID(kept.MirrorTopicID)
	if err == nil && kept.SourceCluster == r.source {
		r.pairing(topicPair{source, mirror}).settings = kept.Settings
	}
	return err
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
