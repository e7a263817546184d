package records

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/kafkatest"
	"kmirror/protocol"
	"kmirror/test/testbed"
)

// rawLog returns partition 0's batches as a Fetch brings them.
func rawLog(t *testing.T, c kafkatest.Cluster, topic string) (batches []protocol.Batch) {
	t.Helper()
	cl := c.Client(t)
	metadata, err := kadm.NewClient(cl).Metadata(t.Context(), topic)
	if err != nil {
		t.Fatal(err)
	}
	end := kafkatest.LogOffsets(t, c, topic)[0].End
	for next := int64(0); next < end; {
		req := kmsg.NewPtrFetchRequest()
		req.MaxWaitMillis, req.MinBytes, req.MaxBytes, req.SessionEpoch = 500, 1, 8<<20, -1
		p := kmsg.NewFetchRequestTopicPartition()
		p.FetchOffset, p.PartitionMaxBytes = next, 8<<20
		x := kmsg.NewFetchRequestTopic()
		x.Topic, x.TopicID, x.Partitions = topic, metadata.Topics[topic].ID, []kmsg.FetchRequestTopicPartition{p}
		req.Topics = append(req.Topics, x)
		resp, err := cl.Broker(int(metadata.Topics[topic].Partitions[0].Leader)).Request(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		answer := resp.(*kmsg.FetchResponse).Topics[0].Partitions[0]
		if err := kerr.ErrorForCode(answer.ErrorCode); err != nil {
			t.Fatal(err)
		}
		before := next
		for rest := answer.RecordBatches; ; {
			var b protocol.Batch
			if b, rest, err = protocol.ParseBatch(rest); err != nil {
				break
			}
			batches = append(batches, b)
			next = b.EndOffset()
		}
		if next == before {
			t.Fatalf("%s: nothing at offset %d of %d: %v", topic, next, end, err)
		}
	}
	return batches
}

// TestRecordsSectionIsByteIdentical is C12 and G4 at the level of bytes: live, each batch on the mirror has the source's records section, codec,
// record count and timestamps, for every codec and for what producers rarely send.
func TestRecordsSectionIsByteIdentical(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	in := testbed.Start(t, source, mirror, "--topics", "/bytes-.*/")
	everyByte := make([]byte, 256)
	for i := range everyByte {
		everyByte[i] = byte(i)
	}
	odd := func() []*kgo.Record {
		return []*kgo.Record{
			{}, {Key: []byte{}, Value: []byte{}}, {Key: everyByte, Value: everyByte}, {Value: []byte("v"), Timestamp: time.UnixMilli(0)},
			{Value: []byte("v"), Timestamp: time.UnixMilli(1000)},
			{Headers: []kgo.RecordHeader{{Key: "twice", Value: []byte("1")}, {Key: "twice"}, {Key: "", Value: []byte{}}, {Key: "ü", Value: everyByte}}},
		}
	}
	for i, codec := range []kgo.CompressionCodec{kgo.NoCompression(), kgo.GzipCompression(), kgo.SnappyCompression(), kgo.Lz4Compression(), kgo.ZstdCompression()} {
		topic := fmt.Sprintf("bytes-%d", i)
		kafkatest.CreateTopic(t, source, topic, 1, 1, "retention.ms", "-1")
		testbed.WaitLive(t, in, topic, 1)
		before := in.Metrics()
		for range 5 {
			produce(t, in.Seeds(), topic, 0, append(odd(), numbered("n", 400, 200)...), kgo.ProducerBatchCompression(codec))
		}
		kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
		wantSameBytes(t, source, mirror, topic)
		for _, b := range rawLog(t, mirror, topic) {
			if b.Codec() != i {
				t.Errorf("%s: codec %d at offset %d", topic, b.Codec(), b.BaseOffset())
			}
		}
		if after := in.Metrics(); after["kmirror_forwarder_recoded_batches_total"] != before["kmirror_forwarder_recoded_batches_total"] {
			t.Errorf("%s: batches were re-encoded", topic)
		}
	}
}

// TestTimestampsAnswerAlike is C14: for create time and append time, the same time finds the same record on both clusters.
func TestTimestampsAnswerAlike(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	in := testbed.Start(t, source, mirror, "--topics", "/times-.*/")
	for _, kind := range []string{"CreateTime", "LogAppendTime"} {
		topic := "times-" + kind
		kafkatest.CreateTopic(t, source, topic, 1, 1, "message.timestamp.type", kind, "retention.ms", "-1")
		testbed.WaitLive(t, in, topic, 1)
		for i := range 10 {
			records := numbered(fmt.Sprint("t", i), 20, 0)
			for k, r := range records {
				r.Timestamp = time.UnixMilli([]int64{0, 1000, time.Now().UnixMilli(), int64(k) * 1_000_000}[k%4])
			}
			produce(t, [][]string{in.Seeds(), source.Seeds()}[i%2], topic, 0, records)
		}
		kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
		times := []int64{0, 1, 1000, 1001, 5_000_000, time.Now().UnixMilli()}
		for _, r := range kafkatest.ReadAll(t, source, topic, 0) {
			times = append(times, r.Timestamp.UnixMilli(), r.Timestamp.UnixMilli()+1)
		}
		ours, theirs := kadm.NewClient(mirror.Client(t)), kadm.NewClient(source.Client(t))
		for _, at := range times {
			want, err := theirs.ListOffsetsAfterMilli(t.Context(), at, topic)
			got, errMirror := ours.ListOffsetsAfterMilli(t.Context(), at, topic)
			if err != nil || errMirror != nil {
				t.Fatal(err, errMirror)
			}
			if w, g := want[topic][0], got[topic][0]; w.Offset != g.Offset || w.Timestamp != g.Timestamp {
				t.Errorf("%s: at %d ms the source finds offset %d (%d ms), the mirror %d (%d ms)", topic, at, w.Offset, w.Timestamp, g.Offset, g.Timestamp)
			}
		}
	}
}

// TestTimestampOutsideTheWindow: a record that the mirror refuses for its time stops its partition, named; once the window is wide enough it goes on.
func TestTimestampOutsideTheWindow(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 1, 1, "message.timestamp.after.max.ms", "864000000")
	kafkatest.CreateTopic(t, mirror, topic, 1, 1, "message.timestamp.after.max.ms", "3600000")
	in := testbed.Start(t, source, mirror, "--topics", topic, "--topics.fix_settings=false")
	testbed.WaitLive(t, in, topic, 1)
	produce(t, in.Seeds(), topic, 0, numbered("now", 10, 0))
	wrong := numbered("clock five hours ahead", 3, 0)
	wrong[2].Timestamp = time.Now().Add(5 * time.Hour).Truncate(time.Millisecond)
	produce(t, in.Seeds(), topic, 0, wrong)
	waitReason(t, in, topic, 0, "source offset 12:", fmt.Sprint(wrong[2].Timestamp.UnixMilli()), "in the future", "message.timestamp.after.max.ms=3600000")
	setConfig(t, mirror, topic, "message.timestamp.after.max.ms", "864000000")
	kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
}

// TestOldFormatsInTheLog: segments that Kafka 0.10.2.1 wrote in formats v0 and v1, in the log of a broker of today, arrive converted, with their offsets,
// followed by what is written now; verify agrees.
func TestOldFormatsInTheLog(t *testing.T) {
	source := kafkatest.Real(t)
	_, mirror := kafkatest.Shared(t)
	names := []string{"zero-0", "one-0", "appendtime-0"}
	for _, name := range names {
		kafkatest.CreateTopic(t, source, "old-"+name, 1, 1, "retention.ms", "-1")
	}
	source.Stop(t)
	for _, name := range names {
		log, err := os.ReadFile(filepath.Join(kafkatest.Root(t), "protocol", "testdata", "old", name+".log"))
		if err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(source.Broker(1).DataDir(), "old-"+name+"-0")
		stale, _ := filepath.Glob(filepath.Join(dir, "0*"))
		for _, file := range append(stale, filepath.Join(source.Broker(1).DataDir(), ".kafka_cleanshutdown")) {
			os.Remove(file) // the broker reads the segment and makes its indexes anew
		}
		os.Remove(filepath.Join(source.Broker(1).DataDir(), "recovery-point-offset-checkpoint"))
		if err := os.WriteFile(filepath.Join(dir, "00000000000000000000.log"), log, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	source.Start(t)
	in := testbed.Start(t, source, mirror, "--topics", "/old-.*/")
	for _, name := range names {
		testbed.WaitLive(t, in, "old-"+name, 1)
		produce(t, in.Seeds(), "old-"+name, 0, numbered("now", 50, 0))
	}
	in.WaitCaughtUp(30 * time.Second)
	for _, name := range names {
		want := kafkatest.LogOffsets(t, source, "old-"+name)[0]
		if got := kafkatest.LogOffsets(t, mirror, "old-"+name)[0]; got != want || want.End < 72+50 {
			t.Errorf("%s: the mirror has offsets %+v, the source %+v", name, got, want)
		}
	}
	code, out := testbed.Run(t, "verify", "--source", source.Seeds()[0], "--mirror", mirror.Seeds()[0], "--topics", "/old-.*/")
	if code != 0 {
		t.Errorf("verify: exit code %d\n%s", code, out)
	}
	checkBatches(t, mirror, names)
}

// checkBatches reads the mirror as a consumer does: k1 to k30 of every codec, by offset.
func checkBatches(t *testing.T, mirror kafkatest.Cluster, names []string) {
	t.Helper()
	for _, name := range names {
		for i, r := range kafkatest.ReadAll(t, mirror, "old-"+name, 0, kgo.FetchIsolationLevel(kgo.ReadCommitted())) {
			if r.Offset != int64(i) || name == "zero-0" && i < 120 && r.Timestamp.UnixMilli() != -1 {
				t.Fatalf("%s: record %d has offset %d, timestamp %d", name, i, r.Offset, r.Timestamp.UnixMilli())
			}
			if name != "one-0" && i < 120 && string(r.Key) != fmt.Sprintf("k%d", i%30+1) {
				t.Fatalf("%s: offset %d has key %q", name, i, r.Key)
			}
		}
	}
}
