package bench

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
)

// number is a record's key in the latency runs.
func number(i int) []byte { return binary.BigEndian.AppendUint64(nil, uint64(i)) }

// benchReplication measures how long after its acknowledgement a record can be read from the mirror, at a low, steady rate.
func benchReplication(t *testing.T, w *world, r *report) {
	for round := range *rounds {
		for i, c := range copiers(t) {
			topic := fmt.Sprintf("steady-%d-%d", round, i)
			kafkatest.CreateTopic(t, w.source, topic, partitions, 1)
			var p *process
			bootstrap := w.source.Seeds()[0]
			if c.name == nameKmirror {
				k := startKmirror(t, w, topic)
				k.awaitReady(t)
				k.awaitStreams(t, partitions)
				p, bootstrap = k.process, k.proxy
			} else {
				p = c.start(t, w, topic)
			}
			r.add("replication latency", fmt.Sprintf("%d/s x 1 KiB", steadyRate), c.name, measureReplication(t, w, p, bootstrap, topic)...)
			p.stop(t)
			deleteTopics(t, w.mirrorAdmin)
		}
	}
}

// moments are when each record was acknowledged by the source and when it was read from the mirror.
type moments struct {
	mu    sync.Mutex
	acked []time.Time // guarded by mu, as is read
	read  []time.Time
}

func measureReplication(t *testing.T, w *world, p *process, bootstrap, topic string) []metric {
	t.Helper()
	// A first record shows that the copier is up; it creates the topic where the copier does so late.
	awaitFirstRecord(t, w, bootstrap, topic)
	count := int(steady.Seconds() * steadyRate)
	m := &moments{acked: make([]time.Time, count), read: make([]time.Time, count)}
	ctx, stop := context.WithTimeout(t.Context(), copyTimeout)
	defer stop()
	var reader sync.WaitGroup
	client := w.mirror.Client(t, kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	defer client.Close()
	reader.Go(func() { m.readAll(ctx, client) })
	before := p.cpu(t)
	acks := produceSteadily(t.Context(), t, bootstrap, topic, func(i int, at time.Time) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.acked[i] = at
	})
	reader.Wait()
	cpu := (p.cpu(t) - before).Seconds() / float64(count) * 1e6
	_, peak := p.memory(t)
	var delays []time.Duration
	for i := count / 5; i < count; i++ { // without the warm-up
		if m.read[i].IsZero() {
			t.Fatalf("record %d of %d isn't on the mirror", i, count)
		}
		delays = append(delays, max(0, m.read[i].Sub(m.acked[i])))
	}
	metrics := append(latencyMetrics("ack to mirror", delays), latencyMetrics("ack", acks)[:2]...)
	return append(metrics, metric{"CPU s/M records", cpu}, metric{"peak RSS MiB", peak})
}

// firstRecord is the key of the record that only shows that a copier is up.
const firstRecord = "first"

func awaitFirstRecord(t *testing.T, w *world, bootstrap, topic string) {
	t.Helper()
	producer, err := kgo.NewClient(kgo.SeedBrokers(bootstrap), kgo.DefaultProduceTopic(topic))
	if err != nil {
		t.Fatal(err)
	}
	defer producer.Close()
	if err := producer.ProduceSync(t.Context(), &kgo.Record{Key: []byte(firstRecord)}).FirstErr(); err != nil {
		t.Fatal(err)
	}
	kafkatest.Eventually(t, copyTimeout, func() error {
		n, err := endOffsets(t.Context(), w.mirrorAdmin, topic)
		if err == nil && n == 0 {
			err = fmt.Errorf("the first record of %s isn't on the mirror: %w", topic, errNotYet)
		}
		return err
	})
}

// readAll consumes until every numbered record was seen or ctx ends.
func (m *moments) readAll(ctx context.Context, client *kgo.Client) {
	for seen := 0; seen < len(m.read); {
		fetches := client.PollFetches(ctx)
		now := time.Now()
		if ctx.Err() != nil {
			return
		}
		m.mu.Lock()
		fetches.EachRecord(func(r *kgo.Record) {
			if len(r.Key) != 8 {
				return
			}
			if i := binary.BigEndian.Uint64(r.Key); m.read[i].IsZero() {
				m.read[i] = now
				seen++
			}
		})
		m.mu.Unlock()
	}
}
