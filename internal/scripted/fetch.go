package scripted

import (
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/protocol"
)

// fetch answers as a broker whose fetch session cache is full: every answer is complete and offers no session.
func (x *exchange) fetch(req *kmsg.FetchRequest) kmsg.Response {
	if req.SessionID != 0 {
		resp := kmsg.NewPtrFetchResponse()
		resp.ErrorCode = kerr.FetchSessionIDNotFound.Code
		return resp
	}
	var resp *kmsg.FetchResponse
	x.cluster.await(x.stopped, time.Duration(req.MaxWaitMillis)*time.Millisecond, func() bool {
		var sizeBytes int
		var failed bool
		resp, sizeBytes, failed = x.fetchOnce(req)
		return failed || sizeBytes >= int(req.MinBytes)
	})
	return resp
}

// fetchOnce reads what there is now. failed: a partition answers with an error or a diverging epoch, which is told at once.
func (x *exchange) fetchOnce(req *kmsg.FetchRequest) (resp *kmsg.FetchResponse, sizeBytes int, failed bool) {
	resp = kmsg.NewPtrFetchResponse()
	resp.Version = req.Version
	for _, rt := range req.Topics {
		st := kmsg.NewFetchResponseTopic()
		st.Topic, st.TopicID = rt.Topic, rt.TopicID
		t, unknown := x.topic(rt.Topic, rt.TopicID)
		for _, rp := range rt.Partitions {
			out := kmsg.NewFetchResponseTopicPartition()
			out.Partition, out.HighWatermark, out.LastStableOffset, out.LogStartOffset, out.PreferredReadReplica = rp.Partition, -1, -1, -1, -1
			p, err := x.replica(t, unknown, rt.Topic, rp.Partition)
			if err == nil {
				err = p.read(x.broker.id, req, rp, int(req.MaxBytes)-sizeBytes, sizeBytes == 0, &out)
			}
			if err != nil {
				out.ErrorCode, failed = err.Code, true
				if p != nil && req.Version >= 12 && (err == kerr.NotLeaderForPartition || err == kerr.FencedLeaderEpoch) {
					out.CurrentLeader.LeaderID, out.CurrentLeader.LeaderEpoch = p.leader, p.leaderEpoch
					x.addFetchBroker(resp, p.leader)
				}
			}
			failed = failed || out.DivergingEpoch.Epoch >= 0
			sizeBytes += len(out.RecordBatches)
			st.Partitions = append(st.Partitions, out)
		}
		resp.Topics = append(resp.Topics, st)
	}
	return resp, sizeBytes, failed
}

func (x *exchange) addFetchBroker(resp *kmsg.FetchResponse, id int32) {
	if resp.Version < 16 || id < 0 {
		return
	}
	host, port := x.cluster.broker(id).hostPort()
	resp.Brokers = append(resp.Brokers, kmsg.FetchResponseBroker{NodeID: id, Host: host, Port: port})
}

// read fills one partition's answer; first: nothing is in the answer yet, so one batch may exceed the limits.
func (p *partition) read(node int32, req *kmsg.FetchRequest, rp kmsg.FetchRequestTopicPartition, limit int, first bool, out *kmsg.FetchResponseTopicPartition) *kerr.Error {
	if err := p.fence(node, rp.CurrentLeaderEpoch); err != nil {
		return err
	}
	out.HighWatermark, out.LastStableOffset, out.LogStartOffset = p.highWatermark, p.lastStableOffset(), p.logStart
	if req.Version >= 12 && rp.LastFetchedEpoch >= 0 {
		epoch, end := p.endOffsetFor(rp.LastFetchedEpoch)
		if epoch < 0 || end < 0 {
			return kerr.OffsetOutOfRange
		}
		if epoch < rp.LastFetchedEpoch || end < rp.FetchOffset {
			out.DivergingEpoch.Epoch, out.DivergingEpoch.EndOffset = epoch, end
			return nil
		}
	}
	if rp.FetchOffset < p.logStart || rp.FetchOffset > p.logEnd {
		return kerr.OffsetOutOfRange
	}
	upper := p.highWatermark
	if req.IsolationLevel == 1 {
		upper = out.LastStableOffset
	}
	out.RecordBatches = p.slice(rp.FetchOffset, upper, min(limit, int(rp.PartitionMaxBytes)), first)
	if req.IsolationLevel == 1 {
		out.AbortedTransactions = []kmsg.FetchResponseTopicPartitionAbortedTransaction{}
		for _, a := range p.aborted {
			if a.lastOffset >= rp.FetchOffset && a.firstOffset < upper {
				out.AbortedTransactions = append(out.AbortedTransactions, kmsg.FetchResponseTopicPartitionAbortedTransaction{ProducerID: a.producerID, FirstOffset: a.firstOffset})
			}
		}
	}
	return nil
}

// slice is the log's bytes from the batch that holds offset up to upper, cut at limit in the middle of a batch as a broker cuts its
// segment file; but the first batch is whole or left out.
func (p *partition) slice(offset, upper int64, limit int, first bool) []byte {
	var out []byte
	for _, b := range p.batches {
		if b.EndOffset() <= offset || b.EndOffset() > upper {
			continue
		}
		if len(out) == 0 && len(b) > limit {
			if first {
				return b
			}
			return nil
		}
		if room := limit - len(out); len(b) > room {
			return append(out, b[:room]...)
		}
		out = append(out, b...)
	}
	return out
}

// batchesFrom lists the batches that reach past offset.
func (p *partition) batchesFrom(offset int64) []protocol.Batch {
	for i, b := range p.batches {
		if b.EndOffset() > offset {
			return p.batches[i:]
		}
	}
	return nil
}
