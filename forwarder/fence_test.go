package forwarder

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/zap/zaptest"

	"kmirror/internal/scripted"
	"kmirror/protocol"
)

const (
	findCoordinatorKey = 10
	apiVersionsKey     = 18
	initProducerIDKey  = 22
)

// fencingRig is a loop that doesn't run, a member of its group, and n streams to be fenced on a mirror of one broker.
type fencingRig struct {
	t       *testing.T
	loop    *loop
	mirror  *scripted.Cluster
	results []recovered
	ids     []string // transactional IDs of the results
}

func newFencingRig(t *testing.T, n int) *fencingRig {
	t.Helper()
	t.Parallel()
	r := &fencingRig{t: t, mirror: scripted.New(t, scripted.Options{})}
	r.mirror.CreateTopic("orders", n)
	opts := Options{Name: "test", Mirror: ClusterOptions{Seeds: r.mirror.Seeds()}, SessionTimeout: time.Minute, Logger: zaptest.NewLogger(t)}
	client, err := kgo.NewClient(clientOptions(opts.Mirror, "test")...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	f, err := New(opts)
	if err != nil {
		t.Fatal(err)
	}
	r.loop = f.newLoop(nil, client, "test", nil)
	r.loop.registry = newRegistry(client, "test", "source", "", 1, opts.Logger)
	r.loop.group.confirmed.Store(int64(bootTime()))
	for i := range n {
		job := &recoverJob{
			id:    identity{sourceCluster: "source", topicID: protocol.TopicID{1}, mirrorTopicID: protocol.TopicID{2}, partition: int32(i)},
			ask:   question{topic: "orders", topicID: r.mirror.TopicID("orders"), partition: int32(i)},
			fence: true,
		}
		r.results = append(r.results, recovered{job: job, numbering: numbering{segments: []segment{{0, 0}}}})
		r.ids = append(r.ids, r.loop.transactionalID(job.id))
	}
	return r
}

// fence fences all and checks that those from bad on were fenced and that the ones below have an error that is want, nil: any.
func (r *fencingRig) fence(bad int, want error) {
	r.t.Helper()
	promptly(r.t, "the fence", func() { r.loop.fenceAll(r.t.Context(), r.results) })
	for i := range r.results {
		x := &r.results[i]
		switch {
		case i >= bad && (x.err != nil || x.fence == nil):
			r.t.Errorf("stream %d wasn't fenced: %v", i, x.err)
		case i < bad && (x.err == nil || x.fence != nil || want != nil && !errors.Is(x.err, want)):
			r.t.Errorf("stream %d has the fence %+v and the error %v, want %v", i, x.fence, x.err, want)
		}
	}
}

// editCoordinators changes the answers about coordinators, by transactional ID.
func (r *fencingRig) editCoordinators(edit func(id int, c *kmsg.FindCoordinatorResponseCoordinator)) {
	r.mirror.Intercept(func(req *scripted.Request) scripted.Action {
		if req.Key != findCoordinatorKey {
			return scripted.Pass()
		}
		return scripted.Edit(func(resp kmsg.Response) {
			found := resp.(*kmsg.FindCoordinatorResponse)
			for i := range found.Coordinators {
				for id := range r.ids {
					if found.Coordinators[i].Key == r.ids[id] {
						edit(id, &found.Coordinators[i])
					}
				}
			}
		})
	})
}

// One transactional ID without a coordinator costs its own stream alone (fence.go: askCoordinators, an answer for each).
func TestAnIDWithoutACoordinatorCostsItsStreamAlone(t *testing.T) {
	for name, err := range map[string]*kerr.Error{"refused": kerr.TransactionalIDAuthorizationFailed, "not there, for ever": kerr.CoordinatorNotAvailable} {
		t.Run(name, func(t *testing.T) {
			r := newFencingRig(t, 4)
			r.editCoordinators(func(id int, c *kmsg.FindCoordinatorResponseCoordinator) {
				if id == 0 {
					c.ErrorCode = err.Code
				}
			})
			r.fence(1, err)
		})
	}
}

// silent is a listener whose connections are taken and never answered; accepted yields each.
func silent(t *testing.T) (addr string, accepted <-chan struct{}) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	taken := make(chan struct{}, 1000)
	done := make(chan struct{})
	var conns []net.Conn
	go func() {
		defer close(done)
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			conns = append(conns, nc)
			taken <- struct{}{}
		}
	}()
	t.Cleanup(func() {
		ln.Close()
		<-done
		for _, nc := range conns {
			nc.Close()
		}
	})
	return ln.Addr().String(), taken
}

// Coordinators that don't answer a dial hold up nobody else's dial (fence.go: transaction, each on its own).
func TestSilentCoordinatorsHoldUpTheirStreamsAlone(t *testing.T) {
	r := newFencingRig(t, 5)
	var silents []string
	for range 3 { // dialled one after the other they take more time than a fence has
		addr, _ := silent(t)
		silents = append(silents, addr)
	}
	r.editCoordinators(func(id int, c *kmsg.FindCoordinatorResponseCoordinator) {
		if id < len(silents) {
			host, port, _ := net.SplitHostPort(silents[id])
			n, _ := strconv.Atoi(port)
			c.Host, c.Port = host, int32(n)
		}
	})
	r.fence(len(silents), nil)
}

// More transactions than run at once, at one coordinator, say nothing or find it busy for ever: those behind them get their turn (fence.go: fenceTurn), on
// connections of their own, and don't wait for them to the end (putOff).
func TestStuckTransactionsCostTheirStreamsAlone(t *testing.T) {
	for name, action := range map[string]func() scripted.Action{
		"no answer": scripted.HoldForever,
		"busy":      func() scripted.Action { return scripted.Fail(kerr.ConcurrentTransactions) },
	} {
		t.Run(name, func(t *testing.T) {
			const stuck = 2*fencesAtOnce + 1
			r := newFencingRig(t, stuck+fencesAtOnce)
			bad := map[string]bool{}
			for _, id := range r.ids[:stuck] {
				bad[id] = true
			}
			r.mirror.Intercept(func(req *scripted.Request) scripted.Action {
				if init, ok := req.Body.(*kmsg.InitProducerIDRequest); ok && init.TransactionalID != nil && bad[*init.TransactionalID] {
					return action()
				}
				return scripted.Pass()
			})
			r.fence(stuck, nil)
			for i := range stuck {
				if err := r.results[i].err; errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("stream %d had the whole time, and the others waited for it: %v", i, err)
				}
			}
		})
	}
}

// A coordinator that doesn't answer a dial holds up who wants it, and nobody else (fill.go: coordinators, whose mu isn't held over a dial).
func TestADialHoldsUpItsCoordinatorAlone(t *testing.T) {
	r := newFencingRig(t, 1)
	addr, accepted := silent(t)
	c := &r.loop.coordinators
	over := make(chan struct{})
	background(t, func(ctx context.Context) {
		defer close(over)
		c.to(ctx, r.loop, addr)
	})
	<-accepted
	promptly(t, "a dial of another coordinator", func() {
		for range 2 {
			if _, err := c.to(t.Context(), r.loop, r.mirror.Seeds()[0]); err != nil {
				t.Error(err)
			}
		}
	})
	select {
	case <-over:
		t.Error("it was over before the other one was dialled")
	default:
	}
	if versions := r.mirror.Requests(apiVersionsKey, func(req *scripted.Request) bool { return req.ClientID == "test" }); len(versions) != 1 {
		t.Errorf("%d dials, want one for both", len(versions))
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	promptly(t, "who gave up", func() {
		if _, err := c.to(ctx, r.loop, addr); !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
	})
	promptly(t, "close", c.close)
}

// A connection that is there only after close is ended too (fill.go: coordinators, closed).
func TestADialThatOutlivesCloseIsEnded(t *testing.T) {
	r := newFencingRig(t, 1)
	release := make(chan struct{})
	asked := r.mirror.InterceptNext(1, apiVersionsKey, nil, func(*scripted.Request) scripted.Action { return scripted.Delay(release) })
	dialled := make(chan *conn, 1)
	go func() {
		c, err := r.loop.coordinators.to(t.Context(), r.loop, r.mirror.Seeds()[0])
		if err != nil {
			t.Error(fmt.Errorf("dial: %w", err))
		}
		dialled <- c
	}()
	<-asked
	r.loop.coordinators.close()
	close(release)
	promptly(t, "the connection's end", func() {
		if c := <-dialled; c != nil {
			<-c.finished
		}
	})
}
