package kafkatest

import (
	"context"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Kind names what a Cluster is made of.
type Kind string

const (
	KindFake Kind = "kfake" // in this process
	KindReal Kind = "kafka" // Apache Kafka, a process for each broker
)

// Cluster is a running Kafka cluster. It ends with the test that it was made for.
type Cluster interface {
	Kind() Kind
	// Seeds lists the HOST:PORT of every broker, running or not. It never changes.
	Seeds() []string
	// Listeners lists the HOST:PORT of every listener for clients that a broker has, also those that Seeds doesn't name.
	Listeners() []string
	// Client returns a client of the cluster, closed at the end of the test.
	Client(t testing.TB, opts ...kgo.Opt) *kgo.Client
}

// Each runs f as two subtests: on kfake and on Apache Kafka. The real cluster is the shared source of this test process
// if TestMain called Main and no option is given (use topic names of your own), else a new one.
func Each(t *testing.T, f func(t *testing.T, c Cluster), opts ...Option) {
	t.Helper()
	t.Run(string(KindFake), func(t *testing.T) { f(t, Fake(t, opts...)) })
	t.Run(string(KindReal), func(t *testing.T) {
		if shared.usable() && len(opts) == 0 {
			source, _ := Shared(t)
			f(t, source)
			return
		}
		f(t, Real(t, opts...))
	})
}

// options are what an Option sets.
type options struct {
	brokers   int
	ids       []int32
	config    map[string]string
	heap      string
	jvm       []string
	optimized bool
	listeners []listener
	fake      []kfake.Opt
}

// Option changes a cluster before it starts.
type Option func(*options)

// Brokers sets the number of brokers (1). Real brokers are numbered from 1, those of kfake from 0.
func Brokers(n int) Option { return func(o *options) { o.brokers = n } }

// IDs sets the brokers' IDs, of real clusters alone, and so their number.
func IDs(ids ...int32) Option { return func(o *options) { o.brokers, o.ids = len(ids), ids } }

// Config sets a broker setting, on every broker.
func Config(key, value string) Option { return func(o *options) { o.config[key] = value } }

// listener is one that real brokers have besides their first.
type listener struct{ name, protocol, advertised string }

// Listener gives real brokers a further listener: a name in capitals, and a security protocol as Kafka calls it. Broker.Listener tells where it is.
func Listener(name, protocol string) Option {
	return func(o *options) { o.listeners = append(o.listeners, listener{name: name, protocol: protocol}) }
}

// FrontedListener is a plaintext Listener of a single broker that clients are told to reach at address, HOST:PORT, as behind a load balancer.
func FrontedListener(name, address string) Option {
	return func(o *options) {
		o.listeners = append(o.listeners, listener{name: name, protocol: "PLAINTEXT", advertised: address})
	}
}

// Heap sets the largest heap of each real broker, as the JVM's -Xmx takes it (700m; 400m when there are several).
func Heap(size string) Option { return func(o *options) { o.heap = size } }

// JVM adds JVM flags to real brokers.
func JVM(flags ...string) Option { return func(o *options) { o.jvm = append(o.jvm, flags...) } }

// Optimized lets real brokers use the optimizing compiler and the default collector: slower to start and to warm up, as
// fast as in production afterwards. For benchmarks.
func Optimized() Option { return func(o *options) { o.optimized = true } }

// FakeOpts hands options on to kfake.
func FakeOpts(opts ...kfake.Opt) Option {
	return func(o *options) { o.fake = append(o.fake, opts...) }
}

func newOptions(opts []Option) options {
	o := options{brokers: 1, config: make(map[string]string)}
	for _, opt := range opts {
		opt(&o)
	}
	if o.heap == "" {
		o.heap = "700m"
		if o.brokers > 1 {
			o.heap = "400m"
		}
	}
	return o
}

// newClient makes the Client of both kinds.
func newClient(t testing.TB, seeds []string, opts []kgo.Opt) *kgo.Client {
	t.Helper()
	cl, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(seeds...), kgo.DisableClientMetrics()}, opts...)...)
	if err != nil {
		t.Fatalf("kafkatest: client: %v", err)
	}
	t.Cleanup(cl.Close)
	return cl
}

// CreateTopic creates a topic and waits until every partition has a leader. configs are pairs "key", "value".
func CreateTopic(t testing.TB, c Cluster, topic string, partitions int32, replicationFactor int16, configs ...string) {
	t.Helper()
	if len(configs)%2 != 0 {
		t.Fatalf("kafkatest: CreateTopic: configs = %q, want pairs", configs)
	}
	set := make(map[string]*string)
	for i := 0; i < len(configs); i += 2 {
		set[configs[i]] = &configs[i+1]
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	adm := kadm.NewClient(c.Client(t))
	if _, err := adm.CreateTopic(ctx, partitions, replicationFactor, set, topic); err != nil {
		t.Fatalf("kafkatest: create topic %s: %v", topic, err)
	}
	Eventually(t, time.Minute, func() error {
		offsets, err := adm.ListEndOffsets(ctx, topic)
		if err == nil {
			err = offsets.Error()
		}
		return err
	})
}

// Eventually calls check every 50 ms until it returns nil. After timeout the test fails with the last error.
func Eventually(t testing.TB, timeout time.Duration, check func() error) {
	t.Helper()
	if err := poll(timeout, check); err != nil {
		t.Fatalf("not within %v: %v", timeout, err)
	}
}

// poll is Eventually for code that isn't a test.
func poll(timeout time.Duration, check func() error) error {
	deadline := time.After(timeout)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-deadline:
			return err
		case <-tick.C:
		}
	}
}
