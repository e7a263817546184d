package protocol

import (
	"bytes"
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"
)

var update = flag.Bool("update", false, "write the golden files in testdata anew")

// golden is one file of testdata: named frames in hex, 32 bytes a line, after comments.
type golden struct {
	about  string
	frames []goldenFrame
}

type goldenFrame struct {
	name  string
	bytes []byte
}

func (g golden) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s\n", g.about)
	for _, f := range g.frames {
		fmt.Fprintf(&b, "%s:\n", f.name)
		for line := range slices.Chunk(f.bytes, 32) {
			fmt.Fprintln(&b, hex.EncodeToString(line))
		}
	}
	return b.String()
}

// readGolden returns the frames of a file by name.
func readGolden(t testing.TB, path string) map[string][]byte {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v; run go test ./protocol -update", err)
	}
	frames, name := make(map[string][]byte), ""
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		switch {
		case line == "" || line[0] == '#':
		case strings.HasSuffix(line, ":"):
			name = strings.TrimSuffix(line, ":")
		default:
			b, err := hex.DecodeString(line)
			if err != nil {
				t.Fatalf("%s: %v", path, err)
			}
			frames[name] = append(frames[name], b...)
		}
	}
	return frames
}

// check compares with the file, or writes it.
func (g golden) check(t *testing.T, path string) {
	t.Helper()
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(g.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want := readGolden(t, path)
	for _, f := range g.frames {
		if !bytes.Equal(f.bytes, want[f.name]) {
			t.Errorf("%s, %s:\n got %x\nwant %x", path, f.name, f.bytes, want[f.name])
		}
	}
}

// goldenBrokers have what is awkward in an address: 255 bytes, an IPv6 literal without brackets, no rack.
var goldenBrokers = []struct {
	id   int32
	host string
	port int32
	rack *string
}{{1, "broker-1.internal", 9092, kmsg.StringPtr("a")}, {2, strings.Repeat("h", 255), 65535, nil}, {1000, "2001:db8::1", 1, kmsg.StringPtr("")}}

// goldenAddress is where the proxy of these files listens.
func goldenAddress(nodeID int32, _ []byte, _ int32) (string, int32, bool) {
	return "kmirror.example.com", 9100 + nodeID, true
}

// goldenResponse is a response as a cluster of goldenBrokers gives it.
func goldenResponse(key, version int16) kmsg.Response {
	response := newResponse(key, version)
	switch r := response.(type) {
	case *kmsg.MetadataResponse:
		for _, b := range goldenBrokers {
			r.Brokers = append(r.Brokers, kmsg.MetadataResponseBroker{NodeID: b.id, Host: b.host, Port: b.port, Rack: b.rack})
		}
		topic := kmsg.NewMetadataResponseTopic()
		topic.Topic, topic.TopicID = kmsg.StringPtr("orders"), [16]byte{15: 9}
		topic.Partitions = []kmsg.MetadataResponseTopicPartition{{Partition: 0, Leader: 1, LeaderEpoch: 4, Replicas: []int32{1, 2}, ISR: []int32{1}, OfflineReplicas: []int32{2}}}
		r.Topics, r.ClusterID, r.ControllerID = append(r.Topics, topic), kmsg.StringPtr("cluster"), 2
	case *kmsg.FindCoordinatorResponse:
		b := goldenBrokers[0]
		r.NodeID, r.Host, r.Port = b.id, b.host, b.port
		for _, b := range goldenBrokers {
			r.Coordinators = append(r.Coordinators, kmsg.FindCoordinatorResponseCoordinator{Key: "group", NodeID: b.id, Host: b.host, Port: b.port})
		}
		r.Coordinators = append(r.Coordinators, kmsg.FindCoordinatorResponseCoordinator{Key: "none", NodeID: -1, Port: -1, ErrorCode: 15, ErrorMessage: kmsg.StringPtr("not available")})
	case *kmsg.DescribeClusterResponse:
		r.ClusterID, r.ControllerID, r.EndpointType = "cluster", 2, 1
		for _, b := range goldenBrokers {
			r.Brokers = append(r.Brokers, kmsg.DescribeClusterResponseBroker{NodeID: b.id, Host: b.host, Port: b.port, Rack: b.rack})
		}
	case *kmsg.ProduceResponse:
		p := kmsg.NewProduceResponseTopicPartition()
		p.ErrorCode, p.BaseOffset, p.CurrentLeader.LeaderID, p.CurrentLeader.LeaderEpoch = 6, -1, 2, 5
		r.Topics = []kmsg.ProduceResponseTopic{{Topic: "orders", TopicID: [16]byte{15: 9}, Partitions: []kmsg.ProduceResponseTopicPartition{p}}}
		if version >= 10 {
			for _, b := range goldenBrokers {
				r.Brokers = append(r.Brokers, kmsg.ProduceResponseBroker{NodeID: b.id, Host: b.host, Port: b.port, Rack: b.rack})
			}
		}
	case *kmsg.ShareFetchResponse:
		r.Topics = []kmsg.ShareFetchResponseTopic{{TopicID: [16]byte{15: 9}, Partitions: []kmsg.ShareFetchResponseTopicPartition{{Records: []byte("records"),
			AcquiredRecords: []kmsg.ShareFetchResponseTopicPartitionAcquiredRecord{{FirstOffset: 1, LastOffset: 2, DeliveryCount: 1}}}}}}
		for _, b := range goldenBrokers {
			r.NodeEndpoints = append(r.NodeEndpoints, kmsg.ShareFetchResponseNodeEndpoint{NodeID: b.id, Host: b.host, Port: b.port, Rack: b.rack})
		}
	case *kmsg.ShareAcknowledgeResponse:
		r.Topics = []kmsg.ShareAcknowledgeResponseTopic{{TopicID: [16]byte{15: 9}, Partitions: []kmsg.ShareAcknowledgeResponseTopicPartition{{ErrorCode: 6}}}}
		for _, b := range goldenBrokers {
			r.NodeEndpoints = append(r.NodeEndpoints, kmsg.ShareAcknowledgeResponseNodeEndpoint{NodeID: b.id, Host: b.host, Port: b.port, Rack: b.rack})
		}
	}
	return response
}

// goldenError is a response that says an error and names no broker, or node -1.
func goldenError(key, version int16) kmsg.Response {
	response := newResponse(key, version)
	if code := reflect.ValueOf(response).Elem().FieldByName("ErrorCode"); code.IsValid() {
		code.SetInt(15)
	}
	if r, ok := response.(*kmsg.FindCoordinatorResponse); ok {
		r.NodeID, r.Port, r.ErrorMessage = -1, -1, kmsg.StringPtr("not available")
		r.Coordinators = []kmsg.FindCoordinatorResponseCoordinator{{Key: "none", NodeID: -1, Port: -1, ErrorCode: 15, ErrorMessage: r.ErrorMessage}}
	}
	return response
}

// tagEverything gives every struct below v a tagged field that nobody knows.
func tagEverything(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			tagEverything(v.Elem())
		}
	case reflect.Slice:
		for i := range v.Len() {
			tagEverything(v.Index(i))
		}
	case reflect.Struct:
		if tags, ok := v.Addr().Interface().(*kmsg.Tags); ok {
			tags.Set(99, []byte("kept"))
			return
		}
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				tagEverything(v.Field(i))
			}
		}
	}
}

func TestGoldenRewrites(t *testing.T) {
	eachRewritten(func(key, version int16) {
		var frames []goldenFrame
		add := func(suffix string, response kmsg.Response) {
			tagEverything(reflect.ValueOf(response))
			frame := responseFrame(response, 7)
			out, err := Rewrite(nil, frame, key, version, goldenAddress)
			if err != nil {
				t.Fatalf("%s v%d%s: %v", apiName(key), version, suffix, err)
			}
			frames = append(frames, goldenFrame{"broker" + suffix, frame}, goldenFrame{"client" + suffix, out})
		}
		add("", goldenResponse(key, version))
		add("-error", goldenError(key, version))
		golden{fmt.Sprintf("%s v%d response, as the broker sends it (made with kmsg) and as the client gets it; then one with an error.", apiName(key), version),
			frames}.check(t, fmt.Sprintf("testdata/%s/v%d-response.hex", strings.ToLower(apiName(key)), version))
	})
}

func TestGoldenVersions(t *testing.T) {
	for version := int16(0); version <= maxAPIVersions; version++ {
		frame := responseFrame(apiVersionsResponse(version), 7)
		out, err := CutVersions(nil, frame, version)
		if err != nil {
			t.Fatalf("v%d: %v", version, err)
		}
		golden{fmt.Sprintf("ApiVersions v%d response of a broker newer than kmirror (made with kmsg), and as the client gets it.", version),
			[]goldenFrame{{"broker", frame}, {"client", out}}}.check(t, fmt.Sprintf("testdata/apiversions/v%d-response.hex", version))
	}
}

func TestGoldenProduce(t *testing.T) {
	for version := int16(0); version <= maxProduce; version++ {
		request := newProduceRequest(version)
		request.Acks, request.TimeoutMillis = -1, 30000
		for _, name := range []string{"orders", "payments"} {
			request.Topics = append(request.Topics, kmsg.ProduceRequestTopic{Topic: name, TopicID: [16]byte{15: byte(len(name))},
				Partitions: []kmsg.ProduceRequestTopicPartition{{Partition: 0, Records: []byte("batch 0")}, {Partition: 300}}})
		}
		frame := requestFrame(request, 7, kmsg.StringPtr("producer-1"), 0)
		path := fmt.Sprintf("testdata/produce/v%d-request.hex", version)
		golden{fmt.Sprintf("Produce v%d request, acks=all, two topics with partitions 0 and 300 (made with kmsg).", version),
			[]goldenFrame{{"client", frame}}}.check(t, path)
		got, err := walkRequest(readGolden(t, path)["client"])
		if want := kmsgRequest(request); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: walk gave %v, %v, want %v", path, got, err, want)
		}
	}
}
