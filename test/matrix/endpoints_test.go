package matrix

import (
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/kafkatest"
)

// newLeaders asks brokers that don't lead a partition, in every version in which they then name the leader's address (KIP-951): through the proxy they
// say the same, and the address is the proxy's.
func (c cluster) newLeaders(t *testing.T) {
	const topic = "new-leaders"
	kafkatest.CreateTopic(t, c.source, topic, 1, 3)
	topics, err := kadm.NewClient(c.source.Client(t)).ListTopics(t.Context(), topic)
	if err != nil {
		t.Fatal(err)
	}
	id, partition := topics[topic].ID, topics[topic].Partitions[0]
	leader := fmt.Sprintf("broker-%d:9092", partition.Leader)
	for _, broker := range partition.Replicas {
		if broker == partition.Leader {
			continue
		}
		both := c.ways(topic)
		both[0].seeds, both[1].seeds = []string{c.source.Broker(broker).Addr}, []string{c.plain.BrokerAddr(broker)}
		for key, versions := range map[kmsg.Key][2]int16{kmsg.Produce: {10, 13}, kmsg.ShareFetch: {1, 2}} {
			for version := versions[0]; version <= versions[1]; version++ {
				what := fmt.Sprintf("%s v%d at broker %d", kmsg.NameForKey(int16(key)), version, broker)
				var direct string
				kafkatest.Eventually(t, time.Minute, func() error { // it may not have heard of the topic yet
					if direct = both[0].ask(t, asksForPartition(key, version, topic, id)); !strings.Contains(direct, leader) {
						return fmt.Errorf("%s: directly %s, want %s named", what, direct, leader)
					}
					return nil
				})
				if through := both[1].ask(t, asksForPartition(key, version, topic, id)); through != direct {
					t.Errorf("%s: through the proxy it is answered otherwise than directly:\n%s", what, diff(strings.Split(direct, "\n"), strings.Split(through, "\n")))
				}
			}
		}
	}
}

// asksForPartition is a request to the leader of partition 0 of a topic.
func asksForPartition(key kmsg.Key, version int16, topic string, id [16]byte) kmsg.Request {
	if key == kmsg.Produce {
		req := kmsg.NewPtrProduceRequest()
		req.Version, req.Acks, req.TimeoutMillis = version, -1, 5000
		req.Topics = []kmsg.ProduceRequestTopic{{Topic: topic, TopicID: id, Partitions: []kmsg.ProduceRequestTopicPartition{{Records: recordBatch()}}}}
		return req
	}
	var member [16]byte
	rand.Read(member[:])
	group, memberID := topic, base64.RawURLEncoding.EncodeToString(member[:])
	req := kmsg.NewPtrShareFetchRequest()
	req.Version, req.GroupID, req.MemberID, req.MaxWaitMillis, req.MaxBytes, req.MaxRecords, req.BatchSize = version, &group, &memberID, 100, 1<<20, 10, 10
	req.Topics = []kmsg.ShareFetchRequestTopic{{TopicID: id, Partitions: []kmsg.ShareFetchRequestTopicPartition{{PartitionMaxBytes: 1 << 20}}}}
	return req
}

// ask returns the answer to a request, in words that are the same on both ways.
func (w way) ask(t *testing.T, request kmsg.Request) string {
	t.Helper()
	c, err := net.Dial("tcp", w.seeds[0])
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	resp, exact, err := exchange(c, request, 5)
	if err != nil {
		return err.Error()
	}
	w.normalize(reflect.ValueOf(resp).Elem())
	printed, err := json.MarshalIndent(resp, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%s\nread to the last byte: %t", printed, exact)
}
