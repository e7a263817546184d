package scripted

import (
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/protocol"
)

// unreplicated is an acks=all append that waits for the high watermark.
type unreplicated struct {
	p     *partition
	epoch int32
	end   int64
	out   *kmsg.ProduceResponseTopicPartition
}

func (x *exchange) produce(req *kmsg.ProduceRequest) kmsg.Response {
	resp := kmsg.NewPtrProduceResponse()
	resp.Version = req.Version
	resp.Topics = make([]kmsg.ProduceResponseTopic, len(req.Topics))
	var waiting []unreplicated
	for i, rt := range req.Topics {
		st := &resp.Topics[i]
		st.Topic, st.TopicID = rt.Topic, rt.TopicID
		st.Partitions = make([]kmsg.ProduceResponseTopicPartition, len(rt.Partitions))
		t, unknown := x.topic(rt.Topic, rt.TopicID)
		for j, rp := range rt.Partitions {
			out := &st.Partitions[j]
			*out = kmsg.NewProduceResponseTopicPartition()
			out.Partition, out.BaseOffset, out.LogAppendTime, out.LogStartOffset = rp.Partition, -1, -1, -1
			p, err := x.replica(t, unknown, rt.Topic, rp.Partition)
			var s stored
			if err == nil {
				s, err = x.append(p, req, rp.Records)
			}
			if err != nil {
				x.refuseProduce(resp, out, p, err)
				continue
			}
			out.BaseOffset, out.LogAppendTime, out.LogStartOffset = s.baseOffset, s.logAppendTime, p.logStart
			waiting = append(waiting, unreplicated{p, p.leaderEpoch, s.end, out})
		}
	}
	if x.cluster.bump(); req.Acks == -1 {
		x.awaitReplicas(resp, waiting, time.Duration(req.TimeoutMillis)*time.Millisecond)
	}
	return resp
}

func (x *exchange) append(p *partition, req *kmsg.ProduceRequest, records []byte) (stored, *kerr.Error) {
	b, _, err := protocol.ParseBatch(records)
	switch {
	case err == nil && b.Transactional() && req.TransactionID == nil:
		return stored{}, kerr.TransactionalIDAuthorizationFailed
	case req.Acks < -1 || req.Acks > 1:
		return stored{}, kerr.InvalidRequiredAcks
	case p.leader != x.broker.id:
		return stored{}, kerr.NotLeaderForPartition
	}
	return p.appendClient(records, x.cluster.opts.Now())
}

// awaitReplicas holds the answer until all is below the high watermark, the leader has changed or the timeout has passed. The base
// offset stays in the answer also then, as DelayedProduce leaves it.
func (x *exchange) awaitReplicas(resp *kmsg.ProduceResponse, waiting []unreplicated, timeout time.Duration) {
	deposed := func(u unreplicated) bool {
		return u.p.deleted || u.p.leader != x.broker.id || u.p.leaderEpoch != u.epoch
	}
	x.cluster.await(x.stopped, timeout, func() bool {
		for _, u := range waiting {
			if !deposed(u) && u.p.highWatermark < u.end {
				return false
			}
		}
		return true
	})
	for _, u := range waiting {
		switch {
		case u.p.highWatermark >= u.end && !u.p.deleted:
		case deposed(u):
			x.refuseProduce(resp, u.out, u.p, kerr.NotLeaderForPartition)
		default:
			u.out.ErrorCode = kerr.RequestTimedOut.Code
		}
	}
}

// refuseProduce puts an error into a partition's answer, with the leader that the client should ask (KIP-951).
func (x *exchange) refuseProduce(resp *kmsg.ProduceResponse, out *kmsg.ProduceResponseTopicPartition, p *partition, err *kerr.Error) {
	out.ErrorCode = err.Code
	if p == nil || err != kerr.NotLeaderForPartition || resp.Version < 10 || p.leader < 0 {
		return
	}
	out.CurrentLeader.LeaderID, out.CurrentLeader.LeaderEpoch = p.leader, p.leaderEpoch
	host, port := x.cluster.broker(p.leader).hostPort()
	for _, b := range resp.Brokers {
		if b.NodeID == p.leader {
			return
		}
	}
	resp.Brokers = append(resp.Brokers, kmsg.ProduceResponseBroker{NodeID: p.leader, Host: host, Port: port})
}

// produceFailed reports whether any partition was refused: with acks=0 a broker then closes the connection.
func produceFailed(resp kmsg.Response) bool {
	produced, ok := resp.(*kmsg.ProduceResponse)
	if !ok {
		return true
	}
	for _, t := range produced.Topics {
		for _, p := range t.Partitions {
			if p.ErrorCode != 0 {
				return true
			}
		}
	}
	return false
}
