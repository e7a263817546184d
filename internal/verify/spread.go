package verify

import "github.com/twmb/franz-go/pkg/kgo"

// In a repartitioned topic each source partition is spread over all of the mirror's partitions: by key as Kafka's producers do, records without a key by source offset. So
// what a source partition gives to a mirror partition is compared: those of the one's records that belong there with those that kmirror wrote there for it, in order. That
// reads each log once for each partition of the other side.

// targets are the mirror partitions that a source partition's records go to.
func (o *Options) targets(key partitionKey, mirror *cluster) []int32 {
	if !o.Repartition {
		return []int32{key.partition}
	}
	all := make([]int32, max(mirror.partitionCount(o.mirrorName(key.topic)), 1)) // a missing topic has one entry, which says so
	for i := range all {
		all[i] = int32(i)
	}
	return all
}

// partitionCount is how many partitions a topic has.
func (c *cluster) partitionCount(topic string) (n int32) {
	for key := range c.logs {
		if key.topic == topic {
			n++
		}
	}
	return n
}

// keptBy tells which of a source partition's records belong to mirror partition to of n.
func keptBy(key partitionKey, to, n int32) func(*kgo.Record) bool {
	byKey := kgo.StickyKeyPartitioner(nil).ForTopic(key.topic)
	return func(r *kgo.Record) bool {
		if r.Key == nil {
			return (r.Offset+int64(key.partition))%int64(n) == int64(to)
		}
		return byKey.Partition(r, int(n)) == int(to)
	}
}

// copiedFrom tells which of kmirror's records on the mirror are copies from a source partition.
func (c *cluster) copiedFrom(key partitionKey) func(*kgo.Record) bool {
	return func(r *kgo.Record) bool { return c.fenced[r.ProducerID] == key }
}
