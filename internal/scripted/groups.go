package scripted

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// groupState is a classic consumer group's state, in the words of DescribeGroups.
type groupState string

const (
	groupEmpty      groupState = "Empty"
	groupPreparing  groupState = "PreparingRebalance"  // waits for members to join
	groupCompleting groupState = "CompletingRebalance" // waits for the leader's assignment
	groupStable     groupState = "Stable"
)

// group is a classic consumer group with the one coordinator of the cluster: the live broker with the lowest ID.
type group struct {
	name         string
	state        groupState
	generation   int32
	protocolType string
	protocol     string
	leader       string
	members      map[string]*member
	offsets      map[topicPartition]Committed
	deadline     *time.Timer // of the rebalance
}

type member struct {
	id, clientID string
	instanceID   *string
	protocols    []kmsg.JoinGroupRequestProtocol
	assignment   []byte
	joining      bool // a JoinGroup waits for the generation
	session      time.Duration
	expiry       *time.Timer
}

type topicPartition struct {
	topic     string
	partition int32
}

// Committed is a group's committed offset.
type Committed struct {
	Offset      int64
	LeaderEpoch int32
	Metadata    string
}

// coordinated finds the group, or says why this broker doesn't serve it.
func (x *exchange) coordinated(name string) (*group, *kerr.Error) {
	if err := x.refused(); err != nil {
		return nil, err
	}
	for _, b := range x.cluster.brokers {
		if b.ln != nil {
			if b != x.broker {
				return nil, kerr.NotCoordinator
			}
			break
		}
	}
	g := x.cluster.groups[name]
	if g == nil {
		g = &group{name: name, state: groupEmpty, members: map[string]*member{}, offsets: map[topicPartition]Committed{}}
		x.cluster.groups[name] = g
	}
	return g, nil
}

// belongs checks a member's claim to a generation.
func (g *group) belongs(memberID string, instanceID *string, generation int32) *kerr.Error {
	if static := g.static(instanceID); static != nil && static.id != memberID {
		return kerr.FencedInstanceID
	}
	if g.members[memberID] == nil {
		return kerr.UnknownMemberID
	}
	if generation != g.generation {
		return kerr.IllegalGeneration
	}
	return nil
}

func (x *exchange) joinGroup(req *kmsg.JoinGroupRequest) kmsg.Response {
	resp := kmsg.NewPtrJoinGroupResponse()
	resp.Generation, resp.MemberID = -1, req.MemberID
	g, err := x.coordinated(req.Group)
	if err != nil {
		resp.ErrorCode = err.Code
		return resp
	}
	m, err := x.joiner(g, req)
	if err != nil {
		resp.MemberID, resp.ErrorCode = req.MemberID, err.Code
		return resp
	}
	if x.rejoin(g, m, req) {
		x.cluster.await(x.stopped, -1, func() bool { return !m.joining || g.members[m.id] != m })
	}
	if g.members[m.id] != m {
		resp.ErrorCode = kerr.UnknownMemberID.Code
		return resp
	}
	resp.Generation, resp.LeaderID, resp.MemberID = g.generation, g.leader, m.id
	resp.Protocol, resp.ProtocolType = &g.protocol, &g.protocolType
	if m.id == g.leader {
		if resp.SkipAssignment = g.state == groupStable; resp.SkipAssignment && req.Version < 9 {
			resp.LeaderID = "" // older clients must not take it for a request to assign
			return resp
		}
		for _, o := range g.sorted() {
			resp.Members = append(resp.Members, kmsg.JoinGroupResponseMember{MemberID: o.id, InstanceID: o.instanceID, ProtocolMetadata: o.metadata(g.protocol)})
		}
	}
	return resp
}

// joiner finds the member that a JoinGroup is of, or makes it. A request without a member ID gets one, in req.
func (x *exchange) joiner(g *group, req *kmsg.JoinGroupRequest) (*member, *kerr.Error) {
	static := g.static(req.InstanceID)
	if req.MemberID != "" {
		if static != nil && static.id != req.MemberID {
			return nil, kerr.FencedInstanceID
		}
		if m := g.members[req.MemberID]; m != nil {
			return m, nil
		}
		return nil, kerr.UnknownMemberID
	}
	x.cluster.nextMember++
	req.MemberID = fmt.Sprintf("%s-%d", x.ClientID, x.cluster.nextMember)
	m := &member{id: req.MemberID}
	if static != nil { // a static member comes back: it takes its place over, and its old self is fenced (KIP-345)
		m.protocols, m.assignment = static.protocols, static.assignment
		x.cluster.removeMember(g, static.id)
		if g.leader == static.id {
			g.leader = m.id
		}
	}
	g.members[m.id] = m
	if req.InstanceID == nil && req.Version >= 4 {
		return nil, kerr.MemberIDRequired
	}
	return m, nil
}

// static finds the member with an instance ID.
func (g *group) static(instanceID *string) *member {
	for _, m := range g.members {
		if instanceID != nil && m.instanceID != nil && *m.instanceID == *instanceID {
			return m
		}
	}
	return nil
}

// rejoin takes a JoinGroup into the group and starts a rebalance where one is needed; false: the member goes on in this generation.
func (x *exchange) rejoin(g *group, m *member, req *kmsg.JoinGroupRequest) bool {
	back := g.state == groupStable && m.instanceID == nil && req.InstanceID != nil && m.protocols != nil
	same := g.state == groupStable && m.id != g.leader && slices.EqualFunc(m.protocols, req.Protocols, func(a, b kmsg.JoinGroupRequestProtocol) bool {
		return a.Name == b.Name && bytes.Equal(a.Metadata, b.Metadata)
	})
	m.clientID, m.instanceID, m.protocols = x.ClientID, req.InstanceID, req.Protocols
	m.session = time.Duration(req.SessionTimeoutMillis) * time.Millisecond
	x.cluster.touch(g, m)
	if back || same {
		return false
	}
	m.joining, g.protocolType = true, req.ProtocolType
	if g.state == groupStable || g.state == groupEmpty || g.state == groupCompleting {
		x.cluster.prepare(g, max(time.Duration(req.RebalanceTimeoutMillis)*time.Millisecond, m.session))
	}
	x.cluster.completeJoin(g, false)
	return true
}

// prepare starts a rebalance: members must join again within timeout.
func (c *Cluster) prepare(g *group, timeout time.Duration) {
	g.state = groupPreparing
	if g.deadline != nil {
		g.deadline.Stop()
	}
	g.deadline = time.AfterFunc(timeout, func() { c.locked(func() { c.completeJoin(g, true) }) })
	c.bump()
}

// completeJoin starts the next generation once all known members have joined, or late: with those that have.
func (c *Cluster) completeJoin(g *group, late bool) {
	if g.state != groupPreparing {
		return
	}
	for id, m := range g.members {
		if m.joining || m.protocols == nil { // an ID that was given out but not used yet isn't waited for
			continue
		}
		if !late {
			return
		}
		c.removeMember(g, id)
	}
	joined := g.sorted()
	if len(joined) == 0 {
		g.state = groupEmpty
		return
	}
	g.deadline.Stop()
	g.generation++
	g.state, g.protocol = groupCompleting, joined[0].protocols[0].Name
	if m := g.members[g.leader]; m == nil || !m.joining {
		g.leader = joined[0].id
	}
	for _, m := range joined {
		m.joining, m.assignment = false, nil
	}
	c.bump()
}

// sorted lists the members that have ever joined, by ID.
func (g *group) sorted() []*member {
	list := slices.SortedFunc(maps.Values(g.members), func(a, b *member) int { return cmp.Compare(a.id, b.id) })
	return slices.DeleteFunc(list, func(m *member) bool { return m.protocols == nil })
}

func (m *member) metadata(protocol string) []byte {
	for _, p := range m.protocols {
		if p.Name == protocol {
			return p.Metadata
		}
	}
	return nil
}

// touch restarts a member's session timeout.
func (c *Cluster) touch(g *group, m *member) {
	if m.expiry != nil {
		m.expiry.Stop()
	}
	m.expiry = time.AfterFunc(m.session, func() {
		c.locked(func() {
			if g.members[m.id] == m && !m.joining && !c.closed {
				c.leave(g, m.id)
			}
		})
	})
}

func (c *Cluster) removeMember(g *group, id string) {
	if m := g.members[id]; m != nil && m.expiry != nil {
		m.expiry.Stop()
	}
	delete(g.members, id)
}

// leave takes a member out and rebalances the rest.
func (c *Cluster) leave(g *group, id string) {
	c.removeMember(g, id)
	switch rest := g.sorted(); {
	case len(rest) == 0:
		g.state = groupEmpty
	case g.state == groupPreparing:
		c.completeJoin(g, false)
	default:
		c.prepare(g, rest[0].session)
	}
	c.bump()
}

func (x *exchange) syncGroup(req *kmsg.SyncGroupRequest) kmsg.Response {
	resp := kmsg.NewPtrSyncGroupResponse()
	g, err := x.coordinated(req.Group)
	if err == nil {
		err = g.belongs(req.MemberID, req.InstanceID, req.Generation)
	}
	if err == nil && (g.state == groupPreparing || g.state == groupEmpty) {
		err = kerr.RebalanceInProgress
	}
	if err != nil {
		resp.ErrorCode = err.Code
		return resp
	}
	m := g.members[req.MemberID]
	x.cluster.touch(g, m)
	if m.id == g.leader && g.state == groupCompleting {
		for _, a := range req.GroupAssignment {
			if o := g.members[a.MemberID]; o != nil {
				o.assignment = a.MemberAssignment
			}
		}
		g.state = groupStable
		x.cluster.bump()
	}
	generation := g.generation
	x.cluster.await(x.stopped, -1, func() bool { return g.state != groupCompleting || g.generation != generation })
	switch {
	case g.members[m.id] != m:
		resp.ErrorCode = kerr.UnknownMemberID.Code
	case g.state != groupStable || g.generation != generation:
		resp.ErrorCode = kerr.RebalanceInProgress.Code
	default:
		resp.MemberAssignment, resp.Protocol, resp.ProtocolType = m.assignment, &g.protocol, &g.protocolType
	}
	return resp
}

func (x *exchange) heartbeat(req *kmsg.HeartbeatRequest) kmsg.Response {
	resp := kmsg.NewPtrHeartbeatResponse()
	g, err := x.coordinated(req.Group)
	if err == nil {
		err = g.belongs(req.MemberID, req.InstanceID, req.Generation)
	}
	if err == nil {
		x.cluster.touch(g, g.members[req.MemberID])
		if g.state == groupPreparing {
			err = kerr.RebalanceInProgress
		}
	}
	resp.ErrorCode = code(err)
	return resp
}

func (x *exchange) leaveGroup(req *kmsg.LeaveGroupRequest) kmsg.Response {
	resp := kmsg.NewPtrLeaveGroupResponse()
	g, err := x.coordinated(req.Group)
	if err != nil {
		resp.ErrorCode = err.Code
		return resp
	}
	members := req.Members
	if req.Version < 3 {
		members = []kmsg.LeaveGroupRequestMember{{MemberID: req.MemberID}}
	}
	for _, rm := range members {
		out := kmsg.LeaveGroupResponseMember{MemberID: rm.MemberID, InstanceID: rm.InstanceID}
		if static := g.static(rm.InstanceID); static != nil && rm.MemberID == "" {
			rm.MemberID = static.id
		}
		if g.members[rm.MemberID] == nil {
			out.ErrorCode = kerr.UnknownMemberID.Code
		} else {
			x.cluster.leave(g, rm.MemberID)
		}
		resp.Members = append(resp.Members, out)
	}
	return resp
}
