package scripted

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/protocol"
)

// Offsets are a partition's marks at one moment.
type Offsets struct {
	LogStart, HighWatermark, LogEnd int64
	Leader, LeaderEpoch             int32
}

// Offsets returns a partition's marks.
func (c *Cluster) Offsets(topicName string, index int32) (o Offsets) {
	c.view(func() {
		p := c.at(topicName, index)
		o = Offsets{p.logStart, p.highWatermark, p.logEnd, p.leader, p.leaderEpoch}
	})
	return o
}

// TopicID returns a topic's ID, zero if there is no such topic.
func (c *Cluster) TopicID(topicName string) (id protocol.TopicID) {
	c.view(func() {
		if t := c.topics[topicName]; t != nil {
			id = t.id
		}
	})
	return id
}

// Log returns a partition's batches as stored, up to the log end. They must not be changed.
func (c *Cluster) Log(topicName string, index int32) (batches []protocol.Batch) {
	c.view(func() { batches = slices.Clone(c.at(topicName, index).batches) })
	return batches
}

// Records returns a partition's records up to the log end; control records and those of aborted transactions are marked.
func (c *Cluster) Records(topicName string, index int32) []LogRecord {
	var batches []protocol.Batch
	var aborted []abortedTxn
	var start int64
	c.view(func() {
		p := c.at(topicName, index)
		batches, aborted, start = slices.Clone(p.batches), slices.Clone(p.aborted), p.logStart
	})
	var out []LogRecord
	for _, b := range batches {
		for _, r := range recordsOf(b) {
			for _, a := range aborted {
				r.Aborted = r.Aborted || b.Transactional() && !r.Control && a.producerID == r.ProducerID && a.firstOffset <= r.Offset && r.Offset < a.lastOffset
			}
			if r.Offset >= start {
				out = append(out, r)
			}
		}
	}
	return out
}

// Producer is what DescribeProducers tells about one producer ID, and how many batches the broker can still recognise as repeats.
type Producer struct {
	ID              int64
	Epoch           int16
	LastSequence    int32
	LastTimestamp   int64
	RetainedBatches int
}

// Producer returns the leader's state of a producer ID; ok is false if the partition doesn't know it.
func (c *Cluster) Producer(topicName string, index int32, id int64) (state Producer, ok bool) {
	c.view(func() {
		if e := c.at(topicName, index).producers[id]; e != nil {
			state, ok = Producer{id, e.epoch, e.lastSequence(), e.lastTimestamp, len(e.batches)}, true
		}
	})
	return state, ok
}

// Requests returns the requests of an API (by API key; -1: all) that match accepts (nil: all), in order of arrival.
func (c *Cluster) Requests(key int16, match func(*Request) bool) (list []Request) {
	c.view(func() {
		for _, r := range c.requests {
			if key < 0 || r.Key == key {
				list = append(list, *r)
			}
		}
	})
	if match == nil {
		return list
	}
	return slices.DeleteFunc(list, func(r Request) bool { return !match(&r) }) // match may ask the cluster
}

// Count returns how many requests of an API (by API key) a client ID sent; "" counts all clients.
func (c *Cluster) Count(key int16, clientID string) int {
	return len(c.Requests(key, func(r *Request) bool { return clientID == "" || r.ClientID == clientID }))
}

// ForgetRequests starts counting anew.
func (c *Cluster) ForgetRequests() {
	c.locked(func() { c.requests = nil })
}

// Connections returns how many client connections are open.
func (c *Cluster) Connections() (n int) {
	c.view(func() {
		for _, b := range c.brokers {
			n += len(b.conns)
		}
	})
	return n
}

// Await waits until cond holds, looking again at each change of the cluster's state and every few milliseconds. After the
// deadline it fails the test, saying what was awaited.
func (c *Cluster) Await(tb testing.TB, what string, cond func() bool) {
	tb.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !cond() {
		c.mu.Lock()
		changed := c.changed
		c.mu.Unlock()
		select {
		case <-changed:
		case <-time.After(5 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			tb.Fatalf("not seen in time: %s", what)
		}
	}
}

// CheckMirrorPrefix says where mirror isn't a prefix of source: nil if each record on the mirror is the source's next, with
// the same key, value, headers and timestamp. Control records and aborted ones don't count on either side; keep (nil: all)
// picks the mirror's records that are ours.
func CheckMirrorPrefix(source, mirror []LogRecord, keep func(LogRecord) bool) error {
	dropped := func(r LogRecord) bool { return r.Control || r.Aborted }
	source = slices.DeleteFunc(slices.Clone(source), dropped)
	mirror = slices.DeleteFunc(slices.Clone(mirror), func(r LogRecord) bool { return dropped(r) || keep != nil && !keep(r) })
	for i, r := range mirror {
		if i == len(source) {
			return fmt.Errorf("the mirror has %d records, the source %d; the first beyond, at mirror offset %d, has value %q", len(mirror), len(source), r.Offset, r.Value)
		}
		if want := source[i]; !sameRecord(want, r) {
			return fmt.Errorf("record %d: mirror offset %d has value %q, source offset %d has %q", i, r.Offset, r.Value, want.Offset, want.Value)
		}
	}
	return nil
}

func sameRecord(a, b LogRecord) bool {
	same := func(x, y []byte) bool { return bytes.Equal(x, y) && (x == nil) == (y == nil) }
	return a.Timestamp == b.Timestamp && same(a.Key, b.Key) && same(a.Value, b.Value) &&
		slices.EqualFunc(a.Headers, b.Headers, func(x, y kmsg.Header) bool { return x.Key == y.Key && same(x.Value, y.Value) })
}
