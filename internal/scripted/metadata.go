package scripted

import (
	"cmp"
	"maps"
	"net"
	"slices"
	"strconv"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
)

const controllerID = 1

func (b *broker) hostPort() (string, int32) {
	host, port, _ := net.SplitHostPort(b.addr)
	n, _ := strconv.Atoi(port)
	return host, int32(n)
}

func (x *exchange) apiVersions() kmsg.Response {
	resp := kmsg.NewPtrApiVersionsResponse()
	for _, key := range slices.Sorted(maps.Keys(offered)) {
		if lowest, highest, ok := x.cluster.versions(key); ok {
			resp.ApiKeys = append(resp.ApiKeys, kmsg.ApiVersionsResponseApiKey{ApiKey: key, MinVersion: lowest, MaxVersion: highest})
		}
	}
	resp.ErrorCode = code(x.refused())
	return resp
}

func (x *exchange) metadata(req *kmsg.MetadataRequest) kmsg.Response {
	resp := kmsg.NewPtrMetadataResponse()
	id := x.cluster.opts.ClusterID
	resp.ClusterID, resp.ControllerID = &id, controllerID
	for _, b := range x.cluster.brokers {
		if b.ln != nil {
			host, port := b.hostPort()
			resp.Brokers = append(resp.Brokers, kmsg.MetadataResponseBroker{NodeID: b.id, Host: host, Port: port})
		}
	}
	if req.Topics == nil || req.Version == 0 && len(req.Topics) == 0 {
		for _, t := range slices.SortedFunc(maps.Values(x.cluster.topics), func(a, b *topic) int { return cmp.Compare(a.name, b.name) }) {
			resp.Topics = append(resp.Topics, x.describeTopic(t))
		}
		return resp
	}
	for _, rt := range req.Topics {
		name := ""
		if rt.Topic != nil {
			name = *rt.Topic
		}
		t, err := x.topic(name, rt.TopicID)
		if t == nil && name != "" && x.cluster.opts.AutoCreate && req.AllowAutoTopicCreation {
			t, err = x.cluster.createTopic(name, 1, map[string]string{}), nil
		}
		if t == nil {
			out := kmsg.NewMetadataResponseTopic()
			out.ErrorCode, out.Topic, out.TopicID = err.Code, rt.Topic, rt.TopicID
			resp.Topics = append(resp.Topics, out)
			continue
		}
		resp.Topics = append(resp.Topics, x.describeTopic(t))
	}
	return resp
}

func (x *exchange) describeTopic(t *topic) kmsg.MetadataResponseTopic {
	out := kmsg.NewMetadataResponseTopic()
	out.Topic, out.TopicID, out.ErrorCode = &t.name, t.id, code(x.refused())
	out.IsInternal = t.name == "__consumer_offsets" || t.name == "__transaction_state"
	for i := range t.partitions {
		p, err := x.replica(t, nil, t.name, int32(i))
		if p == nil {
			p = t.partitions[i]
		}
		if err == nil && p.leader < 0 {
			err = kerr.LeaderNotAvailable
		}
		sp := kmsg.NewMetadataResponseTopicPartition()
		sp.Partition, sp.ErrorCode = p.index, code(err)
		sp.Leader, sp.LeaderEpoch, sp.Replicas, sp.ISR, sp.OfflineReplicas = p.leader, p.leaderEpoch, p.replicas, p.replicas, []int32{}
		out.Partitions = append(out.Partitions, sp)
	}
	return out
}

func (x *exchange) describeCluster() kmsg.Response {
	resp := kmsg.NewPtrDescribeClusterResponse()
	resp.ErrorCode, resp.ClusterID, resp.ControllerID, resp.EndpointType = code(x.refused()), x.cluster.opts.ClusterID, controllerID, 1
	for _, b := range x.cluster.brokers {
		if b.ln != nil {
			host, port := b.hostPort()
			resp.Brokers = append(resp.Brokers, kmsg.DescribeClusterResponseBroker{NodeID: b.id, Host: host, Port: port})
		}
	}
	return resp
}

func (x *exchange) findCoordinator(req *kmsg.FindCoordinatorRequest) kmsg.Response {
	resp := kmsg.NewPtrFindCoordinatorResponse()
	id, err := int32(-1), x.refused()
	var host string
	var port int32
	for _, b := range x.cluster.brokers {
		if b.ln != nil && id < 0 {
			id = b.id
			host, port = b.hostPort()
		}
	}
	resp.ErrorCode, resp.NodeID, resp.Host, resp.Port = code(err), id, host, port
	for _, key := range req.CoordinatorKeys {
		resp.Coordinators = append(resp.Coordinators, kmsg.FindCoordinatorResponseCoordinator{Key: key, NodeID: id, Host: host, Port: port, ErrorCode: code(err)})
	}
	return resp
}
