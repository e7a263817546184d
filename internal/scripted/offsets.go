package scripted

import (
	"slices"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Timestamps of ListOffsets that are no timestamps.
const (
	latest         = -1
	earliest       = -2
	maxTimestamp   = -3
	earliestLocal  = -4
	latestTiered   = -5
	debugReplicaID = -2
)

func (x *exchange) listOffsets(req *kmsg.ListOffsetsRequest) kmsg.Response {
	resp := kmsg.NewPtrListOffsetsResponse()
	for _, rt := range req.Topics {
		st := kmsg.NewListOffsetsResponseTopic()
		st.Topic = rt.Topic
		t, unknown := x.topic(rt.Topic, [16]byte{})
		for _, rp := range rt.Partitions {
			out := kmsg.NewListOffsetsResponseTopicPartition()
			out.Partition, out.Offset, out.Timestamp, out.LeaderEpoch = rp.Partition, -1, -1, -1
			p, err := x.replica(t, unknown, rt.Topic, rp.Partition)
			if err == nil {
				err = p.fence(x.broker.id, rp.CurrentLeaderEpoch)
				if err == kerr.NotLeaderForPartition && req.ReplicaID == debugReplicaID {
					err = nil // a debugging consumer may ask any replica
				}
			}
			if err == nil {
				err = p.listOffset(req, rp.Timestamp, &out)
			}
			out.ErrorCode = code(err)
			st.Partitions = append(st.Partitions, out)
		}
		resp.Topics = append(resp.Topics, st)
	}
	return resp
}

func (p *partition) listOffset(req *kmsg.ListOffsetsRequest, timestamp int64, out *kmsg.ListOffsetsResponseTopicPartition) *kerr.Error {
	upper := p.logEnd
	if req.ReplicaID == -1 {
		if upper = p.highWatermark; req.IsolationLevel == 1 {
			upper = p.lastStableOffset()
		}
		// Until the high watermark reaches the start of its epoch, a new leader doesn't know where the committed log ends.
		if last := p.epochs[len(p.epochs)-1]; last.epoch == p.leaderEpoch && upper < last.start && timestamp != earliest {
			return kerr.OffsetNotAvailable
		}
	}
	switch {
	case timestamp == latest:
		out.Offset, out.LeaderEpoch = upper, p.leaderEpoch
	case timestamp == earliest, timestamp == earliestLocal:
		out.Offset, out.LeaderEpoch = p.logStart, p.epochAt(p.logStart)
	case timestamp == latestTiered:
	case timestamp == maxTimestamp, timestamp >= 0:
		p.findTimestamp(timestamp, upper, out)
	default:
		return kerr.InvalidRequest
	}
	return nil
}

// findTimestamp finds the first record below upper whose timestamp isn't before the wanted one, or the newest for maxTimestamp.
func (p *partition) findTimestamp(wanted, upper int64, out *kmsg.ListOffsetsResponseTopicPartition) {
	for _, b := range p.batches {
		if b.Control() || b.EndOffset() <= p.logStart || wanted >= 0 && b.MaxTimestamp() < wanted {
			continue
		}
		for _, r := range recordsOf(b) {
			if r.Offset < p.logStart || r.Offset >= upper {
				continue
			}
			if wanted >= 0 && r.Timestamp >= wanted || wanted == maxTimestamp && r.Timestamp > out.Timestamp {
				out.Offset, out.Timestamp, out.LeaderEpoch = r.Offset, r.Timestamp, b.LeaderEpoch()
				if wanted >= 0 {
					return
				}
			}
		}
	}
}

func (x *exchange) offsetForLeaderEpoch(req *kmsg.OffsetForLeaderEpochRequest) kmsg.Response {
	resp := kmsg.NewPtrOffsetForLeaderEpochResponse()
	for _, rt := range req.Topics {
		st := kmsg.NewOffsetForLeaderEpochResponseTopic()
		st.Topic = rt.Topic
		t, unknown := x.topic(rt.Topic, [16]byte{})
		for _, rp := range rt.Partitions {
			out := kmsg.NewOffsetForLeaderEpochResponseTopicPartition()
			out.Partition, out.LeaderEpoch, out.EndOffset = rp.Partition, -1, -1
			p, err := x.replica(t, unknown, rt.Topic, rp.Partition)
			if err == nil {
				err = p.fence(x.broker.id, rp.CurrentLeaderEpoch)
			}
			if err == nil {
				out.LeaderEpoch, out.EndOffset = p.endOffsetFor(rp.LeaderEpoch)
			}
			out.ErrorCode = code(err)
			st.Partitions = append(st.Partitions, out)
		}
		resp.Topics = append(resp.Topics, st)
	}
	return resp
}

// describeProducers is answered by any replica, without a look at leadership.
func (x *exchange) describeProducers(req *kmsg.DescribeProducersRequest) kmsg.Response {
	resp := kmsg.NewPtrDescribeProducersResponse()
	for _, rt := range req.Topics {
		st := kmsg.NewDescribeProducersResponseTopic()
		st.Topic = rt.Topic
		t, unknown := x.topic(rt.Topic, [16]byte{})
		for _, index := range rt.Partitions {
			out := kmsg.NewDescribeProducersResponseTopicPartition()
			out.Partition = index
			p, err := x.replica(t, unknown, rt.Topic, index)
			if err == nil && !slices.Contains(p.replicas, x.broker.id) {
				err = kerr.NotLeaderForPartition
			}
			if err == nil {
				out.ActiveProducers = p.producers.describe()
			}
			out.ErrorCode = code(err)
			st.Partitions = append(st.Partitions, out)
		}
		resp.Topics = append(resp.Topics, st)
	}
	return resp
}

func (ps producers) describe() []kmsg.DescribeProducersResponseTopicPartitionActiveProducer {
	var list []kmsg.DescribeProducersResponseTopicPartitionActiveProducer
	for id, e := range ps {
		list = append(list, kmsg.DescribeProducersResponseTopicPartitionActiveProducer{
			ProducerID: id, ProducerEpoch: int32(e.epoch), LastSequence: e.lastSequence(), LastTimestamp: e.lastTimestamp,
			CoordinatorEpoch: e.coordinatorEpoch, CurrentTxnStartOffset: e.txnStart,
		})
	}
	return list
}

func (x *exchange) deleteRecords(req *kmsg.DeleteRecordsRequest) kmsg.Response {
	resp := kmsg.NewPtrDeleteRecordsResponse()
	for _, rt := range req.Topics {
		st := kmsg.NewDeleteRecordsResponseTopic()
		st.Topic = rt.Topic
		t, unknown := x.topic(rt.Topic, [16]byte{})
		for _, rp := range rt.Partitions {
			out := kmsg.NewDeleteRecordsResponseTopicPartition()
			out.Partition, out.LowWatermark = rp.Partition, -1
			p, err := x.replica(t, unknown, rt.Topic, rp.Partition)
			if err == nil {
				err = p.fence(x.broker.id, -1)
			}
			if offset := rp.Offset; err == nil {
				if offset == -1 {
					offset = p.highWatermark
				}
				if offset < 0 || offset > p.highWatermark {
					err = kerr.OffsetOutOfRange
				} else {
					p.deleteRecords(offset)
					out.LowWatermark = p.logStart
				}
			}
			out.ErrorCode = code(err)
			st.Partitions = append(st.Partitions, out)
		}
		resp.Topics = append(resp.Topics, st)
	}
	return resp
}
