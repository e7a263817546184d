package forwarder

import (
	"fmt"

	"kmirror/protocol"
)

// Repartitioning (topics.partitions: repartition) spreads each source partition over all partitions of the mirror topic: by key as Kafka's producers do, records without
// a key by source offset. A share is a stream that takes those of a source partition's records that belong to one mirror partition. To it all others are holes, so it is always
// fenced (rule N4) and follows the source's log; its records keep their order, and so do those of a key, as long as the source's partitions kept it.
//
// The shares of a source partition are owned together. They are born together, since only one of them may find that none was born yet, and have one checkpoint.

// spread is a source partition's shares.
type spread struct {
	of      int32 // mirror partitions
	members []*stream
	gone    int  // members that were let go and are drained
	unclean bool // one of them may have left something on its way
}

// streamKey names a stream: the mirror partition is the source's, unless it's a share.
type streamKey struct {
	topicPartition
	to int32
}

func (s *stream) key() streamKey { return streamKey{s.topicPartition, s.to} }

// targets are the mirror partitions that a source partition goes to.
func (l *loop) targets(tp topicPartition, mirror *topicView) []int32 {
	if !l.opts.Repartition {
		return []int32{tp.partition}
	}
	all := make([]int32, len(mirror.partitions))
	for i := range all {
		all[i] = int32(i)
	}
	return all
}

// join makes a stream a share of its source partition.
func (l *loop) join(s *stream, of int32) {
	x := l.spreads[s.topicPartition]
	if x == nil || len(x.members) == int(x.of) { // those before were let go
		x = &spread{of: of}
		l.spreads[s.topicPartition] = x
	}
	x.members = append(x.members, s)
	s.spread, s.wantFence = x, true
}

func spreadError(was, is int32) error {
	kind := func(of int32) string {
		if of == 0 {
			return "partition to partition"
		}
		return fmt.Sprintf("spread over %d partitions", of)
	}
	return fmt.Errorf("the topic was mirrored %s, and now would be %s: records of a key would move; give it a new mirror topic (topics.rename), or set topics.partitions back", kind(was), kind(is))
}

// keeps reports whether a record belongs to a share.
func (s *stream) keeps(offset int64, key []byte) bool {
	if key == nil {
		return int32((offset+int64(s.index))%int64(s.spread.of)) == s.to
	}
	return protocol.KeyPartition(key, s.spread.of) == s.to
}

// acked is the source offset below which all shares have everything, -1: not known.
func (x *spread) acked() int64 {
	next := int64(-1)
	for _, s := range x.members {
		at := s.acked
		if at < 0 && s.haveStored {
			at = s.stored.next
		}
		if at < 0 || int32(len(x.members)) < x.of {
			return -1
		}
		if next < 0 || at < next {
			next = at
		}
	}
	return next
}

// checkpoint is what is to be committed for all shares; false if that isn't known yet.
func (x *spread) checkpoint(self process) (c checkpoint, ok bool) {
	s := x.members[0]
	c = checkpoint{
		next: x.acked(), sourceTopicID: s.topicID, mirrorTopicID: s.mirrorTopicID, mirrorOffset: -1, mirrorEnd: -1, mirrorEpoch: -1, lineage: lineage{epoch: -1}, owner: self,
	}
	return c, c.next >= 0
}

// handOver notes that a share is drained. With the last one, and if what is to be committed is known, it returns true.
func (x *spread) handOver(s *stream, clean bool, self process) (c checkpoint, ok bool) {
	x.gone++
	x.unclean = x.unclean || !clean
	if x.gone < int(x.of) {
		return c, false
	}
	c, ok = x.checkpoint(self)
	c.released = !x.unclean
	return c, ok
}

// commitShares adds the checkpoints of source partitions whose shares moved.
func (l *loop) commitShares(add func(*stream, checkpoint)) {
	for tp, x := range l.spreads {
		moved, removed := false, 0
		for _, s := range x.members {
			moved = moved || s.uncommitted && s.conn != nil
			if s.removed {
				removed++
			}
		}
		if removed == len(x.members) {
			delete(l.spreads, tp)
		}
		if !moved || removed > 0 {
			continue
		}
		if c, ok := x.checkpoint(l.self); ok {
			for _, s := range x.members {
				s.uncommitted = false
			}
			add(x.members[0], c)
		}
	}
}
