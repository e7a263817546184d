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
	// fenceQuiet is how long those that are done wait for another to begin or end.
	fenceQuiet = 2 * time.Second
	// fencesAtOnce is how many transactions run at one coordinator. One that takes longer than fenceTurn lets another begin, as long as fencesStuck
	// didn't before.
	fencesAtOnce = 8
	fencesStuck  = 64
	fenceTurn    = time.Second
	// coordinatorTimeout bounds one question for coordinators. The client asks any broker: after this time another one.
	coordinatorTimeout = 3 * time.Second
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

	errFenceLate = errors.New("the coordinator didn't end the fence's transaction in time, while others were ended")

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
	l.fenceEach(ctx, wanted, ids, runsFrom)
}

// fenceEach runs the transactions beside each other. One that hangs or finds its coordinator lastingly busy costs its own stream alone: when the
// others are done and for a while none began or ended, the rest is put off. Where none is done, all have the whole time.
func (l *loop) fenceEach(ctx context.Context, wanted []*recovered, ids []string, runsFrom int64) {
	ctx, putOff := context.WithCancelCause(ctx)
	defer putOff(nil)
	at := l.askCoordinators(ctx, ids)
	run := fencing{loop: l, by: map[string]*coordinatorTurns{}, begun: make(chan struct{}, len(wanted))}
	defer run.close()
	done := make(chan error, len(wanted))
	for i, r := range wanted {
		go func() { // awaited by the loop below
			f := &fence{runsFrom: runsFrom}
			if f.producerID, f.epoch, r.err = run.transaction(ctx, ids[i], at[ids[i]], &r.job.ask); r.err == nil {
				r.fence = f
			}
			done <- r.err
		}()
	}
	quiet := time.NewTimer(fenceQuiet)
	defer quiet.Stop()
	some := false
	for left := len(wanted); left > 0; {
		select {
		case err := <-done:
			left--
			some = some || err == nil
			quiet.Reset(fenceQuiet)
		case <-run.begun:
			quiet.Reset(fenceQuiet)
		case <-quiet.C:
			if some {
				putOff(errFenceLate)
			}
		}
	}
}

// coordinatorAt is where a transactional ID's coordinator is, or why that isn't known.
type coordinatorAt struct {
	address string
	err     error
}

// askCoordinators asks once for the coordinators of transactional IDs. Each has its own answer.
func (l *loop) askCoordinators(ctx context.Context, ids []string) map[string]coordinatorAt {
	ctx, cancel := context.WithTimeout(ctx, coordinatorTimeout)
	defer cancel()
	found := make(map[string]coordinatorAt, len(ids))
	req := kmsg.NewPtrFindCoordinatorRequest()
	req.CoordinatorType, req.CoordinatorKeys = 1, ids
	err := error(kerr.CoordinatorNotAvailable)                // of what isn't in an answer
	for _, shard := range l.mirror.RequestSharded(ctx, req) { // one before v4 for each key, whose answer is made one of v4
		if shard.Err != nil {
			err = shard.Err
			continue
		}
		for _, c := range shard.Resp.(*kmsg.FindCoordinatorResponse).Coordinators {
			found[c.Key] = coordinatorAt{net.JoinHostPort(c.Host, strconv.Itoa(int(c.Port))), kerr.ErrorForCode(c.ErrorCode)}
		}
	}
	for _, id := range ids {
		if at, ok := found[id]; !ok || at.err != nil {
			if !ok {
				at.err = err
			}
			found[id] = coordinatorAt{err: fmt.Errorf("transaction coordinator of %s: %w", id, at.err)}
		}
	}
	return found
}

// findCoordinator returns the address of a transactional ID's coordinator.
func (l *loop) findCoordinator(ctx context.Context, id string) (address string, err error) {
	err = retryCoordinator(ctx, func() error {
		at := l.askCoordinators(ctx, []string{id})[id]
		address = at.address
		return at.err
	})
	return address, err
}

// fencing is what the transactions of one batch share: a set of connections to each coordinator, which live as long. Safe for concurrent use.
type fencing struct {
	loop  *loop
	begun chan struct{} // one for each transaction that has its turn; has room for all
	mu    sync.Mutex    // never held over a dial or a question
	by    map[string]*coordinatorTurns
}

// coordinatorTurns are the connections to one coordinator. Each carries one transaction at a time, since a broker answers nothing on a connection before it
// has answered what came first.
type coordinatorTurns struct {
	turns chan struct{} // fencesAtOnce
	stuck chan struct{} // fencesStuck: transactions that gave their turn to others

	idle   []*conn // guarded by fencing.mu
	opened []*conn // guarded by fencing.mu
	failed error   // of a dial; guarded by fencing.mu
}

func (f *fencing) at(address string) *coordinatorTurns {
	f.mu.Lock()
	defer f.mu.Unlock()
	t := f.by[address]
	if t == nil {
		t = &coordinatorTurns{turns: make(chan struct{}, fencesAtOnce), stuck: make(chan struct{}, fencesStuck)}
		f.by[address] = t
	}
	return t
}

// transaction runs the empty transaction of one ID over the partition of q.
func (f *fencing) transaction(ctx context.Context, id string, at coordinatorAt, q *question) (producerID int64, epoch int16, err error) {
	if at.err != nil {
		if at.address, err = f.loop.findCoordinator(ctx, id); err != nil {
			return -1, 0, err
		}
	}
	t := f.at(at.address)
	select {
	case t.turns <- struct{}{}:
	case <-ctx.Done():
		return -1, 0, context.Cause(ctx)
	}
	f.begun <- struct{}{}
	giveTurn := sync.OnceFunc(func() { <-t.turns })
	defer giveTurn()
	slow := time.AfterFunc(fenceTurn, func() {
		select {
		case t.stuck <- struct{}{}:
			giveTurn()
		default: // so many that the connections would be too many
		}
	})
	defer slow.Stop()
	c, err := f.conn(ctx, at.address, t)
	if err != nil {
		return -1, 0, fmt.Errorf("transaction coordinator: %w", err)
	}
	if producerID, epoch, err = emptyTransaction(ctx, c, id, q.topic, q.partition); ctx.Err() != nil {
		return producerID, epoch, err // an answer may be on its way: nobody else waits behind it
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	t.idle = append(t.idle, c)
	return producerID, epoch, err
}

// conn returns a connection that nobody uses, dialled if there is none. Where one dial failed, the others aren't tried.
func (f *fencing) conn(ctx context.Context, address string, t *coordinatorTurns) (*conn, error) {
	f.mu.Lock()
	for len(t.idle) > 0 {
		c := t.idle[len(t.idle)-1]
		t.idle = t.idle[:len(t.idle)-1]
		select {
		case <-c.ended:
		default:
			f.mu.Unlock()
			return c, nil
		}
	}
	err := t.failed
	f.mu.Unlock()
	if err != nil {
		return nil, err
	}
	c, err := dialConn(ctx, address, f.loop.clientID, f.loop.opts.Mirror)
	f.mu.Lock()
	defer f.mu.Unlock()
	if err != nil {
		f.loop.metrics.dialErrors.Inc()
		t.failed = err
		return nil, err
	}
	t.opened = append(t.opened, c)
	return c, nil
}

// close ends the connections; no transaction runs any more.
func (f *fencing) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, t := range f.by {
		for _, c := range t.opened {
			c.close(errConnClosed)
		}
	}
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
