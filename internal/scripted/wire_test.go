package scripted_test

import (
	"encoding/binary"
	"io"
	"net"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/scripted"
)

// wire is one plain connection to a broker: no retries, no pool, nothing between the test and the bytes.
type wire struct {
	t    *testing.T
	conn net.Conn
	corr int32
}

func dial(t *testing.T, addr string) *wire {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return &wire{t: t, conn: conn}
}

// send writes a request without waiting for its answer.
func (w *wire) send(req kmsg.Request) {
	w.t.Helper()
	w.corr++
	frame := kmsg.NewRequestFormatter(kmsg.FormatterClientID("wire")).AppendRequest(nil, req, w.corr)
	if _, err := w.conn.Write(frame); err != nil {
		w.t.Fatalf("%s: %v", kmsg.NameForKey(req.Key()), err)
	}
}

// receive reads the answer to req, the oldest that has none.
func (w *wire) receive(req kmsg.Request) kmsg.Response {
	w.t.Helper()
	resp, err := w.tryReceive(req)
	if err != nil {
		w.t.Fatalf("%s: %v", kmsg.NameForKey(req.Key()), err)
	}
	return resp
}

func (w *wire) tryReceive(req kmsg.Request) (kmsg.Response, error) {
	w.conn.SetReadDeadline(time.Now().Add(30 * time.Second))
	var length [4]byte
	if _, err := io.ReadFull(w.conn, length[:]); err != nil {
		return nil, err
	}
	body := make([]byte, binary.BigEndian.Uint32(length[:]))
	if _, err := io.ReadFull(w.conn, body); err != nil {
		return nil, err
	}
	resp := req.ResponseKind()
	skip := 4
	if resp.IsFlexible() && req.Key() != 18 {
		skip++
	}
	return resp, resp.ReadFrom(body[skip:])
}

func (w *wire) ask(req kmsg.Request) kmsg.Response {
	w.t.Helper()
	w.send(req)
	return w.receive(req)
}

// closed waits until the broker has closed the connection.
func (w *wire) closed() {
	w.t.Helper()
	w.conn.SetReadDeadline(time.Now().Add(30 * time.Second))
	if _, err := w.conn.Read(make([]byte, 1)); err == nil {
		w.t.Fatal("got a byte, want the connection's end")
	} else if ne, ok := err.(net.Error); ok && ne.Timeout() {
		w.t.Fatal("the broker keeps the connection open")
	}
}

func produceRequest(topic string, acks int16, batches ...[]byte) *kmsg.ProduceRequest {
	req := kmsg.NewPtrProduceRequest()
	req.Version, req.Acks, req.TimeoutMillis = 12, acks, 20000
	rp := kmsg.ProduceRequestTopicPartition{Partition: 0, Records: []byte{}}
	for _, b := range batches {
		rp.Records = append(rp.Records, b...)
	}
	req.Topics = []kmsg.ProduceRequestTopic{{Topic: topic, Partitions: []kmsg.ProduceRequestTopicPartition{rp}}}
	return req
}

// produced is the answer of the one partition of a produceRequest.
func produced(resp kmsg.Response) kmsg.ProduceResponseTopicPartition {
	return resp.(*kmsg.ProduceResponse).Topics[0].Partitions[0]
}

func (w *wire) produce(topic string, spec scripted.Batch) kmsg.ProduceResponseTopicPartition {
	w.t.Helper()
	return produced(w.ask(produceRequest(topic, -1, spec.Bytes())))
}

func (w *wire) describe(topic string) kmsg.DescribeProducersResponseTopicPartition {
	w.t.Helper()
	req := kmsg.NewPtrDescribeProducersRequest()
	req.Topics = []kmsg.DescribeProducersRequestTopic{{Topic: topic, Partitions: []int32{0}}}
	return w.ask(req).(*kmsg.DescribeProducersResponse).Topics[0].Partitions[0]
}

type activeProducer = kmsg.DescribeProducersResponseTopicPartitionActiveProducer

func (w *wire) producer(topic string, id int64) (p activeProducer, known bool) {
	w.t.Helper()
	answer := w.describe(topic)
	if answer.ErrorCode != 0 {
		w.t.Fatalf("DescribeProducers: error %d", answer.ErrorCode)
	}
	for _, p := range answer.ActiveProducers {
		if p.ProducerID == id {
			return p, true
		}
	}
	return activeProducer{}, false
}

func (w *wire) listOffset(topic string, replicaID, epoch int32, timestamp int64) kmsg.ListOffsetsResponseTopicPartition {
	w.t.Helper()
	req := kmsg.NewPtrListOffsetsRequest()
	req.Version, req.ReplicaID = 7, replicaID
	rp := kmsg.NewListOffsetsRequestTopicPartition()
	rp.CurrentLeaderEpoch, rp.Timestamp = epoch, timestamp
	req.Topics = []kmsg.ListOffsetsRequestTopic{{Topic: topic, Partitions: []kmsg.ListOffsetsRequestTopicPartition{rp}}}
	return w.ask(req).(*kmsg.ListOffsetsResponse).Topics[0].Partitions[0]
}

// fetchAt is one partition of a Fetch v12, with sensible fields.
func fetchAt(offset int64) kmsg.FetchRequestTopicPartition {
	rp := kmsg.NewFetchRequestTopicPartition()
	rp.FetchOffset, rp.PartitionMaxBytes = offset, 1<<20
	return rp
}

func (w *wire) fetch(topic string, rp kmsg.FetchRequestTopicPartition, edit func(*kmsg.FetchRequest)) kmsg.FetchResponseTopicPartition {
	w.t.Helper()
	req := kmsg.NewPtrFetchRequest()
	req.Version, req.MaxWaitMillis, req.MinBytes, req.MaxBytes, req.SessionEpoch = 12, 100, 1, 1<<20, -1
	req.Topics = []kmsg.FetchRequestTopic{{Topic: topic, Partitions: []kmsg.FetchRequestTopicPartition{rp}}}
	if edit != nil {
		edit(req)
	}
	return w.ask(req).(*kmsg.FetchResponse).Topics[0].Partitions[0]
}

func (w *wire) endForEpoch(topic string, current, epoch int32) kmsg.OffsetForLeaderEpochResponseTopicPartition {
	w.t.Helper()
	req := kmsg.NewPtrOffsetForLeaderEpochRequest()
	req.Version, req.ReplicaID = 4, -1
	rp := kmsg.NewOffsetForLeaderEpochRequestTopicPartition()
	rp.CurrentLeaderEpoch, rp.LeaderEpoch = current, epoch
	req.Topics = []kmsg.OffsetForLeaderEpochRequestTopic{{Topic: topic, Partitions: []kmsg.OffsetForLeaderEpochRequestTopicPartition{rp}}}
	return w.ask(req).(*kmsg.OffsetForLeaderEpochResponse).Topics[0].Partitions[0]
}

func (w *wire) deleteRecords(topic string, before int64) {
	w.t.Helper()
	req := kmsg.NewPtrDeleteRecordsRequest()
	req.Version, req.TimeoutMillis = 2, 10000
	req.Topics = []kmsg.DeleteRecordsRequestTopic{{Topic: topic, Partitions: []kmsg.DeleteRecordsRequestTopicPartition{{Partition: 0, Offset: before}}}}
	if p := w.ask(req).(*kmsg.DeleteRecordsResponse).Topics[0].Partitions[0]; p.ErrorCode != 0 || p.LowWatermark != before {
		w.t.Fatalf("DeleteRecords(%d) = %+v", before, p)
	}
}

// leader asks who leads partition 0.
func (w *wire) leader(topic string) (kmsg.MetadataResponseTopicPartition, error) {
	w.t.Helper()
	req := kmsg.NewPtrMetadataRequest()
	req.Version = 12
	req.Topics = []kmsg.MetadataRequestTopic{{Topic: &topic}}
	t := w.ask(req).(*kmsg.MetadataResponse).Topics[0]
	if err := kerr.ErrorForCode(t.ErrorCode); err != nil {
		return kmsg.MetadataResponseTopicPartition{}, err
	}
	return t.Partitions[0], kerr.ErrorForCode(t.Partitions[0].ErrorCode)
}

// mustLead is leader for a topic that has one.
func (w *wire) mustLead(topic string) kmsg.MetadataResponseTopicPartition {
	w.t.Helper()
	p, err := w.leader(topic)
	if err != nil {
		w.t.Fatalf("Metadata(%s): %v", topic, err)
	}
	return p
}
