package forwarder

import (
	"container/heap"
	"sync"
	"time"

	"kmirror/protocol"
)

// inbox carries events to the loop. Offers are bounded by the memory budget, calls by what was asked for; it never blocks a sender.
type inbox struct {
	mu     sync.Mutex
	offers []offering
	calls  []func()
	wake   chan struct{} // size 1: something is there
}

type offering struct {
	stream *stream
	batch  protocol.AckedBatch
}

func (i *inbox) offer(o offering) {
	i.mu.Lock()
	i.offers = append(i.offers, o)
	i.mu.Unlock()
	i.signal()
}

// call runs fn on the loop.
func (i *inbox) call(fn func()) {
	i.mu.Lock()
	i.calls = append(i.calls, fn)
	i.mu.Unlock()
	i.signal()
}

func (i *inbox) signal() {
	select {
	case i.wake <- struct{}{}:
	default:
	}
}

// take returns what arrived and keeps the given slices for what comes next.
func (i *inbox) take(offers []offering, calls []func()) ([]offering, []func()) {
	i.mu.Lock()
	offers, i.offers = i.offers, offers[:0]
	calls, i.calls = i.calls, calls[:0]
	i.mu.Unlock()
	return offers, calls
}

// timers is a heap of what the loop does later. It belongs to the loop.
type timers []timer

type timer struct {
	at time.Time
	do func()
}

func (t timers) Len() int           { return len(t) }
func (t timers) Less(i, j int) bool { return t[i].at.Before(t[j].at) }
func (t timers) Swap(i, j int)      { t[i], t[j] = t[j], t[i] }
func (t *timers) Push(x any)        { *t = append(*t, x.(timer)) }

func (t *timers) Pop() any {
	last := len(*t) - 1
	x := (*t)[last]
	(*t)[last] = timer{}
	*t = (*t)[:last]
	return x
}

func (t *timers) add(at time.Time, do func()) { heap.Push(t, timer{at, do}) }

// run does what is due and returns when the next is, the zero time if nothing is left.
func (t *timers) run(now time.Time) time.Time {
	for len(*t) > 0 && !(*t)[0].at.After(now) {
		heap.Pop(t).(timer).do()
	}
	if len(*t) == 0 {
		return time.Time{}
	}
	return (*t)[0].at
}
