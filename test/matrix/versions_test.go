package matrix

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"net"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// answerWithin is how long either way may keep a request of the sweep. One that the broker keeps for longer must be kept by the proxy too.
const answerWithin = 10 * time.Second

// kept and ended are what becomes of requests without an answer.
const (
	kept  = "kept"
	ended = "the connection ended"
)

// shareMember is a member ID of share groups, a UUID as Kafka writes it.
const shareMember = "AAAAAAAAAAAAAAAAAAAAAQ"

// notReady is one that a broker says until it leads what was asked for: UNKNOWN_TOPIC_OR_PARTITION, LEADER_NOT_AVAILABLE, NOT_LEADER,
// COORDINATOR_LOAD_IN_PROGRESS, COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR.
var notReady = regexp.MustCompile(`"ErrorCode": (3|5|6|14|15|16),`)

// anError is a field of an answer that tells of an error.
var anError = regexp.MustCompile(`"ErrorCode": -?[1-9]`)

// TestEveryVersionIsServed (guarantee G2) sends a request of every API in every version that the proxy offers, directly and through it. Both are
// answered, and alike; the connection is in step afterwards.
func TestEveryVersionIsServed(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	in := testbed.Start(t, source, mirror, "--topics", "/.*-Produce/")
	both := ways(source, in, fmt.Sprint("versions-", time.Now().UnixNano())) // groups outlive a round of -count
	both[0].seeds, both[1].seeds = []string{source.Broker(1).Addr}, []string{in.BrokerAddr(1)}
	var offered [2]map[int16]kmsg.ApiVersionsResponseApiKey
	for i, w := range both {
		offered[i] = w.offered(t)
	}
	if len(offered[0]) != len(offered[1]) {
		t.Errorf("the proxy offers %d APIs, the broker %d", len(offered[1]), len(offered[0]))
	}
	for i := range both {
		both[i].createTopics(t, source, offered[1])
	}
	for _, w := range both {
		w.waitCoordinators(t)
	}
	for key, through := range offered[1] {
		direct, ok := offered[0][key]
		if !ok || through.MinVersion != direct.MinVersion || through.MaxVersion > direct.MaxVersion {
			t.Errorf("%s is offered as %d to %d, by the broker as %d to %d", kmsg.NameForKey(key), through.MinVersion, through.MaxVersion, direct.MinVersion, direct.MaxVersion)
		}
		t.Run(kmsg.NameForKey(key), parallel(func(t *testing.T) {
			for version := through.MinVersion; version <= through.MaxVersion; version++ {
				sameAnswers(t, both, key, version)
			}
		}))
	}
}

// offered is what a way's versions answer says.
func (w way) offered(t *testing.T) map[int16]kmsg.ApiVersionsResponseApiKey {
	t.Helper()
	request := kmsg.NewPtrApiVersionsRequest()
	c, err := net.Dial("tcp", w.seeds[0])
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	resp, _, err := exchange(c, request, 1)
	if err != nil {
		t.Fatal(err)
	}
	keys := make(map[int16]kmsg.ApiVersionsResponseApiKey)
	for _, k := range resp.(*kmsg.ApiVersionsResponse).ApiKeys {
		keys[k.ApiKey] = k
	}
	return keys
}

// createTopics makes a topic for each API, so that they don't disturb each other.
func (w *way) createTopics(t *testing.T, source *kafkatest.RealCluster, offered map[int16]kmsg.ApiVersionsResponseApiKey) {
	t.Helper()
	w.topicIDs = make(map[string][16]byte)
	request := kmsg.NewPtrCreateTopicsRequest()
	for key := range offered {
		topic := kmsg.NewCreateTopicsRequestTopic()
		topic.Topic, topic.NumPartitions, topic.ReplicationFactor = w.name+kmsg.NameForKey(key), 1, 1
		request.Topics = append(request.Topics, topic)
	}
	resp, err := request.RequestWith(t.Context(), source.Client(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, topic := range resp.Topics {
		if topic.ErrorCode != 0 {
			t.Fatalf("topic %s: error %d", topic.Topic, topic.ErrorCode)
		}
		w.topicIDs[topic.Topic] = topic.TopicID
	}
}

// waitCoordinators waits until the broker leads the topics and coordinates groups and transactions of these names.
func (w way) waitCoordinators(t *testing.T) {
	t.Helper()
	ready := func(request kmsg.Request) error {
		c, err := net.Dial("tcp", w.seeds[0])
		if err != nil {
			return err
		}
		defer c.Close()
		resp, _, err := exchange(c, request, 1)
		if err != nil {
			return err
		}
		printed, err := json.MarshalIndent(resp, "", " ")
		if found := notReady.Find(printed); found != nil {
			return fmt.Errorf("%T says %s", resp, found)
		}
		return err
	}
	groups, transactions, offsets := kmsg.NewPtrDescribeGroupsRequest(), kmsg.NewPtrDescribeTransactionsRequest(), kmsg.NewPtrListOffsetsRequest()
	groups.Version, offsets.Version = 5, 7
	for name := range w.topicIDs {
		groups.Groups = append(groups.Groups, name)
		transactions.TransactionalIDs = append(transactions.TransactionalIDs, name)
		topic := kmsg.NewListOffsetsRequestTopic()
		topic.Topic, topic.Partitions = name, []kmsg.ListOffsetsRequestTopicPartition{kmsg.NewListOffsetsRequestTopicPartition()}
		offsets.Topics = append(offsets.Topics, topic)
	}
	requests := []kmsg.Request{groups, transactions, offsets, kmsg.NewPtrInitProducerIDRequest()} // the first of which fetches a block of IDs
	for kind := range int8(3) {                                                                   // a group's, a transaction's, a share partition's; asking makes their topics
		r := kmsg.NewPtrFindCoordinatorRequest()
		r.Version, r.CoordinatorType, r.CoordinatorKeys = 6, kind, []string{w.name}
		if kind == 2 {
			name := w.name + kmsg.NameForKey(int16(kmsg.ShareFetch))
			id := w.topicIDs[name]
			r.CoordinatorKeys[0] = fmt.Sprintf("%s:%s:0", name, base64.RawURLEncoding.EncodeToString(id[:]))
			state := kmsg.NewPtrInitializeShareGroupStateRequest() // without it a ShareFetch fails, sooner or later
			fill(reflect.ValueOf(state).Elem(), name, id)
			requests = append(requests, state)
		}
		requests = slices.Insert(requests, int(kind), kmsg.Request(r))
	}
	for _, r := range requests {
		kafkatest.Eventually(t, time.Minute, func() error { return ready(r) })
	}
}

// sameAnswers sends the same request on both ways at once, each on a connection of its own.
func sameAnswers(t *testing.T, both [2]way, key, version int16) {
	t.Helper()
	var answers [2]string
	done := make(chan struct{})
	go func() {
		defer close(done)
		answers[0] = both[0].answer(key, version)
	}()
	answers[1] = both[1].answer(key, version)
	<-done
	if answers[0] != answers[1] {
		t.Errorf("v%d: through the proxy it is answered otherwise than directly:\n%s", version, diff(strings.Split(answers[0], "\n"), strings.Split(answers[1], "\n")))
	}
	switch kmsg.Key(key) {
	case kmsg.Produce:
		if version < 3 {
			if answers[0] != ended {
				t.Errorf("v%d, which brokers only offer (KAFKA-18659): %s", version, answers[0])
			}
			return
		}
		fallthrough
	case kmsg.Fetch, kmsg.Metadata, kmsg.FindCoordinator, kmsg.DescribeCluster, kmsg.ApiVersions, kmsg.ShareFetch:
		if anError.MatchString(answers[0]) {
			t.Errorf("v%d: the broker refuses it: %s", version, answers[0])
		}
	}
	if !strings.HasPrefix(answers[0], "{") {
		t.Errorf("v%d: the broker: %s", version, answers[0])
	}
}

// answer is what a request of an API is answered with, in words that are the same on both ways.
func (w way) answer(key, version int16) string {
	c, err := net.Dial("tcp", w.seeds[0])
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	resp, exact, err := exchange(c, w.request(key, version), 77)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return kept
	case err != nil:
		return ended
	}
	next := kmsg.NewPtrApiVersionsRequest()
	if _, _, err := exchange(c, next, 78); err != nil {
		return fmt.Sprintf("%T and then %v", resp, err)
	}
	forget(resp)
	w.normalize(reflect.ValueOf(resp).Elem())
	printed, err := json.MarshalIndent(resp, "", " ")
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%s\nread to the last byte: %t", printed, exact)
}

// exchange sends a request and reads its answer; exact tells whether the answer is nothing but the fields that kmsg knows.
func exchange(c net.Conn, request kmsg.Request, correlationID int32) (resp kmsg.Response, exact bool, err error) {
	if err := c.SetDeadline(time.Now().Add(answerWithin)); err != nil {
		return nil, false, err
	}
	if _, err := c.Write(kmsg.NewRequestFormatter(kmsg.FormatterClientID("versions")).AppendRequest(nil, request, correlationID)); err != nil {
		return nil, false, err
	}
	frame, err := testbed.ReadFrame(c)
	if err != nil {
		return nil, false, err
	}
	if len(frame) < 8 || binary.BigEndian.Uint32(frame[4:]) != uint32(correlationID) {
		return nil, false, fmt.Errorf("an answer to another request: %x", frame)
	}
	body := frame[8:]
	if request.IsFlexible() && request.Key() != int16(kmsg.ApiVersions) {
		if len(body) == 0 || body[0] != 0 {
			return nil, false, fmt.Errorf("a response header with tags: %x", frame)
		}
		body = body[1:]
	}
	resp = request.ResponseKind()
	resp.SetVersion(request.GetVersion())
	if err := resp.ReadFrom(body); err != nil {
		return nil, false, err
	}
	return resp, bytes.Equal(resp.AppendTo(nil), body), nil
}

// request is one of an API in which each list has an item and each name is that of the API's topic.
func (w way) request(key, version int16) kmsg.Request {
	r := kmsg.RequestForKey(key)
	r.SetVersion(version)
	name := w.name + kmsg.NameForKey(key)
	fill(reflect.ValueOf(r).Elem(), name, w.topicIDs[name])
	switch r := r.(type) {
	case *kmsg.ProduceRequest:
		r.Acks, r.TimeoutMillis = -1, 5000
		r.Topics[0].Partitions[0].Records = recordBatch()
	case *kmsg.FetchRequest:
		r.MaxBytes, r.SessionEpoch, r.ForgottenTopics = 1<<20, -1, nil
		r.Topics[0].Partitions[0].PartitionMaxBytes, r.Topics[0].Partitions[0].ReplicaDirectoryID = 1<<20, [16]byte{}
	case *kmsg.MetadataRequest:
		if version < 12 {
			r.Topics[0].TopicID = [16]byte{}
		} else {
			r.Topics[0].Topic = nil
		}
	case *kmsg.DeleteTopicsRequest:
		if version >= 6 {
			r.Topics[0].Topic = nil
		}
	case *kmsg.ShareFetchRequest:
		r.GroupID, r.MemberID, r.MaxBytes, r.MaxRecords, r.BatchSize, r.ForgottenTopicsData = &name, kmsg.StringPtr(shareMember), 1<<20, 10, 10, nil
		r.Topics[0].Partitions[0].AcknowledgementBatches = nil
	case *kmsg.ShareAcknowledgeRequest:
		r.GroupID, r.MemberID, r.ShareSessionEpoch = &name, kmsg.StringPtr(shareMember), 1
	case *kmsg.DescribeACLsRequest:
		r.ResourceType, r.ResourcePatternType, r.Operation, r.PermissionType = 2, 3, 3, 3
	case *kmsg.CreateACLsRequest:
		c := &r.Creations[0]
		c.ResourceType, c.ResourcePatternType, c.Operation, c.PermissionType = 2, 3, 3, 3
	case *kmsg.DeleteACLsRequest:
		f := &r.Filters[0]
		f.ResourceType, f.ResourcePatternType, f.Operation, f.PermissionType = 2, 3, 3, 3
	case *kmsg.AddRaftVoterRequest:
		r.Listeners[0].Name = "ABSENT" // Kafka prints it in capitals
	case *kmsg.CreateTopicsRequest:
		r.ValidateOnly = true
		r.Topics[0] = kmsg.NewCreateTopicsRequestTopic()
		r.Topics[0].Topic, r.Topics[0].NumPartitions, r.Topics[0].ReplicationFactor = name+"-new", 1, 1
	case *kmsg.JoinGroupRequest:
		r.Group += fmt.Sprint("-", version) // one that waits for nobody
		r.ProtocolType, r.SessionTimeoutMillis, r.RebalanceTimeoutMillis, r.MemberID = "consumer", 6000, 6000, ""
	}
	return r
}

// fill gives each list of a request an item and each name a value. Numbers stay what they are by default.
func fill(v reflect.Value, name string, topicID [16]byte) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Field(i); v.Type().Field(i).Name != "UnknownTags" {
				if f.Kind() == reflect.Pointer && f.Type().Elem().Kind() == reflect.String && v.Type().Field(i).Name == "Topic" {
					f.Set(reflect.ValueOf(&name))
				}
				fill(f, name, topicID)
			}
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		if item, ok := v.Index(0).Addr().Interface().(interface{ Default() }); ok {
			item.Default()
		}
		fill(v.Index(0), name, topicID)
	case reflect.String:
		v.SetString(name)
	case reflect.Array:
		v.Set(reflect.ValueOf(topicID))
	}
}

// normalize replaces names, topic IDs and addresses of a way by what they stand for.
func (w way) normalize(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			w.normalize(v.Elem())
		}
	case reflect.Struct:
		if host, port := v.FieldByName("Host"), v.FieldByName("Port"); host.IsValid() && host.Kind() == reflect.String && port.IsValid() {
			if broker, ok := w.addresses[fmt.Sprintf("%s:%d", host.String(), port.Int())]; ok {
				host.SetString(broker)
				port.SetInt(0)
			}
		}
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() && v.Type().Field(i).Name != "UnknownTags" {
				w.normalize(v.Field(i))
			}
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			v.SetBytes(bytes.ReplaceAll(v.Bytes(), []byte(w.name), []byte("RUN-")))
			return
		}
		for i := range v.Len() {
			w.normalize(v.Index(i))
		}
	case reflect.String:
		v.SetString(strings.ReplaceAll(v.String(), w.name, "RUN-"))
	case reflect.Array:
		for _, id := range w.topicIDs {
			if v.Interface() == id {
				v.Set(reflect.ValueOf([16]byte{1}))
				return
			}
		}
	}
}

// forget clears what a cluster makes up for each answer: IDs, times, sizes on disk.
func forget(resp kmsg.Response) {
	switch r := resp.(type) {
	case *kmsg.ApiVersionsResponse:
		for i := range r.ApiKeys {
			if r.ApiKeys[i].ApiKey == int16(kmsg.Fetch) {
				r.ApiKeys[i].MaxVersion = min(r.ApiKeys[i].MaxVersion, 15) // which is what the proxy offers
			}
		}
		slices.SortFunc(r.SupportedFeatures, func(a, b kmsg.ApiVersionsResponseSupportedFeature) int { return strings.Compare(a.Name, b.Name) })
		slices.SortFunc(r.FinalizedFeatures, func(a, b kmsg.ApiVersionsResponseFinalizedFeature) int { return strings.Compare(a.Name, b.Name) })
		r.FinalizedFeaturesEpoch = 0 // grows while a broker starts
	case *kmsg.InitProducerIDResponse:
		r.ProducerID = min(r.ProducerID, 0)
	case *kmsg.JoinGroupResponse:
		r.LeaderID, r.MemberID = "", ""
		for i := range r.Members {
			r.Members[i].MemberID = ""
		}
	case *kmsg.CreateTopicsResponse:
		r.Topics[0].TopicID = [16]byte{}
	case *kmsg.ListGroupsResponse:
		r.Groups = nil // of the other APIs; from v4 on none is in the state that was asked for
	case *kmsg.ShareFetchResponse: // a partition without records is listed when it was ready in time
		r.Topics = slices.DeleteFunc(r.Topics, func(topic kmsg.ShareFetchResponseTopic) bool {
			p := topic.Partitions[0]
			return p.ErrorCode == 0 && len(p.Records) == 0
		})
		if len(r.Topics) == 0 {
			r.Topics = nil
		}
	case *kmsg.DescribeLogDirsResponse:
		r.Dirs[0].UsableBytes = min(r.Dirs[0].UsableBytes, 0)
	}
}

// recordBatch is a batch of one record without key and value.
func recordBatch() []byte {
	r := kmsg.Record{Length: 6}
	batch := kmsg.RecordBatch{Magic: 2, PartitionLeaderEpoch: -1, NumRecords: 1, ProducerID: -1, ProducerEpoch: -1, FirstSequence: -1, Records: r.AppendTo(nil)}
	b := batch.AppendTo(nil)
	binary.BigEndian.PutUint32(b[8:], uint32(len(b)-12))
	binary.BigEndian.PutUint32(b[17:], crc32.Checksum(b[21:], crc32.MakeTable(crc32.Castagnoli)))
	return b
}
