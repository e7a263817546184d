package protocol

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/bits"
)

// Layout of a message, formats v0 and v1 (Kafka's LegacyRecord; before 0.11). Offsets in bytes, integers big endian.
//
//	 0 offset      int64 | 16 magic      int8 | v1: 18 timestamp  int64, ms
//	 8 size        int32 | 17 attributes int8 | key length int32 (-1: null), key, value length int32 (-1: null), value
//	12 CRC32 (IEEE) of [16, end)             |
//
// A compressed message wraps a message set as its value. Its offset is that of the last message inside, whose own offsets are absolute in v0, and
// in v1 (KIP-31) relative to the first that was there before compaction.
const (
	atOldCRC       = 12
	atOldAttribute = 17
	atOldTimestamp = 18
	minOldSize     = 14 // CRC, magic, attributes, two lengths
	// oldRunBytes bounds how many single messages become one batch.
	oldRunBytes = 64 << 10

	noTimestamp = -1
)

var errNested = fmt.Errorf("a compressed message inside a compressed message: %w", ErrCorrupt)

// ConvertOld splits the first messages of format v0 or v1 off b and returns them as one batch, magic 2, with their offsets, keys, values, timestamps
// and codec: a compressed message with what is in it, or a run of plain ones without a hole. An append time becomes the records' own time; a message of v0
// has timestamp -1 (none). The batch doesn't alias b. ErrIncomplete says that b ends before the first message does.
func ConvertOld(b []byte, codec Codec) (batch Batch, rest []byte, err error) {
	m, rest, err := parseOld(b)
	if err != nil {
		return nil, b, err
	}
	var run oldRun
	compression := m.codec()
	if compression == 0 {
		rest, err = run.plain(m, rest)
	} else {
		err = run.wrapped(m, codec)
	}
	if err != nil {
		return nil, b, fmt.Errorf("message at offset %d: %w", m.offset, err)
	}
	records := run.out[BatchHeaderSize:]
	out := Batch(run.out)
	if compression != 0 {
		packed, err := codec.Compress(compression, records)
		if err != nil {
			return nil, b, fmt.Errorf("message at offset %d: %w", m.offset, err)
		}
		out = append(out[:BatchHeaderSize], packed...)
	}
	run.seal(out, compression)
	return out, rest, nil
}

// oldMessage is one message; key and value alias where it was read from and are nil for null.
type oldMessage struct {
	offset     int64
	magic      int8
	attributes int8
	timestamp  int64
	key, value []byte
	size       int
}

func (m *oldMessage) codec() int { return int(m.attributes & AttrCodecMask) }

// parseOld splits the first message off b and checks its CRC.
func parseOld(b []byte) (m oldMessage, rest []byte, err error) {
	if len(b) < lengthPrefix+minOldSize {
		return m, b, ErrIncomplete
	}
	size := int32(binary.BigEndian.Uint32(b[atLength:]))
	m.offset, m.magic, m.attributes = int64(binary.BigEndian.Uint64(b)), int8(b[atMagic]), int8(b[atOldAttribute])
	if m.magic < 0 || m.magic > 1 || size < minOldSize || m.offset < 0 {
		return m, b, fmt.Errorf("message of magic %d, size %d, offset %d: %w", m.magic, size, m.offset, ErrCorrupt)
	}
	if int(size) > len(b)-lengthPrefix {
		return m, b, ErrIncomplete
	}
	m.size = int(size) + lengthPrefix
	rest = b[m.size:]
	b = b[:m.size:m.size]
	if crc32.ChecksumIEEE(b[atMagic:]) != binary.BigEndian.Uint32(b[atOldCRC:]) {
		return m, b, fmt.Errorf("message at offset %d: CRC is wrong: %w", m.offset, ErrCorrupt)
	}
	fields := b[atOldTimestamp:]
	m.timestamp = noTimestamp
	if m.magic == 1 {
		if len(fields) < 8 {
			return m, b, fmt.Errorf("message at offset %d has no timestamp: %w", m.offset, ErrCorrupt)
		}
		m.timestamp = int64(binary.BigEndian.Uint64(fields))
		fields = fields[8:]
	}
	var okKey, okValue bool
	m.key, fields, okKey = oldBytes(fields)
	m.value, fields, okValue = oldBytes(fields)
	if !okKey || !okValue || len(fields) > 0 {
		return m, b, fmt.Errorf("message at offset %d: key or value length: %w", m.offset, ErrCorrupt)
	}
	return m, rest, nil
}

func oldBytes(b []byte) (field, rest []byte, ok bool) {
	if len(b) < 4 {
		return nil, nil, false
	}
	n := int32(binary.BigEndian.Uint32(b))
	b = b[4:]
	if n == -1 {
		return nil, b, true
	}
	if n < 0 || int(n) > len(b) {
		return nil, nil, false
	}
	return b[:n:n], b[n:], true
}

// oldRun builds the records of a batch.
type oldRun struct {
	out                         []byte
	count                       int32
	first, last                 int64 // offsets
	baseTimestamp, maxTimestamp int64
}

// plain adds m and the plain messages behind it that continue it.
func (r *oldRun) plain(m oldMessage, b []byte) (rest []byte, err error) {
	for {
		if err := r.add(m.offset, m.timestamp, m.key, m.value); err != nil {
			return nil, err
		}
		next, behind, err := parseOld(b)
		if err != nil || next.codec() != 0 || next.offset != r.last+1 || len(r.out)+next.size > oldRunBytes {
			return b, nil // what is wrong there is found again when it is the first
		}
		m, b = next, behind
	}
}

// wrapped adds the messages inside a compressed one.
func (r *oldRun) wrapped(m oldMessage, codec Codec) error {
	value := m.value
	if m.codec() == 3 {
		value = FixLZ4Header(value)
	}
	inside, err := codec.Decompress(m.codec(), value)
	if err != nil {
		return err
	}
	base := int64(0)
	if m.magic == 1 {
		lastInside := int64(-1)
		for b := inside; len(b) >= lengthPrefix; {
			n := int64(int32(binary.BigEndian.Uint32(b[atLength:]))) + lengthPrefix
			if n < lengthPrefix || n > int64(len(b)) {
				break
			}
			lastInside = int64(binary.BigEndian.Uint64(b))
			b = b[n:]
		}
		base = m.offset - lastInside // 0 where the offsets inside are absolute
	}
	for len(inside) > 0 {
		x, rest, err := parseOld(inside)
		switch {
		case errors.Is(err, ErrIncomplete):
			return fmt.Errorf("the message set inside is cut off: %w", ErrCorrupt)
		case err != nil:
			return err
		case x.codec() != 0:
			return errNested
		}
		if m.attributes&AttrLogAppendTime != 0 {
			x.timestamp = m.timestamp
		}
		if err := r.add(base+x.offset, x.timestamp, x.key, x.value); err != nil {
			return err
		}
		inside = rest
	}
	if r.count == 0 || r.last != m.offset {
		return fmt.Errorf("%d messages inside, the last at offset %d: %w", r.count, r.last, ErrCorrupt)
	}
	return nil
}

func (r *oldRun) add(offset, timestamp int64, key, value []byte) error {
	if r.count == 0 {
		r.out = append(r.out, make([]byte, BatchHeaderSize)...)
		r.first, r.baseTimestamp, r.maxTimestamp = offset, timestamp, timestamp
	} else if offset <= r.last || offset-r.first > 1<<31-1 {
		return fmt.Errorf("offset %d behind offset %d: %w", offset, r.last, ErrCorrupt)
	}
	r.last, r.maxTimestamp = offset, max(r.maxTimestamp, timestamp)
	r.count++
	var head [1 + 3*binary.MaxVarintLen64]byte // attributes, which are none, and so on
	n := 1 + binary.PutVarint(head[1:], timestamp-r.baseTimestamp)
	n += binary.PutVarint(head[n:], offset-r.first)
	var valueHead [binary.MaxVarintLen64]byte
	n += binary.PutVarint(head[n:], oldLength(key))
	vn := binary.PutVarint(valueHead[:], oldLength(value))
	r.out = binary.AppendVarint(r.out, int64(n+len(key)+vn+len(value)+1))
	r.out = append(r.out, head[:n]...)
	r.out = append(r.out, key...)
	r.out = append(r.out, valueHead[:vn]...)
	r.out = append(r.out, value...)
	r.out = append(r.out, 0) // no headers
	return nil
}

func oldLength(b []byte) int64 {
	if b == nil {
		return -1
	}
	return int64(len(b))
}

// seal writes the header: no producer, no leader epoch.
func (r *oldRun) seal(b Batch, codec int) {
	putLength(b)
	b.SetBaseOffset(r.first)
	b.SetLeaderEpoch(-1)
	b[atMagic] = 2
	binary.BigEndian.PutUint16(b[atAttributes:], uint16(codec))
	binary.BigEndian.PutUint32(b[atLastOffsetDelta:], uint32(r.last-r.first))
	binary.BigEndian.PutUint64(b[atBaseTimestamp:], uint64(r.baseTimestamp))
	binary.BigEndian.PutUint64(b[atMaxTimestamp:], uint64(r.maxTimestamp))
	binary.BigEndian.PutUint64(b[atProducerID:], ^uint64(0))
	binary.BigEndian.PutUint16(b[atProducerEpoch:], ^uint16(0))
	binary.BigEndian.PutUint32(b[atBaseSequence:], ^uint32(0))
	binary.BigEndian.PutUint32(b[atRecordCount:], uint32(r.count))
	reseal(b)
}

// FixLZ4Header returns the LZ4 frame with the right header checksum. Producers before 0.10 computed it with the frame's magic number in it
// (KIP-57, Kafka's KafkaLZ4BlockOutputStream); other decoders refuse that.
func FixLZ4Header(b []byte) []byte {
	const atFlags = 4
	if len(b) < 7 || binary.LittleEndian.Uint32(b) != 0x184D2204 {
		return b
	}
	end := atFlags + 2
	if b[atFlags]&0x08 != 0 { // content size
		end += 8
	}
	if len(b) <= end {
		return b
	}
	sum := byte(xxh32(b[atFlags:end]) >> 8)
	if b[end] == sum {
		return b
	}
	b = append([]byte(nil), b...)
	b[end] = sum
	return b
}

// xxh32 is xxHash32 with seed 0 of fewer than 16 bytes.
func xxh32(b []byte) uint32 {
	const prime1, prime2, prime3, prime4, prime5 = 2654435761, 2246822519, 3266489917, 668265263, 374761393
	h := prime5 + uint32(len(b))
	for ; len(b) >= 4; b = b[4:] {
		h = bits.RotateLeft32(h+binary.LittleEndian.Uint32(b)*prime3, 17) * prime4
	}
	for _, c := range b {
		h = bits.RotateLeft32(h+uint32(c)*prime5, 11) * prime1
	}
	h = (h ^ h>>15) * prime2
	h = (h ^ h>>13) * prime3
	return h ^ h>>16
}
