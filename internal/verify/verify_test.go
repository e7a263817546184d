package verify

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/kafkatest"
	"kmirror/protocol"
)

const producerID = 1<<62 | 12345

// pair is a source and a mirror, with one topic of one partition on each.
type pair struct {
	source, mirror *kgo.Client
	topic          string
	strict         bool // the mirror wants a producer's first sequence to be 0
}

func newPair(t *testing.T, source, mirror kafkatest.Cluster) pair {
	t.Helper()
	topic := strings.NewReplacer("/", "-", " ", "-").Replace(t.Name())
	kafkatest.CreateTopic(t, source, topic, 1, 1)
	kafkatest.CreateTopic(t, mirror, topic, 1, 1)
	client := func(c kafkatest.Cluster) *kgo.Client {
		opts := []kgo.Opt{kgo.DefaultProduceTopic(topic), kgo.RecordPartitioner(kgo.ManualPartitioner())}
		if c.Kind() == kafkatest.KindFake { // it allocates producer IDs of all 63 bits, as no broker does
			opts = append(opts, kgo.DisableIdempotentWrite())
		}
		return c.Client(t, opts...)
	}
	return pair{client(source), client(mirror), topic, mirror.Kind() == kafkatest.KindFake}
}

// record is the n-th test record.
func record(n int) *kgo.Record {
	return &kgo.Record{
		Key: fmt.Append(nil, "key ", n), Value: fmt.Append(nil, "value ", n), Timestamp: time.UnixMilli(1_700_000_000_000 + int64(n)),
		Headers: []kgo.RecordHeader{{Key: "n", Value: fmt.Append(nil, n)}},
	}
}

// produce writes records [from, to) as a foreign producer, three a batch.
func produce(t *testing.T, client *kgo.Client, from, to int) {
	t.Helper()
	for ; from < to; from += 3 {
		var records []*kgo.Record
		for n := from; n < min(from+3, to); n++ {
			records = append(records, record(n))
		}
		if err := client.ProduceSync(t.Context(), records...).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
}

// batches reads the source's record batches as they are stored.
func (p pair) batches(t *testing.T) (batches []protocol.Batch) {
	t.Helper()
	c, err := openCluster(t.Context(), p.source, func(name string) bool { return name == p.topic })
	if err != nil {
		t.Fatal(err)
	}
	key := partitionKey{p.topic, 0}
	r := newReader(c, key, c.logs[key].Range, nil, &allowance{lock: &c.unpacking})
	resp, err := p.source.Broker(int(c.leader(key))).Request(t.Context(), r.request())
	if err != nil {
		t.Fatal(err)
	}
	rest := resp.(*kmsg.FetchResponse).Topics[0].Partitions[0].RecordBatches
	for len(rest) > 0 {
		var batch protocol.Batch
		if batch, rest, err = protocol.ParseBatch(rest); err != nil {
			t.Fatal(err)
		}
		batches = append(batches, batch)
	}
	return batches
}

// mirrorBatch appends a batch to the mirror as kmirror does, at a position.
func (p pair) mirrorBatch(t *testing.T, batch protocol.Batch, producerID, position int64) {
	t.Helper()
	batch = append(protocol.Batch(nil), batch...)
	batch.Stamp(producerID, int16(position>>30), int32(position&(1<<30-1)))
	metadata, err := kadm.NewClient(p.mirror).Metadata(t.Context(), p.topic)
	if err != nil {
		t.Fatal(err)
	}
	partition := kmsg.NewProduceRequestTopicPartition()
	partition.Records = batch
	topic := kmsg.NewProduceRequestTopic()
	topic.Topic, topic.TopicID = p.topic, metadata.Topics[p.topic].ID
	topic.Partitions = append(topic.Partitions, partition)
	req := kmsg.NewPtrProduceRequest()
	req.Acks, req.TimeoutMillis = -1, 5000
	req.Topics = append(req.Topics, topic)
	resp, err := p.mirror.Broker(int(metadata.Topics[p.topic].Partitions[0].Leader)).Request(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	if code := resp.(*kmsg.ProduceResponse).Topics[0].Partitions[0].ErrorCode; code != 0 {
		t.Fatalf("produce to the mirror: error %d", code)
	}
}

// mirrorAll appends every batch of the source.
func (p pair) mirrorAll(t *testing.T) {
	t.Helper()
	for _, b := range p.batches(t) {
		p.mirrorBatch(t, b, producerID, b.BaseOffset())
	}
}

func deleteBefore(t *testing.T, client *kgo.Client, topic string, offset int64) {
	t.Helper()
	var offsets kadm.Offsets
	offsets.AddOffset(topic, 0, offset, -1)
	resp, err := kadm.NewClient(client).DeleteRecords(t.Context(), offsets)
	if err == nil {
		err = resp.Error()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// verify runs the comparison and returns the entry of the only partition.
func (p pair) verify(t *testing.T, change func(*Options)) Partition {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	opts := Options{
		Source: p.source, Mirror: p.mirror, Topics: func(name string) bool { return name == p.topic },
		FromEarliest: true, Patience: 0, Parallel: 2,
	}
	if change != nil {
		change(&opts)
	}
	report, err := Run(ctx, opts)
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Partitions) != 1 {
		t.Fatalf("report = %+v, want one partition", report)
	}
	return report.Partitions[0]
}

// eachPair runs f with two kfake clusters and with two real ones. Every call of its argument makes a topic for that test.
func eachPair(t *testing.T, f func(t *testing.T, fresh func(t *testing.T) pair)) {
	t.Run("kfake", func(t *testing.T) {
		source, mirror := kafkatest.Fake(t), kafkatest.Fake(t)
		f(t, func(t *testing.T) pair { return newPair(t, source, mirror) })
	})
	t.Run("kafka", func(t *testing.T) {
		source, mirror := kafkatest.Shared(t)
		f(t, func(t *testing.T) pair { return newPair(t, source, mirror) })
	})
}

func TestMain(m *testing.M) { kafkatest.Main(m) }

func TestEqual(t *testing.T) {
	eachPair(t, func(t *testing.T, fresh func(t *testing.T) pair) {
		p := fresh(t)
		produce(t, p.source, 0, 100)
		p.mirrorAll(t)
		got := p.verify(t, nil)
		if got.Result != Equal || got.Compared != 100 || !got.SameOffsets || got.SourceSHA != got.MirrorSHA || got.NotMirrored+got.OnlyMirror+got.Foreign != 0 {
			t.Errorf("verify = %+v, want 100 records equal", got)
		}
	})
}

func TestForeignRecordsAreCountedAndLeftOut(t *testing.T) {
	eachPair(t, func(t *testing.T, fresh func(t *testing.T) pair) {
		p := fresh(t)
		produce(t, p.source, 0, 9)
		produce(t, p.mirror, 500, 505)
		for i, b := range p.batches(t) {
			p.mirrorBatch(t, b, producerID, b.BaseOffset())
			if i == 1 {
				produce(t, p.mirror, 600, 602)
			}
		}
		produce(t, p.mirror, 700, 701)
		got := p.verify(t, nil)
		if got.Result != Equal || got.Compared != 9 || got.SameOffsets || got.Foreign != 8 {
			t.Errorf("verify = %s %s, want 9 records equal and 8 foreign", got.Result, got.Summary())
		}
	})
}

func TestDifferencesAreFound(t *testing.T) {
	cases := map[string]struct {
		order  []int // the batches of three records that the mirror gets
		what   string
		offset int64 // of the first difference on the source, -1: none is named
	}{
		"lost in the middle": {[]int{0, 1, 3, 4}, "3 records are not on the mirror", 6},
		"doubled":            {[]int{0, 1, 1, 2}, "3 records on the mirror are not on the source", 6},
		"doubled at the end": {[]int{0, 1, 2, 3, 4, 4}, "the source has no such record", -1},
		"reordered":          {[]int{0, 2, 1, 3, 4}, "the keys differ", 3},
		"lost at the front":  {[]int{2, 3, 4}, "the source's first records are not on the mirror", -1},
		"behind":             {[]int{0, 1}, "the mirror is behind by 9 offsets", 6},
		"empty":              {nil, "the mirror is behind by 15 offsets", 0},
	}
	eachPair(t, func(t *testing.T, fresh func(t *testing.T) pair) {
		for name, tc := range cases {
			t.Run(name, func(t *testing.T) {
				p := fresh(t)
				produce(t, p.source, 0, 15)
				batches := p.batches(t)
				for i, n := range tc.order { // a producer ID each, so that the mirror takes any order
					position := batches[n].BaseOffset()
					if p.strict {
						position = 0
					}
					p.mirrorBatch(t, batches[n], producerID+int64(i), position)
				}
				got := p.verify(t, nil)
				if got.Result != Different || !strings.Contains(got.Summary(), tc.what) {
					t.Errorf("verify = %s: %s, want different: %s", got.Result, got.Summary(), tc.what)
				}
				if d := got.Difference; tc.offset >= 0 && (d == nil || d.SourceOffset != tc.offset) {
					t.Errorf("difference = %+v, want it at source offset %d", d, tc.offset)
				}
			})
		}
	})
}

func TestSidesThatBeginAtDifferentRecordsAreAligned(t *testing.T) {
	eachPair(t, func(t *testing.T, fresh func(t *testing.T) pair) {
		t.Run("copy began at the end", func(t *testing.T) {
			p := fresh(t)
			produce(t, p.source, 0, 60)
			for _, b := range p.batches(t)[10:] {
				position := b.BaseOffset()
				if p.strict {
					position -= 30 // a segment: positions begin at 0
				}
				p.mirrorBatch(t, b, producerID, position)
			}
			got := p.verify(t, func(o *Options) { o.FromEarliest = false })
			if got.Result != Equal || got.Compared != 30 || got.NotMirrored != 30 {
				t.Errorf("verify = %+v, want 30 of 60 equal and 30 not mirrored", got)
			}
		})
		t.Run("source deleted its oldest", func(t *testing.T) {
			p := fresh(t)
			produce(t, p.source, 0, 60)
			p.mirrorAll(t)
			deleteBefore(t, p.source, p.topic, 31)
			got := p.verify(t, nil)
			if got.Result != Equal || got.Compared != 29 || got.OnlyMirror != 31 {
				t.Errorf("verify = %+v, want 29 equal and 31 only on the mirror", got)
			}
		})
		t.Run("mirror deleted its oldest", func(t *testing.T) {
			p := fresh(t)
			produce(t, p.source, 0, 60)
			p.mirrorAll(t)
			deleteBefore(t, p.mirror, p.topic, 10)
			got := p.verify(t, nil)
			if got.Result != Equal || got.Compared != 50 || got.NotMirrored != 10 {
				t.Errorf("verify = %+v, want 50 equal and 10 not mirrored", got)
			}
		})
		t.Run("mirror deleted everything", func(t *testing.T) {
			p := fresh(t)
			produce(t, p.source, 0, 6)
			p.mirrorAll(t)
			deleteBefore(t, p.mirror, p.topic, 6)
			if got := p.verify(t, nil); got.Result != Unknown || got.Reason == "" {
				t.Errorf("verify = %+v, want unknown and a reason", got)
			}
		})
		t.Run("topic recreated", func(t *testing.T) {
			p := fresh(t)
			produce(t, p.source, 0, 60)
			batches := p.batches(t)
			for _, b := range batches[:5] { // the earlier topic's records
				p.mirrorBatch(t, b, producerID, b.BaseOffset())
			}
			deleteBefore(t, p.source, p.topic, 15)
			for _, b := range batches[5:] {
				p.mirrorBatch(t, b, producerID+1, b.BaseOffset()-15)
			}
			got := p.verify(t, nil)
			if got.Result != Equal || got.Compared != 45 || got.OnlyMirror != 15 {
				t.Errorf("verify = %+v, want 45 equal behind 15 of the earlier topic", got)
			}
		})
	})
}

func TestMirrorThatIsStillCatchingUpGetsItsTime(t *testing.T) {
	eachPair(t, func(t *testing.T, fresh func(t *testing.T) pair) {
		p := fresh(t)
		produce(t, p.source, 0, 30)
		batches := p.batches(t)
		for _, b := range batches[:5] {
			p.mirrorBatch(t, b, producerID, b.BaseOffset())
		}
		result := make(chan Partition)
		go func() { result <- p.verify(t, func(o *Options) { o.Patience = time.Minute }) }()
		for _, b := range batches[5:] {
			p.mirrorBatch(t, b, producerID, b.BaseOffset())
		}
		if got := <-result; got.Result != Equal || got.Compared != 30 {
			t.Errorf("verify = %+v, want 30 equal", got)
		}
	})
}

func TestNoTopicIsNotEqual(t *testing.T) {
	source, mirror := kafkatest.Fake(t), kafkatest.Fake(t)
	report, err := Run(t.Context(), Options{Source: source.Client(t), Mirror: mirror.Client(t), Topics: func(string) bool { return true }})
	if err == nil || report.Result != Unknown {
		t.Errorf("Run = %+v, %v, want unknown and an error", report, err)
	}
}

func TestOverall(t *testing.T) {
	for want, partitions := range map[Result][]Partition{
		Equal:     {{Result: Equal}},
		Unknown:   {{Result: Equal}, {Result: Unknown}, {Result: Equal}},
		Different: {{Result: Unknown}, {Result: Different}, {Result: Unknown}},
	} {
		if got := overall(partitions); got != want {
			t.Errorf("overall(%v) = %s, want %s", partitions, got, want)
		}
	}
}

func TestRecordsThatDiffer(t *testing.T) {
	for name, change := range map[string]func(r *kgo.Record){
		"the keys differ":       func(r *kgo.Record) { r.Key = []byte("x") },
		"the values differ":     func(r *kgo.Record) { r.Value = nil },
		"the timestamps differ": func(r *kgo.Record) { r.Timestamp = r.Timestamp.Add(time.Millisecond) },
		"the headers differ":    func(r *kgo.Record) { r.Headers[0].Value = nil },
	} {
		changed := record(1)
		change(changed)
		if got := differ(record(1), changed); !strings.HasPrefix(got, name) {
			t.Errorf("differ = %q, want %q", got, name)
		}
		a, b := newDigest(), newDigest()
		a.add(record(1))
		b.add(changed)
		if a.text() == b.text() {
			t.Errorf("%s, but the digests are equal", name)
		}
	}
	empty := record(1)
	empty.Value = []byte{}
	null := record(1)
	null.Value = nil
	if got := differ(empty, null); got != "the values differ" {
		t.Errorf("differ(empty, null) = %q, want them to be different", got)
	}
}

// TestRecordsDeletedWhileTheyAreRead: retention that takes the beginning of either log after the ranges were asked is no difference, and no reason to give up.
func TestRecordsDeletedWhileTheyAreRead(t *testing.T) {
	eachPair(t, func(t *testing.T, fresh func(t *testing.T) pair) {
		p := fresh(t)
		produce(t, p.source, 0, 60)
		p.mirrorAll(t)
		wanted := func(name string) bool { return name == p.topic }
		source, err := openCluster(t.Context(), p.source, wanted)
		if err != nil {
			t.Fatal(err)
		}
		mirror, err := openCluster(t.Context(), p.mirror, wanted)
		if err != nil {
			t.Fatal(err)
		}
		deleteBefore(t, p.source, p.topic, 30)
		deleteBefore(t, p.mirror, p.topic, 12)
		got := Partition{Topic: p.topic}
		comparePartition(t.Context(), Options{FromEarliest: true, Parallel: 1}, source, mirror, &got)
		if got.Result != Equal || got.Compared != 30 || got.Source.Start != 30 || got.Mirror.Start != 12 {
			t.Errorf("verify = %s: %s, from %d and %d; want 30 equal from 30 and 12", got.Result, got.Summary(), got.Source.Start, got.Mirror.Start)
		}
	})
}

// TestLargeUnpackedBatches: a batch that unpacks to more than an answer may is read by itself.
func TestLargeUnpackedBatches(t *testing.T) {
	eachPair(t, func(t *testing.T, fresh func(t *testing.T) pair) {
		p := fresh(t)
		produce(t, p.source, 0, 3)
		large := record(3) // its time too: another would begin a segment, and a fetch ends with one
		large.Topic, large.Value = p.topic, make([]byte, answerBudget+1<<20)
		opts := append(p.source.Opts(), kgo.ProducerBatchMaxBytes(2*answerBudget), kgo.ProducerBatchCompression(kgo.ZstdCompression()))
		client, err := kgo.NewClient(opts...)
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		if err := client.ProduceSync(t.Context(), large).FirstErr(); err != nil {
			t.Fatal(err)
		}
		produce(t, p.source, 3, 6)
		p.mirrorAll(t)
		if got := p.verify(t, nil); got.Result != Equal || got.Compared != 7 {
			t.Errorf("verify = %s: %s, want 7 equal", got.Result, got.Summary())
		}
	})
}
