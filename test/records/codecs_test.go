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
// source's size, and none was compressed anew. What that saves is measured in test/bench (compression).
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
	recoded := in.Metrics()["kmirror_forwarder_recoded_batches_total"]
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
	if now := in.Metrics()["kmirror_forwarder_recoded_batches_total"]; now != recoded {
		t.Errorf("%v batches were compressed anew", now-recoded)
	}
}
