package security

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// setQuota limits what a broker takes from a client ID or a user, in bytes a second.
func setQuota(t testing.TB, c kafkatest.Cluster, kind, name string, bytesPerSecond float64) {
	t.Helper()
	entity := []kadm.ClientQuotaEntityComponent{{Type: kind, Name: &name}}
	alter := func(op kadm.AlterClientQuotaOp) {
		t.Helper()
		altered, err := kadm.NewClient(c.Client(t)).AlterClientQuotas(context.Background(), []kadm.AlterClientQuotaEntry{{Entity: entity, Ops: []kadm.AlterClientQuotaOp{op}}})
		if err != nil || altered[0].Err != nil {
			t.Fatalf("quota of %s %s: %v, %+v", kind, name, err, altered)
		}
	}
	alter(kadm.AlterClientQuotaOp{Key: "producer_byte_rate", Value: bytesPerSecond})
	kafkatest.Eventually(t, 10*time.Second, func() error {
		found, err := kadm.NewClient(c.Client(t)).DescribeClientQuotas(context.Background(), true, []kadm.DescribeClientQuotaComponent{{Type: kind, MatchName: &name}})
		if err == nil && len(found) != 1 {
			err = fmt.Errorf("quotas of %s %s: %+v", kind, name, found)
		}
		return err
	})
	t.Cleanup(func() { alter(kadm.AlterClientQuotaOp{Key: "producer_byte_rate", Remove: true}) })
}

// throttle sends n requests of 300 kB and returns the longest throttle time that the broker named. With 20 kB/s the first has one of 5 s: the
// broker takes the rate over 10 s at least.
func throttle(t *testing.T, seeds []string, topic string, n int, opts ...kgo.Opt) time.Duration {
	t.Helper()
	var longest atomic.Int64
	throttled := onThrottle(func(d time.Duration) { longest.Store(max(longest.Load(), int64(d))) })
	cl := testbed.NewWriter(t, seeds, topic, append(opts, kgo.WithHooks(throttled), kgo.ProducerBatchCompression(kgo.NoCompression()))...)
	defer cl.Close()
	for range n {
		if err := cl.ProduceSync(t.Context(), kgo.SliceRecord(bytes.Repeat([]byte("x"), 300_000))).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	return time.Duration(longest.Load())
}

// javaThrottle is throttle for one request of Java's producer, which prints the times that it was told.
func javaThrottle(t *testing.T, bootstrap, topic, clientID string) time.Duration {
	t.Helper()
	file := filepath.Join(t.TempDir(), "client.properties")
	text := fmt.Sprintf("security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\nsasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required "+
		"username=\"%s\" password=\"%s\";\nclient.id=%s\n", user, password, clientID)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	out := kafkatest.Tool(t, "org.apache.kafka.tools.ProducerPerformance", "--topic", topic, "--num-records", "1", "--record-size", "300000", "--throughput", "-1",
		"--print-metrics", "--producer.config", file, "--producer-props", "bootstrap.servers="+bootstrap)
	found := regexp.MustCompile(`produce-throttle-time-max:\{[^}]*\}\s*:\s*([0-9.]+)`).FindStringSubmatch(out)
	if found == nil {
		t.Fatalf("ProducerPerformance printed no throttle time\n%s", out)
	}
	ms, err := strconv.ParseFloat(found[1], 64)
	if err != nil {
		t.Fatal(err)
	}
	return time.Duration(ms * float64(time.Millisecond))
}

type onThrottle func(time.Duration)

func (f onThrottle) OnBrokerThrottle(_ kgo.BrokerMetadata, d time.Duration, _ bool) { f(d) }

// TestQuotas is case C36: a broker throttles the client ID or the user that wrote, through the proxy as directly, and nobody else.
func TestQuotas(t *testing.T) {
	source := startSecured(t)
	_, mirror := kafkatest.Shared(t)
	kafkatest.CreateTopic(t, source, "quotas", 1, 1)
	in := testbed.New(t, source, mirror, append([]string{"--topics", "quotas"}, ownLogin("source", "PLAIN")...)...)
	in.Start()
	for _, kind := range []string{"client-id", "user"} {
		var waits []time.Duration
		for i, seeds := range [][]string{source.Seeds(), in.Seeds()} { // each with a client ID or user whose window is empty
			name := fmt.Sprintf("%s-%d", kind, i)
			opts := []kgo.Opt{kgo.SASL(oauthOf(token("someone", time.Now().Add(time.Hour)))), kgo.ClientID(name)}
			if kind == "user" {
				opts = []kgo.Opt{kgo.SASL(oauthOf(token(name, time.Now().Add(time.Hour))))}
			}
			setQuota(t, source, kind, name, 20_000)
			waits = append(waits, throttle(t, seeds, "quotas", 1, opts...))
		}
		if direct, proxied := waits[0], waits[1]; direct == 0 || proxied < direct*9/10 || proxied > direct*11/10 {
			t.Errorf("%s: throttled for %v through the proxy, for %v directly", kind, proxied, direct)
		}
	}
	var waits []time.Duration
	for i, seeds := range [][]string{source.Seeds(), in.Seeds()} {
		name := fmt.Sprintf("java-%d", i)
		setQuota(t, source, "client-id", name, 20_000)
		waits = append(waits, javaThrottle(t, seeds[0], "quotas", name))
	}
	if direct, proxied := waits[0], waits[1]; direct == 0 || proxied < direct*9/10 || proxied > direct*11/10 {
		t.Errorf("Java: throttled for %v through the proxy, for %v directly", proxied, direct)
	}
	if wait := throttle(t, in.Seeds(), "quotas", 3, kgo.ClientID("another"), kgo.SASL(login("PLAIN", user, password))); wait != 0 {
		t.Errorf("a client without a quota was throttled for %v", wait)
	}
}

// logSize is the size of a topic's segments on the one broker of a cluster.
func logSize(t testing.TB, c *kafkatest.RealCluster, topic string) (size int64) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(c.Broker(1).DataDir(), topic+"-*", "*.log"))
	for _, name := range files {
		if info, err := os.Stat(name); err == nil {
			size += info.Size()
		}
	}
	if err != nil || size == 0 {
		t.Fatalf("segments of %s: %q, %v", topic, files, err)
	}
	return size
}

// TestMirrorQuota: a mirror that throttles kmirror delays no acknowledgement; kmirror keeps to the rate, asks nothing twice, and catches up.
func TestMirrorQuota(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	kafkatest.CreateTopic(t, source, "slow-mirror", 2, 1)
	in := testbed.Start(t, source, mirror, "--topics", "slow-mirror")
	testbed.WaitLive(t, in, "slow-mirror", 2)
	const rate, size, perSecond = 200_000, 20_000, 30 // bytes, records
	load := testbed.StartLoad(t, in.Seeds(), "slow-mirror", 2, perSecond, size, kgo.ProducerBatchCompression(kgo.NoCompression()))
	load.WaitAcked(5 * perSecond)
	before := load.Since(0)
	setQuota(t, mirror, "client-id", "kmirror-"+strings.ToLower(t.Name()), rate)
	mark, begun, held := load.Mark(), time.Now(), logSize(t, mirror, "slow-mirror")
	load.WaitAcked(10 * perSecond)
	load.Stop()
	took := time.Since(begun)
	t.Logf("acknowledged without a quota %s, with it %s", before, load.Since(mark))
	if took > 30*time.Second {
		t.Errorf("%d records at %d a second were acknowledged in %v: producers wait for the mirror", 10*perSecond, perSecond, took)
	}
	if wrote := logSize(t, mirror, "slow-mirror") - held; float64(wrote) > rate*(took.Seconds()+11)*1.2 { // a broker's window is 11 s
		t.Errorf("the mirror took %d bytes in %v", wrote, took)
	}
	in.WaitCaughtUp(2 * time.Minute)
	kafkatest.WaitEqual(t, source, mirror, "slow-mirror", time.Minute, kafkatest.SameOffsets())
	for _, trouble := range []string{"no answer in time", "i/o timeout"} {
		if strings.Contains(in.Log(), trouble) {
			t.Errorf("kmirror's log says %q", trouble)
		}
	}
}
