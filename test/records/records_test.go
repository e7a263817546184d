package records

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// unusualRecords are what producers send that copies tend to change: nulls, empties, all byte values, headers twice, old timestamps.
func unusualRecords() (records []*kgo.Record) {
	everyByte := make([]byte, 256)
	for i := range everyByte {
		everyByte[i] = byte(i)
	}
	for _, key := range [][]byte{nil, {}, []byte("k"), everyByte, []byte("schlüssel-キー")} {
		for _, value := range [][]byte{nil, {}, []byte("v"), everyByte, bytes.Repeat([]byte("long "), 50_000)} {
			records = append(records, &kgo.Record{Key: key, Value: value})
		}
	}
	for i, headers := range [][]kgo.RecordHeader{
		{{Key: "twice", Value: []byte("1")}, {Key: "twice", Value: []byte("2")}, {Key: "twice", Value: []byte("1")}},
		{{Key: ""}, {Key: "null"}, {Key: "empty", Value: []byte{}}, {Key: "bytes", Value: everyByte}},
		{{Key: strings.Repeat("ü", 300), Value: bytes.Repeat([]byte{0}, 3000)}},
	} {
		records = append(records, &kgo.Record{Value: fmt.Append(nil, "headers ", i), Headers: headers})
	}
	now := time.Now()
	for i, at := range []time.Time{now, time.UnixMilli(0), time.UnixMilli(1000), now.Add(-72 * time.Hour), now.Add(30 * time.Minute), now} {
		records = append(records, &kgo.Record{Value: fmt.Append(nil, "time ", i), Timestamp: at})
	}
	return records
}

// TestRecordsAsTheyWereSent: live and from the log, in one batch and one by one, every field of a record arrives as it was sent.
func TestRecordsAsTheyWereSent(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	in := testbed.Start(t, source, mirror, "--topics", "/as-sent-.*/")
	for _, kind := range []string{"CreateTime", "LogAppendTime"} {
		t.Run(kind, func(t *testing.T) {
			topic := "as-sent-" + strings.ToLower(kind)
			kafkatest.CreateTopic(t, source, topic, 2, 1, "message.timestamp.type", kind, "retention.ms", "-1")
			testbed.WaitLive(t, in, topic, 2)
			for _, seeds := range [][]string{in.Seeds(), source.Seeds()} {
				for _, linger := range []time.Duration{0, 50 * time.Millisecond} {
					cl := testbed.NewWriter(t, seeds, topic, kgo.ProducerLinger(linger))
					if err := cl.ProduceSync(t.Context(), unusualRecords()...).FirstErr(); err != nil {
						t.Fatal(err)
					}
				}
			}
			kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
			if kind != "CreateTime" {
				return
			}
			for _, at := range []int64{0, 1000, time.Now().Add(-time.Hour).UnixMilli()} {
				want, err := kadm.NewClient(source.Client(t)).ListOffsetsAfterMilli(t.Context(), at, topic)
				got, errMirror := kadm.NewClient(mirror.Client(t)).ListOffsetsAfterMilli(t.Context(), at, topic)
				if err != nil || errMirror != nil {
					t.Fatal(err, errMirror)
				}
				for p, w := range want[topic] {
					if g := got[topic][p]; g.Offset != w.Offset {
						t.Errorf("partition %d: first record after %d ms is at %d on the mirror, at %d on the source", p, at, g.Offset, w.Offset)
					}
				}
			}
		})
	}
}

// TestLargeRecords: a topic that takes large records takes them on the mirror too, without a setting of kmirror's.
func TestLargeRecords(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 2, 1, "max.message.bytes", "10000000")
	in := testbed.Start(t, source, mirror, "--topics", topic, "--mirror_memory", "32MiB")
	testbed.WaitLive(t, in, topic, 2)
	large := bytes.Repeat([]byte("0123456789abcdef"), 400_000) // 6.4 MB
	for _, seeds := range [][]string{in.Seeds(), source.Seeds()} {
		testbed.Write(t, seeds, topic, "small", 100)
		cl := testbed.NewWriter(t, seeds, topic, kgo.ProducerBatchMaxBytes(9_000_000), kgo.ProducerBatchCompression(kgo.NoCompression()))
		for range 3 {
			if err := cl.ProduceSync(t.Context(), &kgo.Record{Key: []byte("large"), Value: large}).FirstErr(); err != nil {
				t.Fatal(err)
			}
		}
		testbed.Write(t, seeds, topic, "small again", 100)
		kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
	}
}

// TestStartLatest: a stream that starts at the end has what came after its birth, over restarts too, and nothing from before.
func TestStartLatest(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 2, 1)
	testbed.Write(t, source.Seeds(), topic, "before", 1000)
	in := testbed.Start(t, source, mirror, "--topics", topic, "--topics.start", "latest")
	testbed.WaitLive(t, in, topic, 2)
	testbed.Write(t, in.Seeds(), topic, "after", 100)
	in.WaitCaughtUp(30 * time.Second)
	in.Kill()
	testbed.Write(t, source.Seeds(), topic, "down", 100)
	in.Start()
	testbed.Write(t, in.Seeds(), topic, "again", 100)
	in.WaitCaughtUp(30 * time.Second)
	want, got := map[string]int{}, map[string]int{}
	for _, prefix := range []string{"after", "down", "again"} {
		for i := range 100 {
			want[fmt.Sprintf("%s-%d", prefix, i)] = 1
		}
	}
	for _, partition := range kafkatest.ReadTopic(t, mirror, topic) {
		for _, r := range partition {
			got[string(r.Value)]++
		}
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("the mirror has %d records, want the %d after the start, each once", len(got), len(want))
	}
}

// TestTransactions: what was committed arrives, what was aborted doesn't, in the order of the source; others in the topic aren't held up.
func TestTransactions(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 2, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	testbed.WaitLive(t, in, topic, 2)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	transact := func(t *testing.T) {
		t.Helper()
		cl := testbed.NewWriter(t, in.Seeds(), topic, kgo.TransactionalID(topic))
		defer cl.Close()
		for i := range 20 {
			err := cl.BeginTransaction()
			for n := range 10 {
				cl.Produce(ctx, testbed.Numbered(fmt.Sprintf("txn%d", i), n), nil)
			}
			err = errors.Join(err, cl.Flush(ctx), cl.EndTransaction(ctx, kgo.TransactionEndTry(i%3 != 0)))
			if err != nil {
				t.Fatal(err)
			}
			testbed.Write(t, in.Seeds(), topic, fmt.Sprintf("plain%d", i), 5)
		}
	}
	transact(t)
	kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.ReadCommitted())
	for range 2 { // and the numbering behind the holes is found again
		in.Kill()
		testbed.Write(t, source.Seeds(), topic, "down", 100)
		in.Start()
		transact(t)
		in.WaitCaughtUp(time.Minute)
		kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.ReadCommitted())
	}
}
