package chaos

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// victim is a process that an actor may kill and freeze. Each has one actor.
type victim struct {
	name                      string
	kill, start, freeze, thaw func()
}

func instanceVictim(t testing.TB, name string, in *testbed.Instance) victim {
	return victim{name: name, kill: in.Kill, freeze: in.Freeze, thaw: in.Thaw, start: func() {
		if err := in.Launch(); err != nil {
			t.Error(err)
		}
	}}
}

func brokerVictim(t testing.TB, name string, b *kafkatest.Broker) victim {
	return victim{
		name: fmt.Sprintf("%s broker %d", name, b.ID),
		kill: func() { b.Kill(t) }, start: func() { b.Start(t) }, freeze: func() { b.Freeze(t) }, thaw: func() { b.Thaw(t) },
	}
}

// step is one thing that happens to a victim.
type step struct {
	after  time.Duration // since the end of the step before
	of     int           // which of the actor's victims
	freeze bool          // SIGSTOP and SIGCONT, else kill -9 and a new start
	length time.Duration // between the two
}

// pace is what an actor's steps are drawn from.
type pace struct {
	kills, freezes int
	after          [2]time.Duration // since the end of the step before
	dead           time.Duration    // at most, between kill and start
	frozen         time.Duration
}

// schedule draws an actor's steps.
func schedule(random *rand.Rand, victims int, p pace) []step {
	steps := make([]step, p.kills+p.freezes)
	for i := range steps {
		steps[i] = step{after: testbed.Between(random, p.after[0], p.after[1]), of: random.IntN(victims), length: testbed.Between(random, 0, p.dead)}
	}
	for _, i := range random.Perm(len(steps))[:p.freezes] {
		steps[i].freeze, steps[i].length = true, p.frozen
	}
	return steps
}

// chaos lets actors act side by side.
type chaos struct {
	t       testing.TB
	seed    uint64
	began   time.Time
	running sync.WaitGroup
}

// act starts an actor. Its schedule follows from the seed, its name and its pace.
func (c *chaos) act(actor string, p pace, victims ...victim) {
	steps := schedule(testbed.NewRandom(c.seed, actor), len(victims), p)
	c.running.Go(func() {
		for _, s := range steps {
			if !testbed.Pause(c.t, s.after) || c.t.Failed() {
				return
			}
			v, what := victims[s.of], "kill"
			begin, end := v.kill, v.start
			if s.freeze {
				begin, end, what = v.freeze, v.thaw, "freeze"
			}
			begin()
			c.t.Logf("%6.2f s: %s %s for %v", time.Since(c.began).Seconds(), what, v.name, s.length.Round(time.Millisecond))
			testbed.Pause(c.t, s.length)
			end()
		}
	})
}

// TestExactlyOnceUnderChaos: kmirror, brokers of the mirror and of the source are killed at random moments, and kmirror is frozen, while
// several idempotent producers write through the proxy. Each acknowledged record is on the source once and on the mirror once, in the
// source's order and at its offset. Then idle restarts append nothing, and nothing was ever written twice.
func TestExactlyOnceUnderChaos(t *testing.T) {
	seed := testbed.NewSeed(t)
	three := []kafkatest.Option{kafkatest.Brokers(3), kafkatest.Config("min.insync.replicas", "2")}
	source, mirror := startBoth(t, three, three)
	const topic, partitions = "chaos", 6
	kafkatest.CreateTopic(t, source, topic, partitions, 3)
	in := testbed.Start(t, source, mirror, "--topics", topic, "--topics.replication_factor", "3")
	l := testbed.StartLedger(t, topic, testbed.LedgerOptions{Writers: 4, PerSecond: 2000, Size: 120, From: time.Now()}, in.Seeds())
	l.WaitAcks(2000)

	c := &chaos{t: t, seed: seed, began: time.Now()}
	c.act("kmirror", pace{kills: 20, freezes: 3, after: [2]time.Duration{200 * time.Millisecond, 4 * time.Second}, dead: time.Second, frozen: 5 * time.Second}, instanceVictim(t, "kmirror", in))
	brokers := pace{kills: 5, after: [2]time.Duration{time.Second, 8 * time.Second}, dead: 3 * time.Second}
	c.act("mirror", brokers, brokerVictims(t, "mirror", mirror)...)
	brokers.kills = 3
	c.act("source", brokers, brokerVictims(t, "source", source)...)
	c.running.Wait()
	if t.Failed() {
		return
	}
	l.WaitAcks(4000)
	l.Stop()
	in.WaitSettled(time.Now())
	l.Check(source, mirror, kafkatest.SameOffsets())
	wantNotMore(t, source, mirror, topic)
	idleRestarts(t, in, mirror, topic, 3)
	t.Logf("kmirror logged %d lines", strings.Count(in.Log(), "\n"))
}

func brokerVictims(t testing.TB, name string, c *kafkatest.RealCluster) (victims []victim) {
	for _, b := range c.Brokers() {
		victims = append(victims, brokerVictim(t, name, b))
	}
	return victims
}

// startBoth starts source and mirror side by side.
func startBoth(t testing.TB, source, mirror []kafkatest.Option) (*kafkatest.RealCluster, *kafkatest.RealCluster) {
	t.Helper()
	return kafkatest.Real(t, source...), kafkatest.Real(t, mirror...)
}

// wantNotMore fails if a replica on the mirror holds more than 1.05 times the bytes of the source's: what was written twice would show,
// also where no consumer sees it.
func wantNotMore(t testing.TB, source, mirror *kafkatest.RealCluster, topic string) {
	t.Helper()
	most := func(c *kafkatest.RealCluster) (n int64) {
		for _, size := range testbed.LogBytes(t, c, topic) {
			n = max(n, size)
		}
		return n
	}
	want, got := most(source), most(mirror)
	if float64(got) > 1.05*float64(want) {
		t.Errorf("the mirror's log has %d bytes, the source's %d", got, want)
	}
	t.Logf("the source's log has %d bytes, the mirror's %d", want, got)
}

// idleRestarts kills and starts kmirror while nobody writes. Not a byte may come to the mirror's log.
func idleRestarts(t testing.TB, in *testbed.Instance, mirror *kafkatest.RealCluster, topic string, n int) {
	t.Helper()
	mirror.WaitInSync(t)
	before, offsets := testbed.LogBytes(t, mirror, topic), fmt.Sprint(kafkatest.LogOffsets(t, mirror, topic))
	for range n {
		in.Kill()
		began := time.Now()
		in.Start()
		in.WaitSettled(began)
	}
	if after := fmt.Sprint(kafkatest.LogOffsets(t, mirror, topic)); after != offsets {
		t.Errorf("idle restarts moved the mirror's offsets from %s to %s", offsets, after)
	}
	if after := testbed.LogBytes(t, mirror, topic); !maps.Equal(after, before) {
		t.Errorf("idle restarts changed the bytes of the mirror's replicas from %v to %v", before, after)
	}
}
