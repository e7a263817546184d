package protocol

import "hash/crc32"

// A CRC without its initial and final inversion is linear over GF(2): crcRaw(a XOR b) = crcRaw(a) XOR crcRaw(b) for equal
// lengths. So a change to a header changes the CRC of the whole batch by crcRaw(old XOR new header), moved past the bytes
// that follow: times x^(8n) modulo the polynomial. Polynomials are bit-reflected, as in package hash/crc32: the
// coefficient of x^0 is the top bit.

const castagnoliPoly = 0x82f63b78

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// crcPowers[k] is x^(8 * 2^k) modulo the polynomial.
var crcPowers = func() (powers [32]uint32) {
	p := uint32(1) << (31 - 8) // x^8
	for k := range powers {
		powers[k] = p
		p = crcMultiply(p, p)
	}
	return powers
}()

// crcRaw is the CRC32C of b with neither inversion. It walks the table itself: hash/crc32 would move a short array to the heap.
func crcRaw(b []byte) (crc uint32) {
	for _, v := range b {
		crc = castagnoli[byte(crc)^v] ^ crc>>8
	}
	return crc
}

// crcShift returns crc times x^(8n): the raw CRC after n zero bytes more.
func crcShift(crc uint32, n int) uint32 {
	for k := 0; n > 0; k, n = k+1, n>>1 {
		if n&1 != 0 {
			crc = crcMultiply(crc, crcPowers[k])
		}
	}
	return crc
}

// crcMultiply is the product of two polynomials modulo the Castagnoli polynomial.
func crcMultiply(a, b uint32) uint32 {
	var product uint32
	for bit := uint32(1) << 31; bit != 0; bit >>= 1 {
		if a&bit != 0 {
			product ^= b
		}
		carry := b & 1
		b = b>>1 ^ castagnoliPoly*carry
	}
	return product
}
