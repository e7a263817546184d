package test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// TestMirrorAsItArrives: with all writers on the proxy, what the source acknowledged is on the mirror at once and at the same offset,
// and the source serves not one Fetch for it. The relay in front of the source is the witness.
func TestMirrorAsItArrives(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	const partitions = 4
	kafkatest.CreateTopic(t, source, topic, partitions, 1)
	behind := testbed.Relayed(t, source)
	in := testbed.Start(t, behind, mirror, "--topics", topic)
	testbed.WaitLive(t, in, topic, partitions)
	served, fetches := behind.Total(kmsg.Fetch), in.Metrics()["kmirror_forwarder_fetches_total"]

	for _, name := range []string{"first", "second"} {
		testbed.Write(t, in.Seeds(), topic, name, 20_000)
	}
	for _, codec := range []kgo.CompressionCodec{kgo.GzipCompression(), kgo.SnappyCompression(), kgo.Lz4Compression(), kgo.ZstdCompression()} {
		testbed.Write(t, in.Seeds(), topic, fmt.Sprintf("codec%v", codec), 2_000, kgo.ProducerBatchCompression(codec))
	}
	kafkatest.Tool(t, performance, "--topic", topic, "--num-records", "20000", "--record-size", "200", "--throughput", "10000",
		"--producer-props", "bootstrap.servers="+in.Seeds()[0], "compression.type=lz4") // names topics by ID
	t.Logf("acknowledged to readable on the mirror: %s", arrival(t, in.Seeds(), mirror, topic, 200))
	in.WaitCaughtUp(30 * time.Second)
	kafkatest.WaitEqual(t, source, mirror, topic, 30*time.Second, kafkatest.SameOffsets())

	if got := behind.Total(kmsg.Fetch) - served; got != 0 {
		t.Errorf("the source served %d Fetch requests while all writers used the proxy, want 0", got)
	}
	if got := in.Metrics()["kmirror_forwarder_fetches_total"] - fetches; got != 0 {
		t.Errorf("kmirror_forwarder_fetches_total grew by %v, want 0", got)
	}
	testbed.WaitLive(t, in, topic, partitions)
	if n := behind.Total(kmsg.Produce); n == 0 {
		t.Error("no Produce went through the relay: it is no witness")
	}

	// What bypasses the proxy must be fetched: the counters count.
	testbed.Write(t, source.Seeds(), topic, "bypass", 100)
	kafkatest.WaitEqual(t, source, mirror, topic, 30*time.Second, kafkatest.SameOffsets())
	if got := behind.Total(kmsg.Fetch) - served; got == 0 {
		t.Error("records that bypassed the proxy arrived without a Fetch through the relay: it is no witness")
	}
}

// arrival measures how long after its acknowledgement a record can be read from the mirror, one record at a time.
func arrival(t testing.TB, seeds []string, mirror kafkatest.Cluster, topic string, n int) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	writer := testbed.NewWriter(t, seeds, topic, kgo.RecordPartitioner(kgo.ManualPartitioner()))
	end := kafkatest.LogOffsets(t, mirror, topic)[0].End
	kafkatest.Eventually(t, 30*time.Second, func() error { // what was written before must not count
		now := kafkatest.LogOffsets(t, mirror, topic)[0].End
		if now != end {
			end = now
			return fmt.Errorf("the mirror still grows")
		}
		return nil
	})
	reader := mirror.Client(t, kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().At(end)}}), kgo.FetchMaxWait(10*time.Second))
	var times []time.Duration
	for i := range n {
		r := testbed.Numbered("timed", i)
		if err := writer.ProduceSync(ctx, r).FirstErr(); err != nil {
			t.Fatal(err)
		}
		acked := time.Now()
		for got := false; !got; {
			fetches := reader.PollFetches(ctx)
			if err := fetches.Err0(); err != nil {
				t.Fatalf("record %d isn't on the mirror: %v", i, err)
			}
			got = slices.ContainsFunc(fetches.Records(), func(m *kgo.Record) bool { return string(m.Value) == string(r.Value) })
		}
		times = append(times, time.Since(acked))
	}
	return testbed.Quantiles(times)
}
