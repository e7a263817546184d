package records

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"io"
	"testing"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// oneValue is the records section of a batch with one record whose value is noise and then zeros, size bytes in all, without holding it.
func oneValue(size int64, noise ...byte) io.Reader {
	body := []byte{0, 0, 0, 1}               // attributes, timestamp delta, offset delta, null key
	body = binary.AppendVarint(body, size)   // zigzag, as Kafka's
	length := int64(len(body)) + size + 1    // and no headers
	head := binary.AppendVarint(nil, length) // before the body
	return io.MultiReader(bytes.NewReader(append(head, body...)), bytes.NewReader(noise), io.LimitReader(zeros{}, size-int64(len(noise))), bytes.NewReader([]byte{0}))
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// pack compresses a records section, with the codec's number in batches.
func pack(t *testing.T, codec int, records io.Reader, opts ...zstd.EOption) []byte {
	t.Helper()
	var out bytes.Buffer
	var w io.WriteCloser
	var err error
	switch codec {
	case 1:
		w = gzip.NewWriter(&out)
	case 3:
		w = lz4.NewWriter(&out)
	case 4:
		w, err = zstd.NewWriter(&out, append([]zstd.EOption{zstd.WithEncoderConcurrency(1), zstd.WithSingleSegment(false)}, opts...)...)
	}
	if err == nil {
		_, err = io.Copy(struct{ io.Writer }{w}, records) // lz4 reads by itself only what is whole
	}
	if f, ok := w.(*zstd.Encoder); ok && err == nil {
		err = f.Flush() // so that the frame names its window and not its size
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// produceRaw sends one batch as it is to a partition of a topic.
func produceRaw(t *testing.T, seeds []string, topic string, partition int32, codec, count int, records []byte) {
	t.Helper()
	batch := kmsg.NewRecordBatch()
	batch.PartitionLeaderEpoch, batch.Magic, batch.Attributes, batch.LastOffsetDelta = -1, 2, int16(codec), int32(count-1)
	batch.FirstTimestamp = time.Now().UnixMilli()
	batch.MaxTimestamp = batch.FirstTimestamp
	batch.ProducerID, batch.ProducerEpoch, batch.FirstSequence, batch.NumRecords, batch.Records = -1, -1, -1, int32(count), records
	b := batch.AppendTo(nil)
	binary.BigEndian.PutUint32(b[8:], uint32(len(b)-12))
	binary.BigEndian.PutUint32(b[17:], crc32.Checksum(b[21:], crc32.MakeTable(crc32.Castagnoli)))

	cl := testbed.NewWriter(t, seeds, "")
	metadata, err := kadm.NewClient(cl).Metadata(t.Context(), topic)
	if err != nil {
		t.Fatal(err)
	}
	p := kmsg.NewProduceRequestTopicPartition()
	p.Partition, p.Records = partition, b
	x := kmsg.NewProduceRequestTopic()
	x.Topic, x.TopicID, x.Partitions = topic, metadata.Topics[topic].ID, []kmsg.ProduceRequestTopicPartition{p}
	req := kmsg.NewPtrProduceRequest()
	req.Acks, req.TimeoutMillis, req.Topics = -1, 60_000, []kmsg.ProduceRequestTopic{x}
	resp, err := cl.Broker(int(metadata.Topics[topic].Partitions[partition].Leader)).Request(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	answer := resp.(*kmsg.ProduceResponse).Topics[0].Partitions[0]
	if err := kerr.ErrorForCode(answer.ErrorCode); err != nil {
		t.Fatalf("%s: produce: %v", topic, err)
	}
}

// wantSameBytes fails unless partition 0's batches have the same records section and the same header but for the producer's fields on both sides.
func wantSameBytes(t *testing.T, source, mirror kafkatest.Cluster, topic string) {
	t.Helper()
	want, got := rawLog(t, source, topic), rawLog(t, mirror, topic)
	if len(want) != len(got) {
		t.Fatalf("%s: %d batches on the mirror, %d on the source", topic, len(got), len(want))
	}
	for k, w := range want {
		g := got[k]
		if !bytes.Equal(w.Records(), g.Records()) || w.Codec() != g.Codec() || w.RecordCount() != g.RecordCount() ||
			w.BaseTimestamp() != g.BaseTimestamp() || w.MaxTimestamp() != g.MaxTimestamp() || w.BaseOffset() != g.BaseOffset() || !g.VerifyCRC() {
			t.Errorf("%s: batch %d at offset %d isn't the same on both sides", topic, k, w.BaseOffset())
		}
	}
}
