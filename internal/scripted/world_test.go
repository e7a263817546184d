package scripted_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"kmirror/internal/kafkatest"
	"kmirror/internal/scripted"
)

// world is a cluster in which a fact can be looked at: a scripted one, or Apache Kafka.
type world interface {
	addr(broker int32) string
	createTopic(t *testing.T, configs ...string) (name string)
	restart(t *testing.T) // of all brokers, cleanly
	kill(t *testing.T)    // kill -9 of all brokers, and start
	// expire returns once an expiry check has run that forgets what is older than a day.
	expire(t *testing.T, forgotten func() bool)
	freeze(t *testing.T, broker int32)
	thaw(t *testing.T, broker int32)
}

var topicNumber atomic.Int64

func newTopicName() string { return fmt.Sprint("facts-", topicNumber.Add(1)) }

type scriptedWorld struct {
	*scripted.Cluster
	brokers int
	topics  []string
	lagging []string // topics whose high watermark stands while a broker is frozen
}

func (w *scriptedWorld) addr(broker int32) string { return w.Seeds()[broker-1] }

func (w *scriptedWorld) createTopic(_ *testing.T, configs ...string) string {
	name := newTopicName()
	w.CreateTopic(name, 1, configs...)
	w.topics = append(w.topics, name)
	return name
}

func (w *scriptedWorld) restart(*testing.T) {
	for id := int32(1); id <= int32(w.brokers); id++ {
		w.Kill(id)
		w.Restart(id)
	}
	for _, topic := range w.topics {
		w.MoveLeader(topic, 0, w.Offsets(topic, 0).Leader)
	}
}

func (w *scriptedWorld) kill(t *testing.T) { w.restart(t) }

func (w *scriptedWorld) expire(t *testing.T, forgotten func() bool) {
	w.Expire()
	if !forgotten() {
		t.Error("Expire left a producer whose last batch is older than a day")
	}
}

func (w *scriptedWorld) freeze(_ *testing.T, broker int32) {
	w.Freeze(broker)
	for _, topic := range w.topics {
		if w.Offsets(topic, 0).Leader != broker {
			w.HoldHighWatermark(topic, 0)
		}
	}
}

func (w *scriptedWorld) thaw(_ *testing.T, broker int32) {
	w.Thaw(broker)
	for _, topic := range w.topics {
		w.ReleaseHighWatermark(topic, 0)
	}
}

type realWorld struct {
	*kafkatest.RealCluster
	brokers int16
}

func (w *realWorld) addr(broker int32) string { return w.Broker(broker).Addr }

func (w *realWorld) createTopic(t *testing.T, configs ...string) string {
	name := newTopicName()
	kafkatest.CreateTopic(t, w.RealCluster, name, 1, w.brokers, configs...)
	return name
}

func (w *realWorld) restart(t *testing.T) {
	w.Stop(t)
	w.Start(t)
}

func (w *realWorld) kill(t *testing.T) {
	w.Kill(t)
	w.Start(t)
}

func (w *realWorld) expire(t *testing.T, forgotten func() bool) {
	kafkatest.Eventually(t, time.Minute, func() error {
		if !forgotten() {
			return fmt.Errorf("a producer whose last batch is older than a day is known")
		}
		return nil
	})
}

func (w *realWorld) freeze(t *testing.T, broker int32) { w.Broker(broker).Freeze(t) }
func (w *realWorld) thaw(t *testing.T, broker int32)   { w.Broker(broker).Thaw(t) }

// dialLeader connects to the leader of a topic's partition 0, once there is one that serves.
func dialLeader(t *testing.T, w world, topic string) (c *wire) {
	t.Helper()
	waitFor(t, "a leader that serves", func() bool {
		meta, err := dial(t, w.addr(1)).leader(topic)
		if err != nil || meta.Leader < 1 {
			return false
		}
		c = dial(t, w.addr(meta.Leader))
		return c.listOffset(topic, -1, meta.LeaderEpoch, -1).ErrorCode == 0
	})
	return c
}

// TestFacts runs every fact on a scripted cluster and on Apache Kafka: the first stands for the second in the tests of rules.
func TestFacts(t *testing.T) {
	for _, brokers := range []int{1, 3} {
		t.Run(fmt.Sprintf("scripted, %d brokers", brokers), func(t *testing.T) {
			w := &scriptedWorld{Cluster: scripted.New(t, scripted.Options{Brokers: brokers, ConnectionsMaxIdle: idle}), brokers: brokers}
			runFacts(t, w, brokers)
		})
	}
	for _, brokers := range []int{1, 3} {
		t.Run(fmt.Sprintf("kafka, %d brokers", brokers), func(t *testing.T) {
			if testing.Short() {
				t.Skip("starts Apache Kafka; run without -short")
			}
			c := kafkatest.Real(t, kafkatest.Brokers(brokers), kafkatest.Config("connections.max.idle.ms", fmt.Sprint(idle.Milliseconds())),
				kafkatest.Config("producer.id.expiration.check.interval.ms", "200"))
			runFacts(t, &realWorld{c, int16(brokers)}, brokers)
		})
	}
}

func runFacts(t *testing.T, w world, brokers int) {
	for _, f := range facts {
		if f.brokers == brokers {
			t.Run(f.name, func(t *testing.T) { f.check(t, w) })
		}
	}
}
