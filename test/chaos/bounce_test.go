package chaos

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kmirror/internal/kafkatest"
	"kmirror/test/clients"
	"kmirror/test/testbed"
)

// roundsOf runs a client's producer again and again, each time with new numbers, until ctx ends. It returns the values of the records
// that were acknowledged; a producer that ends with an error fails the test.
func roundsOf(ctx context.Context, t *testing.T, client clients.Client, bootstrap, topic string) (acked []string) {
	const each = 3000
	for round := 0; ctx.Err() == nil; round++ {
		prefix := fmt.Sprintf("%s-%d", client.Name, round)
		var out bytes.Buffer
		cmd := client.Producer(t, clients.Production{Bootstrap: bootstrap, Topic: topic, Prefix: prefix, Count: each, Acks: "all", Codec: "none", Idempotent: true})
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := kafkatest.Spawn(cmd); err != nil {
			t.Errorf("%s: %v", client.Name, err)
			return acked
		}
		err := cmd.Wait()
		if err != nil && strings.Contains(out.String(), "Unable to bootstrap") {
			continue // kmirror was being restarted: aiokafka gives up before it has sent a record
		}
		if err != nil {
			t.Errorf("%s, round %d: %v\n%s", client.Name, round, err, out.String())
			return acked
		}
		for i := range each {
			acked = append(acked, fmt.Sprintf("%s-%d", prefix, i))
		}
	}
	return acked
}

// javaProducer runs Kafka's VerifiableProducer, idempotent and patient, until ctx ends. It returns the values that it says were
// acknowledged.
func javaProducer(ctx context.Context, t *testing.T, bootstrap, topic string) (acked []string) {
	config := filepath.Join(t.TempDir(), "producer.properties")
	if err := os.WriteFile(config, []byte("enable.idempotence=true\nretries=2147483647\ndelivery.timeout.ms=120000\n"), 0o666); err != nil {
		t.Error(err)
		return nil
	}
	cmd := kafkatest.ToolCommand(t, "org.apache.kafka.tools.VerifiableProducer", "--bootstrap-server", bootstrap, "--topic", topic,
		"--throughput", "500", "--value-prefix", "7", "--command-config", config)
	var out, complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaints
	if err := kafkatest.Spawn(cmd); err != nil {
		t.Errorf("VerifiableProducer: %v", err)
		return nil
	}
	defer context.AfterFunc(ctx, func() { cmd.Process.Signal(syscall.SIGTERM) })() // it flushes first
	err := cmd.Wait()
	if exit, ok := err.(*exec.ExitError); err != nil && (!ok || exit.ExitCode() != 143) {
		t.Errorf("VerifiableProducer: %v\n%s", err, complaints.String())
	}
	for line := range strings.Lines(out.String()) {
		var event struct{ Name, Value string }
		if json.Unmarshal([]byte(line), &event) != nil {
			continue
		}
		switch event.Name {
		case "producer_send_success":
			acked = append(acked, event.Value)
		case "producer_send_error":
			t.Errorf("VerifiableProducer: %s", line)
		}
	}
	return acked
}

// TestIdempotentProducersThroughBounces: idempotent producers of four makes write through the proxy while every broker of the source is
// killed and started in turn and kmirror is restarted once. None of them fails, the producer IDs on the source are those that the source
// gave them, and each acknowledged record is on the source once and on the mirror once.
func TestIdempotentProducersThroughBounces(t *testing.T) {
	source := kafkatest.Real(t, kafkatest.Brokers(3), kafkatest.Config("min.insync.replicas", "2"))
	_, mirror := kafkatest.Shared(t)
	const topic, partitions = "bounces", 6
	kafkatest.CreateTopic(t, source, topic, partitions, 3)
	in := testbed.Start(t, source, mirror, "--topics", topic, "--topics.replication_factor", "1")
	l := testbed.StartLedger(t, topic, testbed.LedgerOptions{Writers: 2, PerSecond: 1000, Size: 100, From: time.Now()}, in.Seeds())

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var running sync.WaitGroup
	var mu sync.Mutex
	acked := map[string][]string{}
	run := func(name string, producer func() []string) {
		running.Go(func() {
			values := producer()
			mu.Lock()
			acked[name] = values
			mu.Unlock()
		})
	}
	for _, client := range clients.All() {
		if client.Name == "confluent-kafka" || client.Name == "aiokafka" {
			run(client.Name, func() []string { return roundsOf(ctx, t, client, in.Seeds()[0], topic) })
		}
	}
	run("java", func() []string { return javaProducer(ctx, t, in.Seeds()[0], topic) })
	l.WaitAcks(5000)
	for _, b := range source.Brokers() {
		b.Kill(t)
		testbed.Pause(t, 2*time.Second) // how long it is down
		b.Start(t)
		source.WaitInSync(t)
		l.WaitAcks(2000)
		if b.ID == 2 {
			in.Stop()
			in.Start()
			l.WaitAcks(2000)
		}
	}
	stop()
	running.Wait()
	l.Stop()
	in.WaitSettled(time.Now())
	l.Check(source, mirror, kafkatest.SameOffsets())
	for name, values := range acked {
		t.Logf("%s: %d records acknowledged", name, len(values))
		if len(values) == 0 {
			t.Errorf("%s: no record was acknowledged", name)
		}
		wantOnce(t, source, topic, name, values)
		wantOnce(t, mirror, topic, name, values)
	}
	wantOwnProducers(t, source, topic)
}

// wantOnce fails unless each value is in the topic once.
func wantOnce(t testing.TB, c kafkatest.Cluster, topic, name string, values []string) {
	t.Helper()
	count := make(map[string]int)
	for _, records := range kafkatest.ReadTopic(t, c, topic) {
		for _, r := range records {
			count[string(r.Value)]++
		}
	}
	wrong := 0
	for _, value := range values {
		if count[value] != 1 {
			if wrong++; wrong <= 3 {
				t.Errorf("%s: acknowledged record %q is there %d times", name, value, count[value])
			}
		}
	}
}

// wantOwnProducers fails if a record on the source carries a producer ID that no broker gave out: those are small numbers.
func wantOwnProducers(t testing.TB, source kafkatest.Cluster, topic string) {
	t.Helper()
	for p, records := range kafkatest.ReadTopic(t, source, topic) {
		for _, r := range records {
			if r.ProducerID < 0 || r.ProducerID >= 1<<20 {
				t.Fatalf("source partition %d offset %d has producer ID %d", p, r.Offset, r.ProducerID)
			}
		}
	}
}
