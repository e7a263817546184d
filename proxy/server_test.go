package proxy

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"

	"kmirror/protocol"
)

var nopLogger = zap.NewNop()

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("kmirror/internal/kafkatest.init.func1.1")) // lives as long as the process
}

// recorder is a Sink that keeps everything.
type recorder struct {
	mu     sync.Mutex
	refuse bool
	offers []protocol.AckedBatch // batches are copies
	grown  []int64
	doubts int
}

func (r *recorder) Offer(b protocol.AckedBatch) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.refuse {
		return false
	}
	memory := b.Memory
	b.Batch = append(protocol.Batch(nil), b.Batch...)
	b.Memory = nil
	r.offers = append(r.offers, b)
	memory.Release()
	return true
}

func (r *recorder) Grown(_ string, _ protocol.TopicID, _ int32, end int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.grown = append(r.grown, end)
}

func (r *recorder) Doubt(string, protocol.TopicID, int32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.doubts++
}

// records is the number of records offered.
func (r *recorder) records() (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, b := range r.offers {
		n += int(b.Batch.RecordCount())
	}
	return n
}

func (r *recorder) grownCount() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.grown)
}

// lister lists the brokers of a cluster through a client of its own.
type lister struct{ client *kgo.Client }

func (l lister) Brokers(ctx context.Context) (string, []Broker, error) {
	request := kmsg.NewPtrMetadataRequest()
	request.Topics = []kmsg.MetadataRequestTopic{} // none; kadm would answer from its cache
	m, err := request.RequestWith(ctx, l.client)
	if err != nil {
		return "", nil, err
	}
	var list []Broker
	for _, b := range m.Brokers {
		list = append(list, Broker{b.NodeID, b.Host, b.Port})
	}
	return *m.ClusterID, list, nil
}

// fakeCluster starts a source cluster in this process.
func fakeCluster(t testing.TB, options ...kfake.Opt) *kfake.Cluster {
	t.Helper()
	c, err := kfake.NewCluster(append([]kfake.Opt{kfake.NumBrokers(3)}, options...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// start runs a proxy until the test ends.
func start(t testing.TB, o Options) *Server {
	t.Helper()
	if o.Listen == "" {
		o.Listen = "127.0.0.1:0"
	}
	if o.Logger == nil {
		o.Logger = zaptest.NewLogger(t)
	}
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run = %v, want nil", err)
		}
		if held := s.held.Load(); held != 0 {
			t.Errorf("%d bytes of requests are still held after Run", held)
		}
		if held := s.answers.held.Load(); held != 0 {
			t.Errorf("%d bytes of answers are still held after Run", held)
		}
	})
	return s
}

// startOn runs a proxy before a fake cluster, and waits until it's ready.
func startOn(t testing.TB, c *kfake.Cluster, o Options) *Server {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(c.ListenAddrs()...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	o.Seeds, o.Brokers = c.ListenAddrs(), lister{client}
	s := start(t, o)
	eventually(t, "proxy is ready", s.Ready)
	return s
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !condition(); {
		if time.Now().After(deadline) {
			t.Fatalf("waited too long until: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func newClient(t testing.TB, seed string, options ...kgo.Opt) *kgo.Client {
	t.Helper()
	c, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(seed)}, options...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestProducerAndGroupThroughTheProxy(t *testing.T) {
	cluster := fakeCluster(t, kfake.SeedTopics(6, "orders"))
	sink := &recorder{}
	s := startOn(t, cluster, Options{Sink: sink})
	ctx := testContext(t)

	const n = 2000
	producer := newClient(t, s.Addr().String(), kgo.DefaultProduceTopic("orders"))
	for i := range n {
		producer.Produce(ctx, kgo.StringRecord(fmt.Sprint(i)), func(_ *kgo.Record, err error) {
			if err != nil {
				t.Errorf("produce: %v", err)
			}
		})
	}
	if err := producer.Flush(ctx); err != nil {
		t.Fatal(err)
	}
	if got := sink.records(); got != n {
		t.Errorf("the sink was offered %d records, want %d", got, n)
	}

	consumer := newClient(t, s.Addr().String(), kgo.ConsumerGroup("g"), kgo.ConsumeTopics("orders"),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	seen := make(map[string]bool)
	for len(seen) < n {
		fetches := consumer.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			t.Fatal(err)
		}
		fetches.EachRecord(func(r *kgo.Record) { seen[string(r.Value)] = true })
	}
	if err := consumer.CommitUncommittedOffsets(ctx); err != nil {
		t.Fatal(err)
	}
	real := make(map[string]bool)
	for _, a := range cluster.ListenAddrs() {
		real[a] = true
	}
	for _, c := range []*kgo.Client{producer, consumer} {
		m, err := kadm.NewClient(c).BrokerMetadata(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range m.Brokers {
			if real[fmt.Sprintf("%s:%d", b.Host, b.Port)] {
				t.Errorf("client was told broker %d's own address %s:%d", b.NodeID, b.Host, b.Port)
			}
		}
	}
}
