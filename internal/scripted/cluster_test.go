package scripted_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/scripted"
)

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func client(t *testing.T, c *scripted.Cluster, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	cl, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(c.Seeds()...)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cl.Close)
	return cl
}

func TestClientsProduceAndConsume(t *testing.T) {
	c := scripted.New(t, scripted.Options{Brokers: 3})
	ctx := testContext(t)
	for codec, compression := range []kgo.CompressionCodec{kgo.NoCompression(), kgo.GzipCompression(), kgo.SnappyCompression(), kgo.Lz4Compression(), kgo.ZstdCompression()} {
		topic := fmt.Sprint("orders-", codec)
		c.CreateTopic(topic, 3)
		producer := client(t, c, kgo.DefaultProduceTopic(topic), kgo.RecordPartitioner(kgo.RoundRobinPartitioner()), kgo.ProducerBatchCompression(compression))
		for i := range 90 {
			if err := producer.ProduceSync(ctx, &kgo.Record{Value: fmt.Appendf(nil, "value %d", i)}).FirstErr(); err != nil {
				t.Fatal(err)
			}
		}
		consumer := client(t, c, kgo.ConsumeTopics(topic), kgo.ConsumerGroup("group-"+topic))
		seen := map[string]int{}
		for len(seen) < 90 {
			fetches := consumer.PollFetches(ctx)
			if err := fetches.Err(); err != nil {
				t.Fatal(err)
			}
			fetches.EachRecord(func(r *kgo.Record) { seen[string(r.Value)]++ })
		}
		for v, n := range seen {
			if n != 1 {
				t.Errorf("%q was read %d times", v, n)
			}
		}
		if err := consumer.CommitUncommittedOffsets(ctx); err != nil {
			t.Fatal(err)
		}
		if o, ok := c.Committed("group-"+topic, topic, 1); !ok || o.Offset != 30 {
			t.Errorf("committed = %+v, %v, want offset 30", o, ok)
		}
	}
	if n := c.Count(0, ""); n < 90 {
		t.Errorf("Count(Produce) = %d, want at least 90", n)
	}
}

func TestTransactionsAreHiddenUntilCommitted(t *testing.T) {
	c := scripted.New(t, scripted.Options{})
	ctx := testContext(t)
	c.CreateTopic("orders", 1)
	producer := client(t, c, kgo.TransactionalID("tx"), kgo.DefaultProduceTopic("orders"))
	for i, commit := range []kgo.TransactionEndTry{kgo.TryCommit, kgo.TryAbort, kgo.TryCommit} {
		if err := producer.BeginTransaction(); err != nil {
			t.Fatal(err)
		}
		if err := producer.ProduceSync(ctx, kgo.StringRecord(fmt.Sprint("tx ", i))).FirstErr(); err != nil {
			t.Fatal(err)
		}
		if err := producer.EndTransaction(ctx, commit); err != nil {
			t.Fatal(err)
		}
	}
	consumer := client(t, c, kgo.ConsumeTopics("orders"), kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	var got []string
	for len(got) < 2 {
		fetches := consumer.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			t.Fatal(err)
		}
		fetches.EachRecord(func(r *kgo.Record) { got = append(got, string(r.Value)) })
	}
	if fmt.Sprint(got) != "[tx 0 tx 2]" {
		t.Errorf("read_committed saw %q, want tx 0 and tx 2", got)
	}
	var aborted int
	for _, r := range c.Records("orders", 0) {
		if r.Aborted {
			aborted++
		}
	}
	if aborted != 1 {
		t.Errorf("Records marks %d aborted records, want 1", aborted)
	}
}

func TestAdminsSeeTopicsGroupsAndLag(t *testing.T) {
	c := scripted.New(t, scripted.Options{Brokers: 2})
	ctx := testContext(t)
	admin := kadm.NewClient(client(t, c))
	if _, err := admin.CreateTopic(ctx, 4, 2, map[string]*string{"cleanup.policy": kmsg.StringPtr("compact")}, "orders"); err != nil {
		t.Fatal(err)
	}
	configs, err := admin.DescribeTopicConfigs(ctx, "orders")
	if err != nil {
		t.Fatal(err)
	}
	for _, config := range configs[0].Configs {
		if config.Key == "cleanup.policy" && config.MaybeValue() != "compact" {
			t.Errorf("cleanup.policy = %q, want compact", config.MaybeValue())
		}
	}
	c.AppendForeign("orders", 2, "a", "b", "c")
	c.Commit("readers", "orders", 2, scripted.Committed{Offset: 1, Metadata: "m"})
	lags, err := admin.Lag(ctx, "readers")
	if err != nil {
		t.Fatal(err)
	}
	if lag := lags["readers"].Lag["orders"][2].Lag; lag != 2 {
		t.Errorf("lag = %d, want 2", lag)
	}
	meta, err := admin.Metadata(ctx, "orders")
	if err != nil || len(meta.Topics["orders"].Partitions) != 4 || meta.Cluster != c.ID() {
		t.Errorf("metadata = %+v, %v", meta, err)
	}
}

func TestGroupMembersShareAndTakeOver(t *testing.T) {
	c := scripted.New(t, scripted.Options{})
	ctx := testContext(t)
	c.CreateTopic("orders", 2)
	opts := []kgo.Opt{kgo.ConsumeTopics("orders"), kgo.ConsumerGroup("readers"), kgo.Balancers(kgo.RangeBalancer()), kgo.HeartbeatInterval(50 * time.Millisecond)}
	assigned := make(chan map[string][]int32, 100)
	note := kgo.OnPartitionsAssigned(func(_ context.Context, _ *kgo.Client, m map[string][]int32) { assigned <- m })
	first := client(t, c, append(opts, note)...)
	waitFor := func(what string, n int) {
		t.Helper()
		for {
			select {
			case m := <-assigned:
				if len(m["orders"]) == n {
					return
				}
			case <-ctx.Done():
				t.Fatalf("not assigned: %s", what)
			}
		}
	}
	waitFor("both partitions to the first", 2)
	second := client(t, c, opts...)
	waitFor("one partition after the second joined", 1)
	second.LeaveGroup()
	waitFor("both partitions after the second left", 2)
	c.Expel("readers")
	waitFor("both partitions after the session was lost", 2)
	first.LeaveGroup()
}

func TestStaticMemberComesBackWithoutRebalance(t *testing.T) {
	c := scripted.New(t, scripted.Options{})
	ctx := testContext(t)
	c.CreateTopic("orders", 4)
	opts := []kgo.Opt{kgo.ConsumeTopics("orders"), kgo.ConsumerGroup("readers"), kgo.InstanceID("one"), kgo.SessionTimeout(20 * time.Second)}
	assigned := make(chan int, 10)
	note := kgo.OnPartitionsAssigned(func(_ context.Context, _ *kgo.Client, m map[string][]int32) { assigned <- len(m["orders"]) })
	wait := func() {
		t.Helper()
		select {
		case n := <-assigned:
			if n != 4 {
				t.Errorf("assigned %d partitions, want 4", n)
			}
		case <-ctx.Done():
			t.Fatal("nothing was assigned")
		}
	}
	first := client(t, c, append(opts, note)...)
	wait()
	first.CloseAllowingRebalance() // a static member doesn't leave
	client(t, c, append(opts, note)...)
	wait()
	for _, r := range c.Requests(14, nil)[1:] { // SyncGroup
		if generation := r.Body.(*kmsg.SyncGroupRequest).Generation; generation != 1 {
			t.Errorf("SyncGroup of generation %d, want 1 throughout", generation)
		}
	}
}
