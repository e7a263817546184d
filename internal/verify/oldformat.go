package verify

import (
	"encoding/binary"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/protocol"
)

// appendTime says that the records up to last, from the one before it on, have the append time of their compressed message of format v1.
// kgo gives them the time of their producer.
type appendTime struct {
	first, last int64
	timestamp   int64
}

type appendTimes []appendTime

// findAppendTimes reads the headers of what a Fetch brought, of any format.
func findAppendTimes(b []byte) (found appendTimes) {
	const atMagic, atAttributes, atTimestamp, headerSize = 16, 17, 18, 26
	next := int64(0)
	for len(b) >= headerSize {
		size := int64(int32(binary.BigEndian.Uint32(b[8:]))) + 12
		if size < headerSize || size > int64(len(b)) {
			return found
		}
		offset := int64(binary.BigEndian.Uint64(b))
		attributes := b[atAttributes]
		if b[atMagic] == 1 && attributes&protocol.AttrLogAppendTime != 0 && attributes&protocol.AttrCodecMask != 0 {
			found = append(found, appendTime{next, offset, int64(binary.BigEndian.Uint64(b[atTimestamp:]))})
		}
		if next = offset + 1; b[atMagic] == 2 && size >= protocol.BatchHeaderSize {
			next = protocol.Batch(b[:size]).EndOffset()
		}
		b = b[size:]
	}
	return found
}

// set gives record its append time, if it has one, and what stands for none otherwise; records are given in order.
func (a *appendTimes) set(record *kgo.Record) {
	if record.Timestamp.IsZero() {
		record.Timestamp = time.UnixMilli(-1) // format v0 has none
	}
	for len(*a) > 0 && (*a)[0].last < record.Offset {
		*a = (*a)[1:]
	}
	if len(*a) > 0 && record.Offset >= (*a)[0].first {
		record.Timestamp = time.UnixMilli((*a)[0].timestamp)
	}
}
