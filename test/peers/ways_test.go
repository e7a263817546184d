package peers

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/pires/go-proxyproto"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"kmirror/internal/kafkatest"
	"kmirror/internal/tunnel"
	"kmirror/test/testbed"
)

// brokerIdle is after how long the source's brokers close idle connections.
const brokerIdle = 4 * time.Second

// TestWaysToTheSource: a source behind a load balancer that wants PROXY protocol headers, behind SOCKS5 and CONNECT proxies, at IPv6 addresses, and with brokers
// that close idle connections.
func TestWaysToTheSource(t *testing.T) {
	balancer, six := testbed.Loopback(kafkatest.PortBlock(t, 1)), net.JoinHostPort("::1", fmt.Sprint(kafkatest.PortBlock(t, 1)))
	source := kafkatest.Real(t, kafkatest.FrontedListener("LB", balancer), kafkatest.FrontedListener("SIX", six),
		kafkatest.Config("connections.max.idle.ms", fmt.Sprint(brokerIdle.Milliseconds())))
	_, mirror := kafkatest.Shared(t)
	w := ways{source, mirror}
	headers := &headerCounts{}
	testbed.NewFront(t, balancer, source.Broker(1).Listener("LB"), headers.add)
	testbed.NewFront(t, six, source.Broker(1).Listener("SIX"), nil)
	for version := range 2 {
		t.Run(fmt.Sprintf("PROXY v%d", version+1), func(t *testing.T) { w.proxyProtocol(t, version+1, balancer, headers) })
	}
	t.Run("tunnels", w.tunnels)
	t.Run("IPv6", func(t *testing.T) { w.six(t, six) })
	t.Run("idle", w.idle)
}

type ways struct{ source, mirror *kafkatest.RealCluster }

// headerCounts counts PROXY protocol headers: those that name a client, by its address, and those that name none.
type headerCounts struct {
	mu     sync.Mutex
	byHost map[string]int
}

func (h *headerCounts) add(header *proxyproto.Header) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.byHost == nil {
		h.byHost = make(map[string]int)
	}
	host := "none"
	if from, _, ok := header.TCPAddrs(); ok && header.Command.IsProxy() {
		host = fmt.Sprint(header.Version, " ", from.IP)
	}
	h.byHost[host]++
}

// take returns the counts and begins anew.
func (h *headerCounts) take() map[string]int {
	h.mu.Lock()
	defer h.mu.Unlock()
	counts := h.byHost
	h.byHost = nil
	return counts
}

// proxyProtocol has a load balancer before kmirror and one behind it: the source is told the real client, and kmirror's own connections name none.
func (w ways) proxyProtocol(t *testing.T, version int, balancer string, headers *headerCounts) {
	topic := fmt.Sprintf("proxied-v%d", version)
	kafkatest.CreateTopic(t, w.source, topic, 3, 1)
	in := testbed.Start(t, seedsOf{w.source, []string{balancer}}, w.mirror, "--name", topic, "--topics", topic,
		"--proxy.proxy_protocol", "required", "--proxy.send_proxy_protocol", fmt.Sprintf("v%d", version))
	testbed.WaitLive(t, in, topic, 3)
	for range 10 { // health checks
		dial(t, in.Seeds()[0]).Close()
	}
	client := &net.TCPAddr{IP: net.ParseIP("2001:db8::7"), Port: 4321}
	behind := kgo.Dialer(func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, network, address)
		if err == nil {
			to := &net.TCPAddr{IP: net.ParseIP("2001:db8::1"), Port: c.RemoteAddr().(*net.TCPAddr).Port}
			_, err = proxyproto.HeaderProxyFromAddrs(byte(version), client, to).WriteTo(c)
		}
		return c, err
	})
	testbed.Write(t, in.Seeds(), topic, "n", 300, behind)
	in.WaitCaughtUp(time.Minute)
	kafkatest.WaitEqual(t, w.source, w.mirror, topic, time.Minute, kafkatest.SameOffsets())
	if code, out := testbed.Run(t, "verify", "--name", topic, "--source", balancer, "--mirror", w.mirror.Seeds()[0], "--topics", topic,
		"--proxy.send_proxy_protocol", fmt.Sprintf("v%d", version)); code != 0 {
		t.Errorf("verify: exit code %d, want 0\n%s", code, out)
	}
	counts := headers.take()
	if name := fmt.Sprint(version, " ", client.IP); counts[name] == 0 || counts["none"] == 0 || len(counts) != 2 {
		t.Errorf("headers that the source's load balancer got: %v, want some of %s and some that name none", counts, name)
	}
	if log := in.Log(); strings.Contains(log, "WARN") {
		t.Errorf("health checks are warned of:\n%s", log)
	}
	if _, err := kadm.NewClient(testbed.NewWriter(t, in.Seeds(), "", kgo.RetryTimeout(time.Second))).BrokerMetadata(t.Context()); err == nil {
		t.Error("a client without a header is served")
	}
}

// tunnels reaches the source through SOCKS5 and the mirror through CONNECT, and neither in any other way.
func (w ways) tunnels(t *testing.T) {
	const topic = "tunnelled"
	kafkatest.CreateTopic(t, w.source, topic, 3, 1)
	socks, connect := tunnel.Socks(t, "u", "s3cret"), tunnel.Connect(t, "u", "s3cret", "200 Connection established")
	in := testbed.New(t, w.source, w.mirror, "--topics", topic, "--source.proxy_url", socks.URL("u", "s3cret"), "--mirror.proxy_url", connect.URL("u", "s3cret"))
	if err := in.Launch(); err != nil {
		t.Fatal(err)
	}
	watch := testbed.WatchSockets(in.PID())
	kafkatest.Eventually(t, testbed.ReadyTimeout, in.Ready)
	testbed.Write(t, in.Seeds(), topic, "n", 300)
	in.WaitCaughtUp(time.Minute)
	kafkatest.WaitEqual(t, w.source, w.mirror, topic, time.Minute, kafkatest.SameOffsets())
	testbed.WantOnlyProxy(t, "kmirror", watch.Done(), append(w.source.Seeds(), w.mirror.Seeds()...), []string{socks.Address(), connect.Address()})
	if socks.Opened.Load() == 0 || connect.Opened.Load() == 0 {
		t.Errorf("%d tunnels through SOCKS5, %d through CONNECT, want some", socks.Opened.Load(), connect.Opened.Load())
	}
	if strings.Contains(in.Log(), "s3cret") {
		t.Error("the log shows a proxy's password")
	}
}

// six has IPv6 alone on every way: to a source and a mirror whose brokers advertise [::1], from clients, and to the operator's listener.
func (w ways) six(t *testing.T, address string) {
	const topic = "six"
	kafkatest.CreateTopic(t, w.source, topic, 3, 1)
	mirrorAddress := net.JoinHostPort("::1", fmt.Sprint(kafkatest.PortBlock(t, 1)))
	w.mirror = kafkatest.Real(t, kafkatest.FrontedListener("SIX", mirrorAddress))
	testbed.NewFront(t, mirrorAddress, w.mirror.Broker(1).Listener("SIX"), nil)
	base := kafkatest.PortBlock(t, 6)
	listen := net.JoinHostPort("::1", fmt.Sprint(base))
	in := testbed.New(t, seedsOf{w.source, []string{address}}, seedsOf{w.mirror, []string{mirrorAddress}}, "--name", topic, "--topics", topic, "--listen", listen, "--broker-port-base", fmt.Sprint(base+1))
	_, adminPort, err := net.SplitHostPort(in.AdminAddr())
	if err != nil {
		t.Fatal(err)
	}
	in.Args = append(in.Args, "--admin", "[::]:"+adminPort) // the test itself asks over IPv4
	in.Start()
	testbed.Write(t, []string{listen}, topic, "n", 300)
	out := kafkatest.Tool(t, "org.apache.kafka.tools.ProducerPerformance", "--topic", topic, "--num-records", "300", "--record-size", "100", "--throughput", "-1",
		"--producer-props", "bootstrap.servers="+listen, "acks=all")
	if !strings.Contains(out, "300 records sent") || strings.Contains(out, "Exception") {
		t.Errorf("ProducerPerformance over IPv6 printed\n%s", out)
	}
	clusters := []string{"--name", topic, "--source", address, "--mirror", mirrorAddress}
	for _, args := range [][]string{
		{"status", "--admin", "[::1]:" + adminPort, "--until-caught-up", "--timeout", "60s"},
		append([]string{"verify", "--topics", topic}, clusters...),
		append([]string{"offsets", "--topic", topic, "--partition", "0", "--offset", "1"}, clusters...),
	} {
		if code, out := testbed.Run(t, args...); code != 0 {
			t.Errorf("kmirror %q: exit code %d, want 0\n%s", args, code, out)
		}
	}
	kafkatest.WaitEqual(t, w.source, w.mirror, topic, time.Minute, kafkatest.SameOffsets())
	metadata, err := kadm.NewClient(testbed.NewWriter(t, []string{listen}, "")).BrokerMetadata(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if b := metadata.Brokers[0]; b.Host != "::1" || int(b.Port) != base+2 { // a bare literal on the wire
		t.Errorf("the client is told %s port %d, want ::1 port %d", b.Host, b.Port, base+2)
	}
	if !strings.Contains(in.Log(), address) {
		t.Errorf("the log doesn't name the broker's own address, %s", address)
	}
}

// idle: a broker that closes an idle connection has its client's closed too, and nothing is left of it.
func (w ways) idle(t *testing.T) {
	const topic = "idle"
	kafkatest.CreateTopic(t, w.source, topic, 1, 1)
	in := testbed.Start(t, w.source, w.mirror, "--roles", "proxy", "--timing.refresh", "1s")
	before := settledState(t, in)
	before.closeWaits = 2 // kmirror's own client looks at its idle connections less often, each 20 s, than these brokers do
	var g errgroup.Group
	for range 20 {
		c := dial(t, in.BrokerAddr(1))
		g.Go(func() error {
			if _, err := ask(c, versionsRequest(), 10*time.Second); err != nil {
				return err
			}
			begun := time.Now()
			if err := c.SetReadDeadline(begun.Add(5 * brokerIdle)); err != nil {
				return err
			}
			if _, err := c.Read(make([]byte, 1)); err != io.EOF {
				return fmt.Errorf("%w after %v, want the end that the broker made", err, time.Since(begun))
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	wantBack(t, in, before)
	testbed.Write(t, in.Seeds(), topic, "n", 100)
}

// blackHole listens at an address and never accepts; its queue is full, so that the kernel drops what dials it.
func blackHole(t testing.TB, address string) {
	t.Helper()
	at, err := net.ResolveTCPAddr("tcp4", address)
	if err != nil {
		t.Fatal(err)
	}
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(fd) })
	err = syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1)
	if err == nil {
		err = syscall.Bind(fd, &syscall.SockaddrInet4{Port: at.Port, Addr: [4]byte(at.IP.To4())})
	}
	if err == nil {
		err = syscall.Listen(fd, 0)
	}
	if err != nil {
		t.Fatal(os.NewSyscallError("listen at "+address, err))
	}
	for range 10 {
		c, err := net.DialTimeout("tcp", address, 500*time.Millisecond)
		if err != nil {
			return // full
		}
		t.Cleanup(func() { c.Close() })
	}
	t.Fatalf("%s still takes connections", address)
}

// TestBlackHoledSeed: a bootstrap server that swallows packets costs the clients that come to it first no more than the connect timeout, and none of them
// the request that it has sent meanwhile; then it is put aside.
func TestBlackHoledSeed(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 1, 1)
	hole := testbed.Loopback(kafkatest.PortBlock(t, 1))
	front := testbed.NewFront(t, hole, source.Seeds()[0], nil)
	in := testbed.Start(t, seedsOf{source, []string{hole, source.Seeds()[0]}}, mirror, "--topics", topic)
	testbed.WaitLive(t, in, topic, 1)
	front.Down()
	blackHole(t, hole)
	const clients, connectTimeout = 10, 3 * time.Second
	came := func() (slow int) {
		t.Helper()
		took := make([]time.Duration, clients)
		var g errgroup.Group
		for i := range took {
			c := dial(t, in.Seeds()[0])
			g.Go(func() error {
				begun := time.Now()
				_, err := ask(c, versionsRequest(), 20*time.Second)
				took[i] = time.Since(begun)
				return err
			})
		}
		if err := g.Wait(); err != nil {
			t.Errorf("a client's first request: %v", err)
		}
		for _, d := range took {
			if d > connectTimeout+2*time.Second {
				t.Errorf("a client waited %v, want the connect timeout at most, %v", d, connectTimeout)
			}
			if d > connectTimeout/2 {
				slow++
			}
		}
		return slow
	}
	if slow := came(); slow == 0 || slow == clients {
		t.Errorf("%d of %d clients waited for the black hole, want some: they take the seeds in turn", slow, clients)
	}
	if slow := came(); slow != 0 {
		t.Errorf("%d of %d clients waited for the black hole again, want it put aside", slow, clients)
	}
	testbed.Write(t, in.Seeds(), topic, "n", 100)
	if n := strings.Count(in.Log(), "bootstrap broker can't be reached"); n != 1 {
		t.Errorf("%d log lines about the black hole, want one", n)
	}
	kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
}
