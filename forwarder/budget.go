package forwarder

import "sync/atomic"

// budget counts the bytes of record batches held in memory against a bound. Safe for concurrent use.
type budget struct {
	limit int64
	used  atomic.Int64
}

// offer takes n bytes for an offered batch. Room for a fetch is kept, so that catch-up goes on under full load: offers that wait
// above a hole are freed by nothing else.
func (b *budget) offer(n int64) bool { return b.take(n, b.limit-max(b.limit/4, fetchBytes)) }

// reserve takes n bytes for a fetch. One fetch is let through whatever the bound, or nothing would ever move.
func (b *budget) reserve(n int64) bool {
	return b.take(n, max(b.limit, n))
}

func (b *budget) take(n, limit int64) bool {
	for {
		used := b.used.Load()
		if used+n > limit {
			return false
		}
		if b.used.CompareAndSwap(used, used+n) {
			return true
		}
	}
}

// force takes n bytes that are there already.
func (b *budget) force(n int64) { b.used.Add(n) }

func (b *budget) free(n int64) { b.used.Add(-n) }
