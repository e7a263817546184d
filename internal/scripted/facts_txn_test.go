package scripted_test

import (
	"testing"
	"time"

	"kmirror/internal/kafkatest"
	"kmirror/internal/scripted"
)

// F8: a transactional ID is forgotten after a time without contact, whatever its producer appended; the next epoch is of another producer ID, and batches of the one before are
// still taken.
func TestFactTransactionalIDsAreForgotten(t *testing.T) {
	t.Parallel()
	forgotten := func(t *testing.T, w world, forget func(ask func() bool)) {
		topic := w.createTopic(t)
		c := dialLeader(t, w, topic)
		c.transactionally(topic+"-before", w.createTopic(t)) // takes producer ID 0, which scripted.Batch can't name
		id, epoch := c.transactionally(topic, topic)
		waitFor(t, "the marker", func() bool {
			p, known := c.producer(topic, id)
			return known && int16(p.ProducerEpoch) == epoch
		})
		batch := func(sequence int32) scripted.Batch {
			return scripted.Batch{ProducerID: id, ProducerEpoch: epoch, BaseSequence: sequence, Values: []string{"x"}}
		}
		appended(t, "first", c.produce(topic, batch(0)), 1, nil)
		var other int64
		forget(func() bool {
			other, _ = c.transactionally(topic, topic)
			return other != id
		})
		if answer := c.produce(topic, batch(1)); answer.ErrorCode != 0 {
			t.Errorf("a batch of the producer before was refused with %d: its epoch is fenced after all", answer.ErrorCode)
		}
	}
	t.Run("scripted", func(t *testing.T) {
		w := &scriptedWorld{Cluster: scripted.New(t, scripted.Options{Brokers: 1}), brokers: 1}
		forgotten(t, w, func(ask func() bool) {
			w.ForgetTransactionalIDs()
			if !ask() {
				t.Error("the producer ID is the same")
			}
		})
	})
	t.Run("kafka", func(t *testing.T) {
		if testing.Short() {
			t.Skip("starts Apache Kafka; run without -short")
		}
		c := kafkatest.Real(t, kafkatest.Config("transactional.id.expiration.ms", "2000"),
			kafkatest.Config("transaction.remove.expired.transaction.cleanup.interval.ms", "500"))
		forgotten(t, &realWorld{c, 1}, func(ask func() bool) {
			for wait := 3 * time.Second; ; wait *= 2 { // each question is contact
				time.Sleep(wait)
				if ask() {
					return
				}
				if wait > time.Minute {
					t.Fatal("the producer ID is still the same")
				}
			}
		})
	})
}
