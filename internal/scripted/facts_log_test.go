package scripted_test

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/scripted"
	"kmirror/protocol"
)

// damaged changes a good batch of two records; seal makes the CRC right again.
func damaged(seal bool, change func(protocol.Batch)) []byte {
	b := scripted.Batch{Values: []string{"a", "b"}}.Bytes()
	change(b)
	if seal {
		binary.BigEndian.PutUint32(b[17:], crc32.Checksum(b[21:], crc32.MakeTable(crc32.Castagnoli)))
	}
	return b
}

func refusedBatches(t *testing.T, w world) {
	topic := w.createTopic(t)
	good := scripted.Batch{Values: []string{"a", "b"}}.Bytes()
	withID := scripted.Batch{ProducerID: ours(topic), BaseSequence: -1, Values: []string{"a"}}.Bytes()
	transactional := scripted.Batch{ProducerID: 77, Attributes: protocol.AttrTransactional, Values: []string{"a"}}.Bytes()
	future := scripted.Batch{Values: []string{"a"}, Timestamp: time.Now().Add(2 * time.Hour)}.Bytes()
	for _, row := range []struct {
		name  string
		bytes []byte
		want  *kerr.Error
	}{
		{"wrong CRC", damaged(false, func(b protocol.Batch) { b[len(b)-1] ^= 1 }), kerr.CorruptMessage},
		{"base offset 7", damaged(true, func(b protocol.Batch) { b.SetBaseOffset(7) }), kerr.InvalidRecord},
		{"more offsets than records", damaged(true, func(b protocol.Batch) { b[26] = 4 }), kerr.InvalidRecord},
		{"no records", damaged(true, func(b protocol.Batch) { b[60] = 0 }), kerr.InvalidRecord},
		{"control batch", damaged(true, func(b protocol.Batch) { b[22] |= protocol.AttrControl }), kerr.InvalidRecord},
		{"two batches", append(bytes.Clone(good), good...), kerr.InvalidRecord},
		{"no batch", []byte{}, kerr.InvalidRecord},
		{"producer ID without sequence", withID, kerr.InvalidRecord},
		{"transactional without transactional ID", transactional, kerr.TransactionalIDAuthorizationFailed},
		{"two hours ahead", future, kerr.InvalidTimestamp},
		{"larger than max.message.bytes", scripted.Batch{Values: []string{string(make([]byte, 2<<20))}}.Bytes(), kerr.MessageTooLarge},
	} {
		t.Run(row.name, func(t *testing.T) {
			appended(t, row.name, produced(dialLeader(t, w, topic).ask(produceRequest(topic, -1, row.bytes))), 0, row.want)
		})
	}
	c := dialLeader(t, w, topic)
	appended(t, "acks=2", produced(c.ask(produceRequest(topic, 2, good))), 0, kerr.InvalidRequiredAcks)
	missing := produced(c.ask(produceRequest("facts-missing", -1, good)))
	appended(t, "missing topic", missing, 0, kerr.UnknownTopicOrPartition)
	if end := c.listOffset(topic, -1, -1, -1).Offset; end != 0 {
		t.Errorf("log end after refusals = %d, want 0", end)
	}
	c.send(produceRequest("facts-missing", 0, good))
	c.closed()
}

func changedBatches(t *testing.T, w world) {
	create, appendTime := w.createTopic(t), w.createTopic(t, "message.timestamp.type", "LogAppendTime")
	c := dialLeader(t, w, create)
	bit := scripted.Batch{Values: []string{"a"}, Attributes: protocol.AttrLogAppendTime, Timestamp: time.UnixMilli(1234567890123)}
	appended(t, "LogAppendTime bit to an append-time topic", c.produce(appendTime, bit), 0, kerr.InvalidTimestamp)
	appended(t, "LogAppendTime bit", c.produce(create, bit), 0, nil)
	stored, _, err := protocol.ParseBatch(c.fetch(create, fetchAt(0), nil).RecordBatches)
	if err != nil || stored.Attributes() != 0 || !stored.VerifyCRC() || stored.MaxTimestamp() != 1234567890123 {
		t.Errorf("stored: attributes %x, CRC right %v, max timestamp %d, %v", stored.Attributes(), stored.VerifyCRC(), stored.MaxTimestamp(), err)
	}
	sent := scripted.Batch{Records: []scripted.Record{{Key: []byte("k"), Value: []byte("v")}, {}}, Codec: kgo.ZstdCompression()}.Bytes()
	appended(t, "zstd", produced(c.ask(produceRequest(create, -1, sent))), 1, nil)
	stored, _, err = protocol.ParseBatch(c.fetch(create, fetchAt(2), nil).RecordBatches)
	if err != nil || stored.BaseOffset() != 1 || !bytes.Equal(stored[16:], sent[16:]) {
		t.Errorf("a good batch was changed: %v, base offset %d", err, stored.BaseOffset())
	}
	before := time.Now().UnixMilli()
	answer := c.produce(appendTime, scripted.Batch{Values: []string{"a"}, Timestamp: time.UnixMilli(5000)})
	appended(t, "append-time topic", answer, 0, nil)
	stored, _, err = protocol.ParseBatch(c.fetch(appendTime, fetchAt(0), nil).RecordBatches)
	if err != nil || stored.Attributes() != protocol.AttrLogAppendTime || !stored.VerifyCRC() || stored.MaxTimestamp() < before || answer.LogAppendTime != stored.MaxTimestamp() {
		t.Errorf("append time: attributes %x, CRC right %v, max timestamp %d, answered %d, %v", stored.Attributes(), stored.VerifyCRC(), stored.MaxTimestamp(), answer.LogAppendTime, err)
	}
}

func leaderEpochs(t *testing.T, w world) {
	topic := w.createTopic(t)
	c := dialLeader(t, w, topic)
	c.produce(topic, sequenced(topic, 0, 0, 4))
	before := c.mustLead(topic).LeaderEpoch
	w.restart(t)
	c = dialLeader(t, w, topic)
	after := c.mustLead(topic).LeaderEpoch
	if after <= before {
		t.Fatalf("leader epoch went from %d to %d, want a higher one", before, after)
	}
	c.produce(topic, sequenced(topic, 0, 4, 2))
	for _, row := range []struct {
		name    string
		current int32
		want    *kerr.Error
	}{{"old", before, kerr.FencedLeaderEpoch}, {"current", after, nil}, {"none", -1, nil}, {"future", after + 1, kerr.UnknownLeaderEpoch}} {
		want := int16(0)
		if row.want != nil {
			want = row.want.Code
		}
		if got := c.listOffset(topic, -1, row.current, -1).ErrorCode; got != want {
			t.Errorf("ListOffsets with %s epoch: error %d, want %d", row.name, got, want)
		}
		rp := fetchAt(0)
		rp.CurrentLeaderEpoch = row.current
		if got := c.fetch(topic, rp, nil).ErrorCode; got != want {
			t.Errorf("Fetch with %s epoch: error %d, want %d", row.name, got, want)
		}
		if got := c.endForEpoch(topic, row.current, after).ErrorCode; got != want {
			t.Errorf("OffsetForLeaderEpoch with %s epoch: error %d, want %d", row.name, got, want)
		}
	}
	for _, row := range []struct {
		ask, epoch int32
		end        int64
	}{{before, before, 4}, {after, after, 6}, {after + 1, -1, -1}} {
		if got := c.endForEpoch(topic, after, row.ask); got.LeaderEpoch != row.epoch || got.EndOffset != row.end {
			t.Errorf("OffsetForLeaderEpoch(%d) = epoch %d, end %d; want %d, %d", row.ask, got.LeaderEpoch, got.EndOffset, row.epoch, row.end)
		}
	}
	diverged := fetchAt(5)
	diverged.CurrentLeaderEpoch, diverged.LastFetchedEpoch = after, before
	if got := c.fetch(topic, diverged, nil); got.DivergingEpoch.Epoch != before || got.DivergingEpoch.EndOffset != 4 || len(got.RecordBatches) > 0 {
		t.Errorf("Fetch at 5 with last fetched epoch %d = %+v, want a diverging epoch with end 4", before, got.DivergingEpoch)
	}
	if latest := c.listOffset(topic, -1, after, -1); latest.Offset != 6 || latest.LeaderEpoch != after {
		t.Errorf("latest = %d in epoch %d, want 6 in %d", latest.Offset, latest.LeaderEpoch, after)
	}
	if first := c.listOffset(topic, -1, after, -2); first.Offset != 0 || first.LeaderEpoch != before {
		t.Errorf("earliest = %d in epoch %d, want 0 in %d", first.Offset, first.LeaderEpoch, before)
	}
}

func fetchCuts(t *testing.T, w world) {
	topic := w.createTopic(t)
	c := dialLeader(t, w, topic)
	one := sequenced(topic, 0, 0, 3)
	size := len(one.Bytes())
	c.produce(topic, one)
	c.produce(topic, sequenced(topic, 0, 3, 3))
	fetch := func(offset int64, maxBytes int32) kmsg.FetchResponseTopicPartition {
		rp := fetchAt(offset)
		rp.PartitionMaxBytes = maxBytes
		return c.fetch(topic, rp, nil)
	}
	for _, row := range []struct {
		name     string
		offset   int64
		maxBytes int32
		want     int
	}{
		{"both", 0, 1 << 20, 2 * size},
		{"from the middle of the first", 2, 1 << 20, 2 * size},
		{"cut in the second", 0, int32(size + 7), size + 7},
		{"first larger than the limit", 0, 10, size},
		{"at the end", 6, 1 << 20, 0},
	} {
		got := fetch(row.offset, row.maxBytes)
		if got.ErrorCode != 0 || len(got.RecordBatches) != row.want || got.HighWatermark != 6 {
			t.Errorf("%s: error %d, %d bytes, high watermark %d; want %d bytes, 6", row.name, got.ErrorCode, len(got.RecordBatches), got.HighWatermark, row.want)
		}
	}
	c.deleteRecords(topic, 4)
	for offset, want := range map[int64]int16{3: kerr.OffsetOutOfRange.Code, 7: kerr.OffsetOutOfRange.Code, 4: 0, 6: 0} {
		if got := fetch(offset, 1<<20); got.ErrorCode != want {
			t.Errorf("Fetch at %d with log [4, 6): error %d, want %d", offset, got.ErrorCode, want)
		}
	}
}

func offsetsByTimestamp(t *testing.T, w world) {
	topic := w.createTopic(t)
	c := dialLeader(t, w, topic)
	base := time.Now().Add(-time.Hour).UnixMilli()
	for i := range int64(2) {
		c.produce(topic, scripted.Batch{Codec: kgo.Lz4Compression(), Records: []scripted.Record{
			{Value: []byte("a"), Timestamp: base + 100*i}, {Value: []byte("b"), Timestamp: base + 100*i + 50}}})
	}
	for _, row := range []struct{ at, offset, timestamp int64 }{
		{base - 5, 0, base}, {base, 0, base}, {base + 1, 1, base + 50}, {base + 51, 2, base + 100}, {base + 151, -1, -1}, {-3, 3, base + 150},
	} {
		got := c.listOffset(topic, -1, -1, row.at)
		if got.ErrorCode != 0 || got.Offset != row.offset || got.Timestamp != row.timestamp {
			t.Errorf("ListOffsets(%d) = error %d, offset %d, timestamp %d; want offset %d, timestamp %d", row.at, got.ErrorCode, got.Offset, got.Timestamp, row.offset, row.timestamp)
		}
	}
}

func describeAnywhere(t *testing.T, w world) {
	topic := w.createTopic(t)
	appended(t, "batch", dialLeader(t, w, topic).produce(topic, sequenced(topic, 0, 0, 3)), 0, nil)
	for id := int32(1); id <= 3; id++ {
		c := dial(t, w.addr(id))
		waitFor(t, "the producer on every replica", func() bool {
			p, known := c.producer(topic, ours(topic))
			return known && p.LastSequence == 2
		})
	}
}

func highWatermark(t *testing.T, w world) {
	topic := w.createTopic(t, "min.insync.replicas", "1")
	c := dialLeader(t, w, topic)
	waitFor(t, "every replica in sync", func() bool { return len(c.mustLead(topic).ISR) == 3 }) // or nobody would be waited for
	meta := c.mustLead(topic)
	appended(t, "batch", c.produce(topic, sequenced(topic, 0, 0, 3)), 0, nil)
	waitFor(t, "the high watermark", func() bool { return c.listOffset(topic, -1, -1, -1).Offset == 3 })
	follower := meta.Leader%3 + 1
	w.freeze(t, follower)
	thawed := false
	defer func() {
		if !thawed {
			w.thaw(t, follower)
		}
	}()
	req := produceRequest(topic, -1, sequenced(topic, 0, 3, 2).Bytes())
	req.TimeoutMillis = 300
	if got := produced(c.ask(req)); got.ErrorCode != kerr.RequestTimedOut.Code || got.BaseOffset != 3 {
		t.Errorf("append without replicas: error %d, base offset %d; want error %d, base offset 3", got.ErrorCode, got.BaseOffset, kerr.RequestTimedOut.Code)
	}
	if got := c.listOffset(topic, -1, meta.LeaderEpoch, -1).Offset; got != 3 {
		t.Errorf("latest for a consumer = %d, want 3", got)
	}
	if got := c.listOffset(topic, -2, meta.LeaderEpoch, -1).Offset; got != 5 {
		t.Errorf("latest for replica -2 = %d, want 5", got)
	}
	if got := c.fetch(topic, fetchAt(3), nil); got.ErrorCode != 0 || len(got.RecordBatches) != 0 || got.HighWatermark != 3 {
		t.Errorf("Fetch at 3 = error %d, %d bytes, high watermark %d; want nothing, 3", got.ErrorCode, len(got.RecordBatches), got.HighWatermark)
	}
	if p, _ := c.producer(topic, ours(topic)); p.LastSequence != 4 {
		t.Errorf("DescribeProducers: last sequence %d, want 4", p.LastSequence)
	}
	w.thaw(t, follower)
	thawed = true
	waitFor(t, "the high watermark after the thaw", func() bool { return c.listOffset(topic, -1, -1, -1).Offset == 5 })
}
