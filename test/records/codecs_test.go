package records

import (
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// hexText is text that halves when it is compressed, the same each time.
func hexText(random *rand.ChaCha8, size int) []byte {
	b := make([]byte, size/2)
	random.Read(b)
	return hex.AppendEncode(nil, b)
}

// TestCompressionIsKept is C12 with Java's producer: with every codec, live and from the log, the mirror's batches have the source's codec and its log the
// source's size.
func TestCompressionIsKept(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	random := rand.NewChaCha8([32]byte{})
	var lines strings.Builder
	for range 500 {
		fmt.Fprintf(&lines, "%s\n", hexText(random, 1024))
	}
	payload := filepath.Join(t.TempDir(), "payload")
	if err := os.WriteFile(payload, []byte(lines.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	in := testbed.Start(t, source, mirror, "--topics", "/kept-.*/")
	for codec, name := range []string{"none", "gzip", "snappy", "lz4", "zstd"} {
		topic := "kept-" + name
		kafkatest.CreateTopic(t, source, topic, 1, 1)
		testbed.WaitLive(t, in, topic, 1)
		for _, seeds := range [][]string{in.Seeds(), source.Seeds()} {
			kafkatest.Tool(t, "org.apache.kafka.tools.ProducerPerformance", "--topic", topic, "--num-records", "20000", "--payload-file", payload,
				"--throughput", "-1", "--producer-props", "bootstrap.servers="+seeds[0], "compression.type="+name, "batch.size=65536", "linger.ms=20")
			kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
		}
		for _, c := range []*kafkatest.RealCluster{source, mirror} {
			for _, b := range rawLog(t, c, topic) {
				if b.Codec() != codec {
					t.Fatalf("%s: a batch at offset %d has codec %d, want %d", topic, b.BaseOffset(), b.Codec(), codec)
				}
			}
		}
		want, got := testbed.LogBytes(t, source, topic)[1], testbed.LogBytes(t, mirror, topic)[1]
		t.Logf("%s: %d KiB on the source, %d on the mirror", name, want>>10, got>>10)
		if got > want*11/10 || got < want*9/10 {
			t.Errorf("%s: the mirror's log has %d bytes, the source's %d: want them within 10 %%", name, got, want)
		}
	}
}

// TestCompressedBytesCostNoMore is C12: the same bytes on the wire take at most 1.5 times the processor time when they are gzip.
func TestCompressedBytesCostNoMore(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	in := testbed.Start(t, source, mirror, "--topics", "/cost-.*/")
	cost := func(name string, records, batch int, codec kgo.CompressionCodec) (seconds, megabytes float64) {
		t.Helper()
		topic := "cost-" + name
		kafkatest.CreateTopic(t, source, topic, 1, 1)
		testbed.WaitLive(t, in, topic, 1)
		random := rand.NewChaCha8([32]byte{})
		cl := testbed.NewWriter(t, in.Seeds(), topic, kgo.ProducerBatchCompression(codec), kgo.ProducerBatchMaxBytes(int32(batch)), kgo.ProducerLinger(20*time.Millisecond))
		before := in.Metrics()["process_cpu_seconds_total"]
		for range records {
			cl.Produce(t.Context(), &kgo.Record{Value: hexText(random, 1024)}, func(_ *kgo.Record, err error) {
				if err != nil {
					t.Error(err)
				}
			})
		}
		if err := cl.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		kafkatest.Eventually(t, time.Minute, func() error {
			if end := kafkatest.LogOffsets(t, mirror, topic)[0].End; end != int64(records) {
				return fmt.Errorf("the mirror has %d records, want %d", end, records)
			}
			return nil
		})
		seconds = in.Metrics()["process_cpu_seconds_total"] - before
		megabytes = float64(testbed.LogBytes(t, source, topic)[1]) / 1e6
		t.Logf("%s: %.2f s of CPU for %.1f MB on the wire", name, seconds, megabytes)
		return seconds, megabytes
	}
	cost("warm-up", 10_000, 64<<10, kgo.NoCompression())
	plain, plainBytes := cost("plain", 60_000, 64<<10, kgo.NoCompression())
	packed, packedBytes := cost("gzip", 108_000, 128<<10, kgo.GzipCompression())
	const noise = 0.1 // seconds: what kmirror does beside, while the writer takes longer
	if limit := 1.5*plain/plainBytes*packedBytes + noise; packed > limit {
		t.Errorf("gzip took %.2f s for %.1f MB, want %.2f at most", packed, packedBytes, limit)
	}
}
