package proxy

import (
	"bytes"
	"encoding/binary"
	"net"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/kafkatest"
	"kmirror/protocol"
)

// apiVersions asks for the versions behind an address, in versions nobody knows first, all on one connection.
func apiVersions(t *testing.T, address string) (refused []byte, v0, v4 *kmsg.ApiVersionsResponse) {
	t.Helper()
	a, err := net.ResolveTCPAddr("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	c := dialRaw(t, a)
	request := kmsg.NewPtrApiVersionsRequest()
	request.ClientSoftwareName, request.ClientSoftwareVersion = "kmirror", "test"
	request.Version = 4
	v99 := requestFrame(request, 99)
	binary.BigEndian.PutUint16(v99[6:], 99)
	c.send(v99)
	refused = c.receive()
	request.Version = 0
	c.send(requestFrame(request, 100))
	v0 = decode(t, kmsg.NewPtrApiVersionsResponse(), 0, c.receive())
	request.Version = 4
	c.send(requestFrame(request, 104))
	v4 = decode(t, kmsg.NewPtrApiVersionsResponse(), 4, c.receive())
	return refused, v0, v4
}

// settledVersions asks the broker, the proxy and the broker again, until the broker says the same both times: while it starts, the epoch of its
// features grows, and it lists features in any order.
func settledVersions(t *testing.T, broker, proxy string) (directRefused, refused []byte, v0, v4, direct *kmsg.ApiVersionsResponse) {
	t.Helper()
	eventually(t, "the broker says the same before and after the proxy", func() bool {
		var before *kmsg.ApiVersionsResponse
		directRefused, _, before = apiVersions(t, broker)
		refused, v0, v4 = apiVersions(t, proxy)
		_, _, direct = apiVersions(t, broker)
		for _, r := range []*kmsg.ApiVersionsResponse{before, v4, direct} {
			sortFeatures(r)
		}
		return bytes.Equal(before.AppendTo(nil), direct.AppendTo(nil))
	})
	return directRefused, refused, v0, v4, direct
}

func sortFeatures(r *kmsg.ApiVersionsResponse) {
	slices.SortFunc(r.SupportedFeatures, func(a, b kmsg.ApiVersionsResponseSupportedFeature) int { return strings.Compare(a.Name, b.Name) })
	slices.SortFunc(r.FinalizedFeatures, func(a, b kmsg.ApiVersionsResponseFinalizedFeature) int { return strings.Compare(a.Name, b.Name) })
}

func TestVersionsOfARealBroker(t *testing.T) {
	if testing.Short() {
		t.Skip("starts Apache Kafka")
	}
	cluster := kafkatest.Real(t)
	client := newClient(t, cluster.Seeds()[0])
	s := start(t, Options{Seeds: cluster.Seeds(), Brokers: lister{client}, Sink: &recorder{}})
	eventually(t, "the proxy is ready", s.Ready)
	directRefused, refused, v0, v4, direct := settledVersions(t, cluster.Seeds()[0], s.Addr().String())
	if !bytes.Equal(refused, directRefused) {
		t.Errorf("refusal of v99 is %x, the broker's own is %x", refused, directRefused)
	}
	for name, got := range map[string]*kmsg.ApiVersionsResponse{"v0": v0, "v4": v4} {
		if len(got.ApiKeys) != len(direct.ApiKeys) {
			t.Fatalf("%s: %d APIs, want the broker's %d", name, len(got.ApiKeys), len(direct.ApiKeys))
		}
		for i, k := range direct.ApiKeys {
			want := k.MaxVersion
			if limit, ok := protocol.MaxVersion(k.ApiKey); ok {
				want = min(want, limit)
			}
			if g := got.ApiKeys[i]; g.ApiKey != k.ApiKey || g.MinVersion != k.MinVersion || g.MaxVersion != want {
				t.Errorf("%s: %s is offered as %d to %d, want %d to %d", name, kmsg.NameForKey(g.ApiKey), g.MinVersion, g.MaxVersion, k.MinVersion, want)
			}
		}
	}
	v4.ApiKeys = direct.ApiKeys
	if got, want := v4.AppendTo(nil), direct.AppendTo(nil); !bytes.Equal(got, want) {
		t.Errorf("all but the versions: got %x, want %x", got, want)
	}

	ctx := testContext(t)
	producer := newClient(t, s.Addr().String(), kgo.DefaultProduceTopic("created-here"), kgo.ConsumeTopics("created-here"), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	if _, err := kadm.NewClient(producer).CreateTopic(ctx, 1, 1, nil, "created-here"); err != nil {
		t.Fatal(err)
	}
	if err := producer.ProduceSync(ctx, kgo.StringRecord("x")).FirstErr(); err != nil {
		t.Fatal(err)
	}
	if got := producer.PollFetches(ctx); got.Err() != nil || got.NumRecords() != 1 {
		t.Errorf("fetched %d records and %v, want 1", got.NumRecords(), got.Err())
	}
	if sink := s.o.Sink.(*recorder); sink.records() != 1 || sink.offers[0].TopicID == (protocol.TopicID{}) {
		t.Errorf("the sink was offered %+v, want one record by topic ID", sink.offers)
	}
	printed := kafkatest.Tool(t, "org.apache.kafka.tools.TopicCommand", "--bootstrap-server", s.Addr().String(), "--describe", "--topic", "created-here")
	if !strings.Contains(printed, "Leader: 1") {
		t.Errorf("kafka-topics printed %q, want a leader", printed)
	}
	if kcat, err := exec.LookPath("kcat"); err == nil {
		out, err := exec.Command(kcat, "-L", "-b", s.Addr().String()).CombinedOutput()
		if err != nil || strings.Contains(string(out), cluster.Seeds()[0]) || !strings.Contains(string(out), "created-here") {
			t.Errorf("kcat -L: %v\n%s", err, out)
		}
	}
}
