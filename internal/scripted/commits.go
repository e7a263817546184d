package scripted

import (
	"cmp"
	"maps"
	"slices"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
)

func (x *exchange) offsetCommit(req *kmsg.OffsetCommitRequest) kmsg.Response {
	resp := kmsg.NewPtrOffsetCommitResponse()
	g, err := x.coordinated(req.Group)
	switch {
	case err != nil:
	case req.Generation < 0 && req.MemberID == "":
		if len(g.sorted()) > 0 {
			err = kerr.UnknownMemberID // a simple consumer beside a live group
		}
	default:
		if err = g.belongs(req.MemberID, req.InstanceID, req.Generation); err == nil {
			x.cluster.touch(g, g.members[req.MemberID])
		}
	}
	for _, rt := range req.Topics {
		st := kmsg.NewOffsetCommitResponseTopic()
		st.Topic = rt.Topic
		for _, rp := range rt.Partitions {
			if err == nil {
				c := Committed{Offset: rp.Offset, LeaderEpoch: rp.LeaderEpoch}
				if rp.Metadata != nil {
					c.Metadata = *rp.Metadata
				}
				g.offsets[topicPartition{rt.Topic, rp.Partition}] = c
			}
			st.Partitions = append(st.Partitions, kmsg.OffsetCommitResponseTopicPartition{Partition: rp.Partition, ErrorCode: code(err)})
		}
		resp.Topics = append(resp.Topics, st)
	}
	return resp
}

func (x *exchange) offsetFetch(req *kmsg.OffsetFetchRequest) kmsg.Response {
	resp := kmsg.NewPtrOffsetFetchResponse()
	if req.Version >= 8 {
		for _, rg := range req.Groups {
			resp.Groups = append(resp.Groups, x.fetchGroup(rg))
		}
		return resp
	}
	rg := kmsg.OffsetFetchRequestGroup{Group: req.Group}
	if req.Topics != nil {
		rg.Topics = []kmsg.OffsetFetchRequestGroupTopic{}
	}
	for _, rt := range req.Topics {
		rg.Topics = append(rg.Topics, kmsg.OffsetFetchRequestGroupTopic{Topic: rt.Topic, Partitions: rt.Partitions})
	}
	answer := x.fetchGroup(rg)
	resp.ErrorCode = answer.ErrorCode
	for _, at := range answer.Topics {
		st := kmsg.NewOffsetFetchResponseTopic()
		st.Topic = at.Topic
		for _, p := range at.Partitions {
			st.Partitions = append(st.Partitions, kmsg.OffsetFetchResponseTopicPartition{
				Partition: p.Partition, Offset: p.Offset, LeaderEpoch: p.LeaderEpoch, Metadata: p.Metadata, ErrorCode: p.ErrorCode})
		}
		resp.Topics = append(resp.Topics, st)
	}
	return resp
}

// fetchGroup reads what one group committed; nil topics means all.
func (x *exchange) fetchGroup(rg kmsg.OffsetFetchRequestGroup) kmsg.OffsetFetchResponseGroup {
	out := kmsg.NewOffsetFetchResponseGroup()
	out.Group = rg.Group
	g, err := x.coordinated(rg.Group)
	if out.ErrorCode = code(err); err != nil {
		return out
	}
	topics := rg.Topics
	if topics == nil {
		byTopic := map[string][]int32{}
		for tp := range g.offsets {
			byTopic[tp.topic] = append(byTopic[tp.topic], tp.partition)
		}
		for _, name := range slices.Sorted(maps.Keys(byTopic)) {
			topics = append(topics, kmsg.OffsetFetchRequestGroupTopic{Topic: name, Partitions: byTopic[name]})
		}
	}
	for _, rt := range topics {
		st := kmsg.NewOffsetFetchResponseGroupTopic()
		st.Topic = rt.Topic
		for _, index := range rt.Partitions {
			c, ok := g.offsets[topicPartition{rt.Topic, index}]
			if !ok {
				c = Committed{-1, -1, ""}
			}
			st.Partitions = append(st.Partitions, kmsg.OffsetFetchResponseGroupTopicPartition{Partition: index, Offset: c.Offset, LeaderEpoch: c.LeaderEpoch, Metadata: &c.Metadata})
		}
		out.Topics = append(out.Topics, st)
	}
	return out
}

func (x *exchange) describeGroups(req *kmsg.DescribeGroupsRequest) kmsg.Response {
	resp := kmsg.NewPtrDescribeGroupsResponse()
	for _, name := range req.Groups {
		out := kmsg.NewDescribeGroupsResponseGroup()
		out.Group, out.State = name, "Dead"
		if g := x.cluster.groups[name]; g != nil {
			out.State, out.ProtocolType, out.Protocol = string(g.state), g.protocolType, g.protocol
			for _, m := range g.sorted() {
				out.Members = append(out.Members, kmsg.DescribeGroupsResponseGroupMember{
					MemberID: m.id, InstanceID: m.instanceID, ClientID: m.clientID, ClientHost: "/127.0.0.1",
					ProtocolMetadata: m.metadata(g.protocol), MemberAssignment: m.assignment})
			}
		}
		out.ErrorCode = code(x.refused())
		resp.Groups = append(resp.Groups, out)
	}
	return resp
}

func (x *exchange) listGroups() kmsg.Response {
	resp := kmsg.NewPtrListGroupsResponse()
	resp.ErrorCode = code(x.refused())
	for _, g := range slices.SortedFunc(maps.Values(x.cluster.groups), func(a, b *group) int { return cmp.Compare(a.name, b.name) }) {
		resp.Groups = append(resp.Groups, kmsg.ListGroupsResponseGroup{Group: g.name, ProtocolType: g.protocolType, GroupState: string(g.state), GroupType: "classic"})
	}
	return resp
}

// Committed returns what a group committed for a partition; ok is false if nothing.
func (c *Cluster) Committed(groupName, topicName string, index int32) (offset Committed, ok bool) {
	c.view(func() {
		if g := c.groups[groupName]; g != nil {
			offset, ok = g.offsets[topicPartition{topicName, index}]
		}
	})
	return offset, ok
}

// Commit sets a group's committed offset from outside; a negative offset removes it.
func (c *Cluster) Commit(groupName, topicName string, index int32, offset Committed) {
	c.locked(func() {
		g := c.groups[groupName]
		if g == nil {
			g = &group{name: groupName, state: groupEmpty, members: map[string]*member{}, offsets: map[topicPartition]Committed{}}
			c.groups[groupName] = g
		}
		if tp := (topicPartition{topicName, index}); offset.Offset < 0 {
			delete(g.offsets, tp)
		} else {
			g.offsets[tp] = offset
		}
	})
}

// Expel removes all members of a group, as if their sessions had timed out; their next heartbeat says so.
func (c *Cluster) Expel(groupName string) {
	c.locked(func() {
		if g := c.groups[groupName]; g != nil {
			for _, m := range g.sorted() {
				c.leave(g, m.id)
			}
		}
	})
}
