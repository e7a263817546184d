package kafkatest

import (
	"testing"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
)

// FakeCluster is kfake. The embedded cluster has its controls: faults, moved leaders, observed requests.
type FakeCluster struct {
	*kfake.Cluster
	seeds []string
}

// Fake starts kfake on free ports of 127.0.0.1 for the length of the test.
func Fake(t testing.TB, opts ...Option) *FakeCluster {
	t.Helper()
	o := newOptions(opts)
	fakeOpts := []kfake.Opt{kfake.NumBrokers(o.brokers)}
	if len(o.config) > 0 {
		fakeOpts = append(fakeOpts, kfake.BrokerConfigs(o.config))
	}
	c, err := kfake.NewCluster(append(fakeOpts, o.fake...)...)
	if err != nil {
		t.Fatalf("kafkatest: kfake: %v", err)
	}
	t.Cleanup(c.Close)
	return &FakeCluster{Cluster: c, seeds: c.ListenAddrs()}
}

func (*FakeCluster) Kind() Kind        { return KindFake }
func (c *FakeCluster) Seeds() []string { return c.seeds }

func (c *FakeCluster) Listeners() []string { return c.seeds }

func (c *FakeCluster) Client(t testing.TB, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	return newClient(t, c.seeds, opts)
}
