package matrix

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/test/testbed"
)

// franz runs franz-go with no limit of versions: producers, transactions, groups of both protocols, a share group, and kadm.
func (c cluster) franz(t *testing.T) {
	agree(t, c.ways("franz"), 150, func(w way) string {
		f := franz{t: t, w: w, topic: w.name + "topic"}
		f.run()
		return strings.Join(f.lines, "\n")
	})
}

type franz struct {
	t     *testing.T
	w     way
	topic string
	lines []string
}

func (f *franz) print(what string, answers ...any) {
	f.lines = append(f.lines, strings.TrimSuffix(fmt.Sprintln(append([]any{what}, answers...)...), "\n"))
}

func (f *franz) client(opts ...kgo.Opt) *kgo.Client {
	return testbed.NewWriter(f.t, f.w.seeds, f.topic, append([]kgo.Opt{kgo.MaxVersions(nil), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.FetchMaxWait(100 * time.Millisecond)}, opts...)...)
}

func (f *franz) run() {
	ctx, cancel := context.WithTimeout(f.t.Context(), patience)
	defer cancel()
	admin := kadm.NewClient(f.client())
	f.create(ctx, admin)
	f.produce(ctx)
	f.read(ctx, "classic", 90, kgo.ConsumerGroup(f.w.name+"classic"))
	f.read(ctx, "KIP-848", 90, kgo.ConsumerGroup(f.w.name+"new"), kgo.ServerSideBalancer())
	f.share(ctx)
	f.transactions(ctx)
	f.read(ctx, "committed", 96, kgo.ConsumerGroup(f.w.name+"committed"), kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	f.administer(ctx, admin)
}

func (f *franz) create(ctx context.Context, admin *kadm.Client) {
	req := kmsg.NewPtrCreateTopicsRequest()
	topic := kmsg.NewCreateTopicsRequestTopic()
	topic.Topic, topic.NumPartitions, topic.ReplicationFactor = f.topic, -1, -1
	for p := range int32(3) {
		a := kmsg.NewCreateTopicsRequestTopicReplicaAssignment()
		a.Partition, a.Replicas = p, []int32{p + 1, (p+1)%3 + 1, (p+2)%3 + 1}
		topic.ReplicaAssignment = append(topic.ReplicaAssignment, a)
	}
	req.Topics = append(req.Topics, topic)
	for range 2 {
		resp, err := req.RequestWith(ctx, f.client())
		if err != nil {
			f.t.Fatal(err)
		}
		f.print("create", resp.Topics[0].ErrorCode, resp.Topics[0].NumPartitions, len(resp.Topics[0].Configs))
	}
	for {
		offsets, err := admin.ListEndOffsets(ctx, f.topic)
		if err == nil && offsets.Error() == nil {
			break
		}
		if ctx.Err() != nil {
			f.t.Fatal(err)
		}
		time.Sleep(50 * time.Millisecond)
	}
	brokers, err := admin.ListBrokers(ctx)
	for _, b := range brokers {
		f.print("broker", b.NodeID, fmt.Sprintf("%s:%d", b.Host, b.Port), err)
	}
	details, err := admin.ListTopics(ctx, f.topic)
	for _, p := range details[f.topic].Partitions.Sorted() {
		f.print("partition", p.Partition, p.Leader, p.LeaderEpoch, p.Replicas, err)
	}
}

func (f *franz) produce(ctx context.Context) {
	f.send(ctx, "idempotent", nil)
	f.send(ctx, "acks=1", append(testbed.WithAcks(kgo.LeaderAck()), kgo.ProducerBatchCompression(kgo.Lz4Compression())))
	f.send(ctx, "acks=0", testbed.WithAcks(kgo.NoAck()))
	cl := f.client(kgo.ProducerBatchMaxBytes(3<<20), kgo.ProducerBatchCompression(kgo.NoCompression()), kgo.RecordRetries(0))
	f.print("too large", cl.ProduceSync(ctx, &kgo.Record{Value: bytes.Repeat([]byte("x"), 2<<20)}).FirstErr())
	f.print("no such topic", cl.ProduceSync(ctx, &kgo.Record{Topic: f.topic + "-absent", Value: []byte("x")}).FirstErr())
}

func (f *franz) send(ctx context.Context, name string, opts []kgo.Opt) {
	cl := f.client(opts...)
	for i := range 30 {
		r, err := cl.ProduceSync(ctx, f.record("v", i)).First()
		f.print(name, r.Partition, r.Offset, err)
	}
}

func (f *franz) record(prefix string, i int) *kgo.Record {
	return &kgo.Record{Partition: int32(i % 3), Key: fmt.Append(nil, i), Value: fmt.Append(nil, prefix, i), Headers: []kgo.RecordHeader{{Key: "n", Value: []byte{byte(i)}}}}
}

// read reads n records in a group and commits.
func (f *franz) read(ctx context.Context, name string, n int, opts ...kgo.Opt) {
	cl := f.client(append(opts, kgo.ConsumeTopics(f.topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.DisableAutoCommit())...)
	var lines []string
	for len(lines) < n && ctx.Err() == nil {
		fetches := cl.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			f.t.Fatal(err)
		}
		fetches.EachRecord(func(r *kgo.Record) {
			lines = append(lines, fmt.Sprintf("%s %d@%03d %s=%s epoch %d", name, r.Partition, r.Offset, r.Key, r.Value, r.LeaderEpoch))
		})
	}
	slices.Sort(lines)
	f.lines = append(f.lines, lines...)
	f.print("commit", cl.CommitUncommittedOffsets(ctx))
	f.print("leave", cl.LeaveGroupContext(ctx))
}

// share reads what is there with a share group, and accepts it.
func (f *franz) share(ctx context.Context) {
	group := f.w.name + "share"
	earliest := "earliest"
	req := kmsg.NewPtrIncrementalAlterConfigsRequest()
	resource := kmsg.NewIncrementalAlterConfigsRequestResource()
	resource.ResourceType, resource.ResourceName = kmsg.ConfigResourceTypeGroupConfig, group
	config := kmsg.NewIncrementalAlterConfigsRequestResourceConfig()
	config.Name, config.Value = "share.auto.offset.reset", &earliest
	resource.Configs = append(resource.Configs, config)
	req.Resources = append(req.Resources, resource)
	resp, err := req.RequestWith(ctx, f.client())
	if err != nil {
		f.t.Fatal(err)
	}
	f.print("share config", resp.Resources[0].ErrorCode)
	cl := f.client(kgo.ShareGroup(group), kgo.ConsumeTopics(f.topic))
	var lines []string
	for len(lines) < 90 && ctx.Err() == nil {
		cl.PollFetches(ctx).EachRecord(func(r *kgo.Record) {
			lines = append(lines, fmt.Sprintf("share %d@%03d %s=%s", r.Partition, r.Offset, r.Key, r.Value))
			r.Ack(kgo.AckAccept)
		})
	}
	slices.Sort(lines)
	f.lines = append(f.lines, lines...)
	cl.Close()
}

func (f *franz) transactions(ctx context.Context) {
	first := f.client(kgo.TransactionalID(f.w.name + "tx"))
	for _, end := range []kgo.TransactionEndTry{kgo.TryCommit, kgo.TryAbort} {
		if err := first.BeginTransaction(); err != nil {
			f.t.Fatal(err)
		}
		for i := range 6 {
			r, err := first.ProduceSync(ctx, f.record("tx", i)).First()
			f.print("transaction", r.Partition, r.Offset, err)
		}
		f.print("end", first.EndTransaction(ctx, end))
	}
	if err := first.BeginTransaction(); err != nil {
		f.t.Fatal(err)
	}
	second := f.client(kgo.TransactionalID(f.w.name + "tx"))
	_, _, err := second.ProducerID(ctx)
	f.print("second", err, "first", first.ProduceSync(ctx, f.record("late", 0)).FirstErr())
}

func (f *franz) administer(ctx context.Context, admin *kadm.Client) {
	offsets, err := admin.ListCommittedOffsets(ctx, f.topic)
	for _, o := range offsets.Offsets()[f.topic] {
		f.lines = append(f.lines, fmt.Sprintf("committed %03d %d", o.Partition, o.At))
	}
	slices.Sort(f.lines[len(f.lines)-3:])
	f.print("offsets", err)
	for _, group := range []string{"classic", "committed"} {
		lags, err := admin.Lag(ctx, f.w.name+group)
		lag := lags[f.w.name+group]
		f.print("group", group, lag.State, lag.Protocol, lag.Lag.Total(), lag.Error(), err)
	}
	configs, err := admin.DescribeTopicConfigs(ctx, f.topic)
	f.print("configs", err)
	for _, config := range configs {
		for _, c := range config.Configs {
			f.print("config", c.Key, c.MaybeValue(), c.Source)
		}
	}
	states, err := admin.DescribeTransactions(ctx, f.w.name+"tx")
	f.print("transaction", states[f.w.name+"tx"].State, states[f.w.name+"tx"].Err, err)
	grown, err := admin.CreatePartitions(ctx, 2, f.topic)
	f.print("grow", grown.Error(), err)
	less, err := admin.UpdatePartitions(ctx, 2, f.topic)
	f.print("grow less", less.Error(), err)
	dirs, err := admin.DescribeAllLogDirs(ctx, nil)
	f.print("log dirs", len(dirs), err)
	deleted, err := admin.DeleteTopics(ctx, f.topic, f.topic+"-absent")
	for _, topic := range []string{f.topic, f.topic + "-absent"} {
		f.print("delete", deleted[topic].Err, err)
	}
}
