package protocol

import (
	"encoding/binary"
	"fmt"
)

// walker reads primitive types from b, from at on. The first read past the end or out of range sets bad, and all reads
// after it return zero values, so that a caller checks once, at the end.
//
// Invariant: 0 <= at <= len(b), and a length or a count from b is compared with len(b)-at before it is used.
type walker struct {
	b        []byte
	at       int
	flexible bool // compact strings and arrays, tagged fields (KIP-482)
	bad      bool
}

// err describes where and in what the walk went wrong; nil if it didn't.
func (w *walker) err(what string, version int16) error {
	if !w.bad {
		return nil
	}
	return fmt.Errorf("%s v%d, byte %d of %d: %w", what, version, w.at, len(w.b), ErrMalformed)
}

// span returns the next n bytes; they alias b.
func (w *walker) span(n int) []byte {
	if w.bad || n < 0 || n > len(w.b)-w.at {
		w.bad = true
		return nil
	}
	w.at += n
	return w.b[w.at-n : w.at : w.at]
}

func (w *walker) skip(n int) { w.span(n) }

func (w *walker) int8() int8 {
	if s := w.span(1); s != nil {
		return int8(s[0])
	}
	return 0
}

func (w *walker) int16() int16 {
	if s := w.span(2); s != nil {
		return int16(binary.BigEndian.Uint16(s))
	}
	return 0
}

func (w *walker) int32() int32 {
	if s := w.span(4); s != nil {
		return int32(binary.BigEndian.Uint32(s))
	}
	return 0
}

func (w *walker) int64() int64 {
	if s := w.span(8); s != nil {
		return int64(binary.BigEndian.Uint64(s))
	}
	return 0
}

func (w *walker) topicID() (id TopicID) {
	copy(id[:], w.span(len(id)))
	return id
}

// uvarint reads an unsigned varint of at most 32 bits. Most have one byte.
func (w *walker) uvarint() int {
	if !w.bad && w.at < len(w.b) && w.b[w.at] < 0x80 {
		w.at++
		return int(w.b[w.at-1])
	}
	return w.longUvarint()
}

func (w *walker) longUvarint() int {
	var v uint64
	for shift := 0; shift < 35; shift += 7 {
		s := w.span(1)
		if s == nil {
			return 0
		}
		v |= uint64(s[0]&0x7f) << shift
		if s[0] < 0x80 {
			if v > 1<<32-1 {
				break
			}
			return int(v)
		}
	}
	w.bad = true
	return 0
}

// nullableString returns nil for null; "" is not nil.
func (w *walker) nullableString() []byte {
	n := 0
	if w.flexible {
		n = w.uvarint() - 1
	} else {
		n = int(w.int16())
	}
	if w.bad || n < 0 {
		return nil
	}
	return w.span(n)
}

// string reads a string that must not be null.
func (w *walker) string() []byte {
	s := w.nullableString()
	w.bad = w.bad || s == nil
	return s
}

// nullableBytes returns nil for null.
func (w *walker) nullableBytes() []byte {
	n := 0
	if w.flexible {
		n = w.uvarint() - 1
	} else {
		n = int(w.int32())
	}
	if w.bad || n < 0 {
		return nil
	}
	return w.span(n)
}

// count reads the length of an array whose elements have at least min bytes; null counts as 0.
func (w *walker) count(min int) int {
	n := 0
	if w.flexible {
		n = w.uvarint() - 1
	} else {
		n = int(w.int32())
	}
	if w.bad || n > (len(w.b)-w.at)/min {
		w.bad = true
		return 0
	}
	return max(n, 0)
}

// tags skips a section of tagged fields; nothing in messages that aren't flexible.
func (w *walker) tags() {
	if !w.flexible {
		return
	}
	for range w.tagCount() {
		w.uvarint()
		w.skip(w.uvarint())
		if w.bad {
			return
		}
	}
}

// tagCount reads the number of tagged fields of a section, each of which has at least two bytes.
func (w *walker) tagCount() int {
	n := w.uvarint()
	if w.bad || n > (len(w.b)-w.at)/2 {
		w.bad = true
		return 0
	}
	return n
}

// int32s skips an array of int32.
func (w *walker) int32s() { w.skip(4 * w.count(4)) }

func appendInt16(dst []byte, v int16) []byte { return binary.BigEndian.AppendUint16(dst, uint16(v)) }

func appendInt32(dst []byte, v int32) []byte { return binary.BigEndian.AppendUint32(dst, uint32(v)) }

func appendString(dst []byte, s string, flexible bool) []byte {
	if flexible {
		dst = binary.AppendUvarint(dst, uint64(len(s))+1)
	} else {
		dst = appendInt16(dst, int16(len(s)))
	}
	return append(dst, s...)
}

func appendCount(dst []byte, n int, flexible bool) []byte {
	if flexible {
		return binary.AppendUvarint(dst, uint64(n)+1)
	}
	return appendInt32(dst, int32(n))
}
