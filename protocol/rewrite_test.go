package protocol

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// kmsgRewrite does what Rewrite does by decoding and encoding with kmsg.
func kmsgRewrite(response kmsg.Response, address AddressFunc) {
	eachHost(reflect.ValueOf(response), func(nodeID int32, host, port reflect.Value) {
		if host.String() == "" {
			return
		}
		h, p, _ := address(nodeID, []byte(host.String()), int32(port.Int()))
		host.SetString(h)
		port.SetInt(int64(p))
	})
}

func TestRewriteAgreesWithKmsgInEveryVersion(t *testing.T) {
	r := rand.New(rand.NewSource(1))
	eachRewritten(func(key, version int16) {
		for range 200 {
			response := filledResponse(r, key, version)
			frame := responseFrame(response, r.Int31())
			kmsgRewrite(response, translate)
			want := responseFrame(response, int32(binary.BigEndian.Uint32(frame[4:])))
			got, err := Rewrite([]byte("before"), frame, key, version, translate)
			if err != nil {
				t.Fatalf("%s v%d: %v\n%x", apiName(key), version, err, frame)
			}
			if !bytes.Equal(got, append([]byte("before"), want...)) {
				t.Fatalf("%s v%d: Rewrite(%x)\n got %x\nwant %x", apiName(key), version, frame, got[6:], want)
			}
		}
	})
}

// TestTopicsOfMetadataAgreeWithKmsg: names and IDs are those that kmsg wrote; a response that is cut off names none but those before the cut.
func TestTopicsOfMetadataAgreeWithKmsg(t *testing.T) {
	r := rand.New(rand.NewSource(5))
	for version := int16(0); version <= maxMetadata; version++ {
		for range 100 {
			response := filledResponse(r, KeyMetadata, version).(*kmsg.MetadataResponse)
			var want, got []string
			for _, topic := range response.Topics {
				if version >= 10 && topic.Topic != nil && *topic.Topic != "" && topic.TopicID != [16]byte{} {
					want = append(want, fmt.Sprintf("%s %x", *topic.Topic, topic.TopicID))
				}
			}
			take := func(name []byte, id TopicID) { got = append(got, fmt.Sprintf("%s %x", name, id)) }
			frame := responseFrame(response, 7)
			if MetadataTopics(frame, version, take); !slices.Equal(got, want) {
				t.Fatalf("v%d: MetadataTopics(%x) = %q, want %q", version, frame, got, want)
			}
			got = nil
			cut := bytes.Clone(frame[:8+r.Intn(len(frame)-8)])
			binary.BigEndian.PutUint32(cut, uint32(len(cut)-4))
			if MetadataTopics(cut, version, take); len(got) > len(want) || !slices.Equal(got, want[:len(got)]) {
				t.Fatalf("v%d: MetadataTopics of a part = %q, want the first of %q", version, got, want)
			}
		}
	}
}

func TestWhatIsRewritten(t *testing.T) {
	first := map[int16]int16{KeyProduce: 10, KeyMetadata: 0, KeyFindCoordinator: 0, KeyDescribeCluster: 0, KeyShareFetch: 0, KeyShareAcknowledge: 0}
	for key := int16(-1); key < 200; key++ {
		for version := int16(0); version < 20; version++ {
			from, ok := first[key]
			if got, want := Rewrites(key, version), ok && version >= from; got != want {
				t.Errorf("Rewrites(%s v%d) = %v, want %v", apiName(key), version, got, want)
			}
		}
	}
}

func TestRewriteToTheSameAddressesIsACopy(t *testing.T) {
	same := func(_ int32, host []byte, port int32) (string, int32, bool) { return string(host), port, true }
	r := rand.New(rand.NewSource(2))
	eachRewritten(func(key, version int16) {
		for range 50 {
			frame := responseFrame(filledResponse(r, key, version), 7)
			if got, err := Rewrite(nil, frame, key, version, same); err != nil || !bytes.Equal(got, frame) {
				t.Fatalf("%s v%d: Rewrite(%x) = %x, %v, want the same", apiName(key), version, frame, got, err)
			}
		}
	})
}

func TestEveryStrictPrefixOfAResponseFails(t *testing.T) {
	r := rand.New(rand.NewSource(3))
	eachRewritten(func(key, version int16) {
		for range 10 {
			frame := responseFrame(filledResponse(r, key, version), 7)
			for n := range len(frame) {
				prefix := bytes.Clone(frame[:n])
				if _, err := Rewrite(nil, prefix, key, version, translate); !errors.Is(err, ErrMalformed) {
					t.Fatalf("%s v%d: Rewrite of %d of %d bytes = %v, want ErrMalformed", apiName(key), version, n, len(frame), err)
				}
				if n >= 4 {
					binary.BigEndian.PutUint32(prefix, uint32(n-4)) // the size agrees, the content is cut
				}
				if out, err := Rewrite([]byte("keep"), prefix, key, version, translate); !errors.Is(err, ErrMalformed) || string(out) != "keep" {
					t.Fatalf("%s v%d: Rewrite of a frame of %d of %d bytes = %q, %v, want ErrMalformed", apiName(key), version, n, len(frame), out, err)
				}
			}
		}
	})
}

func TestNoAddressLeaksOfABrokerWithoutListener(t *testing.T) {
	nowhere := func(nodeID int32, host []byte, port int32) (string, int32, bool) {
		return "proxy", 9100, nodeID%2 == 0
	}
	secret := []byte("secret.internal")
	r := rand.New(rand.NewSource(4))
	eachRewritten(func(key, version int16) {
		for range 100 {
			response := filledResponse(r, key, version)
			kept, total := 0, 0
			eachHost(reflect.ValueOf(response), func(nodeID int32, host, port reflect.Value) {
				total++
				if nodeID%2 == 0 {
					kept++
				}
				host.SetString(string(secret))
			})
			got, err := Rewrite(nil, responseFrame(response, 7), key, version, nowhere)
			if err != nil {
				t.Fatalf("%s v%d: %v", apiName(key), version, err)
			}
			if bytes.Contains(got, secret) {
				t.Fatalf("%s v%d: Rewrite kept a broker's own address: %q", apiName(key), version, got)
			}
			read := newResponse(key, version)
			readResponse(t, read, got)
			if key == KeyFindCoordinator {
				checkCoordinators(t, read.(*kmsg.FindCoordinatorResponse), response.(*kmsg.FindCoordinatorResponse))
				continue
			}
			left := 0
			eachHost(reflect.ValueOf(read), func(int32, reflect.Value, reflect.Value) { left++ })
			if left != kept {
				t.Fatalf("%s v%d: %d of %d brokers are left, want %d", apiName(key), version, left, total, kept)
			}
		}
	})
}

// checkCoordinators checks that coordinators with odd node IDs became COORDINATOR_NOT_AVAILABLE.
func checkCoordinators(t *testing.T, got, sent *kmsg.FindCoordinatorResponse) {
	t.Helper()
	if got.Version <= 3 {
		if sent.NodeID%2 != 0 && (got.NodeID != -1 || got.Host != "" || got.Port != -1 || got.ErrorCode != 15) {
			t.Fatalf("FindCoordinator v%d: got node %d %q:%d error %d, want none with error 15", got.Version, got.NodeID, got.Host, got.Port, got.ErrorCode)
		}
		return
	}
	for i, c := range got.Coordinators {
		if sent.Coordinators[i].NodeID%2 != 0 && (c.NodeID != -1 || c.Host != "" || c.Port != -1 || c.ErrorCode != 15) {
			t.Fatalf("FindCoordinator v%d: got node %d %q:%d error %d, want none with error 15", got.Version, c.NodeID, c.Host, c.Port, c.ErrorCode)
		}
		if c.Key != sent.Coordinators[i].Key {
			t.Fatalf("FindCoordinator v%d: got key %q, want %q", got.Version, c.Key, sent.Coordinators[i].Key)
		}
	}
}

func TestUnknownCoordinatorStaysUntouched(t *testing.T) {
	for version := int16(0); version <= maxFindCoordinator; version++ {
		response := newResponse(KeyFindCoordinator, version).(*kmsg.FindCoordinatorResponse)
		response.NodeID, response.Port, response.ErrorCode = -1, -1, 15
		response.Coordinators = []kmsg.FindCoordinatorResponseCoordinator{{Key: "g", NodeID: -1, Port: -1, ErrorCode: 15}}
		frame := responseFrame(response, 7)
		refuse := func(int32, []byte, int32) (string, int32, bool) {
			t.Errorf("v%d: asked for the address of no node", version)
			return "", 0, false
		}
		if got, err := Rewrite(nil, frame, KeyFindCoordinator, version, refuse); err != nil || !bytes.Equal(got, frame) {
			t.Errorf("v%d: Rewrite(%x) = %x, %v, want the same", version, frame, got, err)
		}
	}
}

func TestControllersAreLeftOutOfDescribeCluster(t *testing.T) {
	response := newResponse(KeyDescribeCluster, 1).(*kmsg.DescribeClusterResponse)
	response.EndpointType = 2
	response.Brokers = []kmsg.DescribeClusterResponseBroker{{NodeID: 1, Host: "controller.internal", Port: 9093}}
	got, err := Rewrite(nil, responseFrame(response, 7), KeyDescribeCluster, 1, translate)
	if err != nil || bytes.Contains(got, []byte("controller.internal")) {
		t.Fatalf("Rewrite = %q, %v, want no controller", got, err)
	}
}

func TestRewriteRefusesVersionsItDoesNotKnow(t *testing.T) {
	for _, key := range append(rewritten, KeyFetch, 18, 68) {
		limit, ok := MaxVersion(key)
		if !ok {
			limit = 0
		}
		frame := []byte{0, 0, 0, 60, 0, 0, 0, 1, 63: 0}
		if _, err := Rewrite(nil, frame, key, limit+1, translate); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s v%d: Rewrite = %v, want ErrMalformed", apiName(key), limit+1, err)
		}
	}
}

// TestEveryResponseWithAnAddressIsDecidedAbout fails when a new kmsg brings a host and a port, in a response of its own or in one that has others.
func TestEveryResponseWithAnAddressIsDecidedAbout(t *testing.T) {
	const (
		isRewritten = "rewritten"
		controllers = "between controllers"
		members     = "user endpoints of the group's members, not brokers"
	)
	decided := map[string]string{
		"Produce.Brokers": isRewritten, "Metadata.Brokers": isRewritten, "FindCoordinator": isRewritten, "FindCoordinator.Coordinators": isRewritten,
		"DescribeCluster.Brokers": isRewritten, "ShareFetch.NodeEndpoints": isRewritten, "ShareAcknowledge.NodeEndpoints": isRewritten,
		"Fetch.Brokers":                                               "cut to v15; the addresses come with v16",
		"Vote.NodeEndpoints":                                          controllers,
		"BeginQuorumEpoch.NodeEndpoints":                              controllers,
		"EndQuorumEpoch.NodeEndpoints":                                controllers,
		"FetchSnapshot.NodeEndpoints":                                 controllers,
		"UpdateRaftVoter.CurrentLeader":                               controllers,
		"DescribeQuorum.Nodes.Listeners":                              "listeners of controllers, for an operator to read",
		"StreamsGroupHeartbeat.PartitionsByUserEndpoint.UserEndpoint": members,
		"StreamsGroupDescribe.Groups.Members.UserEndpoint":            members,
	}
	found, rewrites := make(map[string]bool), make(map[string]bool)
	for key := int16(0); key <= kmsg.MaxKey; key++ {
		response := kmsg.ResponseForKey(key)
		if response == nil {
			continue
		}
		for _, path := range addressPaths(reflect.TypeOf(response), kmsg.NameForKey(key)) {
			found[path] = true
			rewrites[kmsg.NameForKey(key)] = rewrites[kmsg.NameForKey(key)] || decided[path] == isRewritten
			if decided[path] == "" {
				t.Errorf("the response has a host and a port at %s: rewrite it, cut its version, or say why it may pass", path)
			}
		}
	}
	for path, decision := range decided {
		if !found[path] {
			t.Errorf("%s (%s) has no address", path, decision)
		}
	}
	for _, key := range rewritten {
		if !rewrites[kmsg.NameForKey(key)] {
			t.Errorf("%s is rewritten but not decided so", kmsg.NameForKey(key))
		}
	}
}

// addressPaths lists where t has a text field with Host in its name beside a number with Port in it, in any depth, by the names of the fields that lead there.
func addressPaths(t reflect.Type, path string) (paths []string) {
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array:
		return addressPaths(t.Elem(), path)
	case reflect.Struct:
		host, port := false, false
		for i := range t.NumField() {
			f := t.Field(i)
			kind := f.Type.Kind()
			if kind == reflect.Pointer {
				kind = f.Type.Elem().Kind()
			}
			host = host || strings.Contains(f.Name, "Host") && kind == reflect.String
			port = port || strings.Contains(f.Name, "Port") && kind >= reflect.Int && kind <= reflect.Uint64
			paths = append(paths, addressPaths(f.Type, path+"."+f.Name)...)
		}
		if host && port {
			paths = append(paths, path)
		}
	}
	return paths
}

// TestAddressPaths proves that the test above can fail.
func TestAddressPaths(t *testing.T) {
	type endpoint struct {
		NodeID   int32
		HostName *string
		Port     uint16
	}
	type response struct {
		ClientHost string
		Leader     struct{ Endpoints []endpoint }
		Old        *endpoint
	}
	if got, want := addressPaths(reflect.TypeFor[*response](), "Tomorrow"), []string{"Tomorrow.Leader.Endpoints", "Tomorrow.Old"}; !slices.Equal(got, want) {
		t.Errorf("addressPaths = %q, want %q", got, want)
	}
}

func TestRewriteAllocatesNothing(t *testing.T) {
	frame := metadataFrame(100)
	dst := make([]byte, 0, 2*len(frame))
	address := func(int32, []byte, int32) (string, int32, bool) { return "proxy.example.net", 9100, true }
	if n := testing.AllocsPerRun(100, func() { Rewrite(dst, frame, KeyMetadata, 12, address) }); n != 0 {
		t.Errorf("Rewrite allocates %v times, want 0", n)
	}
}

// metadataFrame is a Metadata v12 response of 3 brokers and n partitions.
func metadataFrame(n int) []byte {
	m := newResponse(KeyMetadata, 12).(*kmsg.MetadataResponse)
	for id := range int32(3) {
		m.Brokers = append(m.Brokers, kmsg.MetadataResponseBroker{NodeID: id, Host: "broker.example.com", Port: 9092})
	}
	topic := kmsg.NewMetadataResponseTopic()
	topic.Topic = kmsg.StringPtr("orders")
	for p := range int32(n) {
		topic.Partitions = append(topic.Partitions, kmsg.MetadataResponseTopicPartition{Partition: p, Leader: p % 3,
			Replicas: []int32{0, 1, 2}, ISR: []int32{0, 1, 2}})
	}
	m.Topics = append(m.Topics, topic)
	return responseFrame(m, 7)
}

func BenchmarkRewriteMetadata(b *testing.B) {
	frame := metadataFrame(1000)
	dst := make([]byte, 0, 2*len(frame))
	address := func(int32, []byte, int32) (string, int32, bool) { return "proxy.example.net", 9100, true }
	b.SetBytes(int64(len(frame)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Rewrite(dst, frame, KeyMetadata, 12, address); err != nil {
			b.Fatal(err)
		}
	}
}
