// Package bufpool lends byte buffers by size class, counted by reference.
//
// It is not a memory limit: who holds many buffers accounts for them.
//
//	buf := bufpool.Get(n) // one reference, len(buf.B) == n, contents undefined
//	buf.Retain()          // a second owner
//	buf.Release()         // exactly once an owner; the last one returns the memory
package bufpool

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

const (
	minClass = 9  // 512 B
	maxClass = 24 // 16 MiB; larger buffers are left to the garbage collector
)

// Buf is a pooled buffer. B must not be used after the last Release.
type Buf struct {
	B     []byte
	class int // -1: not pooled
	refs  atomic.Int32
}

var classes [maxClass + 1]sync.Pool

// classOf returns the smallest size class that holds n bytes.
func classOf(n int) int {
	if n <= 1<<minClass {
		return minClass
	}
	return bits.Len(uint(n - 1))
}

// Footprint is how much memory a buffer of n bytes takes, for those who account for it.
func Footprint(n int) int {
	if class := classOf(n); class <= maxClass {
		return 1 << class
	}
	return n
}

// Get returns a buffer of n bytes with undefined contents and one reference.
func Get(n int) *Buf {
	class := classOf(n)
	if class > maxClass {
		b := &Buf{B: make([]byte, n), class: -1}
		b.refs.Store(1)
		return b
	}
	b, _ := classes[class].Get().(*Buf)
	if b == nil {
		b = &Buf{B: make([]byte, 1<<class), class: class}
	}
	b.B = b.B[:n]
	b.refs.Store(1)
	return b
}

// Retain adds an owner.
func (b *Buf) Retain() {
	if b.refs.Add(1) <= 1 {
		panic("bufpool: Retain after the last Release")
	}
}

// Release ends one ownership.
func (b *Buf) Release() {
	switch n := b.refs.Add(-1); {
	case n < 0:
		panic("bufpool: Release without ownership")
	case n == 0 && b.class >= 0:
		b.B = b.B[:cap(b.B)]
		classes[b.class].Put(b)
	}
}
