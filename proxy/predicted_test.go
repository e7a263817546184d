package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// mute can't ask for brokers, as a proxy without credentials of its own can't.
type mute struct{}

func (mute) Brokers(context.Context) (string, []Broker, error) {
	return "", nil, errors.New("SASL is needed")
}

// TestAProxyWithoutCredentialsSurvivesARestart has clients that know only the ports of brokers, and a proxy that learns brokers from its
// clients' answers alone: after a restart the first connection to each port leads it to them.
func TestAProxyWithoutCredentialsSurvivesARestart(t *testing.T) {
	cluster := fakeCluster(t, kfake.SeedTopics(6, "orders"))
	base := freePorts(t, 3) + 1 // kfake's IDs begin with 0
	run := func() (*Server, func()) {
		s, err := New(Options{Listen: "127.0.0.1:0", BrokerPortBase: base, BrokerIDs: []int32{0, 1, 2}, Seeds: cluster.ListenAddrs()[1:2],
			Brokers: mute{}, RefreshEvery: 10 * time.Millisecond, Grace: time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx) }()
		eventually(t, "the proxy is ready", s.Ready)
		return s, func() {
			cancel()
			if err := <-done; err != nil {
				t.Errorf("Run = %v", err)
			}
		}
	}
	s, stop := run()
	eventually(t, "the proxy is ready", s.Ready)
	port := func(id int) string { return fmt.Sprintf("127.0.0.1:%d", base+id) }
	client := newClient(t, port(0), kgo.SeedBrokers(port(0), port(1), port(2)), kgo.DefaultProduceTopic("orders"), kgo.RecordPartitioner(kgo.RoundRobinPartitioner()),
		kgo.RetryBackoffFn(func(int) time.Duration { return 5 * time.Millisecond }), kgo.MetadataMinAge(10*time.Millisecond))
	produce := func() {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		for range 30 { // every partition
			if err := client.ProduceSync(ctx, kgo.StringRecord("x")).FirstErr(); err != nil {
				t.Fatal(err)
			}
		}
	}
	produce()
	stop()
	s, stop = run() // the bootstrap listener has another port now
	defer stop()
	produce()
	for _, b := range s.Status().Brokers {
		if b.Source != cluster.ListenAddrs()[b.ID] {
			t.Errorf("the listener of broker %d leads to %q, want %q", b.ID, b.Source, cluster.ListenAddrs()[b.ID])
		}
	}
	eventually(t, "no connection of a broker leads to a bootstrap broker", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		for c := range s.conns {
			if c.guessed {
				return false
			}
		}
		return true
	})
}

// TestTakenPortsAreNamedAtStart: of the brokers that the settings name.
func TestTakenPortsAreNamedAtStart(t *testing.T) {
	base := freePorts(t, 4)
	for _, port := range []int{base + 2, base + 4} {
		taken, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			t.Fatal(err)
		}
		defer taken.Close()
	}
	_, err := New(Options{Listen: "127.0.0.1:0", BrokerPortBase: base, BrokerIDs: []int32{1, 2, 3, 4}, Seeds: []string{"127.0.0.1:1"}})
	for _, want := range []string{"broker 2", fmt.Sprint(base + 2), "broker 4", fmt.Sprint(base + 4)} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("New = %v, want an error that names %s", err, want)
		}
	}
	for _, port := range []int{base + 1, base + 3} { // those that were bound are free again
		ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			t.Errorf("port %d after New failed: %v", port, err)
			continue
		}
		ln.Close()
	}
}

// TestALatePortClashHarmsNoOneElse: it is logged once, counted, and over when the port is free; the other brokers' clients see nothing.
func TestALatePortClashHarmsNoOneElse(t *testing.T) {
	base := freePorts(t, 2)
	taken, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", base+2))
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	var list []Broker
	b := metadataBroker(t, "one", func() []Broker { return list })
	list = []Broker{brokerAt(1, b.ln)}
	core, logged := observer.New(zap.InfoLevel)
	brokers := &fixed{list: list}
	s := startBefore(t, b, Options{BrokerPortBase: base, Brokers: brokers, RefreshEvery: 5 * time.Millisecond, Logger: zap.New(core)})
	eventually(t, "the proxy is ready", s.Ready)
	client := dialRaw(t, s.brokers.get(1).ln.Addr())
	brokers.set(list[0], Broker{2, b.ln.Addr().(*net.TCPAddr).IP.String() + ".internal", 9092})
	eventually(t, "several attempts to bind were counted", func() bool { return s.metrics.bindErrors.Load() >= 3 })
	if n := logged.FilterMessageSnippet("no listener for broker").Len(); n != 1 {
		t.Errorf("the clash is logged %d times, want once", n)
	}
	client.send(rawRequest(68, 0, 1, nil))
	if got := string(client.receive()[8:]); got != "one" {
		t.Errorf("broker 1 answers %q, want one", got)
	}
	taken.Close()
	eventually(t, "the listener of broker 2 is bound", func() bool { return s.brokers.get(2) != nil && s.Ready() })
	if logged.FilterMessageSnippet("has its listener now").Len() != 1 {
		t.Error("the log doesn't say that broker 2 has its listener")
	}
}
