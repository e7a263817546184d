package bench

import (
	"encoding/hex"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// compressions are loads of about as many bytes on the wire: their text halves when it is compressed.
var compressions = []struct {
	name    string
	codec   kgo.CompressionCodec
	records int
	batch   int32 // bytes before compression
}{
	{"none", kgo.NoCompression(), 300_000, 64 << 10},
	{"gzip", kgo.GzipCompression(), 540_000, 128 << 10},
}

// benchCompression measures what a byte on the wire costs kmirror, mirroring as it arrives, compressed and not (case C12: at most 1.5 times as much).
func benchCompression(t *testing.T, w *world, r *report) {
	const topic = "compressed"
	source := w.source.(*kafkatest.RealCluster)
	kafkatest.CreateTopic(t, w.source, topic, partitions, 1)
	k := startKmirror(t, w, topic)
	k.awaitReady(t)
	for range *rounds {
		for _, c := range compressions {
			k.awaitStreams(t, partitions)
			records := workload{records: c.records}.scaled(*scale).records
			before, stored := k.process.cpu(t), testbed.LogBytes(t, source, topic)[1]
			produceText(t, k.proxy, topic, records, kgo.ProducerBatchCompression(c.codec), kgo.ProducerBatchMaxBytes(c.batch))
			k.awaitStreams(t, partitions)
			spent := (k.process.cpu(t) - before).Seconds()
			gigabytes := float64(testbed.LogBytes(t, source, topic)[1]-stored) / 1e9
			r.add("compression", "text", c.name, metric{"CPU s/GB on the wire", spent / gigabytes})
		}
	}
}

// produceText writes records of 1 KiB of hexadecimal digits.
func produceText(t *testing.T, seed, topic string, records int, opts ...kgo.Opt) {
	t.Helper()
	client, err := kgo.NewClient(append(opts, kgo.SeedBrokers(seed), kgo.DefaultProduceTopic(topic), kgo.ProducerLinger(20*time.Millisecond))...)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	random, half := rand.NewChaCha8([32]byte{}), make([]byte, 512)
	for range records {
		random.Read(half)
		client.Produce(t.Context(), &kgo.Record{Value: hex.AppendEncode(nil, half)}, func(_ *kgo.Record, err error) {
			if err != nil {
				t.Error(err)
			}
		})
	}
	if err := client.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
}
