// Command sarama prints a transcript of IBM's sarama: transcript BOOTSTRAP PREFIX; or how a log-in goes: login BOOTSTRAP MECHANISM HANDSHAKE USER SECRET. It is a module of its own, so that kmirror doesn't depend on sarama.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/IBM/sarama"
)

func main() {
	var err error
	switch args := os.Args[1:]; {
	case len(args) == 3 && args[0] == "transcript":
		err = transcript(args[1], args[2])
	case len(args) == 6 && args[0] == "login":
		err = login(args[1], args[2], args[3], args[4], args[5])
	default:
		fmt.Fprintln(os.Stderr, "usage: sarama transcript BOOTSTRAP PREFIX | login BOOTSTRAP MECHANISM HANDSHAKE USER SECRET")
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func newConfig() *sarama.Config {
	c := sarama.NewConfig()
	c.Version = sarama.MaxVersion
	c.Producer.Return.Successes = true
	c.Producer.Partitioner = sarama.NewManualPartitioner
	c.Producer.Retry.Max = 2
	c.Consumer.Offsets.Initial = sarama.OffsetOldest
	c.Consumer.MaxWaitTime = 100 * time.Millisecond
	return c
}

func idempotent() *sarama.Config {
	c := newConfig()
	c.Producer.Idempotent = true
	c.Producer.RequiredAcks = sarama.WaitForAll
	c.Net.MaxOpenRequests = 1
	return c
}

func transcript(bootstrap, prefix string) error {
	client, err := sarama.NewClient([]string{bootstrap}, newConfig())
	if err != nil {
		return err
	}
	defer client.Close()
	admin, err := sarama.NewClusterAdminFromClient(client)
	if err != nil {
		return err
	}
	topic := prefix + "topic"
	if err := create(client, admin, topic); err != nil {
		return err
	}
	if err := produce(bootstrap, topic); err != nil {
		return err
	}
	if err := group(bootstrap, topic, prefix+"readers", 90, newConfig()); err != nil {
		return err
	}
	if err := transactions(bootstrap, topic, prefix+"tx"); err != nil {
		return err
	}
	committed := newConfig()
	committed.Consumer.IsolationLevel = sarama.ReadCommitted
	if err := group(bootstrap, topic, prefix+"committed", 96, committed); err != nil {
		return err
	}
	return administer(client, admin, topic, prefix)
}

func create(client sarama.Client, admin sarama.ClusterAdmin, topic string) error {
	limit := "20000"
	detail := &sarama.TopicDetail{
		NumPartitions: -1, ReplicationFactor: -1, ConfigEntries: map[string]*string{"max.message.bytes": &limit},
		ReplicaAssignment: map[int32][]int32{0: {1, 2, 3}, 1: {2, 3, 1}, 2: {3, 1, 2}},
	}
	fmt.Println("create", admin.CreateTopic(topic, detail, false))
	fmt.Println("create again", admin.CreateTopic(topic, detail, false))
	brokers, _, err := admin.DescribeCluster()
	if err != nil {
		return err
	}
	var addresses []string
	for _, b := range brokers {
		addresses = append(addresses, fmt.Sprint(b.ID(), " ", b.Addr()))
	}
	slices.Sort(addresses)
	fmt.Println("brokers", addresses)
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		if err := client.RefreshMetadata(topic); err == nil {
			if writable, err := client.WritablePartitions(topic); err == nil && len(writable) == 3 {
				break
			}
		}
		if time.Now().After(deadline) {
			return errors.New("the topic has no leaders")
		}
	}
	for p := range int32(3) {
		leader, err := client.Leader(topic, p)
		if err != nil {
			return err
		}
		replicas, err := client.Replicas(topic, p)
		fmt.Println("partition", p, "leader", leader.ID(), leader.Addr(), "replicas", replicas, err)
	}
	return nil
}

func produce(bootstrap, topic string) error {
	one := newConfig()
	one.Producer.RequiredAcks, one.Producer.Compression = sarama.WaitForLocal, sarama.CompressionZSTD
	none := newConfig()
	none.Producer.RequiredAcks = sarama.NoResponse
	for _, c := range []*sarama.Config{idempotent(), one, none} {
		producer, err := sarama.NewSyncProducer([]string{bootstrap}, c)
		if err != nil {
			return err
		}
		for i := range 30 {
			fmt.Println(send(producer, topic, i, fmt.Sprintf("v%d", i)))
		}
		if c == one {
			fmt.Println("too large:", send(producer, topic, 0, strings.Repeat("x", 30_000)))
			fmt.Println("no such topic:", send(producer, topic+"-absent", 0, "x"))
		}
		if err := producer.Close(); err != nil {
			return err
		}
	}
	return nil
}

// send tells where a record went, or how it was refused.
func send(producer sarama.SyncProducer, topic string, i int, value string) string {
	partition, offset, err := producer.SendMessage(&sarama.ProducerMessage{
		Topic: topic, Partition: int32(i % 3), Key: sarama.StringEncoder(fmt.Sprintf("k%d", i)), Value: sarama.StringEncoder(value),
		Headers: []sarama.RecordHeader{{Key: []byte("n"), Value: []byte{byte(i)}}},
	})
	return fmt.Sprint("sent ", partition, " ", offset, " ", err)
}

func transactions(bootstrap, topic, id string) error {
	c := idempotent()
	c.Producer.Transaction.ID = id
	producer, err := sarama.NewSyncProducer([]string{bootstrap}, c)
	if err != nil {
		return err
	}
	for _, end := range []func() error{producer.CommitTxn, producer.AbortTxn} {
		if err := producer.BeginTxn(); err != nil {
			return err
		}
		for i := range 6 {
			fmt.Println("transaction", send(producer, topic, i, fmt.Sprintf("tx%d", i)))
		}
		fmt.Println("end", end())
	}
	other, err := sarama.NewSyncProducer([]string{bootstrap}, c)
	if err != nil {
		return err
	}
	if err := producer.BeginTxn(); err != nil {
		return err
	}
	fmt.Println("fenced", send(producer, topic, 0, "late"))
	producer.Close() // says again that it's fenced
	return other.Close()
}

// reader collects what a group reads, until it has enough.
type reader struct {
	mu     sync.Mutex
	lines  []string
	want   int
	enough context.CancelFunc
}

func (*reader) Setup(s sarama.ConsumerGroupSession) error {
	fmt.Println("claims", s.Claims(), s.GenerationID() > 0)
	return nil
}

func (*reader) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (r *reader) ConsumeClaim(s sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for m := range claim.Messages() {
		s.MarkMessage(m, "")
		r.mu.Lock()
		r.lines = append(r.lines, fmt.Sprintf("%d %03d %s %s %d", m.Partition, m.Offset, m.Key, m.Value, len(m.Headers)))
		if len(r.lines) == r.want {
			r.enough()
		}
		r.mu.Unlock()
	}
	return nil
}

func group(bootstrap, topic, id string, want int, c *sarama.Config) error {
	group, err := sarama.NewConsumerGroup([]string{bootstrap}, id, c)
	if err != nil {
		return err
	}
	late, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	ctx, enough := context.WithCancel(late)
	r := &reader{want: want, enough: enough}
	for ctx.Err() == nil {
		if err := group.Consume(ctx, []string{topic}, r); err != nil {
			return err
		}
	}
	if len(r.lines) < want {
		return fmt.Errorf("group %s read %d records of %d", id, len(r.lines), want)
	}
	slices.Sort(r.lines)
	fmt.Println(strings.Join(r.lines, "\n"))
	return group.Close()
}

func administer(client sarama.Client, admin sarama.ClusterAdmin, topic, prefix string) error {
	for _, at := range []int64{sarama.OffsetOldest, sarama.OffsetNewest} {
		offset, err := client.GetOffset(topic, 1, at)
		fmt.Println("offset", offset, err)
	}
	coordinator, err := admin.Coordinator(prefix + "readers")
	fmt.Println("coordinator known", err == nil && slices.ContainsFunc(client.Brokers(), func(b *sarama.Broker) bool { return b.Addr() == coordinator.Addr() }), err)
	groups, err := admin.DescribeConsumerGroups([]string{prefix + "readers"})
	for _, g := range groups {
		fmt.Println("group", g.GroupId, g.State, g.ProtocolType, g.Protocol, len(g.Members), g.Err, err)
	}
	committed, err := admin.ListConsumerGroupOffsets(prefix+"readers", map[string][]int32{topic: {0, 1, 2}})
	for p := range int32(3) {
		fmt.Println("committed", committed.GetBlock(topic, p).Offset, err)
	}
	entries, err := admin.DescribeConfig(sarama.ConfigResource{Type: sarama.TopicResource, Name: topic})
	slices.SortFunc(entries, func(a, b sarama.ConfigEntry) int { return strings.Compare(a.Name, b.Name) })
	for _, e := range entries {
		fmt.Println("config", e.Name, e.Value, e.Source, err)
	}
	fmt.Println("delete records", admin.DeleteRecords(topic, map[int32]int64{0: 5}))
	fmt.Println("grow", admin.CreatePartitions(topic, 5, nil, false))
	fmt.Println("grow less", admin.CreatePartitions(topic, 2, nil, false))
	dirs, err := admin.DescribeLogDirs([]int32{1, 2, 3})
	fmt.Println("log dirs", len(dirs), err)
	fmt.Println("delete group", admin.DeleteConsumerGroup(prefix+"readers"))
	fmt.Println("delete", admin.DeleteTopic(topic))
	fmt.Println("delete again", admin.DeleteTopic(topic+"-absent"))
	return nil
}
