package scripted_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/kafkatest"
	"kmirror/internal/scripted"
	"kmirror/protocol"
)

// idle is connections.max.idle.ms in these tests.
const idle = 2 * time.Second

// fact is one thing that the rules of exactly once rely on, named as in docs/guarantees.md.
type fact struct {
	name    string
	brokers int
	check   func(t *testing.T, w world)
}

var facts = []fact{
	{"F1 an unknown producer ID may start anywhere", 1, unknownProducer},
	{"F2 a known one goes on or repeats one of five", 1, knownProducer},
	{"F2 a new epoch starts at 0", 1, newEpoch},
	{"F2 sequences wrap", 1, sequencesWrap},
	{"F2 after a reload one batch is remembered", 1, reload},
	{"F3 old batches are forgotten at the check", 1, expiry},
	{"F3 old batches are forgotten at a restart", 1, expiryAtRestart},
	{"F4 the state survives kill -9 and DeleteRecords", 1, survival},
	{"F5 DescribeProducers lists idempotent producers", 1, describeLists},
	{"F7 an empty aborted transaction raises the epoch", 1, emptyTransaction},
	{"F9 idle connections are closed", 1, idleClose},
	{"F10 one connection keeps its order", 1, connectionOrder},
	{"batches that brokers refuse", 1, refusedBatches},
	{"what a broker changes in a batch", 1, changedBatches},
	{"leader epochs fence", 1, leaderEpochs},
	{"fetch cuts batches", 1, fetchCuts},
	{"offsets by timestamp", 1, offsetsByTimestamp},
	{"F5 any replica answers DescribeProducers", 3, describeAnywhere},
	{"F6 reads end at the high watermark", 3, highWatermark},
}

// ours is a producer ID that no broker allocates.
func ours(topic string) int64 {
	id := int64(1) << 61
	for _, c := range topic {
		id += int64(c) * 31
	}
	return id
}

// sequenced is a batch of n records at a sequence.
func sequenced(topic string, epoch int16, sequence int32, n int) scripted.Batch {
	b := scripted.Batch{ProducerID: ours(topic), ProducerEpoch: epoch, BaseSequence: sequence}
	for i := range n {
		b.Values = append(b.Values, fmt.Sprintf("%d.%d", epoch, int(sequence)+i))
	}
	return b
}

// appended fails unless the batch went to offset, or was refused with the wanted error.
func appended(t *testing.T, what string, got kmsg.ProduceResponseTopicPartition, offset int64, want *kerr.Error) {
	t.Helper()
	wantCode := int16(0)
	if want != nil {
		wantCode, offset = want.Code, -1
	}
	if got.ErrorCode != wantCode || got.BaseOffset != offset {
		t.Errorf("%s: error %d (%v), base offset %d; want error %d, base offset %d", what, got.ErrorCode, kerr.ErrorForCode(got.ErrorCode), got.BaseOffset, wantCode, offset)
	}
}

func unknownProducer(t *testing.T, w world) {
	topic := w.createTopic(t)
	c := dialLeader(t, w, topic)
	appended(t, "epoch 5, sequence 777", c.produce(topic, sequenced(topic, 5, 777, 3)), 0, nil)
	appended(t, "its next sequence", c.produce(topic, sequenced(topic, 5, 780, 1)), 3, nil)
}

func knownProducer(t *testing.T, w world) {
	topic := w.createTopic(t)
	c := dialLeader(t, w, topic)
	for i := range 7 {
		appended(t, fmt.Sprint("batch ", i), c.produce(topic, sequenced(topic, 0, int32(10*i), 10)), int64(10*i), nil)
	}
	for i := 2; i < 7; i++ {
		got := c.produce(topic, sequenced(topic, 0, int32(10*i), 10))
		appended(t, fmt.Sprint("repeat of batch ", i), got, int64(10*i), nil)
		if got.LogAppendTime < 0 {
			t.Errorf("repeat of batch %d: log append time %d, want the batch's timestamp", i, got.LogAppendTime)
		}
	}
	for i := range 2 {
		appended(t, fmt.Sprint("repeat of batch ", i), c.produce(topic, sequenced(topic, 0, int32(10*i), 10)), 0, kerr.OutOfOrderSequenceNumber)
	}
	appended(t, "part of a batch", c.produce(topic, sequenced(topic, 0, 60, 5)), 0, kerr.OutOfOrderSequenceNumber)
	appended(t, "two batches as one", c.produce(topic, sequenced(topic, 0, 50, 20)), 0, kerr.OutOfOrderSequenceNumber)
	appended(t, "a gap", c.produce(topic, sequenced(topic, 0, 71, 1)), 0, kerr.OutOfOrderSequenceNumber)
	appended(t, "the next", c.produce(topic, sequenced(topic, 0, 70, 1)), 70, nil)
}

func newEpoch(t *testing.T, w world) {
	topic := w.createTopic(t)
	c := dialLeader(t, w, topic)
	appended(t, "epoch 3", c.produce(topic, sequenced(topic, 3, 50, 2)), 0, nil)
	appended(t, "epoch 4 at 52", c.produce(topic, sequenced(topic, 4, 52, 2)), 0, kerr.OutOfOrderSequenceNumber)
	appended(t, "epoch 2 at 0", c.produce(topic, sequenced(topic, 2, 0, 2)), 0, kerr.InvalidProducerEpoch)
	appended(t, "epoch 4 at 0", c.produce(topic, sequenced(topic, 4, 0, 2)), 2, nil)
	appended(t, "repeat of epoch 3", c.produce(topic, sequenced(topic, 3, 50, 2)), 0, kerr.InvalidProducerEpoch)
	appended(t, "repeat of epoch 4", c.produce(topic, sequenced(topic, 4, 0, 2)), 2, nil)
	appended(t, "epoch 6 at 0", c.produce(topic, sequenced(topic, 6, 0, 1)), 4, nil)
}

func sequencesWrap(t *testing.T, w world) {
	topic := w.createTopic(t)
	c := dialLeader(t, w, topic)
	appended(t, "over the wrap", c.produce(topic, sequenced(topic, 0, math.MaxInt32-1, 4)), 0, nil)
	appended(t, "repeat", c.produce(topic, sequenced(topic, 0, math.MaxInt32-1, 4)), 0, nil)
	appended(t, "behind the wrap", c.produce(topic, sequenced(topic, 0, 2, 1)), 4, nil)
}

func reload(t *testing.T, w world) {
	topic := w.createTopic(t)
	c := dialLeader(t, w, topic)
	for i := range 3 {
		appended(t, fmt.Sprint("batch ", i), c.produce(topic, sequenced(topic, 0, int32(i), 1)), int64(i), nil)
	}
	w.restart(t)
	c = dialLeader(t, w, topic)
	appended(t, "repeat of the last but one", c.produce(topic, sequenced(topic, 0, 1, 1)), 0, kerr.OutOfOrderSequenceNumber)
	appended(t, "repeat of the last", c.produce(topic, sequenced(topic, 0, 2, 1)), 2, nil)
	appended(t, "the next", c.produce(topic, sequenced(topic, 0, 3, 1)), 3, nil)
}

// threeDaysOld is sequenced with timestamps that brokers forget producers for.
func threeDaysOld(topic string, sequence int32, n int) scripted.Batch {
	b := sequenced(topic, 0, sequence, n)
	b.Timestamp = time.Now().Add(-72 * time.Hour)
	return b
}

func expiry(t *testing.T, w world) {
	topic := w.createTopic(t)
	c := dialLeader(t, w, topic)
	appended(t, "fresh batch", c.produce(topic, sequenced(topic, 0, 0, 2)), 0, nil)
	appended(t, "old batch", c.produce(topic, threeDaysOld(topic, 2, 2)), 2, nil)
	w.expire(t, func() bool {
		_, known := c.producer(topic, ours(topic))
		return !known
	})
	appended(t, "repeat of the fresh batch", c.produce(topic, sequenced(topic, 0, 0, 2)), 4, nil)
	if _, known := c.producer(topic, ours(topic)); !known {
		t.Error("a fresh batch after expiry didn't make the producer known")
	}
}

func expiryAtRestart(t *testing.T, w world) {
	old, fresh := w.createTopic(t), w.createTopic(t)
	c := dialLeader(t, w, old)
	appended(t, "old batch", c.produce(old, threeDaysOld(old, 7, 2)), 0, nil)
	appended(t, "fresh batch", c.produce(fresh, sequenced(fresh, 0, 7, 2)), 0, nil)
	w.kill(t)
	c = dialLeader(t, w, old)
	appended(t, "repeat of the old batch", c.produce(old, threeDaysOld(old, 7, 2)), 2, nil)
	appended(t, "repeat of the fresh batch", c.produce(fresh, sequenced(fresh, 0, 7, 2)), 0, nil)
}

func survival(t *testing.T, w world) {
	topic := w.createTopic(t)
	c := dialLeader(t, w, topic)
	appended(t, "batch", c.produce(topic, sequenced(topic, 9, 5, 3)), 0, nil)
	c.deleteRecords(topic, 3)
	appended(t, "a gap after DeleteRecords", c.produce(topic, sequenced(topic, 9, 9, 1)), 0, kerr.OutOfOrderSequenceNumber)
	w.kill(t)
	c = dialLeader(t, w, topic)
	appended(t, "a gap after kill -9", c.produce(topic, sequenced(topic, 9, 9, 1)), 0, kerr.OutOfOrderSequenceNumber)
	appended(t, "repeat of the deleted batch", c.produce(topic, sequenced(topic, 9, 5, 3)), 0, nil)
	appended(t, "the next", c.produce(topic, sequenced(topic, 9, 8, 1)), 3, nil)
}

func describeLists(t *testing.T, w world) {
	topic := w.createTopic(t)
	c := dialLeader(t, w, topic)
	if p, known := c.producer(topic, ours(topic)); known {
		t.Errorf("DescribeProducers before the first batch lists %+v", p)
	}
	spec := sequenced(topic, 4, 100, 5)
	spec.Timestamp = time.UnixMilli(time.Now().UnixMilli() - 1000)
	appended(t, "batch", c.produce(topic, spec), 0, nil)
	got, known := c.producer(topic, ours(topic))
	if !known || got.ProducerEpoch != 4 || got.LastSequence != 104 || got.LastTimestamp != spec.Timestamp.UnixMilli() || got.CurrentTxnStartOffset != -1 {
		t.Errorf("DescribeProducers = %+v, want epoch 4, last sequence 104, the batch's timestamp", got)
	}
	if answer := c.describe("facts-missing"); answer.ErrorCode != kerr.UnknownTopicOrPartition.Code {
		t.Errorf("DescribeProducers of a missing topic: error %d, want %d", answer.ErrorCode, kerr.UnknownTopicOrPartition.Code)
	}
}

// transactionally runs an empty aborted transaction over a topic and returns the producer ID and the epoch it leaves.
func (w *wire) transactionally(txnID, topic string) (id int64, epoch int16) {
	w.t.Helper()
	init := kmsg.NewPtrInitProducerIDRequest()
	init.Version, init.TransactionalID, init.TransactionTimeoutMillis, init.ProducerID, init.ProducerEpoch = 4, &txnID, 30000, -1, -1
	var initialized *kmsg.InitProducerIDResponse
	for deadline := time.Now().Add(30 * time.Second); ; {
		initialized = w.ask(init).(*kmsg.InitProducerIDResponse)
		if initialized.ErrorCode == 0 {
			break
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("InitProducerId: error %d", initialized.ErrorCode)
		}
		find := kmsg.NewPtrFindCoordinatorRequest() // creates the coordinator's topic
		find.Version, find.CoordinatorType, find.CoordinatorKeys = 4, 1, []string{txnID}
		w.ask(find)
	}
	add := kmsg.NewPtrAddPartitionsToTxnRequest()
	add.Version, add.TransactionalID, add.ProducerID, add.ProducerEpoch = 3, txnID, initialized.ProducerID, initialized.ProducerEpoch
	add.Topics = []kmsg.AddPartitionsToTxnRequestTopic{{Topic: topic, Partitions: []int32{0}}}
	for deadline := time.Now().Add(30 * time.Second); ; { // CONCURRENT_TRANSACTIONS while the last one's markers are written
		code := w.ask(add).(*kmsg.AddPartitionsToTxnResponse).Topics[0].Partitions[0].ErrorCode
		if code == 0 {
			break
		}
		if code != kerr.ConcurrentTransactions.Code || time.Now().After(deadline) {
			w.t.Fatalf("AddPartitionsToTxn: error %d", code)
		}
	}
	end := kmsg.NewPtrEndTxnRequest()
	end.Version, end.TransactionalID, end.ProducerID, end.ProducerEpoch = 5, txnID, initialized.ProducerID, initialized.ProducerEpoch
	ended := w.ask(end).(*kmsg.EndTxnResponse)
	if ended.ErrorCode != 0 {
		w.t.Fatalf("EndTxn: error %d", ended.ErrorCode)
	}
	return ended.ProducerID, ended.ProducerEpoch
}

func emptyTransaction(t *testing.T, w world) {
	topic := w.createTopic(t)
	c := dialLeader(t, w, topic)
	c.transactionally(topic+"-before", w.createTopic(t)) // takes producer ID 0, which scripted.Batch can't name
	id, epoch := c.transactionally(topic, topic)
	waitFor(t, "the marker", func() bool {
		p, known := c.producer(topic, id)
		return known && int16(p.ProducerEpoch) == epoch
	})
	if p, _ := c.producer(topic, id); p.LastSequence != -1 {
		t.Errorf("last sequence after the marker = %d, want -1", p.LastSequence)
	}
	batch := func(epoch int16, sequence int32) scripted.Batch {
		return scripted.Batch{ProducerID: id, ProducerEpoch: epoch, BaseSequence: sequence, Values: []string{"x"}}
	}
	appended(t, "older epoch", c.produce(topic, batch(epoch-1, 0)), 0, kerr.InvalidProducerEpoch)
	appended(t, "this epoch at 1", c.produce(topic, batch(epoch, 1)), 0, kerr.OutOfOrderSequenceNumber)
	appended(t, "this epoch at 0", c.produce(topic, batch(epoch, 0)), 1, nil)
	again, newer := c.transactionally(topic, topic)
	if again != id || newer <= epoch {
		t.Errorf("second transaction: producer ID %d, epoch %d; want %d and more than %d", again, newer, id, epoch)
	}
	waitFor(t, "the second marker", func() bool {
		p, known := c.producer(topic, id)
		return known && int16(p.ProducerEpoch) == newer
	})
	w.restart(t)
	c = dialLeader(t, w, topic)
	appended(t, "the first epoch after a restart", c.produce(topic, batch(epoch, 1)), 0, kerr.InvalidProducerEpoch)
	f := c.fetch(topic, fetchAt(0), nil)
	first, rest, err := protocol.ParseBatch(f.RecordBatches)
	if err != nil || !first.Control() || first.EndOffset() != 1 {
		t.Errorf("the log starts with control %v, end offset %d, %v; want one control record", first.Control(), first.EndOffset(), err)
	}
	if second, _, err := protocol.ParseBatch(rest); err != nil || second.Control() {
		t.Errorf("behind the marker: %v, want the data batch", err)
	}
}

func waitFor(t *testing.T, what string, cond func() bool) {
	t.Helper()
	kafkatest.Eventually(t, 30*time.Second, func() error {
		if !cond() {
			return fmt.Errorf("not seen: %s", what)
		}
		return nil
	})
}

func idleClose(t *testing.T, w world) {
	silent, half := dial(t, w.addr(1)), dial(t, w.addr(1))
	if _, err := half.conn.Write([]byte{0, 0, 0, 50, 0, 3}); err != nil {
		t.Fatal(err)
	}
	silent.closed()
	half.closed()
}

func connectionOrder(t *testing.T, w world) {
	topic := w.createTopic(t)
	c := dialLeader(t, w, topic)
	var sent []*kmsg.ProduceRequest
	for i := range 200 {
		req := produceRequest(topic, -1, sequenced(topic, 0, int32(i), 1).Bytes())
		c.send(req)
		sent = append(sent, req)
	}
	for i, req := range sent {
		appended(t, fmt.Sprint("request ", i), produced(c.receive(req)), int64(i), nil)
	}
}
