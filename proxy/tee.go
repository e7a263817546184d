package proxy

import (
	"sync/atomic"

	"kmirror/internal/bufpool"
	"kmirror/protocol"
)

// producePart is one partition of a Produce request that was kept. It aliases the frame.
type producePart struct {
	topic     []byte // nil from v13 on
	topicID   protocol.TopicID
	partition int32
	records   []byte
}

// partKey finds a producePart when a broker's response isn't in the order of the request.
type partKey struct {
	topic     string
	topicID   protocol.TopicID
	partition int32
}

// maxScratch bounds what a connection keeps for its next large Produce request.
const maxScratch = 64

// produceAnswered reads the response to a Produce request and tells the sink about it. It reports whether the response carries
// broker addresses. A response that can't be read ends the connection: it might hide some.
func (c *conn) produceAnswered(r *request, frame []byte) (endpoints bool, err error) {
	answers := protocol.NewProduceResponse(frame, r.header.APIVersion)
	if c.s.o.Sink == nil {
		for answers.Next() {
			if answers.ErrorCode == 0 {
				c.accessProduced(answers.Topic, answers.TopicID)
			}
		}
	} else {
		c.readKept(r)
		for i := 0; answers.Next(); i++ {
			if answers.ErrorCode == 0 {
				c.accessProduced(answers.Topic, answers.TopicID)
			}
			c.tell(r, i, &answers)
		}
		c.forgetKept()
		r.unshare()
	}
	if err := answers.Err(); err != nil {
		return false, &closeError{reasonResponse, err}
	}
	return answers.NodeEndpoints(), nil
}

// readKept lists the partitions of a request that was kept. A request that can't be read lists none: the broker's answer to
// it is what counts.
func (c *conn) readKept(r *request) {
	if r.frame == nil {
		return
	}
	if !r.copied && c.filled.Load() < r.seq {
		return // answered before all of it was sent: the request goroutine still reads into the frame
	}
	walk := protocol.NewProduceRequest(r.frame.B)
	for walk.Next() {
		c.produceParts = append(c.produceParts, producePart{walk.Topic, walk.TopicID, walk.Partition, walk.Records})
	}
	if walk.Err() != nil {
		c.produceParts = c.produceParts[:0]
	}
}

func (c *conn) forgetKept() {
	clear(c.produceParts)
	c.produceParts = c.produceParts[:0]
	clear(c.partIndex)
	if cap(c.produceParts) > maxScratch {
		c.produceParts, c.partIndex = nil, nil
	}
}

// part finds the partition of the request that answer number i is about; nil if the request wasn't kept.
func (c *conn) part(i int, a *protocol.ProduceResponse) *producePart {
	if i < len(c.produceParts) && c.produceParts[i].matches(a) {
		return &c.produceParts[i] // brokers mostly answer in order
	}
	if len(c.produceParts) == 0 {
		return nil
	}
	if len(c.partIndex) == 0 {
		if c.partIndex == nil {
			c.partIndex = make(map[partKey]int, len(c.produceParts))
		}
		for j := range c.produceParts {
			p := &c.produceParts[j]
			c.partIndex[partKey{c.s.topics.name(p.topic), p.topicID, p.partition}] = j
		}
	}
	if j, ok := c.partIndex[partKey{c.s.topics.name(a.Topic), a.TopicID, a.Partition}]; ok {
		return &c.produceParts[j]
	}
	return nil
}

func (p *producePart) matches(a *protocol.ProduceResponse) bool {
	return p.partition == a.Partition && p.topicID == a.TopicID && string(p.topic) == string(a.Topic)
}

// tell passes on to the sink what the broker answered for one partition.
func (c *conn) tell(r *request, i int, a *protocol.ProduceResponse) {
	m := &c.s.metrics
	switch {
	case protocol.DoubtfulCode(a.ErrorCode):
		c.s.o.Sink.Doubt(c.s.topics.name(a.Topic), a.TopicID, a.Partition)
		m.doubts.Inc()
		return
	case a.ErrorCode != 0 || a.BaseOffset < 0:
		return // not appended, or a repeat whose offset the broker has forgotten
	}
	p := c.part(i, a)
	if p == nil {
		c.s.o.Sink.Grown(c.s.topics.name(a.Topic), a.TopicID, a.Partition, a.BaseOffset+1)
		m.grown.Inc()
		return
	}
	batch, rest, err := protocol.ParseBatch(p.records)
	if err != nil || len(rest) > 0 || batch.Transactional() || batch.Control() || !batch.Dense() || a.LogAppendTime >= 0 {
		c.s.o.Sink.Grown(c.s.topics.name(a.Topic), a.TopicID, a.Partition, a.BaseOffset+recordCount(p.records))
		m.grown.Inc()
		return
	}
	c.offer(r, a, batch)
}

// sharedFrame is a kept request whose batches the sink has without a copy. It counts as held until the last of them is let go.
type sharedFrame struct {
	frame *bufpool.Buf
	s     *Server
	refs  atomic.Int32
}

// Release ends one ownership.
func (f *sharedFrame) Release() {
	if f.refs.Add(-1) == 0 {
		f.s.unhold(len(f.frame.B))
		f.frame.Release()
	}
}

// share returns the request's frame as the memory of one more batch.
func (r *request) share(s *Server) *sharedFrame {
	if r.shared == nil {
		r.shared = &sharedFrame{frame: r.frame, s: s}
		r.shared.refs.Store(1) // the request's own
	}
	r.shared.refs.Add(1)
	return r.shared
}

// unshare gives up the request's own part in a shared frame.
func (r *request) unshare() {
	if r.shared != nil {
		r.shared.Release()
		r.shared, r.frame = nil, nil
	}
}

// offer hands a batch to the sink: with the frame that it lies in if it's alone there, else with a share of it, or, where the sink keeps so much that new requests might
// not be held, as a copy. The sink may change the batch, so a frame whose last write hasn't returned (though its answer is here) isn't handed over.
func (c *conn) offer(r *request, a *protocol.ProduceResponse, batch protocol.Batch) {
	var memory protocol.Releaser = r.frame
	switch written := r.copied || c.written.Load() >= r.seq; {
	case written && len(c.produceParts) == 1:
		c.s.unhold(len(r.frame.B))
		r.frame = nil
	case written && c.s.mayShare():
		memory = r.share(c.s)
	default:
		own := bufpool.Get(len(batch))
		copy(own.B, batch)
		memory, batch = own, protocol.Batch(own.B[:len(batch):len(batch)])
	}
	taken := c.s.o.Sink.Offer(protocol.AckedBatch{
		Topic:      c.s.topics.name(a.Topic),
		TopicID:    a.TopicID,
		Partition:  a.Partition,
		BaseOffset: a.BaseOffset,
		Batch:      batch,
		Memory:     memory,
	})
	if taken {
		c.s.metrics.offered.Inc()
		return
	}
	memory.Release()
	c.s.metrics.refused.Inc()
}

// recordCount is the number of offsets that records take, as far as they can be read; at least 1.
func recordCount(records []byte) int64 {
	var n int64
	for len(records) > 0 {
		batch, rest, err := protocol.ParseBatch(records)
		if err != nil {
			break
		}
		n += int64(batch.LastOffsetDelta()) + 1
		records = rest
	}
	return max(n, 1)
}
