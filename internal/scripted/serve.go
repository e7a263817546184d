package scripted

import (
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/protocol"
)

// exchange is one request on its way through a broker. Handlers run with Cluster.mu held.
type exchange struct {
	*Request
	cluster *Cluster
	broker  *broker
	stopped <-chan struct{}
	fail    func(topic string, partition int32) *kerr.Error // nil: nothing is refused by the script
}

// API keys that the package speaks of by itself.
const (
	apiVersionsKey = 18
)

// offered lists the API versions of a broker, by API key.
var offered = map[int16][2]int16{
	0: {3, 13}, 1: {4, 17}, 2: {1, 10}, 3: {0, 13}, 8: {2, 9}, 9: {1, 9}, 10: {0, 6}, 11: {0, 9}, 12: {0, 4}, 13: {0, 5}, 14: {0, 5},
	15: {0, 5}, 16: {0, 5}, 18: {0, 4}, 19: {2, 7}, 20: {1, 6}, 21: {0, 2}, 22: {0, 5}, 23: {2, 4}, 24: {0, 3}, 26: {0, 5},
	32: {1, 4}, 37: {0, 3}, 44: {0, 1}, 60: {0, 2}, 61: {0, 0},
}

func (c *Cluster) versions(key int16) (lowest, highest int16, ok bool) {
	v, ok := offered[key]
	if limit, lowered := c.opts.MaxVersions[key]; lowered {
		v[1] = min(v[1], limit)
	}
	return v[0], v[1], ok && v[0] <= v[1]
}

func (c *Cluster) offers(key, version int16) bool {
	lowest, highest, ok := c.versions(key)
	return ok && lowest <= version && version <= highest
}

// unsupportedApiVersions answers an ApiVersions request of an unknown version: error 35, in v0, with the entry of ApiVersions alone.
func unsupportedApiVersions() kmsg.Response {
	resp := kmsg.NewPtrApiVersionsResponse()
	resp.ErrorCode = kerr.UnsupportedVersion.Code
	resp.ApiKeys = []kmsg.ApiVersionsResponseApiKey{{ApiKey: apiVersionsKey, MinVersion: 0, MaxVersion: offered[apiVersionsKey][1]}}
	return resp
}

// serve answers a request; nil closes the connection. The caller holds mu.
func (b *broker) serve(x *exchange) kmsg.Response {
	resp := x.dispatch()
	if resp != nil {
		resp.SetVersion(x.Version)
	}
	x.cluster.bump()
	return resp
}

func (x *exchange) dispatch() kmsg.Response {
	switch req := x.Body.(type) {
	case *kmsg.ProduceRequest:
		return x.produce(req)
	case *kmsg.FetchRequest:
		return x.fetch(req)
	case *kmsg.ListOffsetsRequest:
		return x.listOffsets(req)
	case *kmsg.OffsetForLeaderEpochRequest:
		return x.offsetForLeaderEpoch(req)
	case *kmsg.DescribeProducersRequest:
		return x.describeProducers(req)
	case *kmsg.DeleteRecordsRequest:
		return x.deleteRecords(req)
	case *kmsg.MetadataRequest:
		return x.metadata(req)
	case *kmsg.ApiVersionsRequest:
		return x.apiVersions()
	case *kmsg.DescribeClusterRequest:
		return x.describeCluster()
	case *kmsg.CreateTopicsRequest:
		return x.createTopics(req)
	case *kmsg.CreatePartitionsRequest:
		return x.createPartitions(req)
	case *kmsg.DeleteTopicsRequest:
		return x.deleteTopics(req)
	case *kmsg.DescribeConfigsRequest:
		return x.describeConfigs(req)
	case *kmsg.IncrementalAlterConfigsRequest:
		return x.alterConfigs(req)
	case *kmsg.FindCoordinatorRequest:
		return x.findCoordinator(req)
	default:
		return x.dispatchGroups()
	}
}

func (x *exchange) dispatchGroups() kmsg.Response {
	switch req := x.Body.(type) {
	case *kmsg.JoinGroupRequest:
		return x.joinGroup(req)
	case *kmsg.SyncGroupRequest:
		return x.syncGroup(req)
	case *kmsg.HeartbeatRequest:
		return x.heartbeat(req)
	case *kmsg.LeaveGroupRequest:
		return x.leaveGroup(req)
	case *kmsg.OffsetCommitRequest:
		return x.offsetCommit(req)
	case *kmsg.OffsetFetchRequest:
		return x.offsetFetch(req)
	case *kmsg.DescribeGroupsRequest:
		return x.describeGroups(req)
	case *kmsg.ListGroupsRequest:
		return x.listGroups()
	case *kmsg.InitProducerIDRequest:
		return x.initProducerID(req)
	case *kmsg.AddPartitionsToTxnRequest:
		return x.addPartitionsToTxn(req)
	case *kmsg.EndTxnRequest:
		return x.endTxn(req)
	}
	return nil
}

func code(err *kerr.Error) int16 {
	if err == nil {
		return 0
	}
	return err.Code
}

// refused is the script's error for the request as a whole.
func (x *exchange) refused() *kerr.Error {
	if x.fail == nil {
		return nil
	}
	return x.fail("", -1)
}

// topic finds a topic by ID, or by name where the request carries no ID.
func (x *exchange) topic(name string, id [16]byte) (*topic, *kerr.Error) {
	if id != ([16]byte{}) || name == "" {
		if t := x.cluster.topicByID(protocol.TopicID(id)); t != nil {
			return t, nil
		}
		return nil, kerr.UnknownTopicID
	}
	if t := x.cluster.topics[name]; t != nil {
		return t, nil
	}
	return nil, kerr.UnknownTopicOrPartition
}

// replica finds this broker's replica of a partition, after the script had its say.
func (x *exchange) replica(t *topic, unknown *kerr.Error, name string, index int32) (*partition, *kerr.Error) {
	if t != nil {
		name = t.name
	}
	if x.fail != nil {
		if err := x.fail(name, index); err != nil {
			return nil, err
		}
	}
	if unknown != nil {
		return nil, unknown
	}
	if index < 0 || int(index) >= len(t.partitions) {
		return nil, kerr.UnknownTopicOrPartition
	}
	p := t.partitions[index]
	if old := p.clones[x.broker.id]; old != nil {
		return old, nil
	}
	return p, nil
}
