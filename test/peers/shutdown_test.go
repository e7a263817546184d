package peers

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// seedsOf is a cluster that is reached at other addresses.
type seedsOf struct {
	kafkatest.Cluster
	seeds []string
}

func (c seedsOf) Seeds() []string { return c.seeds }

// producer is a process that writes to a topic of its own.
type producer struct {
	name, topic string
	cmd         *exec.Cmd
	out         bytes.Buffer
	stdin       io.Closer // ends it; nil for one that ends by itself
	values      func(output string) (prefix string, n int, err error)
}

func (p *producer) start(t testing.TB) {
	t.Helper()
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.out
	if err := kafkatest.Spawn(p.cmd); err != nil {
		t.Fatal(err)
	}
}

// javaRecords at javaRate take about as long as the test's steps.
const javaRecords, javaRate, jsRate = 10_000, 400, 300

const javaTopic = "shutdown-java"

// javaProducer writes the numbers from 0 on.
func javaProducer(t testing.TB, bootstrap, topic string) *producer {
	t.Helper()
	return &producer{
		name: "java", topic: topic,
		cmd: kafkatest.ToolCommand(t, "org.apache.kafka.tools.ProducerPerformance", "--topic", topic, "--num-records", strconv.Itoa(javaRecords), "--payload-monotonic",
			"--throughput", strconv.Itoa(javaRate), "--producer-props", "bootstrap.servers="+bootstrap, "acks=all"),
		values: func(output string) (string, int, error) {
			// A failed record is a stack trace; lines that begin otherwise tell of retries.
			if strings.Contains(output, "\norg.apache.kafka.common.errors") || !strings.Contains(output, fmt.Sprintf("%d records sent", javaRecords)) {
				return "", 0, fmt.Errorf("it printed\n%s", output)
			}
			return "", javaRecords, nil
		},
	}
}

// kafkajsProducer writes js-0, js-1 and so on until it's told to end.
func kafkajsProducer(t testing.TB, bootstrap, topic string) *producer {
	t.Helper()
	root := kafkatest.Root(t)
	modules := filepath.Join(root, ".cache", "node", "node_modules")
	if _, err := os.Stat(modules); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal(err)
		}
		t.Skipf("%v; `make deps` installs it", err)
	}
	cmd := exec.CommandContext(t.Context(), "node", filepath.Join(root, "test", "peers", "steady.js"), bootstrap, topic, strconv.Itoa(jsRate))
	cmd.Env = append(os.Environ(), "NODE_PATH="+modules)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	return &producer{name: "kafkajs", topic: topic, cmd: cmd, stdin: stdin, values: func(output string) (string, int, error) {
		n, err := strconv.Atoi(strings.TrimSpace(output))
		return "js-", n, err
	}}
}

// finish waits for the producer's end, and checks that the source has each record that it wrote once.
func (p *producer) finish(t testing.TB, source kafkatest.Cluster) {
	t.Helper()
	if p.stdin != nil {
		p.stdin.Close()
	}
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("%s: %v\n%s", p.name, err, p.out.String())
		return
	}
	prefix, n, err := p.values(p.out.String())
	if err != nil {
		t.Errorf("%s: %v", p.name, err)
		return
	}
	count := make(map[string]int)
	for _, records := range kafkatest.ReadTopic(t, source, p.topic) {
		for _, r := range records {
			count[string(r.Value)]++
		}
	}
	wrong := 0
	for i := range n {
		if value := prefix + strconv.Itoa(i); count[value] != 1 {
			if wrong++; wrong == 1 {
				t.Errorf("%s: record %q is on the source %d times", p.name, value, count[value])
			}
		}
	}
	if len(count) != n || wrong > 0 {
		t.Errorf("%s: %d different records on the source, %d of them wrong, want the %d acknowledged ones once", p.name, len(count), wrong, n)
	}
}

// members are a consumer group's.
type members struct {
	clients []*kgo.Client
	ended   sync.WaitGroup
	mu      sync.Mutex
	seen    map[string]bool
}

func startMembers(t testing.TB, n int, group string, topics []string, seeds []string) *members {
	t.Helper()
	m := &members{seen: make(map[string]bool)}
	for range n {
		cl := testbed.NewWriter(t, seeds, "", kgo.ConsumerGroup(group), kgo.ConsumeTopics(topics...), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
			kgo.HeartbeatInterval(time.Second), kgo.DialTimeout(2*time.Second), kgo.FetchMaxWait(time.Second))
		m.clients = append(m.clients, cl)
		m.ended.Go(func() {
			for {
				fetches := cl.PollFetches(t.Context())
				if fetches.IsClientClosed() || t.Context().Err() != nil {
					return
				}
				m.mu.Lock()
				fetches.EachRecord(func(r *kgo.Record) { m.seen[fmt.Sprintf("%s-%d-%d", r.Topic, r.Partition, r.Offset)] = true })
				m.mu.Unlock()
			}
		})
	}
	return m
}

func (m *members) read() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.seen)
}

func (m *members) stop() {
	for _, cl := range m.clients {
		cl.Close()
	}
	m.ended.Wait()
}

// memberIDs asks the source for a group's members; none while it rebalances.
func memberIDs(source kafkatest.Cluster, t testing.TB, group string) []string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	described, err := kadm.NewClient(source.Client(t)).DescribeGroups(ctx, group)
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	if g := described[group]; g.State == "Stable" {
		for _, member := range g.Members {
			ids = append(ids, member.MemberID)
		}
	}
	slices.Sort(ids)
	return ids
}

// ends is how many records each topic has.
func ends(t testing.TB, source kafkatest.Cluster, topics []string) map[string]int64 {
	t.Helper()
	total := make(map[string]int64)
	for _, topic := range topics {
		for _, o := range kafkatest.LogOffsets(t, source, topic) {
			total[topic] += o.End
		}
	}
	return total
}

// waitGrowth waits until each producer has written more.
func waitGrowth(t testing.TB, source kafkatest.Cluster, topics []string, n int64) {
	t.Helper()
	from := ends(t, source, topics)
	kafkatest.Eventually(t, time.Minute, func() error {
		for topic, end := range ends(t, source, topics) {
			if end < from[topic]+n && (topic != javaTopic || end < javaRecords) {
				return fmt.Errorf("%s grew by %d records, want %d", topic, end-from[topic], n)
			}
		}
		return nil
	})
}

// TestShutdownUnderForeignClients is case C35: producers of Java and kafkajs and a group of four go on over restarts, also while the mirror is far away or
// down. Each acknowledged record is there once, no member loses its session, and the mirror gets all of it.
func TestShutdownUnderForeignClients(t *testing.T) {
	source, _ := kafkatest.Shared(t)
	at := testbed.Loopback(kafkatest.PortBlock(t, 1))
	mirror := kafkatest.Real(t, kafkatest.FrontedListener("FAR", at))
	front := testbed.NewFront(t, at, mirror.Broker(1).Listener("FAR"), nil)
	topics := []string{javaTopic, "shutdown-js1", "shutdown-js2"}
	for _, topic := range topics {
		kafkatest.CreateTopic(t, source, topic, 2, 1)
	}
	in := testbed.Start(t, source, seedsOf{mirror, []string{at}}, "--topics", strings.Join(topics, ","))
	for _, topic := range topics {
		testbed.WaitLive(t, in, topic, 2)
	}
	bootstrap := in.Seeds()[0]
	producers := []*producer{javaProducer(t, bootstrap, topics[0]), kafkajsProducer(t, bootstrap, topics[1]), kafkajsProducer(t, bootstrap, topics[2])}
	for _, p := range producers {
		p.start(t)
	}
	const group = "shutdown-readers"
	readers := startMembers(t, 4, group, topics, in.Seeds())
	waitGrowth(t, source, topics, 300)
	var joined []string
	kafkatest.Eventually(t, 30*time.Second, func() error {
		if joined = memberIDs(source, t, group); len(joined) != 4 {
			return fmt.Errorf("members %v, want 4", joined)
		}
		return nil
	})
	for _, step := range []struct {
		name   string
		change func()
	}{
		{"the mirror is near", func() {}},
		{"2 s away", func() { front.SetDelay(time.Second) }},
		{"down", func() { front.SetDelay(0); front.Down() }},
	} {
		step.change()
		waitGrowth(t, source, topics, 300)
		begun := time.Now()
		in.Stop() // exit code 0
		t.Logf("%s: stopped after %v", step.name, time.Since(begun).Round(time.Millisecond))
		in.Start()
		waitGrowth(t, source, topics, 300)
	}
	front.Up()
	for _, p := range producers {
		p.finish(t, source)
	}
	want := 0
	for _, end := range ends(t, source, topics) {
		want += int(end)
	}
	kafkatest.Eventually(t, 30*time.Second, func() error {
		if n := readers.read(); n != want {
			return fmt.Errorf("the group has read %d of %d records", n, want)
		}
		return nil
	})
	kafkatest.Eventually(t, 30*time.Second, func() error {
		if now := memberIDs(source, t, group); !slices.Equal(now, joined) {
			return fmt.Errorf("members %v, want those from before, %v: no session may end", now, joined)
		}
		return nil
	})
	readers.stop()
	in.WaitCaughtUp(time.Minute)
	for _, topic := range topics {
		kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
	}
}

// joinGroup is a JoinGroup of a member that its coordinator waits for, in a rebalance, for so long.
func joinGroup(group string, rebalance time.Duration) *kmsg.JoinGroupRequest {
	req := kmsg.NewPtrJoinGroupRequest()
	req.Version = 3 // the last that needs no member ID first
	req.Group, req.ProtocolType = group, "consumer"
	req.SessionTimeoutMillis, req.RebalanceTimeoutMillis = 60_000, int32(rebalance.Milliseconds())
	protocol := kmsg.NewJoinGroupRequestProtocol()
	protocol.Name = "range"
	req.Protocols = append(req.Protocols, protocol)
	return req
}

// join sends a JoinGroup and hands on how it ended.
func join(t testing.TB, address string, req *kmsg.JoinGroupRequest) <-chan error {
	t.Helper()
	c := dial(t, address)
	done := make(chan error, 1)
	go func() {
		resp, err := ask(c, req, time.Minute)
		if err == nil && resp.(*kmsg.JoinGroupResponse).ErrorCode != 0 {
			err = fmt.Errorf("error code %d", resp.(*kmsg.JoinGroupResponse).ErrorCode)
		}
		done <- err
	}()
	return done
}

// holdJoin brings a group into a state in which its second member's JoinGroup is held, since the first doesn't come, for so long.
func holdJoin(t testing.TB, in *testbed.Instance, group string, held time.Duration) <-chan error {
	t.Helper()
	if err := <-join(t, in.BrokerAddr(1), joinGroup(group, held)); err != nil {
		t.Fatal(err)
	}
	done := join(t, in.BrokerAddr(1), joinGroup(group, held))
	kafkatest.Eventually(t, 10*time.Second, func() error {
		if n := in.Metrics()["kmirror_proxy_requests_in_flight"]; n != 1 {
			return fmt.Errorf("%v requests in flight, want the JoinGroup", n)
		}
		return nil
	})
	return done
}

// refused waits until nothing listens at an address.
func refused(t testing.TB, address string) {
	t.Helper()
	kafkatest.Eventually(t, 5*time.Second, func() error {
		c, err := net.Dial("tcp", address)
		if err == nil {
			c.Close()
			return fmt.Errorf("%s still takes connections", address)
		}
		return nil
	})
}

// TestHeldJoinGroupOverShutdown is C35's slow member: a JoinGroup that the coordinator holds gets its answer, with the listeners closed, if that comes within the
// proxy's part of grace; else it's cut then, kmirror still ends in time, and the member joins through the next one.
func TestHeldJoinGroupOverShutdown(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 1, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	const held = 6 * time.Second
	begun := time.Now()
	done := holdJoin(t, in, "held", held)
	in.Signal(syscall.SIGTERM)
	refused(t, in.Seeds()[0])
	refused(t, in.BrokerAddr(1))
	select {
	case err := <-done:
		t.Fatalf("the JoinGroup ended before the listeners closed: %v", err)
	default:
	}
	if err := <-done; err != nil {
		t.Errorf("JoinGroup in flight at SIGTERM: %v, want its answer", err)
	}
	if took := time.Since(begun); took < held/2 {
		t.Errorf("it was answered after %v, so it wasn't held", took)
	}
	if code := in.Wait(15 * time.Second); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}

	const grace = 6 * time.Second // the proxy's part is half of it
	in.Args = append(in.Args, "--grace", grace.String())
	in.Start()
	done = holdJoin(t, in, "held-longer", 2*grace)
	begun = time.Now()
	in.Signal(syscall.SIGTERM)
	if err := <-done; err == nil || time.Since(begun) > grace {
		t.Errorf("JoinGroup held for longer than grace ended after %v with %v, want it cut", time.Since(begun), err)
	}
	if code := in.Wait(grace); code != 0 || time.Since(begun) > grace {
		t.Errorf("exit code %d after %v, want 0 within grace, %v", code, time.Since(begun), grace)
	}
	in.Start()
	if err := <-join(t, in.BrokerAddr(1), joinGroup("held-longer", time.Second)); err != nil {
		t.Errorf("the member that was cut joins again: %v", err)
	}
}
