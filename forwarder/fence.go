package forwarder

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// A fenced session (rule N6) begins with an empty aborted transaction over the mirror partition. Its marker, a control record that no consumer
// sees, raises the epoch of the stream's transactional producer ID there, so that the broker refuses all earlier sessions (F7).
//
// A stream is fenced while it reads what compaction left with holes. At the log's end it opens a new dense generation, whose birth the newest
// fence alone may write.

const (
	fenceTimeout  = 8 * time.Second // for the transactions of one recovery
	markerTimeout = 3 * time.Second
	fencesAtOnce  = 16
	// fenceTransaction is after what time the coordinator ends a transaction that we began and left.
	fenceTransaction = 30 * time.Second

	// A session that goes on is fenced anew before the coordinator forgets the transactional ID (F8), and sooner while it appends old data, after which the
	// broker may forget the producer (F3).
	refenceAfter    = 12 * time.Hour
	refenceOldAfter = 3 * time.Minute
	// A share has no place on the mirror in its checkpoint: a scan starts where the session began.
	refenceShareAfter = time.Hour
)

var (
	errOvertaken = errors.New("another owner went on with this stream meanwhile")
	errNoMarker  = errors.New("the marker of the fence hasn't come to the mirror partition yet")
	errNoFence   = errors.New("compacted logs need DescribeProducers on the mirror (Kafka 2.8)")
	errHoles     = errors.New("the source log has holes: going on in a fenced session")
	errAtEnd     = errors.New("the holes of the source log are passed: going on in a dense generation")
	errRefence   = errors.New("the session is to be fenced anew")

	errNotConfirmed = errors.New("the group membership isn't confirmed now")
)

// transactionalID of a stream, the same in all its generations.
func (l *loop) transactionalID(id identity) string {
	id.generation = 0
	return fmt.Sprintf("kmirror.%s.%016x", l.opts.Name, id.producerID())
}

// fenceAll fences what is to be fenced among results, on connections to the coordinators that live as long. A result's fence has no source and no
// landmark yet.
func (l *loop) fenceAll(ctx context.Context, results []recovered) {
	var wanted []*recovered
	var ids []string
	for i := range results {
		if r := &results[i]; r.err == nil && len(r.numbering.segments) > 0 && (r.job.fence || r.numbering.fence != nil) {
			wanted, ids = append(wanted, r), append(ids, l.transactionalID(r.job.id))
		}
	}
	if len(wanted) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, fenceTimeout)
	defer cancel()
	fail := func(err error) {
		for _, r := range wanted {
			r.err = err
		}
	}
	if !l.group.mayAct() { // who was away too long must not shut out the new owner (rule S2)
		fail(errNotConfirmed)
		return
	}
	runsFrom, err := l.registry.runsEnd(ctx)
	if err != nil {
		fail(err)
		return
	}
	coordinators, err := l.findCoordinators(ctx, ids)
	if err != nil {
		fail(err)
		return
	}
	conns := l.dialAll(ctx, coordinators)
	defer func() {
		for _, c := range conns {
			c.close(errConnClosed)
		}
	}()
	var wg sync.WaitGroup
	turns := make(chan struct{}, fencesAtOnce)
	for i, r := range wanted {
		c := conns[coordinators[ids[i]]]
		if c == nil {
			r.err = fmt.Errorf("transaction coordinator %s can't be reached", coordinators[ids[i]])
			continue
		}
		turns <- struct{}{}
		wg.Go(func() {
			defer func() { <-turns }()
			f := &fence{runsFrom: runsFrom}
			if f.producerID, f.epoch, r.err = emptyTransaction(ctx, c, ids[i], r.job.ask.topic, r.job.ask.partition); r.err == nil {
				r.fence = f
			}
		})
	}
	wg.Wait()
}

// findCoordinators returns the address of each transactional ID's coordinator.
func (l *loop) findCoordinators(ctx context.Context, ids []string) (map[string]string, error) {
	addresses := make(map[string]string, len(ids))
	return addresses, retryCoordinator(ctx, func() error {
		req := kmsg.NewPtrFindCoordinatorRequest()
		req.CoordinatorType, req.CoordinatorKeys = 1, ids
		for _, shard := range l.mirror.RequestSharded(ctx, req) {
			if shard.Err != nil {
				return fmt.Errorf("transaction coordinator: %w", shard.Err)
			}
			resp := shard.Resp.(*kmsg.FindCoordinatorResponse)
			if len(resp.Coordinators) == 0 { // before v4: one key each
				resp.Coordinators = append(resp.Coordinators, kmsg.FindCoordinatorResponseCoordinator{
					Key: shard.Req.(*kmsg.FindCoordinatorRequest).CoordinatorKey, Host: resp.Host, Port: resp.Port, ErrorCode: resp.ErrorCode,
				})
			}
			for _, c := range resp.Coordinators {
				if err := kerr.ErrorForCode(c.ErrorCode); err != nil {
					return fmt.Errorf("transaction coordinator of %s: %w", c.Key, err)
				}
				addresses[c.Key] = net.JoinHostPort(c.Host, strconv.Itoa(int(c.Port)))
			}
		}
		return nil
	})
}

// dialAll connects to each address once; those that can't be reached are missing.
func (l *loop) dialAll(ctx context.Context, addresses map[string]string) map[string]*conn {
	conns := map[string]*conn{}
	for _, addr := range addresses {
		if _, dialled := conns[addr]; dialled {
			continue
		}
		c, err := dialConn(ctx, addr, l.clientID, l.opts.Mirror)
		if err != nil {
			l.metrics.dialErrors.Inc()
			continue
		}
		conns[addr] = c
	}
	return conns
}

// emptyTransaction opens a new epoch of a transactional ID and runs one over a partition. After an error nothing is known; the next attempt raises the epoch
// again.
func emptyTransaction(ctx context.Context, c *conn, id, topic string, partition int32) (producerID int64, epoch int16, err error) {
	if producerID, epoch, err = initProducerID(ctx, c, id); err == nil {
		err = abortEmpty(ctx, c, id, producerID, epoch, topic, partition)
	}
	return producerID, epoch, err
}

// askOnce sends a request, at most in version limit, and returns the error of the code that read finds in the answer.
func askOnce[R kmsg.Response](ctx context.Context, c *conn, req kmsg.Request, limit int16, read func(R) int16) error {
	resp, buf, err := c.request(ctx, req, limit)
	if err != nil {
		return err
	}
	defer buf.Release()
	return kerr.ErrorForCode(read(resp.(R)))
}

// retryCoordinator repeats ask while the coordinator is busy with the transaction before, or isn't there yet.
func retryCoordinator(ctx context.Context, ask func() error) error {
	wait := newBackoff(2*time.Millisecond, 200*time.Millisecond)
	for {
		err := ask()
		if !slices.ContainsFunc([]*kerr.Error{kerr.ConcurrentTransactions, kerr.CoordinatorLoadInProgress, kerr.CoordinatorNotAvailable},
			func(busy *kerr.Error) bool { return errors.Is(err, busy) }) {
			return err
		}
		if sleep(ctx, wait.next()); ctx.Err() != nil {
			return err
		}
	}
}

// goFenced ends a dense session at a hole that no transaction explains (rule N4), once all before it is answered.
func (l *loop) goFenced(s *stream) {
	if l.answered(s) {
		s.wantFence = true
		l.again(s, errHoles)
	}
}

// leaveFence ends a fenced session at the log's end, once all is answered, for a dense generation.
func (l *loop) leaveFence(s *stream) {
	if l.answered(s) {
		s.wantDense = true
		l.again(s, errAtEnd)
	}
}

// answered reports whether all that was read is on the mirror; if not, what comes next is read a moment later.
func (l *loop) answered(s *stream) bool {
	if len(s.queue) > 0 || len(s.flight) > 0 {
		l.fetchLater(s, 20*time.Millisecond)
		return false
	}
	return true
}

// again recovers a stream at once: its session ends in order.
func (l *loop) again(s *stream, why error) {
	l.endSession(s, why)
	l.setState(s, StateRecover, "")
	s.wait.reset()
	s.retryAt = l.now
	l.recover(s)
}

// refence has fenced sessions fenced anew where it's time: what is in flight is waited for, then the session ends.
func (l *loop) refence() {
	for _, s := range l.streams {
		if s.conn == nil || s.fence == nil {
			continue
		}
		age := l.now.Sub(s.sessionFrom)
		s.draining = s.draining || age > refenceAfter || s.spread != nil && age > refenceShareAfter || s.lastOld && age > refenceOldAfter || s.sent > sequenceMask
		if s.draining && len(s.flight) == 0 {
			l.again(s, errRefence)
		}
	}
}

// coverQueue makes durable which source offsets the waiting records have, before they are sent (rule N6).
func (l *loop) coverQueue(s *stream) {
	if s.covering {
		return
	}
	s.covering = true
	runs, upTo := s.uncoveredRuns()
	session, from := s.session, s.covered
	records := s.runsRecords(runs, from)
	l.spawn(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, mirrorTimeout)
		defer cancel()
		err := l.registry.appendRuns(ctx, records)
		l.inbox.call(func() {
			if s.session != session || s.removed {
				return
			}
			s.covering = false
			if err != nil {
				l.endSession(s, err)
				return
			}
			s.covered = upTo
			l.makeReady(s)
		})
	})
}
