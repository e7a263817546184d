package bench

import (
	"bufio"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
)

const idlePartitions = 2000

// benchIdle measures what many quiet streams cost, once each has carried a record.
func benchIdle(t *testing.T, w *world, r *report) {
	const topic = "idle"
	kafkatest.CreateTopic(t, w.source, topic, idlePartitions, 1)
	k := startKmirror(t, w, topic)
	k.awaitReady(t)
	k.awaitStreams(t, idlePartitions)
	client, err := kgo.NewClient(kgo.SeedBrokers(k.proxy), kgo.DefaultProduceTopic(topic), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	records := make([]*kgo.Record, idlePartitions)
	for i := range records {
		records[i] = &kgo.Record{Partition: int32(i), Value: []byte("x")}
	}
	if err := client.ProduceSync(t.Context(), records...).FirstErr(); err != nil {
		t.Fatal(err)
	}
	k.awaitStreams(t, idlePartitions)
	for range *rounds {
		before, begin := k.cpu(t), time.Now()
		time.Sleep(*steady)
		cpu := (k.cpu(t) - before).Seconds() / time.Since(begin).Seconds()
		now, peak := k.memory(t)
		r.add("idle", fmt.Sprintf("%d partitions", idlePartitions), nameKmirror, metric{"CPU % of a core", 100 * cpu},
			metric{"goroutines", k.metric(t, "go_goroutines")}, metric{"RSS MiB", now}, metric{"peak RSS MiB", peak})
	}
}

// metric reads one unlabelled value of /metrics.
func (k *kmirror) metric(t *testing.T, name string) float64 {
	t.Helper()
	resp, err := http.Get("http://" + k.admin + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if value, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			var v float64
			if _, err := fmt.Sscan(value, &v); err != nil {
				t.Fatal(err)
			}
			return v
		}
	}
	t.Fatalf("kmirror shows no metric %s", name)
	return 0
}
