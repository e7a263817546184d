package forwarder

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/zap"
)

// OffsetPolicy says for which holes of the source log, made by transactions, offsets on the mirror are kept equal. A hole is filled with empty aborted
// transactions, whose control records each take one offset that no consumer sees.
type OffsetPolicy int8

// The policies.
const (
	OffsetsAuto      OffsetPolicy = iota // holes of markers alone
	OffsetsIdentical                     // those of aborted records too
	OffsetsMapped                        // none: offsets shift at each hole
)

// fillPatience is how long a filler is tried again before the stream goes on with shifted offsets, unless the options say otherwise.
const fillPatience = 15 * time.Second

// filler writes a stream's empty transactions. One task at a time has it.
type filler struct {
	id         string // transactional ID
	address    string // of its coordinator
	producerID int64  // -1: not asked for yet
	epoch      int16
}

// coordinators are connections to transaction coordinators, by address. Safe for concurrent use; mu is never held over a dial.
type coordinators struct {
	mu     sync.Mutex
	conns  map[string]*coordinatorDial
	closed bool
}

// coordinatorDial is a connection that is there, or will be once it was dialled.
type coordinatorDial struct {
	done chan struct{} // closed once conn or err is set
	conn *conn
	err  error
}

// usable reports whether the connection is there or is being dialled.
func (d *coordinatorDial) usable() bool {
	select {
	case <-d.done:
	default:
		return true
	}
	if d.err != nil {
		return false
	}
	select {
	case <-d.conn.ended:
		return false
	default:
		return true
	}
}

// to returns the connection to a coordinator, dialled if there is none. Who comes while it is dialled waits for that, as long as ctx lasts.
func (c *coordinators) to(ctx context.Context, l *loop, address string) (*conn, error) {
	c.mu.Lock()
	d := c.conns[address]
	mine := d == nil || !d.usable()
	if mine {
		d = &coordinatorDial{done: make(chan struct{})}
		if c.conns == nil {
			c.conns = map[string]*coordinatorDial{}
		}
		c.conns[address] = d
	}
	c.mu.Unlock()
	if mine {
		d.conn, d.err = dialConn(ctx, address, l.clientID, l.opts.Mirror)
		c.mu.Lock()
		if d.err == nil && c.closed {
			d.conn.close(errConnClosed)
		}
		close(d.done)
		c.mu.Unlock()
	}
	select {
	case <-d.done:
		return d.conn, d.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func (c *coordinators) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, d := range c.conns {
		select {
		case <-d.done:
			if d.err == nil {
				d.conn.close(errConnClosed)
			}
		default: // who dials it finds it closed
		}
	}
}

// fillBefore fills the hole below the head of the queue, or finds that the stream's offsets aren't the source's any more.
func (l *loop) fillBefore(s *stream) {
	head := &s.queue[0]
	missing, hole := head.base-s.mirrorEnd, head.base-s.holeBefore(head.base)
	if missing < 0 || missing > hole || head.holeData && !s.fillData {
		l.giveUpFilling(s, nil)
		return
	}
	l.fill(s, head.base)
}

// fillBehind fills a hole at the source log's end, so that log ends are equal too.
func (l *loop) fillBehind(s *stream) {
	if !s.fills || s.fence != nil || s.conn == nil || s.filling || len(s.queue) > 0 || len(s.flight) > 0 || s.holeFrom < 0 || s.mirrorEnd < s.holeFrom || s.mirrorEnd >= s.next {
		return
	}
	if s.holeData && !s.fillData || !l.group.mayAct() {
		return // what comes next decides
	}
	l.fill(s, s.next)
}

// giveUpFilling lets a stream's offsets be mapped from here on.
func (l *loop) giveUpFilling(s *stream, why error) {
	s.fills, s.shifted = false, true
	fields := s.logFields(zap.Int64("source_offset", s.acked), zap.Int64("mirror_offset", s.mirrorEnd))
	if why != nil {
		fields = append(fields, zap.Error(why))
	}
	say := l.log.Debug // they never were
	if s.filler != nil || why != nil {
		say = l.log.Info
	}
	say("offsets on the mirror are not the source's from here on", fields...)
	l.makeReady(s)
}

var errFillTime = errors.New("filling the holes that transactions leave took longer than timing.fill, without reaching the log's end")

// fill writes fillers until the mirror's log ends at upTo; nothing else is sent meanwhile.
func (l *loop) fill(s *stream, upTo int64) {
	left := l.opts.FillTime - s.fillSpent
	if left <= 0 {
		l.giveUpFilling(s, errFillTime)
		return
	}
	if s.filler == nil {
		s.filler = &filler{id: l.transactionalID(s.identity()) + ".fill", producerID: -1}
	}
	s.filling = true
	s.unanswered++ // a hand-over waits for it
	stop, cancel := context.WithCancel(context.Background())
	s.stopFilling = cancel
	f, c, session, question, began := s.filler, s.conn, s.session, l.questionOf(s), l.now
	l.spawn(func(ctx context.Context) {
		ctx, end := context.WithTimeout(ctx, left)
		defer end()
		defer context.AfterFunc(stop, end)()
		done, logEnd, err := l.runFiller(ctx, f, c, question, upTo)
		late := errors.Is(ctx.Err(), context.DeadlineExceeded)
		l.inbox.call(func() {
			cancel()
			s.unanswered--
			l.metrics.fillers.Add(float64(done))
			if s.session != session || s.removed {
				l.drained(s)
				return
			}
			s.filling = false
			s.fillSpent += l.now.Sub(began)
			s.mirrorEnd, s.uncommitted = max(s.mirrorEnd, logEnd), true
			switch {
			case err == nil:
				l.makeReady(s)
				l.fillBehind(s)
			case late:
				l.giveUpFilling(s, errFillTime)
			default:
				l.giveUpFilling(s, err)
			}
		})
	})
}

// endFilling stops a filling that is under way; what is on its way still counts, as the next one's log end will tell.
func (s *stream) endFilling() {
	if s.filling {
		s.stopFilling()
		s.filler, s.filling = nil, false
	}
}

// runFiller runs empty transactions, one after the other, until the mirror's log ends at upTo, and returns how many and where it ends. It runs beside the loop.
// It gives up when nothing was filled for the patience, be it that the coordinator fails, says nothing or is busy all the time.
func (l *loop) runFiller(ctx context.Context, f *filler, c *conn, q question, upTo int64) (done, end int64, err error) {
	wait := newBackoff(20*time.Millisecond, time.Second)
	patience := cmp.Or(l.opts.FillPatience, fillPatience)
	for deadline := time.Now().Add(patience); ; {
		var ran bool
		if end, ran, err = l.fillStep(ctx, deadline, f, c, q, end, upTo); ran {
			done++
			deadline = time.Now().Add(patience)
			wait.reset()
			continue
		}
		if err == nil {
			break
		}
		f.producerID = -1 // whether the last one counts isn't known: begin anew
		switch {
		case errors.Is(err, kerr.TransactionalIDAuthorizationFailed), errors.Is(err, kerr.UnsupportedVersion), ctx.Err() != nil:
			return done, 0, err
		case time.Now().After(deadline):
			return done, 0, fmt.Errorf("nothing was filled for %s: %w", patience, err)
		}
		sleep(ctx, wait.next())
	}
	end, err = awaitLogEnd(ctx, c, q, upTo, patience)
	return done, end, err
}

// fillStep runs one empty transaction, unless the mirror's log ends at upTo, and returns where it ends then. end is where it ended before, 0: not known.
func (l *loop) fillStep(ctx context.Context, deadline time.Time, f *filler, c *conn, q question, end, upTo int64) (now int64, ran bool, err error) {
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	if f.producerID < 0 {
		// Once the new epoch is there, what the one before had begun is over: the log's end says how much is missing.
		end = 0
		if err := l.openFiller(ctx, f); err != nil {
			return 0, false, err
		}
	}
	if end == 0 {
		if end, err = awaitLogEnd(ctx, c, q, 0, 0); err != nil {
			return 0, false, err
		}
	}
	if end >= upTo {
		return end, false, nil
	}
	if err := l.runOnce(ctx, f, q); err != nil {
		return 0, false, err
	}
	return end + 1, true, nil
}

// openFiller opens a new epoch.
func (l *loop) openFiller(ctx context.Context, f *filler) (err error) {
	if f.address, err = l.findCoordinator(ctx, f.id); err != nil {
		return err
	}
	c, err := l.coordinators.to(ctx, l, f.address)
	if err != nil {
		return err
	}
	f.producerID, f.epoch, err = initProducerID(ctx, c, f.id)
	return err
}

func (l *loop) runOnce(ctx context.Context, f *filler, q question) error {
	c, err := l.coordinators.to(ctx, l, f.address)
	if err != nil {
		return err
	}
	return abortEmpty(ctx, c, f.id, f.producerID, f.epoch, q.topic, q.partition)
}

// awaitLogEnd waits until the markers of what was aborted are in the log, and returns its end.
func awaitLogEnd(ctx context.Context, c *conn, q question, wanted int64, patience time.Duration) (end int64, err error) {
	wait := newBackoff(2*time.Millisecond, 200*time.Millisecond)
	for deadline := time.Now().Add(patience); ; sleep(ctx, wait.next()) {
		answers := make([]answer, 1)
		err := (&resolver{conn: c}).listOffsets(ctx, []question{q}, answers, latestOffset, -2, func(_ *answer, offset int64) { end = offset })
		if err = errors.Join(err, answers[0].err); err != nil || end >= wanted {
			return end, err
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			return end, fmt.Errorf("the mirror's log ends at %d, want %d behind the fillers: %w", end, wanted, errNoMarker)
		}
	}
}

// initProducerID opens an epoch of a transactional ID.
func initProducerID(ctx context.Context, c *conn, id string) (producerID int64, epoch int16, err error) {
	err = retryCoordinator(ctx, func() error {
		req := kmsg.NewPtrInitProducerIDRequest()
		req.TransactionalID, req.TransactionTimeoutMillis, req.ProducerID, req.ProducerEpoch = &id, int32(fenceTransaction.Milliseconds()), -1, -1
		return askOnce(ctx, c, req, 4, func(resp *kmsg.InitProducerIDResponse) int16 {
			producerID, epoch = resp.ProducerID, resp.ProducerEpoch
			return resp.ErrorCode
		})
	})
	if err != nil {
		return -1, 0, fmt.Errorf("InitProducerId %s: %w", id, err)
	}
	return producerID, epoch, nil
}

// abortEmpty runs an empty transaction over a partition and aborts it. EndTxn stays below v5, in which it would raise the epoch. The marker may come
// later than the answer (F7).
func abortEmpty(ctx context.Context, c *conn, id string, producerID int64, epoch int16, topic string, partition int32) error {
	err := retryCoordinator(ctx, func() error {
		req := kmsg.NewPtrAddPartitionsToTxnRequest()
		req.TransactionalID, req.ProducerID, req.ProducerEpoch = id, producerID, epoch
		req.Topics = []kmsg.AddPartitionsToTxnRequestTopic{{Topic: topic, Partitions: []int32{partition}}}
		return askOnce(ctx, c, req, 3, func(resp *kmsg.AddPartitionsToTxnResponse) int16 {
			for _, t := range resp.Topics {
				for _, p := range t.Partitions {
					return p.ErrorCode
				}
			}
			return kerr.UnknownServerError.Code
		})
	})
	if err != nil {
		return fmt.Errorf("AddPartitionsToTxn %s: %w", id, err)
	}
	req := kmsg.NewPtrEndTxnRequest()
	req.TransactionalID, req.ProducerID, req.ProducerEpoch, req.Commit = id, producerID, epoch, false
	if err := askOnce(ctx, c, req, 4, func(resp *kmsg.EndTxnResponse) int16 { return resp.ErrorCode }); err != nil {
		return fmt.Errorf("EndTxn %s: %w", id, err)
	}
	return nil
}
