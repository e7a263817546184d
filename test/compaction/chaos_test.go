package compaction

import (
	"sync"
	"testing"
	"time"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// writing writes to a topic until it is stopped, in bursts that let segments roll. It returns after the last burst is acknowledged.
func (h *history) writing() (stop func()) {
	done := make(chan struct{})
	var running sync.WaitGroup
	running.Go(func() {
		for {
			h.write(60)
			select {
			case <-done:
				return
			case <-time.After(testbed.Between(h.random, 20*time.Millisecond, 150*time.Millisecond)):
			}
		}
	})
	return sync.OnceFunc(func() {
		close(done)
		running.Wait()
	})
}

// TestKilledWhileTheSourceIsCleaned: kmirror is killed again and again, for long enough that the cleaner gets ahead of it, and mirror and source brokers
// now and then, while one writer goes through the proxy and the log is cleaned all the time.
func TestKilledWhileTheSourceIsCleaned(t *testing.T) {
	t.Parallel()
	source, mirror := clusters(t)
	topic := testbed.TopicName(t)
	compactedTopic(t, source, topic, time.Hour)
	kafkatest.CreateTopic(t, mirror, topic, 1, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic, "--timing.session_timeout", "3s")
	h := newHistory(t, source.Seeds(), topic)
	h.keys = 200
	stop := h.writing()
	defer stop()
	random := testbed.NewRandom(testbed.NewSeed(t), "kills")
	for i := range 12 {
		time.Sleep(testbed.Between(random, 200*time.Millisecond, 3*time.Second))
		in.Kill()
		if i%5 == 4 {
			mirror.Kill(t)
			mirror.Start(t)
		}
		time.Sleep(testbed.Between(random, 100*time.Millisecond, 1500*time.Millisecond))
		if err := in.Launch(); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	kafkatest.Eventually(t, testbed.ReadyTimeout, in.Ready)
	in.WaitCaughtUp(patience)
	check(t, source, mirror, topic)
}

// TestHandedOverWhileTheSourceIsCleaned: of two instances the owner is frozen in the middle of the holes, the other goes on, and the frozen one wakes while
// it does. The second mirror forgets producers after 4 s and transactional IDs after 2 s (facts F3 and F8), so that all data is old and fences come to nothing.
func TestHandedOverWhileTheSourceIsCleaned(t *testing.T) {
	t.Parallel()
	const idle = "3000" // connections.max.idle.ms of the mirror: a zombie's connection is closed after it
	for name, config := range map[string][]kafkatest.Option{
		"usual": {kafkatest.Config("connections.max.idle.ms", idle)},
		"forgetful": {
			kafkatest.Config("connections.max.idle.ms", idle),
			kafkatest.Config("producer.id.expiration.ms", "4000"), kafkatest.Config("producer.id.expiration.check.interval.ms", "200"),
			kafkatest.Config("transactional.id.expiration.ms", "2000"), kafkatest.Config("transaction.remove.expired.transaction.cleanup.interval.ms", "500"),
		},
	} {
		t.Run(name, func(t *testing.T) { handOver(t, "handed-over-"+name, config...) })
	}
}

func handOver(t *testing.T, topic string, config ...kafkatest.Option) {
	source, mirror := clusters(t, config...)
	compactedTopic(t, source, topic, time.Hour)
	kafkatest.CreateTopic(t, mirror, topic, 1, 1)
	args := []string{"--name", topic, "--topics", topic, "--roles", "mirror", "--timing.session_timeout", "2s", "--timing.takeover_wait", "5s"}
	instances := []*testbed.Instance{testbed.Start(t, source, mirror, args...), testbed.Start(t, source, mirror, args...)}
	h := newHistory(t, source.Seeds(), topic)
	h.keys = 200
	stop := h.writing()
	defer stop()
	random := testbed.NewRandom(testbed.NewSeed(t), "freezes")
	for range 4 {
		owner := ownerOf(t, topic, instances...)
		time.Sleep(testbed.Between(random, 100*time.Millisecond, 700*time.Millisecond))
		instances[owner].Freeze()
		ownerOf(t, topic, instances[1-owner])
		time.Sleep(testbed.Between(random, 0, 700*time.Millisecond))
		instances[owner].Thaw()
	}
	stop()
	for _, in := range instances {
		in.WaitCaughtUp(patience)
	}
	check(t, source, mirror, topic)
}

// ownerOf waits until one of the instances has the partition.
func ownerOf(t *testing.T, topic string, instances ...*testbed.Instance) (owner int) {
	t.Helper()
	kafkatest.Eventually(t, patience, func() error {
		for i, in := range instances {
			status, err := in.AskStatus()
			if err != nil {
				return err
			}
			if status.Mirror != nil && len(status.Mirror.Streams) == 1 && status.Mirror.Streams[0].Topic == topic {
				owner = i
				return nil
			}
		}
		return errNoOwner
	})
	return owner
}

// TestBothSidesAreCleaned: the mirror's own cleaner removes what the source's does, and where kmirror stands is known though its last batches are gone.
func TestBothSidesAreCleaned(t *testing.T) {
	t.Parallel()
	source, mirror := clusters(t)
	topic := testbed.TopicName(t)
	compactedTopic(t, source, topic, 0)
	compactedTopic(t, mirror, topic, 0)
	in := testbed.Start(t, source, mirror, "--topics", topic, "--timing.settings", "500ms")
	testbed.WaitLive(t, in, topic, 1)
	h := newHistory(t, in.Seeds(), topic)
	for round := range 6 {
		h.write(300)
		time.Sleep(150 * time.Millisecond)
		switch round {
		case 2:
			in.Kill()
			h.cl.Close()
			direct := newHistory(t, source.Seeds(), topic)
			direct.n, h = h.n, direct
		case 4:
			in.Start()
		}
	}
	h.write(5)
	in.WaitCaughtUp(patience)
	for range 3 { // a restart finds its place though the mirror's cleaner was there
		time.Sleep(150 * time.Millisecond)
		h.write(3)
		in.WaitCaughtUp(patience)
		waitCleaned(t, mirror, topic, 200)
		in.Stop()
		h.write(3)
		in.Start()
	}
	in.WaitCaughtUp(patience)
	equalMaps(t, source, mirror, topic)
}
