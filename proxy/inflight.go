package proxy

import (
	"errors"
	"sync"

	"kmirror/internal/bufpool"
	"kmirror/protocol"
)

// maxInFlight bounds the requests of one connection that wait for an answer. At the bound the proxy stops reading from the
// client until the broker has answered; it never drops or fails one.
const maxInFlight = 1024

// answer says what is to be done with the response to a request.
type answer int8

const (
	answerOpaque    answer = iota // pass it on
	answerProduce                 // read it for the sink, rewrite node endpoints
	answerRewrite                 // rewrite broker addresses
	answerVersions                // cut version ranges
	answerHandshake               // SaslHandshake v0: raw tokens follow
	answerToken                   // a raw SASL token, without a header
	answerLogin                   // SaslHandshake v1 or SaslAuthenticate: read its outcome for the logs
)

// request is a request that was sent to the broker and waits for its response.
type request struct {
	header protocol.RequestHeader
	answer answer
	frame  *bufpool.Buf // a Produce request kept for the sink; nil for all others
	shared *sharedFrame // frame, once batches in it were handed over
	copied bool         // frame is a copy of its own, not the buffer that is written to the broker
	seq    uint64       // number of the request on this connection
}

// flight is the queue of a connection's requests in the order sent, which is the order of the responses (Kafka answers one
// connection in order). The request goroutine pushes, the response goroutine pops.
type flight struct {
	mu      sync.Mutex
	changed sync.Cond
	ring    []request // grows up to maxInFlight
	head, n int
	tokens  int    // raw tokens among the n
	pushed  uint64 // requests ever pushed
	settled uint64 // requests whose answer was written to the client
	waiting bool   // someone waits for changed
	closed  bool
}

var errFlightClosed = errors.New("connection is closing")

func (f *flight) init() { f.changed.L = &f.mu }

// push appends r and returns true, or returns false if the queue is full or closed.
func (f *flight) push(r request) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed || f.n == maxInFlight {
		return false
	}
	if f.n == len(f.ring) {
		f.grow()
	}
	f.pushed++
	r.seq = f.pushed
	f.ring[(f.head+f.n)%len(f.ring)] = r
	f.n++
	if r.answer == answerToken {
		f.tokens++
	}
	return true
}

func (f *flight) grow() {
	ring := make([]request, max(4, 2*len(f.ring)))
	for i := range f.n {
		ring[i] = f.ring[(f.head+i)%len(f.ring)]
	}
	f.ring, f.head = ring, 0
}

// waitRoom waits until push can succeed.
func (f *flight) waitRoom() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for f.n == maxInFlight && !f.closed {
		f.wait()
	}
	if f.closed {
		return errFlightClosed
	}
	return nil
}

// pop removes the oldest request; false if there is none.
func (f *flight) pop() (r request, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.n == 0 {
		return r, false
	}
	return f.take(), true
}

// take removes the oldest of at least one request. f.mu is held.
func (f *flight) take() request {
	r := f.ring[f.head]
	f.ring[f.head].frame = nil
	f.head = (f.head + 1) % len(f.ring)
	f.n--
	if r.answer == answerToken {
		f.tokens--
	}
	f.wake()
	return r
}

// popBehindTokens removes the oldest request that isn't a raw token, with all tokens before it, if it has this correlation ID.
func (f *flight) popBehindTokens(correlationID int32) (r request, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	tokens := 0
	for tokens < f.n && f.ring[(f.head+tokens)%len(f.ring)].answer == answerToken {
		tokens++
	}
	if tokens == f.n || f.ring[(f.head+tokens)%len(f.ring)].header.CorrelationID != correlationID {
		return r, false
	}
	for range tokens {
		f.take()
	}
	return f.take(), true
}

// settle says that the answers to all requests popped so far were written to the client.
func (f *flight) settle() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.settled = f.pushed - uint64(f.n)
	f.wake()
}

// waitSettled waits until every request pushed so far was answered. Raw tokens aren't waited for, since the last one may have no answer.
func (f *flight) waitSettled() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for f.unanswered() > 0 && !f.closed {
		f.wait()
	}
	if f.closed {
		return errFlightClosed
	}
	return nil
}

// last is the number of the request pushed last.
func (f *flight) last() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.pushed
}

// waits reports the number of requests that weren't answered yet, without raw tokens.
func (f *flight) waits() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.unanswered()
}

// unanswered is waits with f.mu held.
func (f *flight) unanswered() int { return int(f.pushed-f.settled) - f.tokens }

// totals returns the number of requests ever pushed and of those answered.
func (f *flight) totals() (asked, answered uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.pushed, f.settled
}

// close ends all waiting; push fails from now on.
func (f *flight) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	f.wake()
}

func (f *flight) wait() {
	f.waiting = true
	f.changed.Wait()
}

func (f *flight) wake() {
	if f.waiting {
		f.waiting = false
		f.changed.Broadcast()
	}
}
