package forwarder

import (
	"context"
	"math/rand/v2"
	"time"
)

// backoff doubles from least to most, each step jittered by a quarter either way.
type backoff struct {
	least, most, now time.Duration
}

func newBackoff(least, most time.Duration) backoff { return backoff{least: least, most: most} }

func (b *backoff) reset() { b.now = 0 }

func (b *backoff) next() time.Duration {
	b.now = min(max(2*b.now, b.least), b.most)
	return b.now*3/4 + rand.N(b.now/2)
}

// sleep waits for d or ctx's end.
func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
