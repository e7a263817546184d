package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"golang.org/x/sync/errgroup"

	"kmirror/protocol"
)

const (
	partitionBytes = 1 << 20 // of one partition in one fetch
	fetchBytes     = 8 << 20
	fetchWaitMs    = 500
	produceWaitMs  = 30_000
)

// partition is one source partition and its place on the mirror.
type partition struct {
	topic              string
	number             int32
	sourceID, mirrorID [16]byte // topic IDs
	sourceLeader       int32
	mirrorLeader       int32
	next               int64 // source offset to fetch next
}

// backlog is what one fetch brought, by the index of the lane's partition, oldest batch first.
type backlog [][]protocol.Batch

// lane copies some partitions over one connection to either cluster. While one backlog is appended, the next is fetched.
type lane struct {
	source, mirror *kgo.Client
	partitions     []*partition
}

func newLane(source, mirror string) (*lane, error) {
	s, err := kgo.NewClient(kgo.SeedBrokers(source))
	if err != nil {
		return nil, fmt.Errorf("source: %w", err)
	}
	m, err := kgo.NewClient(kgo.SeedBrokers(mirror))
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("mirror: %w", err)
	}
	return &lane{source: s, mirror: m}, nil
}

func (l *lane) run(ctx context.Context) error {
	defer l.source.Close()
	defer l.mirror.Close()
	group, ctx := errgroup.WithContext(ctx)
	backlogs := make(chan backlog) // unbuffered: at most one backlog waits, in the fetcher's hand
	group.Go(func() error { return l.fetchLoop(ctx, backlogs) })
	group.Go(func() error { return l.appendLoop(ctx, backlogs) })
	return group.Wait()
}

func (l *lane) fetchLoop(ctx context.Context, backlogs chan<- backlog) error {
	for {
		b, err := l.fetch(ctx)
		if err != nil {
			return fmt.Errorf("fetch: %w", err)
		}
		select {
		case backlogs <- b:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// fetch asks for all partitions of the lane at once and moves each position behind the last whole batch.
func (l *lane) fetch(ctx context.Context) (backlog, error) {
	req := kmsg.NewPtrFetchRequest()
	req.MaxWaitMillis, req.MinBytes, req.MaxBytes = fetchWaitMs, 1, fetchBytes
	req.SessionEpoch = -1 // no fetch session
	for _, p := range l.partitions {
		t := kmsg.NewFetchRequestTopic()
		t.Topic, t.TopicID = p.topic, p.sourceID
		tp := kmsg.NewFetchRequestTopicPartition()
		tp.Partition, tp.FetchOffset, tp.PartitionMaxBytes = p.number, p.next, partitionBytes
		t.Partitions = append(t.Partitions, tp)
		req.Topics = append(req.Topics, t)
	}
	answer, err := l.source.Broker(int(l.partitions[0].sourceLeader)).Request(ctx, req)
	if err != nil {
		return nil, err
	}
	resp := answer.(*kmsg.FetchResponse)
	if err := kerr.ErrorForCode(resp.ErrorCode); err != nil {
		return nil, err
	}
	b := make(backlog, len(l.partitions))
	for _, t := range resp.Topics {
		for _, tp := range t.Partitions {
			i := l.index(t.Topic, t.TopicID, tp.Partition)
			if i < 0 {
				return nil, errors.New("answer names a partition that wasn't asked for")
			}
			if err := kerr.ErrorForCode(tp.ErrorCode); err != nil {
				return nil, fmt.Errorf("topic %s partition %d: %w", l.partitions[i].topic, tp.Partition, err)
			}
			if b[i], err = l.partitions[i].split(tp.RecordBatches); err != nil {
				return nil, err
			}
		}
	}
	return b, nil
}

// index finds a partition by the topic's name or ID, whichever the answer's version has; -1: none.
func (l *lane) index(topic string, id [16]byte, number int32) int {
	for i, p := range l.partitions {
		if p.number == number && (p.topic == topic || topic == "" && p.sourceID == id) {
			return i
		}
	}
	return -1
}

// split cuts fetched bytes into batches; a batch that the fetch's end cut off is fetched again.
func (p *partition) split(fetched []byte) ([]protocol.Batch, error) {
	var batches []protocol.Batch
	for len(fetched) > 0 {
		b, rest, err := protocol.ParseBatch(fetched)
		if errors.Is(err, protocol.ErrIncomplete) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("topic %s partition %d offset %d: %w", p.topic, p.number, p.next, err)
		}
		fetched = rest
		if b.BaseOffset() < p.next { // brokers answer from the start of the batch that holds the offset
			continue
		}
		p.next = b.EndOffset()
		batches = append(batches, b)
	}
	return batches, nil
}

// appendLoop appends backlogs, one batch of each partition a request.
func (l *lane) appendLoop(ctx context.Context, backlogs <-chan backlog) error {
	for {
		select {
		case b := <-backlogs:
			for round := 0; ; round++ {
				req := l.produceRequest(b, round)
				if len(req.Topics) == 0 {
					break
				}
				if err := l.produce(ctx, req); err != nil {
					return fmt.Errorf("append: %w", err)
				}
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// produceRequest holds the round'th batch of each partition that has one.
func (l *lane) produceRequest(b backlog, round int) *kmsg.ProduceRequest {
	req := kmsg.NewPtrProduceRequest()
	req.Acks, req.TimeoutMillis = -1, produceWaitMs
	for i, batches := range b {
		if round >= len(batches) {
			continue
		}
		p := l.partitions[i]
		rewrite(batches[round])
		t := kmsg.NewProduceRequestTopic()
		t.Topic, t.TopicID = p.topic, p.mirrorID
		tp := kmsg.NewProduceRequestTopicPartition()
		tp.Partition, tp.Records = p.number, batches[round]
		t.Partitions = append(t.Partitions, tp)
		req.Topics = append(req.Topics, t)
	}
	return req
}

func (l *lane) produce(ctx context.Context, req *kmsg.ProduceRequest) error {
	answer, err := l.mirror.Broker(int(l.partitions[0].mirrorLeader)).Request(ctx, req)
	if err != nil {
		return err
	}
	for _, t := range answer.(*kmsg.ProduceResponse).Topics {
		for _, tp := range t.Partitions {
			if err := kerr.ErrorForCode(tp.ErrorCode); err != nil {
				return fmt.Errorf("partition %d: %w", tp.Partition, err)
			}
		}
	}
	return nil
}

// listPartitions describes the topics on both clusters and matches them by name and number.
func listPartitions(ctx context.Context, source, mirror string, topics []string) ([]*partition, error) {
	onSource, err := describe(ctx, source, topics)
	if err != nil {
		return nil, fmt.Errorf("source: %w", err)
	}
	onMirror, err := describe(ctx, mirror, topics)
	if err != nil {
		return nil, fmt.Errorf("mirror: %w", err)
	}
	var all []*partition
	for _, t := range onSource.Sorted() {
		m := onMirror[t.Topic]
		for _, p := range t.Partitions.Sorted() {
			mp, ok := m.Partitions[p.Partition]
			if !ok {
				return nil, fmt.Errorf("mirror has no topic %s partition %d", t.Topic, p.Partition)
			}
			all = append(all, &partition{
				topic: t.Topic, number: p.Partition, sourceID: t.ID, mirrorID: m.ID,
				sourceLeader: p.Leader, mirrorLeader: mp.Leader,
			})
		}
	}
	if len(all) == 0 {
		return nil, errors.New("no partitions to copy")
	}
	return all, nil
}

func describe(ctx context.Context, seed string, topics []string) (kadm.TopicDetails, error) {
	client, err := kgo.NewClient(kgo.SeedBrokers(seed))
	if err != nil {
		return nil, err
	}
	defer client.Close()
	details, err := kadm.NewClient(client).ListTopics(ctx, topics...)
	if err != nil {
		return nil, err
	}
	return details, details.Error()
}
