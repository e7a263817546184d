// Package demo is what surrounds kmirror in kmirror demo: a source and a mirror cluster inside the process (kfake), a small producer
// that writes through the proxy, and a reader of the mirror that says what arrived.
//
// The clusters hold everything in memory and end with the process. kmirror itself is wired in package main, as always.
//
//	d, err := demo.New()
//	defer d.Close()
//	err = d.Run(ctx, os.Stdout, demo.Addresses{Proxy: "127.0.0.1:9092", Admin: "127.0.0.1:9180"})
package demo

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Topic is the topic that the producer writes to.
const Topic = "orders"

// Brokers is how many brokers the source has.
const Brokers = 3

const partitions = 3

// Addresses say where kmirror listens, host:port.
type Addresses struct{ Proxy, Admin string }

// Demo is the two clusters.
type Demo struct {
	source, mirror *kfake.Cluster

	mu   sync.Mutex
	sent map[string]time.Time // value -> when the producer sent it; removed once it arrived
}

// New starts both clusters on free ports of the loopback interface.
func New() (*Demo, error) {
	source, err := kfake.NewCluster(kfake.ClusterID("demo-source"), kfake.NumBrokers(Brokers), kfake.SeedTopics(partitions, Topic))
	if err != nil {
		return nil, fmt.Errorf("demo: source cluster: %w", err)
	}
	mirror, err := kfake.NewCluster(kfake.ClusterID("demo-mirror"), kfake.NumBrokers(3))
	if err != nil {
		source.Close()
		return nil, fmt.Errorf("demo: mirror cluster: %w", err)
	}
	return &Demo{source: source, mirror: mirror, sent: map[string]time.Time{}}, nil
}

// Close ends the clusters.
func (d *Demo) Close() {
	d.source.Close()
	d.mirror.Close()
}

// Source lists the source's brokers.
func (d *Demo) Source() []string { return d.source.ListenAddrs() }

// Mirror lists the mirror's brokers.
func (d *Demo) Mirror() []string { return d.mirror.ListenAddrs() }

// Run tells how to join in, produces and tells what arrives, until ctx ends.
func (d *Demo) Run(ctx context.Context, w io.Writer, at Addresses) error {
	d.introduce(w, at)
	producer, err := kgo.NewClient(kgo.SeedBrokers(at.Proxy), kgo.ClientID("demo-producer"), kgo.DefaultProduceTopic(Topic), kgo.ProducerLinger(0))
	if err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	defer producer.Close()
	reader, err := kgo.NewClient(kgo.SeedBrokers(d.Mirror()...), kgo.ClientID("demo-reader"), kgo.ConsumeTopics(Topic),
		kgo.MetadataMinAge(100*time.Millisecond), kgo.MetadataMaxAge(time.Second))
	if err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	defer reader.Close()
	var wg sync.WaitGroup
	wg.Go(func() { d.produce(ctx, producer) })
	wg.Go(func() { d.tell(ctx, w, reader) })
	wg.Wait()
	fmt.Fprintln(w, "\nEnding: the proxy answers what is in flight, then the mirror drains.")
	return nil
}

func (d *Demo) introduce(w io.Writer, at Addresses) {
	fmt.Fprintf(w, `Two Kafka clusters inside this process, and kmirror between them:

  producers, consumers -> proxy %s -> source %s
                            |
                            +-> mirror %s

A small producer writes to topic %q through the proxy, one record a second. Join in:

  echo hello | kcat -P -b %s -t %s    write through the proxy
  kcat -C -b %s -t %s                 read the source
  kcat -C -b %s -t %s                 read the mirror
  http://%s/                               the status page

Ctrl-C ends it. What arrives on the mirror:

`, at.Proxy, d.Source()[0], d.Mirror()[0], Topic, at.Proxy, Topic, d.Source()[0], Topic, d.Mirror()[0], Topic, at.Admin)
}

// produce writes a record each second.
func (d *Demo) produce(ctx context.Context, client *kgo.Client) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for n := 1; ; n++ {
		value := fmt.Sprintf("order %d", n)
		d.mu.Lock()
		d.sent[value] = time.Now()
		d.mu.Unlock()
		client.Produce(ctx, &kgo.Record{Key: fmt.Append(nil, "customer ", n%7), Value: []byte(value)}, nil) // the mirror's reader tells
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// tell prints every record that arrives on the mirror.
func (d *Demo) tell(ctx context.Context, w io.Writer, client *kgo.Client) {
	for ctx.Err() == nil {
		fetches := client.PollFetches(ctx)
		now := time.Now()
		fetches.EachRecord(func(r *kgo.Record) {
			fmt.Fprintf(w, "  %-12q partition %d, offset %d%s\n", r.Value, r.Partition, r.Offset, d.since(string(r.Value), now))
		})
	}
}

// since says how long ago the producer sent value, "" if it didn't.
func (d *Demo) since(value string, now time.Time) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	at, known := d.sent[value]
	if !known {
		return ", written by someone else"
	}
	delete(d.sent, value)
	return fmt.Sprintf(", %.1f ms after it was sent", float64(now.Sub(at).Microseconds())/1000)
}
