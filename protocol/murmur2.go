package protocol

import "encoding/binary"

// KeyPartition is the partition of n to which Kafka's Java client sends a record with that key (BuiltInPartitioner: murmur2, sign bit off).
func KeyPartition(key []byte, n int32) int32 { return int32(murmur2(key)&0x7fffffff) % n }

// murmur2 is Kafka's Utils.murmur2.
func murmur2(b []byte) uint32 {
	const multiplier = 0x5bd1e995
	h := uint32(0x9747b28c) ^ uint32(len(b))
	for ; len(b) >= 4; b = b[4:] {
		k := binary.LittleEndian.Uint32(b) * multiplier
		k = (k ^ k>>24) * multiplier
		h = h*multiplier ^ k
	}
	switch len(b) {
	case 3:
		h ^= uint32(b[2]) << 16
		fallthrough
	case 2:
		h ^= uint32(b[1]) << 8
		fallthrough
	case 1:
		h = (h ^ uint32(b[0])) * multiplier
	}
	h = (h ^ h>>13) * multiplier
	return h ^ h>>15
}
