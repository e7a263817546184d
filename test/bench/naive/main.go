// Command naive is the simplest copy of Kafka topics that keeps every record batch as it is: the floor that kmirror is measured
// against. It fetches raw batches, rewrites each header, computes the whole CRC anew and appends one batch a partition a request,
// waiting for each answer. It doesn't merge, remember, retry or check anything: a crash doubles or loses records.
//
//	naive -source 127.0.0.1:9092 -mirror 127.0.0.1:9192 -topics a,b -connections 2
//
// It is for clusters of one broker, copies from offset 0 and runs until a signal ends it. The mirror's topics must exist.
package main

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"hash/crc32"
	"log"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"golang.org/x/sync/errgroup"

	"kmirror/protocol"
)

func main() {
	source := flag.String("source", "", "the source's `host:port`")
	mirror := flag.String("mirror", "", "the mirror's `host:port`")
	topics := flag.String("topics", "", "topics to copy, separated by commas")
	connections := flag.Int("connections", 1, "connections to the mirror; the partitions are dealt out over them")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *source, *mirror, strings.Split(*topics, ","), *connections); err != nil && ctx.Err() == nil {
		log.Fatal("naive: ", err)
	}
}

// run deals the partitions out over lanes, each with a connection of its own to either cluster, and returns with the first error.
func run(ctx context.Context, source, mirror string, topics []string, connections int) error {
	if connections < 1 {
		return errors.New("at least one connection is needed")
	}
	all, err := listPartitions(ctx, source, mirror, topics)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	for i := range min(connections, len(all)) {
		l, err := newLane(source, mirror)
		if err != nil {
			return fmt.Errorf("lane %d: %w", i, err)
		}
		for n := i; n < len(all); n += connections {
			l.partitions = append(l.partitions, all[n])
		}
		group.Go(func() error { return l.run(ctx) })
	}
	return group.Wait()
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// rewrite makes b what a broker takes from a producer without idempotence: base offset 0, no leader epoch, no producer. The whole
// CRC is computed anew, which is what kmirror avoids.
func rewrite(b protocol.Batch) {
	const atCRC, atAttributes, atProducerID, afterSequence = 17, 21, 43, 57
	b.SetBaseOffset(0)
	b.SetLeaderEpoch(-1)
	for i := atProducerID; i < afterSequence; i++ { // producer ID, epoch and base sequence: -1 each
		b[i] = 0xff
	}
	binary.BigEndian.PutUint32(b[atCRC:], crc32.Checksum(b[atAttributes:], castagnoli))
}
