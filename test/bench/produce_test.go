package bench

import (
	"context"
	"crypto/tls"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
)

// route is one way from a producer to the source.
type route struct {
	name      string
	bootstrap string
	topic     string      // the mirrored topic for kmirror alone: what others write would be mirrored too, and cost it time
	process   *process    // nil: none
	tls       *tls.Config // nil: plaintext
	kmirror   *kmirror    // nil: another route
}

const (
	plainTopic    = "produced"
	mirroredTopic = "produced-and-mirrored"
)

// startRoutes starts each proxy; all stay up and idle while another is measured.
func startRoutes(t *testing.T, w *world) []route {
	t.Helper()
	relayed, behindRelay := addListener(t, w)
	kafkatest.CreateTopic(t, w.source, plainTopic, partitions, 1)
	kafkatest.CreateTopic(t, w.source, mirroredTopic, partitions, 1)
	type starter struct {
		name  string
		start func() route
	}
	starters := wanted(t, []starter{
		{"direct", func() route {
			return route{bootstrap: w.source.Seeds()[0], topic: plainTopic}
		}},
		{"relay", func() route {
			return route{bootstrap: relayed, topic: plainTopic, process: start(t, "relay", w.relay, "-listen", relayed, "-to", behindRelay)}
		}},
		{"kmirror, proxy only", func() route {
			k := startKmirror(t, w, mirroredTopic, "--roles", "proxy")
			k.awaitReady(t)
			return route{bootstrap: k.proxy, topic: plainTopic, process: k.process}
		}},
		{"kmirror, tee on", func() route { // it keeps and offers every batch, of a topic that nobody mirrors
			k := startKmirror(t, w, mirroredTopic)
			k.awaitReady(t)
			return route{bootstrap: k.proxy, topic: plainTopic, process: k.process}
		}},
		{"kmirror, mirroring", func() route {
			k := startKmirror(t, w, mirroredTopic)
			k.awaitReady(t)
			k.awaitStreams(t, partitions)
			return route{bootstrap: k.proxy, topic: mirroredTopic, process: k.process, kmirror: k}
		}},
	}, func(s starter) string { return s.name })
	var routes []route
	for _, s := range starters {
		rt := s.start()
		rt.name = s.name
		routes = append(routes, rt)
	}
	return routes
}

// addListener gives the source a second listener that advertises the relay's address, as the relay rewrites nothing.
func addListener(t *testing.T, w *world) (advertised, address string) {
	t.Helper()
	broker := w.source.(*kafkatest.RealCluster).Broker(1)
	ports := kafkatest.PortBlock(t, 3)
	advertised, address, controller := loopback(ports), loopback(ports+1), loopback(ports+2)
	broker.SetConfig("listeners", fmt.Sprintf("PLAINTEXT://%s,RELAYED://%s,CONTROLLER://%s", broker.Addr, address, controller))
	broker.SetConfig("advertised.listeners", fmt.Sprintf("PLAINTEXT://%s,RELAYED://%s", broker.Addr, advertised))
	broker.SetConfig("listener.security.protocol.map", "PLAINTEXT:PLAINTEXT,RELAYED:PLAINTEXT,CONTROLLER:PLAINTEXT")
	broker.SetConfig("controller.quorum.voters", "1@"+controller)
	broker.Restart(t)
	return advertised, address
}

func loopback(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }

// settle returns once what was produced is on the mirror, so that the next measurement has the machine for itself.
func (rt *route) settle(t *testing.T) {
	t.Helper()
	if rt.kmirror != nil {
		rt.kmirror.awaitStreams(t, partitions)
	}
}

// Long enough that the producer's own start, with a JVM to warm up, doesn't count for much.
var produceWorkloads = []workload{
	{name: "4M x 100 B", records: 4_000_000, size: 100},
	{name: "1M x 1 KiB", records: 1_000_000, size: 1024},
}

// benchProduce runs Kafka's own ProducerPerformance through each route.
func benchProduce(t *testing.T, w *world, r *report) {
	routes := startRoutes(t, w)
	for _, load := range produceWorkloads {
		load = load.scaled(*scale)
		for range *rounds {
			for _, rt := range routes {
				r.add("produce", load.name, rt.name, measureProduce(t, w, rt, load)...)
			}
		}
	}
}

func measureProduce(t *testing.T, w *world, rt route, load workload) []metric {
	t.Helper()
	var before time.Duration
	if rt.process != nil {
		before = rt.process.cpu(t)
	}
	rate := producerPerformance(t, w, rt, load)
	rt.settle(t)
	metrics := []metric{{"records/s", rate}, {"MB/s", rate * float64(load.size) / 1e6}}
	if rt.process == nil {
		return append(metrics, metric{"CPU s/GB", 0}, metric{"peak RSS MiB", 0})
	}
	cpu := (rt.process.cpu(t) - before).Seconds()
	_, peak := rt.process.memory(t)
	return append(metrics, metric{"CPU s/GB", cpu / load.bytes() * 1e9}, metric{"peak RSS MiB", peak})
}

// sentLine is ProducerPerformance's summary: "500000 records sent, 96302.0 records/sec (94.04 MB/sec), 12.3 ms avg latency, …".
var sentLine = regexp.MustCompile(`(?m)^(\d+) records sent, ([0-9.]+) records/sec .* 99\.9th\.?$`)

func producerPerformance(t *testing.T, w *world, rt route, load workload) float64 {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "java", "-Xmx512m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
		"-cp", filepath.Join(w.jars, "*"), "org.apache.kafka.tools.ProducerPerformance",
		"--bootstrap-server", rt.bootstrap, "--topic", rt.topic, "--num-records", fmt.Sprint(load.records), "--record-size", fmt.Sprint(load.size),
		"--throughput", "-1", "--command-property", "acks=all").CombinedOutput()
	if err != nil {
		t.Fatalf("ProducerPerformance through %s: %v\n%s", rt.name, err, out)
	}
	found := sentLine.FindAllStringSubmatch(string(out), -1)
	if len(found) == 0 || found[len(found)-1][1] != fmt.Sprint(load.records) {
		t.Fatalf("ProducerPerformance through %s printed no summary:\n%s", rt.name, strings.TrimSpace(string(out)))
	}
	rate, err := strconv.ParseFloat(found[len(found)-1][2], 64)
	if err != nil {
		t.Fatal(err)
	}
	return rate
}

// benchLatency measures acknowledgements at a low, steady rate.
func benchLatency(t *testing.T, w *world, r *report) {
	routes := startRoutes(t, w)
	for range *rounds {
		for _, rt := range routes {
			var before time.Duration
			if rt.process != nil {
				before = rt.process.cpu(t)
			}
			acks := produceSteadily(t.Context(), t, rt.bootstrap, rt.topic, nil)
			metrics := latencyMetrics("ack", acks)
			if rt.process != nil {
				metrics = append(metrics, metric{"CPU s/M records", (rt.process.cpu(t) - before).Seconds() / (steady.Seconds() * steadyRate) * 1e6})
			} else {
				metrics = append(metrics, metric{"CPU s/M records", 0})
			}
			rt.settle(t)
			r.add("ack latency", fmt.Sprintf("%d/s x 1 KiB", steadyRate), rt.name, metrics...)
		}
	}
}

func latencyMetrics(name string, latencies []time.Duration) []metric {
	var metrics []metric
	for _, q := range []float64{0.5, 0.99, 0.999} {
		ms := float64(quantile(latencies, q)) / float64(time.Millisecond)
		metrics = append(metrics, metric{fmt.Sprintf("%s p%g ms", name, 100*q), ms})
	}
	return metrics
}

const (
	steadyRate = 1000 // records a second
	steadySize = 1024
)

// produceSteadily writes at a steady rate, each record at once in a batch of its own, and returns how long each acknowledgement
// took, without the first fifth (warm-up). acked, if not nil, is called with each record's number and the moment of its acknowledgement.
func produceSteadily(ctx context.Context, t *testing.T, bootstrap, topic string, acked func(number int, at time.Time)) []time.Duration {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(bootstrap), kgo.DefaultProduceTopic(topic), kgo.ProducerLinger(0), kgo.RequiredAcks(kgo.AllISRAcks()))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	count := int(steady.Seconds() * steadyRate)
	latencies := make([]time.Duration, count)
	value := make([]byte, steadySize)
	var mu sync.Mutex
	var failure error // guarded by mu; the first
	begin := time.Now()
	for i := range count {
		if wait := time.Until(begin.Add(time.Duration(i) * time.Second / steadyRate)); wait > 0 {
			time.Sleep(wait)
		}
		sent := time.Now()
		client.Produce(ctx, &kgo.Record{Key: number(i), Value: value}, func(_ *kgo.Record, err error) {
			now := time.Now()
			mu.Lock()
			defer mu.Unlock()
			latencies[i] = now.Sub(sent)
			if err != nil && failure == nil {
				failure = err
			}
			if acked != nil {
				acked(i, now)
			}
		})
	}
	if err := client.Flush(ctx); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if failure != nil {
		t.Fatalf("produce to %s: %v", topic, failure)
	}
	return latencies[count/5:]
}
