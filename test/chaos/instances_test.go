package chaos

import (
	"fmt"
	"testing"
	"time"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// twoInstances starts two processes of one name. Each has its own proxy; both share the partitions.
func twoInstances(t testing.TB, source, mirror kafkatest.Cluster, topic string) (a, b *testbed.Instance) {
	t.Helper()
	args := []string{"--name", "two-" + topic, "--topics", topic, "--timing.session_timeout", "3s"}
	a, b = testbed.Start(t, source, mirror, args...), testbed.Start(t, source, mirror, args...)
	return a, b
}

// wantShared waits until all partitions are owned, each by one of the instances, and each of these owns share of them.
func wantShared(t testing.TB, partitions, share int, instances ...*testbed.Instance) {
	t.Helper()
	began := time.Now()
	kafkatest.Eventually(t, time.Minute, func() error {
		owner := map[int32]int{}
		for i, in := range instances {
			status, err := in.AskStatus()
			if err != nil {
				return err
			}
			if status.Mirror == nil || len(status.Mirror.Streams) != share {
				return fmt.Errorf("instance %d has %+v, want %d partitions", i, status.Mirror, share)
			}
			for _, s := range status.Mirror.Streams {
				if s.State != "live" && s.State != "tail" {
					return fmt.Errorf("instance %d: %+v", i, s)
				}
				owner[s.Partition] = i
			}
		}
		if len(owner) != partitions {
			return fmt.Errorf("%d of %d partitions are owned", len(owner), partitions)
		}
		return nil
	})
	t.Logf("%d partitions are shared %d each after %v", partitions, share, time.Since(began).Round(time.Millisecond))
}

// TestTwoInstancesUnderChaos: either of two instances is killed and frozen for longer than the group's session timeout at random moments;
// the other takes over, and the one that thaws finds its partitions in other hands. The result is as in TestExactlyOnceUnderChaos.
func TestTwoInstancesUnderChaos(t *testing.T) {
	seed := testbed.NewSeed(t)
	source, mirror := kafkatest.Shared(t)
	const topic, partitions = "shared", 6
	kafkatest.CreateTopic(t, source, topic, partitions, 1)
	a, b := twoInstances(t, source, mirror, topic)
	wantShared(t, partitions, partitions/2, a, b)
	both := append(a.Seeds(), b.Seeds()...)
	l := testbed.StartLedger(t, topic, testbed.LedgerOptions{Writers: 4, PerSecond: 2000, Size: 120, From: time.Now()}, both, append(b.Seeds(), a.Seeds()...))
	l.WaitAcks(2000)

	c := &chaos{t: t, seed: seed, began: time.Now()}
	p := pace{kills: 4, freezes: 3, after: [2]time.Duration{time.Second, 6 * time.Second}, dead: 6 * time.Second, frozen: 5 * time.Second}
	c.act("a", p, instanceVictim(t, "a", a))
	c.act("b", p, instanceVictim(t, "b", b))
	c.running.Wait()
	if t.Failed() {
		return
	}
	wantShared(t, partitions, partitions/2, a, b)

	// Each in turn goes for good, first by a crash, then frozen; the other has everything.
	a.Kill()
	wantShared(t, partitions, partitions, b)
	l.WaitAcks(2000)
	a.Start()
	wantShared(t, partitions, partitions/2, a, b)
	b.Freeze()
	wantShared(t, partitions, partitions, a)
	l.WaitAcks(2000)
	b.Thaw()
	wantShared(t, partitions, partitions/2, a, b)

	l.Stop()
	began := time.Now()
	a.WaitSettled(began)
	b.WaitSettled(began)
	l.Check(source, mirror, kafkatest.SameOffsets())
	before := fmt.Sprint(kafkatest.LogOffsets(t, mirror, topic))
	a.Stop()
	b.Kill()
	b.Start()
	wantShared(t, partitions, partitions, b)
	b.WaitSettled(time.Now())
	if after := fmt.Sprint(kafkatest.LogOffsets(t, mirror, topic)); after != before {
		t.Errorf("idle restarts moved the mirror's offsets from %s to %s", before, after)
	}
}
