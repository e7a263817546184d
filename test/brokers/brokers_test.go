package brokers

import (
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

const sparseID = 1001

// newInstance is testbed.New on ports of which the one of broker 1001 is free too.
func newInstance(t *testing.T, source, mirror kafkatest.Cluster, args ...string) *testbed.Instance {
	t.Helper()
	for range 20 {
		in := testbed.New(t, source, mirror, args...)
		if ln, err := net.Listen("tcp", in.BrokerAddr(sparseID)); err == nil {
			ln.Close()
			return in
		}
	}
	t.Fatal("no free ports")
	return nil
}

// leadsTo checks that an address is that of a broker: brokers describe only their own settings.
func leadsTo(address string, id int32) error {
	conn, err := net.DialTimeout("tcp", address, time.Second)
	if err != nil {
		return err
	}
	defer conn.Close()
	req := kmsg.NewPtrDescribeConfigsRequest()
	req.Version = 1
	req.Resources = []kmsg.DescribeConfigsRequestResource{{ResourceType: kmsg.ConfigResourceTypeBroker, ResourceName: fmt.Sprint(id), ConfigNames: []string{"node.id"}}}
	if _, err := conn.Write(kmsg.NewRequestFormatter().AppendRequest(nil, req, 1)); err != nil {
		return err
	}
	if err := conn.SetReadDeadline(time.Now().Add(3 * time.Second)); err != nil {
		return err
	}
	frame, err := testbed.ReadFrame(conn)
	if err != nil {
		return err
	}
	resp := req.ResponseKind().(*kmsg.DescribeConfigsResponse)
	if err := resp.ReadFrom(frame[8:]); err != nil {
		return err
	}
	if r := resp.Resources[0]; r.ErrorCode != 0 {
		return fmt.Errorf("%s isn't broker %d: %v: %s", address, id, kerr.ErrorForCode(r.ErrorCode), *r.ErrorMessage)
	}
	return nil
}

// group reads a topic in a group through the proxy, and knows what it has read.
type group struct {
	client *kgo.Client
	ended  sync.WaitGroup
	mu     sync.Mutex
	seen   map[string]bool
}

func startGroup(t *testing.T, topic string, seeds ...string) *group {
	g := &group{seen: make(map[string]bool)}
	g.client = testbed.NewWriter(t, seeds, "", kgo.ConsumerGroup(topic+"-readers"), kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.DialTimeout(2*time.Second))
	g.ended.Go(func() {
		for {
			fetches := g.client.PollFetches(t.Context())
			if fetches.IsClientClosed() || t.Context().Err() != nil {
				return
			}
			g.mu.Lock()
			fetches.EachRecord(func(r *kgo.Record) { g.seen[string(r.Value)] = true })
			g.mu.Unlock()
		}
	})
	t.Cleanup(func() { g.client.Close(); g.ended.Wait() })
	return g
}

func (g *group) len() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.seen)
}

// world is a source of brokers 1, 2 and 1001, kmirror, and its clients.
type world struct {
	t      *testing.T
	source *kafkatest.RealCluster
	in     *testbed.Instance
	topic  string
	ledger *testbed.Ledger
	group  *group
}

// settled checks, after a step, that each listener leads to its broker within 10 s, and that producers and the group go on.
func (w world) settled(step string, ids ...int32) {
	w.t.Helper()
	start := time.Now()
	kafkatest.Eventually(w.t, 10*time.Second, func() error {
		for _, id := range ids {
			if err := leadsTo(w.in.BrokerAddr(id), id); err != nil {
				return err
			}
		}
		return nil
	})
	w.t.Logf("%s: every listener led to its broker after %v", step, time.Since(start).Round(time.Millisecond))
	acked, read := w.ledger.Acks.Load(), w.group.len()
	kafkatest.Eventually(w.t, 30*time.Second, func() error {
		if w.ledger.Acks.Load() < acked+200 || w.group.len() < read+200 {
			return fmt.Errorf("after %s: %d records more acknowledged, %d more read, want 200 each", step, w.ledger.Acks.Load()-acked, w.group.len()-read)
		}
		return nil
	})
}

// TestBrokersComeAndGo is case C22: listeners follow node IDs, whatever the addresses, and clients' ports never change.
func TestBrokersComeAndGo(t *testing.T) {
	source, mirror := kafkatest.Real(t, kafkatest.IDs(1, 2, sparseID)), kafkatest.Real(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 6, 3)
	in := newInstance(t, source, mirror, "--topics", topic, "--topics.replication_factor", "1", "--timing.refresh", "1s")
	in.Start()
	w := world{t, source, in, topic, testbed.StartLedger(t, topic, testbed.LedgerOptions{Writers: 2, PerSecond: 200, From: time.Now(), Size: 60}, in.Seeds()),
		startGroup(t, topic, in.BrokerAddr(1), in.BrokerAddr(2), in.BrokerAddr(sparseID))}
	w.settled("the start", 1, 2, sparseID)

	one, two := source.Broker(1), source.Broker(2)
	one.Stop(t)
	two.Kill(t) // in order it would wait for the controllers' majority
	kafkatest.SwapAddrs(t, one, two)
	one.Start(t)
	two.Start(t)
	w.settled("brokers 1 and 2 had swapped their addresses", 1, 2, sparseID)

	w.addAndRemove()

	for _, b := range source.Brokers() {
		source.WaitInSync(t)
		b.Restart(t)
	}
	w.settled("a rolling restart", 1, 2, sparseID)

	w.ledger.Stop()
	in.WaitCaughtUp(time.Minute)
	w.ledger.Check(source, mirror)
	kafkatest.Eventually(t, 30*time.Second, func() error {
		if acked := int(w.ledger.Acks.Load()); w.group.len() < acked {
			return fmt.Errorf("the group read %d of %d acknowledged records", w.group.len(), acked)
		}
		return nil
	})
}

// addAndRemove adds broker 4, which leads a partition for a while, kills kmirror meanwhile, and removes the broker.
func (w world) addAndRemove() {
	t := w.t
	four := w.source.AddBroker(t, 4)
	w.in.Hide(four.Addr)
	w.move(0, 4)
	w.settled("broker 4 had come", 1, 2, 4, sparseID)

	w.in.Kill()
	w.in.Start()
	w.settled("kmirror was killed", 1, 2, 4, sparseID) // the group knows brokers' ports alone

	w.move(0, 1, 2, sparseID)
	w.source.RemoveBroker(t, four)
	start := time.Now()
	conn, err := net.DialTimeout("tcp", w.in.BrokerAddr(4), time.Second)
	switch {
	case errors.Is(err, syscall.ECONNRESET): // a listener took it
	case err != nil:
		t.Errorf("the port of broker 4, which was removed: %v, want it kept", err)
	default:
		defer conn.Close()
		conn.SetReadDeadline(start.Add(5 * time.Second))
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the port of broker 4, which was removed, gave %v after %v, want the connection closed", err, time.Since(start))
		}
	}
	w.settled("broker 4 had gone", 1, 2, sparseID)
}

// move gives a partition to other brokers and waits until the first of them leads it.
func (w world) move(partition int32, to ...int32) {
	w.t.Helper()
	adm := kadm.NewClient(w.source.Client(w.t))
	var req kadm.AlterPartitionAssignmentsReq
	req.Assign(w.topic, partition, to)
	if resp, err := adm.AlterPartitionAssignments(w.t.Context(), req); err != nil || resp.Error() != nil {
		w.t.Fatal(err, resp.Error())
	}
	kafkatest.Eventually(w.t, time.Minute, func() error {
		topics, err := adm.ListTopics(w.t.Context(), w.topic)
		if err != nil {
			return err
		}
		p := topics[w.topic].Partitions[partition]
		if len(p.Replicas) != len(to) || len(p.ISR) != len(to) || !slices.Contains(to, p.Leader) {
			return fmt.Errorf("partition %d: leader %d, replicas %v, in sync %v, want %v", partition, p.Leader, p.Replicas, p.ISR, to)
		}
		return nil
	})
}

// TestTakenPortsEndTheStart: a port of a broker that the settings name is taken, and kmirror says whose.
func TestTakenPortsEndTheStart(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	in := testbed.New(t, source, mirror, "--proxy.broker_ports.ids", "1-3")
	taken, err := net.Listen("tcp", in.BrokerAddr(2))
	if err != nil {
		t.Fatal(err)
	}
	if err := in.Launch(); err != nil {
		t.Fatal(err)
	}
	if code := in.Wait(20 * time.Second); code != 1 || !strings.Contains(in.Log(), "listener of broker 2: listen tcp "+in.BrokerAddr(2)) {
		t.Errorf("exit code %d, log:\n%s\nwant 1, and the port of broker 2 named", code, in.LogTail(5))
	}
	taken.Close()
	in.Start()
}
