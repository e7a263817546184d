package verify

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

type partitionKey struct {
	topic     string
	partition int32
}

// logState is what the cluster said about a partition's log.
type logState struct {
	Range
	exists bool
	err    error
}

// cluster is one side: what it holds, and where to read it.
type cluster struct {
	client   *kgo.Client
	topicIDs map[string][16]byte
	logs     map[partitionKey]logState // asked once, at the start

	ours   func(producerID int64) bool // of the mirror: whether it is one of kmirror's
	fenced map[int64]partitionKey      // the source partitions that fenced producer IDs copy

	unpacking sync.Mutex // held by the one partition that unpacks more than answerBudget

	mu      sync.Mutex
	leaders map[partitionKey]int32
}

// openCluster asks for the wanted topics' partitions, their leaders and their ranges.
func openCluster(ctx context.Context, client *kgo.Client, wanted func(string) bool) (*cluster, error) {
	admin := kadm.NewClient(client)
	metadata, err := admin.Metadata(ctx)
	if err != nil {
		return nil, err
	}
	c := &cluster{
		client: client, ours: isOurs,
		topicIDs: map[string][16]byte{}, logs: map[partitionKey]logState{}, leaders: map[partitionKey]int32{},
	}
	var names []string
	for name, topic := range metadata.Topics {
		if wanted(name) {
			names = append(names, name)
			c.topicIDs[name] = topic.ID
			c.note(topic)
		}
	}
	if len(names) == 0 {
		return c, nil
	}
	starts, err := admin.ListStartOffsets(ctx, names...)
	if err != nil {
		return nil, err
	}
	ends, err := admin.ListCommittedOffsets(ctx, names...)
	if err != nil {
		return nil, err
	}
	for key, state := range c.logs {
		start, okStart := starts.Lookup(key.topic, key.partition)
		end, okEnd := ends.Lookup(key.topic, key.partition)
		if !okStart || !okEnd {
			state.err = errors.Join(state.err, errors.New("its offsets are not known"))
		}
		state.err = errors.Join(state.err, start.Err, end.Err)
		state.Range = Range{Start: start.Offset, End: end.Offset}
		c.logs[key] = state
	}
	return c, nil
}

// note keeps a topic's partitions and leaders.
func (c *cluster) note(topic kadm.TopicDetail) {
	for _, p := range topic.Partitions {
		key := partitionKey{topic.Topic, p.Partition}
		c.leaders[key] = p.Leader
		c.logs[key] = logState{exists: true}
	}
}

// partitions lists the partitions by topic and number.
func (c *cluster) partitions() []partitionKey {
	keys := make([]partitionKey, 0, len(c.logs))
	for key := range c.logs {
		keys = append(keys, key)
	}
	slices.SortFunc(keys, func(a, b partitionKey) int {
		if order := strings.Compare(a.topic, b.topic); order != 0 {
			return order
		}
		return int(a.partition) - int(b.partition)
	})
	return keys
}

// leader returns the last known leader of a partition, -1 if there is none.
func (c *cluster) leader(key partitionKey) int32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.leaders[key]
}

// refreshLeader asks again who leads the partition.
func (c *cluster) refreshLeader(ctx context.Context, key partitionKey) error {
	metadata, err := kadm.NewClient(c.client).Metadata(ctx, key.topic)
	if err != nil {
		return err
	}
	topic, known := metadata.Topics[key.topic]
	if !known || topic.Err != nil {
		return fmt.Errorf("topic %s: %w", key.topic, topic.Err)
	}
	if id := c.topicIDs[key.topic]; id != [16]byte(topic.ID) {
		return errTopicRecreated
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range topic.Partitions {
		c.leaders[partitionKey{key.topic, p.Partition}] = p.Leader
	}
	return nil
}

// startOffset asks where the partition's log starts now.
func (c *cluster) startOffset(ctx context.Context, key partitionKey) (int64, error) {
	starts, err := kadm.NewClient(c.client).ListStartOffsets(ctx, key.topic)
	if err != nil {
		return 0, err
	}
	start, known := starts.Lookup(key.topic, key.partition)
	if !known {
		return 0, errors.New("its start is not known")
	}
	return start.Offset, start.Err
}

// lastStableOffset asks where the partition's committed records end now.
func (c *cluster) lastStableOffset(ctx context.Context, key partitionKey) (int64, error) {
	ends, err := kadm.NewClient(c.client).ListCommittedOffsets(ctx, key.topic)
	if err != nil {
		return 0, err
	}
	end, known := ends.Lookup(key.topic, key.partition)
	if !known {
		return 0, errors.New("its end is not known")
	}
	return end.Offset, end.Err
}
