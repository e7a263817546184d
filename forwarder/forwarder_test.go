package forwarder_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/zap/zaptest"

	"kmirror/forwarder"
	"kmirror/internal/kafkatest"
)

func TestMain(m *testing.M) { kafkatest.Main(m) }

// start runs a forwarder for all topics until stop is called or the test ends.
func start(t *testing.T, source, mirror []string, change func(*forwarder.Options)) (f *forwarder.Forwarder, stop func()) {
	t.Helper()
	opts := forwarder.Options{
		Name: "test", Source: forwarder.ClusterOptions{Seeds: source}, Mirror: forwarder.ClusterOptions{Seeds: mirror},
		Instance: t.Name(), Include: []*regexp.Regexp{regexp.MustCompile(".*")}, ReplicationFactor: -1, MemoryBytes: 64 << 20,
		RefreshEvery: time.Second, LookEvery: 300 * time.Millisecond, CheckpointEvery: 300 * time.Millisecond,
		SessionTimeout: 10 * time.Second, TakeoverWait: 11 * time.Minute, Logger: zaptest.NewLogger(t),
	}
	if change != nil {
		change(&opts)
	}
	f, err := forwarder.New(opts)
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- f.Run(ctx) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run = %v, want nil", err)
		}
	}
	t.Cleanup(stop)
	return f, stop
}

// waitCaughtUp waits until every stream is at lag 0 after a fresh look at the source.
func waitCaughtUp(t *testing.T, f *forwarder.Forwarder) {
	t.Helper()
	kafkatest.Eventually(t, time.Minute, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if err := f.Look(ctx); err != nil {
			return err
		}
		s := f.Status()
		if !s.CaughtUp || len(s.Streams) == 0 {
			return fmt.Errorf("not caught up: %+v", s)
		}
		return nil
	})
}

// produce writes n numbered records with client, spread over the partitions.
func produce(t *testing.T, client *kgo.Client, topic string, from, n int) {
	t.Helper()
	var failed error
	for i := range n {
		client.Produce(t.Context(), &kgo.Record{Topic: topic, Key: fmt.Append(nil, from+i), Value: fmt.Append(nil, "value ", from+i)}, func(_ *kgo.Record, err error) {
			failed = errors.Join(failed, err)
		})
	}
	if err := client.Flush(t.Context()); err != nil || failed != nil {
		t.Fatalf("produce: %v", errors.Join(err, failed))
	}
}

// pair returns a source and a mirror of the same kind as c.
func pair(t *testing.T, kind kafkatest.Kind) (source, mirror kafkatest.Cluster) {
	t.Helper()
	if kind == kafkatest.KindFake {
		return kafkatest.Fake(t), kafkatest.Fake(t)
	}
	return kafkatest.Real(t), kafkatest.Real(t)
}

func eachPair(t *testing.T, test func(t *testing.T, source, mirror kafkatest.Cluster)) {
	for _, kind := range []kafkatest.Kind{kafkatest.KindFake, kafkatest.KindReal} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			source, mirror := pair(t, kind)
			test(t, source, mirror)
		})
	}
}

func TestCatchUpAcrossRestarts(t *testing.T) {
	t.Parallel()
	eachPair(t, func(t *testing.T, source, mirror kafkatest.Cluster) {
		kafkatest.CreateTopic(t, source, "orders", 6, 1)
		client := source.Client(t)
		for round := range 3 {
			produce(t, client, "orders", 1000*round, 1000)
			// Merging changes where batches end, and nothing else.
			f, stop := start(t, source.Seeds(), mirror.Seeds(), func(o *forwarder.Options) { o.MergeBytes = int64(round) * 100_000 })
			waitCaughtUp(t, f)
			produce(t, client, "orders", 10000+1000*round, 1000)
			waitCaughtUp(t, f)
			stop()
			kafkatest.Equal(t, source, mirror, "orders", kafkatest.SameOffsets())
		}
	})
}

func TestWithoutAProxyStreamsFollowTheLog(t *testing.T) {
	t.Parallel()
	eachPair(t, func(t *testing.T, source, mirror kafkatest.Cluster) {
		kafkatest.CreateTopic(t, source, "orders", 3, 1)
		client := source.Client(t)
		f, _ := start(t, source.Seeds(), mirror.Seeds(), func(o *forwarder.Options) { o.NoOffers = true })
		for round := range 5 {
			produce(t, client, "orders", 100*round, 100)
			waitCaughtUp(t, f)
			for _, s := range f.Status().Streams {
				if s.State != "tail" {
					t.Fatalf("partition %d is in state %s, want tail", s.Partition, s.State)
				}
			}
		}
		kafkatest.Equal(t, source, mirror, "orders", kafkatest.SameOffsets())
	})
}
