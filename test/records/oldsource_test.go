package records

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// TestOldSource: kmirror started with MirrorMaker 1's flags and files mirrors a Kafka 0.10.2.1, whatever codec its Java producer or a client of today
// wrote with, over kill -9; verify agrees. With a listener, old and new producers reach the old broker through it, and
// what it answers them wakes the mirror.
func TestOldSource(t *testing.T) {
	source := kafkatest.Old(t)
	_, mirror := kafkatest.Shared(t)
	const topic = "old.source"
	kafkatest.CreateTopic(t, source, topic, 2, 1)
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	in := testbed.New(t, source, mirror)
	config := []string{
		"--consumer.config", file("consumer.properties", "bootstrap.servers="+source.Seeds()[0]+"\ngroup.id=mm\nauto.offset.reset=earliest\n"),
		"--producer.config", file("producer.properties", "bootstrap.servers="+mirror.Seeds()[0]+"\nacks=all\ncompression.type=gzip\n"),
		"--whitelist", `old\..*,none`,
	}
	listening := without(in.Args, "--source", "--mirror")
	in.Args = append(without(listening, "--listen", "--broker-port-base"), config...)
	n := 0
	write := func(seeds []string) { // every codec that there was then, from both kinds of client
		t.Helper()
		for _, codec := range []kgo.CompressionCodec{kgo.NoCompression(), kgo.GzipCompression(), kgo.SnappyCompression(), kgo.Lz4Compression()} {
			records := append(numbered(fmt.Sprint("now", n), 50, 100), &kgo.Record{}, &kgo.Record{Key: []byte{}, Value: []byte{}}, &kgo.Record{Key: []byte("k")})
			for _, r := range records {
				r.Headers = nil // that came later
			}
			produce(t, seeds, topic, int32(n%2), records, kgo.ProducerBatchCompression(codec), kgo.DisableIdempotentWrite(), kgo.RequiredAcks(kgo.AllISRAcks()),
				kgo.ProducerBatchMaxBytes(1<<20))
			n++
		}
		for _, codec := range []string{"none", "gzip", "snappy", "lz4"} {
			var lines []string
			for i := range 50 {
				lines = append(lines, fmt.Sprintf("k%d:then %s %d", i, codec, n))
			}
			kafkatest.OldConsoleProducer(t, seeds[0], topic, codec, lines...)
			n++
		}
	}
	write(source.Seeds())
	in.Start()
	kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
	in.Kill()
	in.Args = append(slices.Clone(listening), config...)
	in.Start()
	write(in.Seeds())
	in.WaitCaughtUp(time.Minute)
	kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
	if n := in.Metrics()[`kmirror_proxy_batches_total{outcome="grown"}`]; n < 8 { // one for each codec of each kind of client, at least
		t.Errorf("the mirror was told %v times that the log grew, want 8: old producers' answers say so", n)
	}
	if got := kafkatest.LogOffsets(t, source, topic); got[0].End+got[1].End != 2*4*(53+50) {
		t.Errorf("the source ends at %+v, want %d records", got, 2*4*(53+50))
	}
	if code, out := testbed.Run(t, append([]string{"verify"}, config...)...); code != 0 {
		t.Errorf("verify: exit code %d\n%s", code, out)
	}
}

// without returns args without some flags and their values.
func without(args []string, flags ...string) (left []string) {
	for i := 0; i < len(args); i++ {
		if slices.Contains(flags, args[i]) {
			i++
			continue
		}
		left = append(left, args[i])
	}
	return left
}
