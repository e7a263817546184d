package forwarder

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/zap"

	"kmirror/protocol"
)

// topicPartition names a source partition.
type topicPartition struct {
	topic     string
	partition int32
}

// commit is one partition's checkpoint on its way to the source.
type commit struct {
	topicPartition
	topicID protocol.TopicID
	checkpoint
}

// group is kmirror's membership in its consumer group on the source: Kafka's own protocol shares partitions out and says who is alive. It
// decides who works; safety never rests on it (docs/guarantees.md). It consumes nothing.
type group struct {
	client         *kgo.Client // on the source
	name           string
	instanceID     string // static membership (KIP-345), so that a restarted process has its partitions back at once; "": dynamic
	sessionTimeout time.Duration
	log            *zap.Logger
	// topics returns the topics to mirror and their partition counts, as this member knows them.
	topics func() map[string]int32
	// assigned is called with the whole new assignment, on the group's goroutine. losses counts how often the membership was lost: where it
	// grew, others may have owned the same partitions meanwhile. topics is what this member had asked for.
	assigned func(owned map[topicPartition]bool, losses int, topics map[string]int32)

	changed   chan struct{} // size 1: topics may have changed
	confirmed atomic.Int64  // bootTime at which the last confirmed membership was asked for, 0: none

	mu         sync.Mutex // guards the fields below; commits come from elsewhere
	memberID   string
	generation int32
	owned      map[topicPartition]bool // run's goroutine only
	subscribed map[string]int32        // the leader's view at the last assignment; run's goroutine only
	leading    bool                    // run's goroutine only
	losses     int                     // run's goroutine only
}

const assignmentProtocol = "kmirror-sticky"

// mayAct reports whether the membership was confirmed within the session timeout (rule S2).
func (g *group) mayAct() bool {
	at := g.confirmed.Load()
	return at != 0 && bootTime()-time.Duration(at) < g.sessionTimeout
}

// run keeps the membership until ctx ends. It doesn't leave: leave does, after the streams were drained.
func (g *group) run(ctx context.Context) {
	g.generation = -1
	backoff := newBackoff(100*time.Millisecond, 3*time.Second)
	down := false
	for ctx.Err() == nil {
		err := g.session(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil || errors.Is(err, kerr.RebalanceInProgress) || errors.Is(err, kerr.MemberIDRequired) {
			backoff.reset()
			down = false
			continue
		}
		g.lost(err)
		if !down {
			g.log.Warn("group membership lost, joining again", zap.String("group", g.name), zap.Error(err))
			down = true
		}
		sleep(ctx, backoff.next())
	}
}

// lost forgets what the error says is no longer valid.
func (g *group) lost(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case errors.Is(err, kerr.FencedInstanceID):
		// Another process has our instance ID: the group must not be fought over, so join as a member without one.
		g.log.Error("another instance has this instance ID; going on without one", zap.String("instance", g.instanceID))
		g.instanceID, g.memberID, g.generation = "", "", -1
	case errors.Is(err, kerr.UnknownMemberID):
		g.memberID, g.generation = "", -1
	case errors.Is(err, kerr.IllegalGeneration):
		g.generation = -1
	default:
		return
	}
	g.losses++
}

// session joins, takes the assignment and sends heartbeats until something ends it; nil means: join again, nothing is wrong.
func (g *group) session(ctx context.Context) error {
	join, err := g.join(ctx)
	if err != nil {
		return err
	}
	asked := bootTime()
	assignment, err := g.sync(ctx, join)
	if err != nil {
		return err
	}
	// The broker counts the session timeout from its answer; counting from before the question is on the safe side.
	g.confirmed.Store(int64(asked))
	g.owned = assignment
	g.assigned(maps.Clone(assignment), g.losses, g.subscribed)
	return g.beat(ctx)
}

func (g *group) instance() *string {
	if g.instanceID == "" {
		return nil
	}
	return &g.instanceID
}

func (g *group) join(ctx context.Context) (*kmsg.JoinGroupResponse, error) {
	topics := g.topics()
	meta := kmsg.NewConsumerMemberMetadata()
	meta.Version, meta.Generation = 1, -1
	meta.Topics = slices.Sorted(maps.Keys(topics))
	for _, topic := range byTopic(g.owned) {
		meta.OwnedPartitions = append(meta.OwnedPartitions, kmsg.ConsumerMemberMetadataOwnedPartition{Topic: topic.topic, Partitions: topic.partitions})
	}
	req := kmsg.NewPtrJoinGroupRequest()
	g.mu.Lock()
	req.Group, req.MemberID, req.InstanceID = g.name, g.memberID, g.instance()
	g.mu.Unlock()
	req.SessionTimeoutMillis = int32(g.sessionTimeout.Milliseconds())
	req.RebalanceTimeoutMillis = req.SessionTimeoutMillis
	req.ProtocolType = "consumer"
	p := kmsg.NewJoinGroupRequestProtocol()
	p.Name, p.Metadata = assignmentProtocol, meta.AppendTo(nil)
	req.Protocols = append(req.Protocols, p)
	resp, err := req.RequestWith(ctx, g.client)
	if err != nil {
		return nil, fmt.Errorf("JoinGroup: %w", err)
	}
	if errors.Is(kerr.ErrorForCode(resp.ErrorCode), kerr.MemberIDRequired) {
		g.mu.Lock()
		g.memberID = resp.MemberID
		g.mu.Unlock()
	}
	if err := kerr.ErrorForCode(resp.ErrorCode); err != nil {
		return nil, fmt.Errorf("JoinGroup: %w", err)
	}
	g.mu.Lock()
	g.memberID, g.generation = resp.MemberID, resp.Generation
	g.mu.Unlock()
	g.subscribed = topics
	return resp, nil
}

func (g *group) sync(ctx context.Context, join *kmsg.JoinGroupResponse) (map[topicPartition]bool, error) {
	req := kmsg.NewPtrSyncGroupRequest()
	req.Group, req.MemberID, req.Generation, req.InstanceID = g.name, join.MemberID, join.Generation, g.instance()
	req.ProtocolType, req.Protocol = kmsg.StringPtr("consumer"), join.Protocol
	if g.leading = join.LeaderID == join.MemberID; g.leading && !join.SkipAssignment {
		req.GroupAssignment = g.assign(join)
	}
	resp, err := req.RequestWith(ctx, g.client)
	if err != nil {
		return nil, fmt.Errorf("SyncGroup: %w", err)
	}
	if err := kerr.ErrorForCode(resp.ErrorCode); err != nil {
		return nil, fmt.Errorf("SyncGroup: %w", err)
	}
	owned := map[topicPartition]bool{}
	if len(resp.MemberAssignment) == 0 {
		return owned, nil
	}
	var a kmsg.ConsumerMemberAssignment
	if err := a.ReadFrom(resp.MemberAssignment); err != nil {
		return nil, fmt.Errorf("SyncGroup: assignment: %w", err)
	}
	for _, t := range a.Topics {
		for _, p := range t.Partitions {
			owned[topicPartition{t.Topic, p}] = true
		}
	}
	return owned, nil
}

// beat sends heartbeats until the group rebalances or the topics change.
func (g *group) beat(ctx context.Context) error {
	ticker := time.NewTicker(min(g.sessionTimeout/10, 3*time.Second))
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-g.changed:
			// Only the leader's view of the topics becomes an assignment; any member that sees more asks for a new one.
			if !maps.Equal(g.topics(), g.subscribed) {
				return nil
			}
			continue
		case <-ticker.C:
		}
		req := kmsg.NewPtrHeartbeatRequest()
		g.mu.Lock()
		req.Group, req.MemberID, req.Generation, req.InstanceID = g.name, g.memberID, g.generation, g.instance()
		g.mu.Unlock()
		asked := bootTime()
		resp, err := req.RequestWith(ctx, g.client)
		if err == nil {
			err = kerr.ErrorForCode(resp.ErrorCode)
		}
		switch {
		case err == nil:
			g.confirmed.Store(int64(asked))
		case errors.Is(err, kerr.RebalanceInProgress):
			g.confirmed.Store(int64(asked)) // still a member
			return err
		case errors.Is(err, kerr.UnknownMemberID), errors.Is(err, kerr.IllegalGeneration), errors.Is(err, kerr.FencedInstanceID):
			g.confirmed.Store(0)
			return fmt.Errorf("heartbeat: %w", err)
		case bootTime()-time.Duration(g.confirmed.Load()) > g.sessionTimeout:
			return fmt.Errorf("heartbeat: %w", err)
		}
	}
}

// commit stores checkpoints. It returns an error for the whole or the first of a partition's.
func (g *group) commit(ctx context.Context, commits []commit) error {
	if len(commits) == 0 {
		return nil
	}
	req := kmsg.NewPtrOffsetCommitRequest()
	g.mu.Lock()
	req.Group, req.MemberID, req.Generation, req.InstanceID = g.name, g.memberID, g.generation, g.instance()
	g.mu.Unlock()
	at := map[string]int{}
	for i := range commits {
		c := &commits[i]
		j, ok := at[c.topic]
		if !ok {
			j = len(req.Topics)
			at[c.topic] = j
			t := kmsg.NewOffsetCommitRequestTopic()
			t.Topic, t.TopicID = c.topic, c.topicID
			req.Topics = append(req.Topics, t)
		}
		p := kmsg.NewOffsetCommitRequestTopicPartition()
		p.Partition, p.Offset, p.LeaderEpoch = c.partition, c.next, c.lineage.epoch
		p.Metadata = kmsg.StringPtr(c.metadata())
		req.Topics[j].Partitions = append(req.Topics[j].Partitions, p)
	}
	resp, err := req.RequestWith(ctx, g.client)
	if err != nil {
		return fmt.Errorf("OffsetCommit: %w", err)
	}
	for _, t := range resp.Topics {
		for _, p := range t.Partitions {
			if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
				return fmt.Errorf("OffsetCommit: topic %s partition %d: %w", t.Topic, p.Partition, err)
			}
		}
	}
	return nil
}

// leave ends the membership, so that others needn't wait for the session timeout.
func (g *group) leave(ctx context.Context) error {
	g.confirmed.Store(0)
	if g.memberID == "" {
		return nil
	}
	req := kmsg.NewPtrLeaveGroupRequest()
	req.Group, req.MemberID = g.name, g.memberID
	m := kmsg.NewLeaveGroupRequestMember()
	m.MemberID, m.InstanceID = g.memberID, g.instance()
	req.Members = append(req.Members, m)
	resp, err := req.RequestWith(ctx, g.client)
	if err == nil {
		err = kerr.ErrorForCode(resp.ErrorCode)
	}
	if err != nil {
		return fmt.Errorf("LeaveGroup: %w", err)
	}
	return nil
}

type ownedTopic struct {
	topic      string
	partitions []int32
}

func byTopic(owned map[topicPartition]bool) []ownedTopic {
	m := map[string][]int32{}
	for tp := range owned {
		m[tp.topic] = append(m[tp.topic], tp.partition)
	}
	topics := make([]ownedTopic, 0, len(m))
	for topic, partitions := range m {
		slices.Sort(partitions)
		topics = append(topics, ownedTopic{topic, partitions})
	}
	slices.SortFunc(topics, func(a, b ownedTopic) int { return strings.Compare(a.topic, b.topic) })
	return topics
}

// assign is the leader's work: every partition of every topic that the leader sees, shared out evenly, each staying where it was if
// that is even.
func (g *group) assign(join *kmsg.JoinGroupResponse) []kmsg.SyncGroupRequestGroupAssignment {
	members := make([]string, 0, len(join.Members))
	owner := map[topicPartition]string{}
	for _, m := range join.Members {
		members = append(members, m.MemberID)
		var meta kmsg.ConsumerMemberMetadata
		if meta.ReadFrom(m.ProtocolMetadata) != nil {
			continue
		}
		for _, t := range meta.OwnedPartitions {
			for _, p := range t.Partitions {
				owner[topicPartition{t.Topic, p}] = m.MemberID
			}
		}
	}
	shares := share(members, g.subscribed, owner)
	out := make([]kmsg.SyncGroupRequestGroupAssignment, 0, len(members))
	for _, id := range members {
		var a kmsg.ConsumerMemberAssignment
		for _, t := range byTopic(shares[id]) {
			a.Topics = append(a.Topics, kmsg.ConsumerMemberAssignmentTopic{Topic: t.topic, Partitions: t.partitions})
		}
		s := kmsg.NewSyncGroupRequestGroupAssignment()
		s.MemberID, s.MemberAssignment = id, a.AppendTo(nil)
		out = append(out, s)
	}
	return out
}

// share splits the partitions of topics evenly over the members; a partition stays with its owner as long as that has room.
func share(members []string, topics map[string]int32, owner map[topicPartition]string) map[string]map[topicPartition]bool {
	sort.Strings(members)
	shares := make(map[string]map[topicPartition]bool, len(members))
	for _, id := range members {
		shares[id] = map[topicPartition]bool{}
	}
	total := 0
	for _, n := range topics {
		total += int(n)
	}
	room, extra := total/len(members), total%len(members)
	fits := func(id string) bool { // the first members to reach room take one of the extra each
		n := len(shares[id])
		if n == room && extra > 0 {
			extra--
			return true
		}
		return n < room
	}
	var rest []topicPartition
	for _, topic := range slices.Sorted(maps.Keys(topics)) {
		for p := range topics[topic] {
			tp := topicPartition{topic, p}
			if id, ok := owner[tp]; ok && shares[id] != nil && fits(id) {
				shares[id][tp] = true
			} else {
				rest = append(rest, tp)
			}
		}
	}
	i := 0
	for _, tp := range rest {
		for !fits(members[i]) {
			i = (i + 1) % len(members)
		}
		shares[members[i]][tp] = true
	}
	return shares
}

// isRebalance reports whether an error says that the group is changing: the next try, in the next generation, will do.
func isRebalance(err error) bool {
	return errors.Is(err, kerr.RebalanceInProgress) || errors.Is(err, kerr.IllegalGeneration) || errors.Is(err, kerr.UnknownMemberID)
}
