package forwarder

import (
	"crypto/sha256"
	"encoding/binary"
	"sort"

	"kmirror/protocol"
)

const (
	sequenceBits = 30 // rule N2
	sequenceMask = 1<<sequenceBits - 1
	// ProducerIDBit is set in every producer ID of kmirror and never in one that a broker allocates (rule N1).
	ProducerIDBit = 1 << 62
)

// identity names a stream: one source partition, or a share of it, into one mirror partition (rule N1). A new generation is a new identity.
type identity struct {
	sourceCluster string
	topicID       protocol.TopicID
	partition     int32
	mirrorTopicID protocol.TopicID
	generation    int32
	// Of a share (spread.go): its mirror partition and how many there are; else 0.
	to, of int32
}

// producerID hashes the identity to 62 bits under a high bit that allocated IDs never reach.
func (id identity) producerID() int64 {
	b := make([]byte, 0, 128)
	b = append(b, id.topicID[:]...)
	b = append(b, id.mirrorTopicID[:]...)
	b = binary.BigEndian.AppendUint32(b, uint32(id.partition))
	b = binary.BigEndian.AppendUint32(b, uint32(id.generation))
	b = append(b, id.sourceCluster...)
	if id.of > 0 {
		b = binary.BigEndian.AppendUint32(b, uint32(id.to))
		b = binary.BigEndian.AppendUint32(b, uint32(id.of))
	}
	sum := sha256.Sum256(b)
	return int64(binary.BigEndian.Uint64(sum[:8])&(ProducerIDBit-1) | ProducerIDBit)
}

// segment says that source offsets from source on have the positions from position on, up to the next segment.
type segment struct {
	source   int64
	position int64
}

// landmark is a place in a stream's appends: behind a batch of that producer ID and epoch whose last sequence is end-1.
type landmark struct {
	producerID int64 // -1: before the first batch
	epoch      int16
	end        int64
}

var noLandmark = landmark{producerID: -1}

// fence is the numbering of a fenced session (rule N6): a producer ID that the mirror's transaction coordinator gave, in an epoch that shuts
// out all before it. Sequences count the session's records from 0; which source offsets they have is in the positions topic.
type fence struct {
	producerID int64
	epoch      int16
	source     int64    // where the session begins
	behind     landmark // our last batch on the mirror at that time
	settled    bool     // nothing that this fence doesn't shut out can arrive any more
	runsFrom   int64    // offset in the positions topic below which nothing of the session is
	mirrorEnd  int64    // offset on the mirror below which nothing of the session is
	// mirrorEpoch is the leader epoch in which the mirror's log ended at mirrorEnd.
	mirrorEpoch int32
}

func (f *fence) same(other *fence) bool {
	return f != nil && other != nil && f.producerID == other.producerID && f.epoch == other.epoch
}

// numbering maps source offsets to positions, which become producer epoch and sequence on the mirror (rules N2, N3), unless a fence does (N6).
//
// Invariant: segments is not empty, ascending in both fields, and the first is the stream's birth.
type numbering struct {
	generation int32
	producerID int64
	segments   []segment
	fence      *fence // the newest, nil: the generation is dense
	// fencers are the producer IDs of all fences that the stream ever had. One, unless the mirror forgot the transactional ID (F8).
	fencers []int64
}

// stampID is the producer ID of new batches.
func (n *numbering) stampID() int64 {
	if n.fence != nil {
		return n.fence.producerID
	}
	return n.producerID
}

// birth is the first source offset of the stream.
func (n *numbering) birth() int64 { return n.segments[0].source }

// position of a source offset at or behind the birth.
func (n *numbering) position(offset int64) int64 {
	i := sort.Search(len(n.segments), func(i int) bool { return n.segments[i].source > offset })
	s := n.segments[max(i-1, 0)]
	return s.position + offset - s.source
}

// offset is the source offset at a position: behind a hole where the position is both a hole's start and its end.
func (n *numbering) offset(position int64) int64 {
	i := sort.Search(len(n.segments), func(i int) bool { return n.segments[i].position > position })
	s := n.segments[max(i-1, 0)]
	return s.source + position - s.position
}

// holeBefore returns where the hole begins that ends at a source offset; that offset where there is none.
func (n *numbering) holeBefore(source int64) int64 {
	i := sort.Search(len(n.segments), func(i int) bool { return n.segments[i].source >= source })
	if i == 0 || i == len(n.segments) || n.segments[i].source != source {
		return source
	}
	before := n.segments[i-1]
	return before.source + n.segments[i].position - before.position
}

// runs returns the source offsets of count positions from position on.
func (n *numbering) runs(position, count int64) (runs []protocol.Run) {
	for end := position + count; position < end; {
		i := sort.Search(len(n.segments), func(i int) bool { return n.segments[i].position > position })
		stop := end
		if i < len(n.segments) {
			stop = min(end, n.segments[i].position)
		}
		runs = protocol.AppendRun(runs, n.offset(position), stop-position)
		position = stop
	}
	return runs
}

// hasSegment reports whether a segment begins at a source offset.
func (n *numbering) hasSegment(source int64) bool {
	i := sort.Search(len(n.segments), func(i int) bool { return n.segments[i].source >= source })
	return i < len(n.segments) && n.segments[i].source == source
}

// sequence splits a position into producer epoch and sequence. An epoch starts at sequence 0, as F2 wants.
func sequence(position int64) (epoch int16, base int32) {
	return int16(position >> sequenceBits), int32(position & sequenceMask)
}

// positionOf is the inverse of sequence.
func positionOf(epoch int32, base int32) int64 { return int64(epoch)<<sequenceBits | int64(base) }

// epochRoom is how many positions from position on share its epoch; a batch that is longer must be split there.
func epochRoom(position int64) int64 { return sequenceMask + 1 - position&sequenceMask }
