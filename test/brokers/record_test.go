package brokers

import (
	"encoding/binary"
	"encoding/hex"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
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

// kafkaVersion is what kafkatest runs.
const kafkaVersion = "4.3.1"

var record = flag.Bool("record", false, "record a real broker's answers into protocol/testdata/recorded")

// recorder asks a broker raw requests over one connection and keeps the answers.
type recorder struct {
	t    *testing.T
	conn net.Conn
	dir  string
}

// ask sends a request in a version and returns the answer's frame.
func (r *recorder) ask(req kmsg.Request, version int16) []byte {
	r.t.Helper()
	req.SetVersion(version)
	if _, err := r.conn.Write(kmsg.NewRequestFormatter(kmsg.FormatterClientID("recorder")).AppendRequest(nil, req, 7)); err != nil {
		r.t.Fatal(err)
	}
	if err := r.conn.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		r.t.Fatal(err)
	}
	frame, err := testbed.ReadFrame(r.conn)
	if err != nil {
		r.t.Fatalf("%T v%d: %v", req, version, err)
	}
	return frame
}

// write asks and writes the answer, with what there is in it, into a file.
func (r *recorder) write(req kmsg.Request, version int16, about string) {
	r.t.Helper()
	frame := r.ask(req, version)
	if got := binary.BigEndian.Uint32(frame[4:]); got != 7 {
		r.t.Fatalf("%T v%d: correlation ID %d", req, version, got)
	}
	name := strings.ToLower(kmsg.NameForKey(req.Key()))
	var text strings.Builder
	fmt.Fprintf(&text, "# %s v%d response of Apache Kafka %s: %s.\n", kmsg.NameForKey(req.Key()), version, kafkaVersion, about)
	fmt.Fprintf(&text, "# Bytes 0-3 size, 4-7 correlation ID, then %sthe body. Recorded by go test ./test/brokers -run TestRecordAnswers -record\nbroker:\n",
		map[bool]string{true: "the header's tags, ", false: ""}[req.IsFlexible()])
	for line := range slices.Chunk(frame, 32) {
		fmt.Fprintln(&text, hex.EncodeToString(line))
	}
	if err := os.WriteFile(filepath.Join(r.dir, fmt.Sprintf("%s-v%d.hex", name, version)), []byte(text.String()), 0o644); err != nil {
		r.t.Fatal(err)
	}
}

// TestRecordAnswers writes the golden frames that protocol's tests read, if it's told to.
func TestRecordAnswers(t *testing.T) {
	if !*record {
		return
	}
	source := kafkatest.Real(t, kafkatest.IDs(1, 2))
	kafkatest.CreateTopic(t, source, "orders", 1, 2)
	topics, err := kadm.NewClient(source.Client(t)).ListTopics(t.Context(), "orders")
	if err != nil {
		t.Fatal(err)
	}
	follower := source.Broker(3 - topics["orders"].Partitions[0].Leader)
	conn, err := net.Dial("tcp", follower.Addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	r := &recorder{t, conn, filepath.Join(kafkatest.Root(t), "protocol", "testdata", "recorded")}
	if err := os.MkdirAll(r.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	r.lookups(t, source)
	r.newLeaders(topics["orders"].ID)
}

// lookups records the answers that always name brokers.
func (r *recorder) lookups(t *testing.T, source *kafkatest.RealCluster) {
	group := source.Client(t, kgo.ConsumerGroup("readers"), kgo.ConsumeTopics("orders"))
	kafkatest.Eventually(t, time.Minute, func() error { // the coordinator is there
		described, err := kadm.NewClient(group).DescribeGroups(t.Context(), "readers")
		if err != nil {
			return err
		}
		return described["readers"].Err
	})
	for version := int16(0); version <= 13; version++ {
		req := kmsg.NewPtrMetadataRequest()
		name := "orders"
		req.Topics = []kmsg.MetadataRequestTopic{{Topic: &name}}
		r.write(req, version, "two brokers, a topic of one partition")
	}
	for version := int16(0); version <= 6; version++ {
		req := kmsg.NewPtrFindCoordinatorRequest()
		req.CoordinatorKey, req.CoordinatorKeys = "readers", []string{"readers", "writers"}
		r.write(req, version, "coordinators of groups readers and (v4 and later) writers")
	}
	for version := int16(0); version <= 2; version++ {
		r.write(kmsg.NewPtrDescribeClusterRequest(), version, "two brokers")
	}
}

// newLeaders records the answers of a broker that doesn't lead a partition: they name the leader's address (KIP-951).
func (r *recorder) newLeaders(topicID [16]byte) {
	for version := int16(10); version <= 13; version++ {
		req := kmsg.NewPtrProduceRequest()
		req.Acks, req.TimeoutMillis = 1, 1000
		req.Topics = []kmsg.ProduceRequestTopic{{Topic: "orders", TopicID: topicID, Partitions: []kmsg.ProduceRequestTopicPartition{{Records: emptyBatch()}}}}
		r.write(req, version, "NOT_LEADER_OR_FOLLOWER, with the leader's address")
	}
	group := "sharers"
	for version := int16(1); version <= 2; version++ {
		member := fmt.Sprintf("AAAAAAAAAAAAAAAAAAAA%dA", version)
		fetch := kmsg.NewPtrShareFetchRequest()
		fetch.GroupID, fetch.MemberID, fetch.MaxWaitMillis, fetch.MaxBytes, fetch.MaxRecords, fetch.BatchSize = &group, &member, 100, 1<<20, 10, 10
		fetch.Topics = []kmsg.ShareFetchRequestTopic{{TopicID: topicID, Partitions: []kmsg.ShareFetchRequestTopicPartition{{PartitionMaxBytes: 1 << 20}}}}
		r.write(fetch, version, "NOT_LEADER_OR_FOLLOWER, with the leader's address")
		ack := kmsg.NewPtrShareAcknowledgeRequest()
		ack.GroupID, ack.MemberID, ack.ShareSessionEpoch = &group, &member, 1
		ack.Topics = []kmsg.ShareAcknowledgeRequestTopic{{TopicID: topicID, Partitions: []kmsg.ShareAcknowledgeRequestTopicPartition{{
			AcknowledgementBatches: []kmsg.ShareAcknowledgeRequestTopicPartitionAcknowledgementBatch{{AcknowledgeTypes: []int8{1}}}}}}}
		r.write(ack, version, "NOT_LEADER_OR_FOLLOWER, whose leader isn't named")
	}
}

// emptyBatch is a record batch of one record without key and value.
func emptyBatch() []byte {
	r := kmsg.Record{Length: 6}
	batch := kmsg.RecordBatch{Magic: 2, PartitionLeaderEpoch: -1, NumRecords: 1, ProducerID: -1, ProducerEpoch: -1, FirstSequence: -1, Records: r.AppendTo(nil)}
	b := batch.AppendTo(nil)
	binary.BigEndian.PutUint32(b[8:], uint32(len(b)-12))
	return b
}
