package test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// rawConn speaks Kafka's protocol frame by frame, so that a test decides about every byte.
type rawConn struct {
	t    testing.TB
	conn net.Conn
	corr int32
}

func dialRaw(t testing.TB, addr string) *rawConn {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return &rawConn{t: t, conn: conn}
}

// send sends req and returns its correlation ID.
func (c *rawConn) send(req kmsg.Request) int32 {
	c.t.Helper()
	c.corr++
	if _, err := c.conn.Write(kmsg.NewRequestFormatter(kmsg.FormatterClientID("raw")).AppendRequest(nil, req, c.corr)); err != nil {
		c.t.Fatal(err)
	}
	return c.corr
}

// receive returns the next answer's correlation ID and what follows it.
func (c *rawConn) receive() (int32, []byte) {
	c.t.Helper()
	c.conn.SetReadDeadline(time.Now().Add(15 * time.Second))
	frame, err := testbed.ReadFrame(c.conn)
	if err != nil {
		c.t.Fatalf("no answer: %v", err)
	}
	return int32(binary.BigEndian.Uint32(frame[4:])), frame[8:]
}

// ask sends req and decodes its answer.
func (c *rawConn) ask(req kmsg.Request) kmsg.Response {
	c.t.Helper()
	want := c.send(req)
	got, body := c.receive()
	if got != want {
		c.t.Fatalf("correlation ID = %d, want %d", got, want)
	}
	resp := req.ResponseKind()
	if resp.IsFlexible() && req.Key() != int16(kmsg.ApiVersions) {
		body = body[1:] // no tags in the header
	}
	if err := resp.ReadFrom(body); err != nil {
		c.t.Fatalf("%T v%d: %v", resp, req.GetVersion(), err)
	}
	return resp
}

func (c *rawConn) apiVersions(version int16) *kmsg.ApiVersionsResponse {
	c.t.Helper()
	req := kmsg.NewPtrApiVersionsRequest()
	req.Version, req.ClientSoftwareName, req.ClientSoftwareVersion = version, "raw", "1"
	return c.ask(req).(*kmsg.ApiVersionsResponse)
}

// TestVersionsOfTomorrow is case C01: a client that opens with a version nobody knows is refused as a broker would, and goes on.
func TestVersionsOfTomorrow(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	in := testbed.Start(t, source, mirror, "--topics", topic)

	c := dialRaw(t, in.Seeds()[0])
	if _, err := c.conn.Write([]byte{0, 0, 0, 12, 0, 18, 0, 99, 0, 0, 0, 5, 0, 1, 'x', 0}); err != nil {
		t.Fatal(err)
	}
	want := []byte{0, 35, 0, 0, 0, 1, 0, 18, 0, 0, 0, 4}
	if corr, body := c.receive(); corr != 5 || !bytes.Equal(body, want) {
		t.Errorf("answer to ApiVersions v99: correlation ID %d, % x; want 5, % x", corr, body, want)
	}
	c.apiVersions(0)
	through := c.apiVersions(4)
	direct := dialRaw(t, source.Seeds()[0]).apiVersions(4)

	ranges := map[int16]kmsg.ApiVersionsResponseApiKey{}
	for _, k := range direct.ApiKeys {
		ranges[k.ApiKey] = k
	}
	if len(through.ApiKeys) != len(direct.ApiKeys) {
		t.Errorf("the proxy offers %d APIs, the broker %d", len(through.ApiKeys), len(direct.ApiKeys))
	}
	for _, k := range through.ApiKeys {
		if b, ok := ranges[k.ApiKey]; !ok || k.MinVersion != b.MinVersion || k.MaxVersion > b.MaxVersion {
			t.Errorf("%s: the proxy offers [%d, %d], the broker [%d, %d]", kmsg.NameForKey(k.ApiKey), k.MinVersion, k.MaxVersion, b.MinVersion, b.MaxVersion)
		}
	}
	wantFeatures(t, in, source)
	wantServed(t, in, through)

	if _, err := kadm.NewClient(testbed.NewWriter(t, in.Seeds(), "")).CreateTopic(t.Context(), 1, 1, nil, topic); err != nil {
		t.Fatal(err)
	}
	testbed.Write(t, in.Seeds(), topic, "uncapped", 10, kgo.MaxVersions(nil))
	kafkatest.WaitEqual(t, source, mirror, topic, 30*time.Second, kafkatest.SameOffsets())
}

// wantFeatures wants the broker's features through the proxy. Their order is any, and their epoch rises whenever the cluster learns something, so the
// broker is asked before and after the proxy until it says the same.
func wantFeatures(t *testing.T, in *testbed.Instance, source kafkatest.Cluster) {
	t.Helper()
	features := func(seeds []string) string {
		r := dialRaw(t, seeds[0]).apiVersions(4)
		slices.SortFunc(r.FinalizedFeatures, func(a, b kmsg.ApiVersionsResponseFinalizedFeature) int { return strings.Compare(a.Name, b.Name) })
		slices.SortFunc(r.SupportedFeatures, func(a, b kmsg.ApiVersionsResponseSupportedFeature) int { return strings.Compare(a.Name, b.Name) })
		return fmt.Sprint(r.SupportedFeatures, r.FinalizedFeatures, r.FinalizedFeaturesEpoch)
	}
	for begun, before := time.Now(), features(source.Seeds()); ; {
		got := features(in.Seeds())
		after := features(source.Seeds())
		if before == after {
			if got != after {
				t.Errorf("features through the proxy = %s, want the broker's %s", got, after)
			}
			return
		}
		if before = after; time.Since(begun) > time.Minute {
			t.Fatalf("the broker's features change all the time, now they are %s", after)
		}
	}
}

// wantServed asks with every offered version of the requests whose answers name brokers: each must name the proxy.
func wantServed(t *testing.T, in *testbed.Instance, offered *kmsg.ApiVersionsResponse) {
	wantHost, wantPort, _ := net.SplitHostPort(in.BrokerAddr(1))
	wantAddress := func(what string, host string, port int32) {
		t.Helper()
		if got := net.JoinHostPort(host, fmt.Sprint(port)); got != in.BrokerAddr(1) {
			t.Errorf("%s names %s, want %s:%s", what, got, wantHost, wantPort)
		}
	}
	for _, k := range offered.ApiKeys {
		for version := k.MinVersion; version <= k.MaxVersion; version++ {
			what := fmt.Sprintf("%s v%d", kmsg.NameForKey(k.ApiKey), version)
			switch kmsg.Key(k.ApiKey) {
			case kmsg.Metadata:
				req := kmsg.NewPtrMetadataRequest()
				req.Version = version
				for _, b := range dialRaw(t, in.Seeds()[0]).ask(req).(*kmsg.MetadataResponse).Brokers {
					wantAddress(what, b.Host, b.Port)
				}
			case kmsg.FindCoordinator:
				req := kmsg.NewPtrFindCoordinatorRequest()
				req.Version, req.CoordinatorKey, req.CoordinatorKeys = version, "versions", []string{"versions"}
				resp := dialRaw(t, in.BrokerAddr(1)).ask(req).(*kmsg.FindCoordinatorResponse)
				if version < 4 && resp.ErrorCode == 0 {
					wantAddress(what, resp.Host, resp.Port)
				}
				for _, c := range resp.Coordinators {
					if c.ErrorCode == 0 {
						wantAddress(what, c.Host, c.Port)
					}
				}
			case kmsg.DescribeCluster:
				req := kmsg.NewPtrDescribeClusterRequest()
				req.Version, req.EndpointType = version, 1
				for _, b := range dialRaw(t, in.BrokerAddr(1)).ask(req).(*kmsg.DescribeClusterResponse).Brokers {
					wantAddress(what, b.Host, b.Port)
				}
			}
		}
	}
}

// oneRecord is a record batch with one record without a key, as a producer without idempotence sends it.
func oneRecord(value string) []byte {
	record := kmsg.NewRecord()
	record.Value = []byte(value)
	body := record.AppendTo(nil)[1:] // without the length, which is 0 so far: one byte
	record.Length = int32(len(body))
	batch := kmsg.NewRecordBatch()
	batch.PartitionLeaderEpoch, batch.Magic = -1, 2
	batch.FirstTimestamp = time.Now().UnixMilli()
	batch.MaxTimestamp = batch.FirstTimestamp
	batch.ProducerID, batch.ProducerEpoch, batch.FirstSequence, batch.NumRecords = -1, -1, -1, 1
	batch.Records = record.AppendTo(nil)
	b := batch.AppendTo(nil)
	binary.BigEndian.PutUint32(b[8:], uint32(len(b)-12))
	binary.BigEndian.PutUint32(b[17:], crc32.Checksum(b[21:], crc32.MakeTable(crc32.Castagnoli)))
	return b
}

// TestAcksMixedOnOneConnection is case C07 (c): exactly one answer for acks=1 and acks=all, none for acks=0, in the order of the requests.
func TestAcksMixedOnOneConnection(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 1, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	testbed.WaitLive(t, in, topic, 1)
	c := dialRaw(t, in.BrokerAddr(1))
	const requests, depth = 1000, 5
	var waiting []int32
	receive := func() {
		t.Helper()
		if got, _ := c.receive(); got != waiting[0] {
			t.Fatalf("answer with correlation ID %d, want %d", got, waiting[0])
		}
		waiting = waiting[1:]
	}
	for i := range requests {
		acks := int16(i%3) - 1
		req := kmsg.NewPtrProduceRequest()
		req.Version, req.Acks, req.TimeoutMillis = int16(3+i%10), acks, 10_000
		of := kmsg.NewProduceRequestTopic()
		of.Topic = topic
		p := kmsg.NewProduceRequestTopicPartition()
		p.Records = oneRecord(fmt.Sprintf("mixed-%d", i))
		of.Partitions = append(of.Partitions, p)
		req.Topics = append(req.Topics, of)
		if corr := c.send(req); acks != 0 {
			waiting = append(waiting, corr)
		}
		for len(waiting) >= depth {
			receive()
		}
	}
	for len(waiting) > 0 {
		receive()
	}
	c.ask(func() kmsg.Request { r := kmsg.NewPtrMetadataRequest(); r.Version = 5; return r }()) // and nothing came in between
	kafkatest.WaitEqual(t, source, mirror, topic, 30*time.Second, kafkatest.SameOffsets())
	if got := kafkatest.LogOffsets(t, mirror, topic)[0].End; got != requests {
		t.Errorf("the mirror ends at %d, want %d", got, requests)
	}
}

// TestFireAndForget is case C07 (a) and (b): no answer is waited for where none comes, and a client that closes at once loses nothing.
func TestFireAndForget(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 3, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	testbed.WaitLive(t, in, topic, 3)
	t.Run("short runs", func(t *testing.T) {
		const runs, each = 200, 50
		for i := range runs {
			testbed.Write(t, in.Seeds(), topic, fmt.Sprintf("run%d", i), each, testbed.WithAcks(kgo.NoAck())...)
		}
		kafkatest.Eventually(t, 30*time.Second, func() error {
			total := int64(0)
			for _, o := range kafkatest.LogOffsets(t, source, topic) {
				total += o.End
			}
			if total != runs*each {
				return fmt.Errorf("the source has %d records, want %d", total, runs*each)
			}
			return nil
		})
		kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
	})
	t.Run("one long connection", func(t *testing.T) {
		out := kafkatest.Tool(t, performance, "--topic", topic, "--num-records", "100000", "--record-size", "1024", "--throughput", "-1",
			"--producer-props", "bootstrap.servers="+in.Seeds()[0], "acks=0", "enable.idempotence=false")
		if !strings.Contains(out, "100000 records sent") {
			t.Errorf("ProducerPerformance printed\n%s", out)
		}
		in.WaitForwarded(0)
		if held := in.Metrics()["kmirror_proxy_held_bytes"]; held != 0 {
			t.Errorf("the proxy holds %v bytes of requests that nobody answers, want 0", held)
		}
		kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
	})
}
