package proxy

import (
	"cmp"
	"context"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"kmirror/internal/bufpool"
)

// answerChunk is how many bytes of a large answer are read or written at a time, so that its way can be followed.
const answerChunk = 256 << 10

// answers bounds the memory of answers that are read whole and don't fit a pipe's buffer, over all connections: most often Metadata of many topics, and
// ShareFetch. An answer that finds no room waits for its turn. So that clients that don't read can't keep the room from others for ever, the sweep ends those
// whose answers stand still, but only while someone waits.
type answers struct {
	limit    int64
	patience time.Duration
	room     *semaphore.Weighted // of bytes
	held     atomic.Int64
	waiting  atomic.Int64
}

func newAnswers(limit int64, patience time.Duration) *answers {
	return &answers{limit: limit, patience: patience, room: semaphore.NewWeighted(limit)}
}

// take waits until there is room for n bytes, or for the one answer that is larger than all the room. What it took goes to give.
func (a *answers) take(ctx context.Context, n int) (taken int64, err error) {
	taken = min(int64(n), a.limit)
	if !a.room.TryAcquire(taken) {
		a.waiting.Add(1)
		err = a.room.Acquire(ctx, taken)
		a.waiting.Add(-1)
		if err != nil {
			return 0, errCut // kmirror is stopping
		}
	}
	a.held.Add(taken)
	return taken, nil
}

func (a *answers) give(taken int64) {
	a.held.Add(-taken)
	a.room.Release(taken)
}

// answerWay is how far an answer in memory has come; the zero value is none.
type answerWay struct {
	moved    atomic.Int64 // when bytes of it were last read or written, in nanoseconds since 1970
	toClient atomic.Bool
}

func (w *answerWay) begin(toClient bool) {
	w.toClient.Store(toClient)
	w.move()
}

func (w *answerWay) move() { w.moved.Store(time.Now().UnixNano()) }

func (w *answerWay) end() { w.moved.Store(0) }

// stands tells how long the answer hasn't moved; 0 without one.
func (w *answerWay) stands(now time.Time) time.Duration {
	if moved := w.moved.Load(); moved != 0 {
		return now.Sub(time.Unix(0, moved))
	}
	return 0
}

// readLarge is readResponse for a response that doesn't fit the pipe's buffer.
func (c *conn) readLarge(r *request, n int) error {
	if err := c.responses.flush(); err != nil { // the answers before it don't wait
		return err
	}
	taken, err := c.s.answers.take(c.s.base, n)
	if err != nil {
		return err
	}
	defer c.s.answers.give(taken)
	defer c.way.end()
	c.way.begin(false)
	whole := bufpool.Get(n)
	if err := c.inChunks(whole.B, c.responses.take); err != nil {
		whole.Release()
		return err
	}
	changed, err := c.rewrite(r, whole.B)
	if err != nil {
		whole.Release()
		return err
	}
	if changed != nil {
		whole.Release() // before the write: the client may take its time
	}
	out := cmp.Or(changed, whole)
	defer out.Release()
	c.way.begin(true)
	return c.inChunks(out.B, c.responses.write)
}

func (c *conn) inChunks(b []byte, move func([]byte) error) error {
	for chunk := range slices.Chunk(b, answerChunk) {
		if err := move(chunk); err != nil {
			return err
		}
		c.way.move()
	}
	return nil
}

// freeAnswer ends c if its answer stands still and others wait for the memory. Only the sweep calls it.
func (c *conn) freeAnswer(now time.Time) {
	if c.s.answers.waiting.Load() == 0 || c.way.stands(now) <= c.s.answers.patience {
		return
	}
	reason := reasonBroker
	if c.way.toClient.Load() {
		reason = reasonUnread
	}
	c.endFor(reason)
	c.abort()
}
