package forwarder

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/bufpool"
	"kmirror/protocol"
)

const (
	produceTimeout     = 10 * time.Second // how long the mirror may wait for its replicas
	maxProduceVersion  = 13               // from 13 on topics are named by ID (KIP-516)
	flexibleProduce    = 9
	topicIDProduce     = 13
	maxRequestBytes    = 4 << 20 // batches in one request; a single larger batch goes alone
	producePrefixBytes = 64      // head room beside names: request header, counts, tags
)

// sending is one batch in a Produce request. The request owns its memory until it is answered.
type sending struct {
	stream  *stream
	session int64
	entry   entry
}

// producing is one Produce request under way.
type producing struct {
	link  *link
	parts []sending
	sent  time.Time
}

// holds reports whether the request has a batch for the mirror partition of a stream already; it may have one only.
func (p *producing) holds(s *stream) bool {
	return s.spread != nil && slices.ContainsFunc(p.parts, func(x sending) bool { return x.stream.to == s.to && x.stream.mirrorTopic == s.mirrorTopic })
}

// frame encodes the request: all prefixes in one pooled buffer, the batches as they are.
func (p *producing) frame(version int16, clientID string, correlationID int32) outgoing {
	slices.SortStableFunc(p.parts, func(a, b sending) int { return strings.Compare(a.stream.topic, b.stream.topic) })
	room := producePrefixBytes + len(clientID)
	for i := range p.parts {
		room += len(p.parts[i].stream.topic) + producePrefixBytes
	}
	head := bufpool.Get(room)
	e := produceEncoder{version: version, b: head.B[:0]}
	e.request(clientID, correlationID, p.parts)
	if cap(e.b) != cap(head.B) {
		panic("forwarder: the Produce request's prefixes outgrew their buffer")
	}
	return outgoing{head: head, pieces: e.pieces}
}

// produceEncoder writes Produce v3 to v13, acks=all, not transactional; Kafka's ProduceRequest.json.
type produceEncoder struct {
	version int16
	b       []byte // what was written
	from    int    // start of what isn't in pieces yet
	size    int    // bytes in pieces
	pieces  [][]byte
}

func (e *produceEncoder) flexible() bool { return e.version >= flexibleProduce }

func (e *produceEncoder) request(clientID string, correlationID int32, parts []sending) {
	e.pieces = make([][]byte, 0, 2*len(parts)+1)
	e.b = append(e.b, 0, 0, 0, 0) // the frame's length
	e.b = binary.BigEndian.AppendUint16(e.b, uint16(kmsg.Produce))
	e.b = binary.BigEndian.AppendUint16(e.b, uint16(e.version))
	e.b = binary.BigEndian.AppendUint32(e.b, uint32(correlationID))
	e.b = binary.BigEndian.AppendUint16(e.b, uint16(len(clientID)))
	e.b = append(e.b, clientID...)
	if e.flexible() {
		e.b = append(e.b, 0, 0) // no tags in the header; null transactional ID
	} else {
		e.b = append(e.b, 0xff, 0xff)
	}
	e.b = append(e.b, 0xff, 0xff) // acks=all
	e.b = binary.BigEndian.AppendUint32(e.b, uint32(produceTimeout.Milliseconds()))
	topics := 0
	for i := range parts {
		if i == 0 || parts[i].stream.topic != parts[i-1].stream.topic {
			topics++
		}
	}
	e.count(topics)
	for len(parts) > 0 {
		n := 1
		for n < len(parts) && parts[n].stream.topic == parts[0].stream.topic {
			n++
		}
		e.topic(parts[:n])
		parts = parts[n:]
	}
	e.endTags()
	e.cut(nil)
	binary.BigEndian.PutUint32(e.pieces[0], uint32(e.size-4))
}

func (e *produceEncoder) topic(parts []sending) {
	s := parts[0].stream
	switch {
	case e.version >= topicIDProduce:
		e.b = append(e.b, s.mirrorTopicID[:]...)
	case e.flexible():
		e.b = binary.AppendUvarint(e.b, uint64(len(s.mirrorTopic)+1))
		e.b = append(e.b, s.mirrorTopic...)
	default:
		e.b = binary.BigEndian.AppendUint16(e.b, uint16(len(s.mirrorTopic)))
		e.b = append(e.b, s.mirrorTopic...)
	}
	e.count(len(parts))
	for i := range parts {
		batch := parts[i].entry.batch
		e.b = binary.BigEndian.AppendUint32(e.b, uint32(parts[i].stream.to))
		if e.flexible() {
			e.b = binary.AppendUvarint(e.b, uint64(len(batch)+1))
		} else {
			e.b = binary.BigEndian.AppendUint32(e.b, uint32(len(batch)))
		}
		e.cut(batch)
		e.endTags()
	}
	e.endTags()
}

func (e *produceEncoder) count(n int) {
	if e.flexible() {
		e.b = binary.AppendUvarint(e.b, uint64(n+1))
	} else {
		e.b = binary.BigEndian.AppendUint32(e.b, uint32(n))
	}
}

func (e *produceEncoder) endTags() {
	if e.flexible() {
		e.b = append(e.b, 0)
	}
}

// cut ends the piece being written and puts batch behind it.
func (e *produceEncoder) cut(batch protocol.Batch) {
	if e.from < len(e.b) {
		e.pieces = append(e.pieces, e.b[e.from:len(e.b):len(e.b)])
		e.size += len(e.b) - e.from
		e.from = len(e.b)
	}
	if len(batch) > 0 {
		e.pieces = append(e.pieces, batch)
		e.size += len(batch)
	}
}

// produceAnswer is what the mirror said of one batch.
type produceAnswer struct {
	code       int16
	message    string
	baseOffset int64
	known      bool    // the answer names this partition
	badRecords []int32 // their places in the batch, where the broker names them (Produce v8)
}

// readAnswers matches the response to the request's batches; brokers answer in an order of their own.
func (p *producing) readAnswers(version int16, body []byte) (answers []produceAnswer, throttle time.Duration, err error) {
	resp := kmsg.NewPtrProduceResponse()
	resp.Version = version
	if err := resp.ReadFrom(body); err != nil {
		return nil, 0, fmt.Errorf("Produce answer: %w", err)
	}
	answers = make([]produceAnswer, len(p.parts))
	for i := range resp.Topics {
		t := &resp.Topics[i]
		for j := range t.Partitions {
			a := &t.Partitions[j]
			k := slices.IndexFunc(p.parts, func(s sending) bool {
				if s.stream.to != a.Partition {
					return false
				}
				if version >= topicIDProduce {
					return s.stream.mirrorTopicID == protocol.TopicID(t.TopicID)
				}
				return s.stream.mirrorTopic == t.Topic
			})
			if k >= 0 {
				answers[k] = produceAnswer{code: a.ErrorCode, baseOffset: a.BaseOffset, known: true}
				for _, bad := range a.ErrorRecords {
					answers[k].badRecords = append(answers[k].badRecords, bad.RelativeOffset)
				}
				if a.ErrorMessage != nil {
					answers[k].message = *a.ErrorMessage
				}
			}
		}
	}
	return answers, time.Duration(resp.ThrottleMillis) * time.Millisecond, nil
}
