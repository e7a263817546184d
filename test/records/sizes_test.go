package records

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/forwarder"
	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// streamOf returns the status of a partition's stream.
func streamOf(in *testbed.Instance, topic string, partition int32) (forwarder.StreamStatus, error) {
	s, err := in.AskStatus()
	if err != nil {
		return forwarder.StreamStatus{}, err
	}
	for _, x := range s.Mirror.Streams {
		if x.Topic == topic && x.Partition == partition {
			return x, nil
		}
	}
	return forwarder.StreamStatus{}, fmt.Errorf("no stream of %s partition %d", topic, partition)
}

// waitReason waits until a stream has failed for a reason that names all of words, and returns its status.
func waitReason(t *testing.T, in *testbed.Instance, topic string, partition int32, words ...string) (found forwarder.StreamStatus) {
	t.Helper()
	kafkatest.Eventually(t, 30*time.Second, func() (err error) {
		if found, err = streamOf(in, topic, partition); err != nil {
			return err
		}
		for _, word := range words {
			if found.State != "failed" || !strings.Contains(found.Reason, word) {
				return fmt.Errorf("state %q, reason %q, want failed for a reason with %q", found.State, found.Reason, words)
			}
		}
		return nil
	})
	return found
}

func setConfig(t *testing.T, c kafkatest.Cluster, topic, name, value string) {
	t.Helper()
	responses, err := kadm.NewClient(c.Client(t)).AlterTopicConfigs(t.Context(), []kadm.AlterConfig{{Op: kadm.SetConfig, Name: name, Value: &value}}, topic)
	if err == nil {
		_, err = responses.On(topic, nil)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// produce writes records to a partition; those of one call may be one batch.
func produce(t *testing.T, seeds []string, topic string, partition int32, records []*kgo.Record, opts ...kgo.Opt) {
	t.Helper()
	cl := testbed.NewWriter(t, seeds, topic, append([]kgo.Opt{
		kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchMaxBytes(9 << 20), kgo.ProducerLinger(100 * time.Millisecond),
	}, opts...)...)
	defer cl.Close()
	for _, r := range records {
		r.Partition = partition
	}
	if err := cl.ProduceSync(t.Context(), records...).FirstErr(); err != nil {
		t.Fatal(err)
	}
}

func numbered(prefix string, n, size int) (records []*kgo.Record) {
	for i := range n {
		r := testbed.Numbered(prefix, i)
		r.Value = append(r.Value, bytes.Repeat([]byte{'.'}, size)...)
		records = append(records, r)
	}
	return records
}

// TestRecordTooLarge is C11: a topic that kmirror makes takes the source's large records; one that others made with a smaller limit stops just that
// partition at just that record, says why, doesn't hammer, and drains once the limit was raised.
func TestRecordTooLarge(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	for _, made := range []bool{true, false} {
		t.Run(fmt.Sprintf("made by kmirror %t", made), func(t *testing.T) {
			topic := fmt.Sprintf("too-large-%t", made)
			kafkatest.CreateTopic(t, source, topic, 2, 1, "max.message.bytes", "10485760")
			if !made {
				kafkatest.CreateTopic(t, mirror, topic, 2, 1, "max.message.bytes", "200000")
			}
			in := testbed.Start(t, source, mirror, "--topics", topic, "--topics.fix_settings=false")
			testbed.WaitLive(t, in, topic, 2)
			produce(t, in.Seeds(), topic, 0, numbered("before", 100, 0))
			produce(t, in.Seeds(), topic, 0, numbered("large", 1, 5<<20), kgo.ProducerBatchCompression(kgo.NoCompression()))
			produce(t, in.Seeds(), topic, 0, numbered("after", 100, 0))
			if !made {
				waitReason(t, in, topic, 0, "source offset 100 ", "max.message.bytes is 200000", "5242")
				sent := in.Metrics()["kmirror_forwarder_produced_bytes_total"]
				produce(t, in.Seeds(), topic, 1, numbered("steady", 1000, 100))
				kafkatest.Eventually(t, 30*time.Second, func() error {
					if s, err := streamOf(in, topic, 1); err != nil || s.LagRecords != 0 || s.Next != 1000 {
						return fmt.Errorf("partition 1: %+v, %v", s, err)
					}
					return nil
				})
				time.Sleep(12 * time.Second) // longer than a retry: what is looked for is that nothing happens
				if got := kafkatest.LogOffsets(t, mirror, topic)[0]; got.End != 100 {
					t.Errorf("the mirror's log ends at %d, want 100", got.End)
				}
				if more := in.Metrics()["kmirror_forwarder_produced_bytes_total"] - sent; more > 1<<20 {
					t.Errorf("%.0f bytes were sent while the record was known to be too large", more)
				}
				if n := strings.Count(in.Log(), "stream stopped"); n != 1 {
					t.Errorf("the log says %d times that the stream stopped, want once", n)
				}
				setConfig(t, mirror, topic, "max.message.bytes", "10485760")
			}
			kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
		})
	}
}

// TestBatchTooLargeIsSplit: batches over the mirror's limit arrive in parts, with every codec, live and from the log, and numbered as before.
func TestBatchTooLargeIsSplit(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 1, 1, "max.message.bytes", "10485760")
	kafkatest.CreateTopic(t, mirror, topic, 1, 1, "max.message.bytes", "20000")
	in := testbed.Start(t, source, mirror, "--topics", topic, "--topics.fix_settings=false")
	testbed.WaitLive(t, in, topic, 1)
	for _, codec := range []kgo.CompressionCodec{kgo.NoCompression(), kgo.GzipCompression(), kgo.ZstdCompression()} {
		for _, seeds := range [][]string{in.Seeds(), source.Seeds()} {
			records := numbered("split", 300, 0)
			for i, r := range records { // so that it doesn't shrink to nothing
				for n := range 60 {
					r.Value = fmt.Appendf(r.Value, " %x", (i+1)*(n+7)*2654435761)
				}
			}
			produce(t, seeds, topic, 0, records, kgo.ProducerBatchCompression(codec))
		}
	}
	kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
	in.Kill()
	produce(t, source.Seeds(), topic, 0, numbered("down", 3000, 300), kgo.ProducerBatchCompression(kgo.NoCompression()))
	in.Start()
	kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
}
