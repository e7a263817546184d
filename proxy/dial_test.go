package proxy

import (
	"testing"
	"time"
)

// TestUnreachableWait: a client isn't let go at once, nor all of them at the same time, but none waits longer for a dial that took long already.
func TestUnreachableWait(t *testing.T) {
	least := func(time.Duration) time.Duration { return 0 }
	most := func(limit time.Duration) time.Duration { return limit - 1 }
	for _, tt := range []struct {
		name   string
		took   time.Duration
		random func(time.Duration) time.Duration
		want   time.Duration
	}{
		{"refused at once", 0, least, unreachableDelay},
		{"refused at once, the other end", 0, most, 2*unreachableDelay - 1},
		{"refused after a while", 60 * time.Millisecond, least, unreachableDelay - 60*time.Millisecond},
		{"timed out", dialTimeout, most, 0},
	} {
		if got := unreachableWait(tt.took, tt.random); got != tt.want {
			t.Errorf("%s: unreachableWait = %v, want %v", tt.name, got, tt.want)
		}
	}
}

// TestUnreachableBrokerIsNotDialledInATightLoop: a client that comes again at once finds out no faster than every 100 ms that the source is down.
func TestUnreachableBrokerIsNotDialledInATightLoop(t *testing.T) {
	b := script(t, nil)
	s := startBefore(t, b, Options{})
	b.ln.Close()
	for range 3 {
		begun := time.Now()
		c := dialRaw(t, s.Addr())
		c.wantClosed("a broker that is down")
		if took := time.Since(begun); took < unreachableDelay {
			t.Errorf("closed after %v, want at least %v", took, unreachableDelay)
		}
	}
}
