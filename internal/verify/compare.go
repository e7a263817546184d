package verify

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// comparison is the comparison of one partition.
type comparison struct {
	p      *Partition
	opts   Options
	source *reader
	mirror *reader
	sum    digest // of the records that were compared: they are equal
}

// run compares and sets the result. An error means that it could not be told.
func (c *comparison) run(ctx context.Context) error {
	c.sum = newDigest()
	c.p.SameOffsets = true
	if ended, err := c.align(ctx); err != nil || ended {
		return err
	}
	if c.p.NotMirrored > 0 && c.opts.FromEarliest && c.p.Mirror.Start == 0 {
		c.p.Result, c.p.Reason = Different, "the source's first records are not on the mirror, which deleted none"
	}
	for {
		ended, err := c.step(ctx)
		if err != nil || ended {
			return err
		}
	}
}

// maxRuns is how often a partition is compared anew because records were deleted from the log's start while they were read.
const maxRuns = 5

// runAgain compares until nothing was deleted under way, and looks closer where compaction may explain what it finds.
func (c *comparison) runAgain(ctx context.Context) (err error) {
	compacted := func() (again bool, err error) {
		if c.p.Result != Different && c.p.NotMirrored+c.p.OnlyMirror == 0 {
			return false, nil
		}
		source, mirror, err := c.policies(ctx)
		if err != nil || !source && !mirror {
			return false, nil // it stays as it was found
		}
		return true, c.runCompacted(ctx, source, mirror)
	}
	for n := 1; ; n++ {
		if err = c.run(ctx); err == nil {
			_, err = compacted()
		}
		if !errors.Is(err, errDeleted) || n == maxRuns {
			return err
		}
		if err := c.begin(ctx); err != nil {
			return err
		}
	}
}

// begin asks for the logs' starts again and lets the comparison begin there.
func (c *comparison) begin(ctx context.Context) (err error) {
	p := c.p
	*p = Partition{Topic: p.Topic, Partition: p.Partition, MirrorPartition: p.MirrorPartition, Source: p.Source, Mirror: p.Mirror}
	if p.Source.Start, err = c.source.cluster.startOffset(ctx, c.source.key); err != nil {
		return fmt.Errorf("source: %w", err)
	}
	if p.Mirror.Start, err = c.mirror.cluster.startOffset(ctx, c.mirror.key); err != nil {
		return fmt.Errorf("mirror: %w", err)
	}
	c.source, c.mirror = c.source.clone(p.Source.Start), c.mirror.clone(p.Mirror.Start)
	c.source.end, c.mirror.end = max(p.Source.Start, p.Source.End), max(p.Mirror.Start, p.Mirror.End)
	return nil
}

// step compares the next record of each side. It returns true at the end or at the first difference.
func (c *comparison) step(ctx context.Context) (ended bool, err error) {
	a, err := c.source.peek(ctx)
	if err != nil {
		return true, fmt.Errorf("source: %w", err)
	}
	b, err := c.mirror.peek(ctx)
	if err != nil {
		return true, fmt.Errorf("mirror: %w", err)
	}
	switch {
	case a == nil && (b == nil || b.record.Offset >= c.p.Mirror.End): // what came later was written to the source later too
		if c.p.Result == "" {
			c.p.Result = Equal
		}
		return true, nil
	case a == nil:
		c.differ(nil, b, "the source has no such record")
		return true, nil
	case b == nil:
		grown, err := c.awaitMirror(ctx)
		return !grown, err
	}
	if what := differ(a.record, b.record); what != "" {
		return true, c.explain(ctx, a, b, what)
	}
	c.p.Compared++
	c.p.SameOffsets = c.p.SameOffsets && a.record.Offset == b.record.Offset
	c.sum.add(a.record)
	c.source.take()
	c.mirror.take()
	return false, nil
}

// awaitMirror waits for the mirror to grow. One that stands still for longer than Patience is different, which it notes.
func (c *comparison) awaitMirror(ctx context.Context) (grown bool, err error) {
	for begun := time.Now(); ; {
		end, err := c.mirror.cluster.lastStableOffset(ctx, c.mirror.key)
		if err != nil {
			return false, fmt.Errorf("mirror: %w", err)
		}
		c.mirror.end = max(c.mirror.end, end)
		it, err := c.mirror.peek(ctx)
		switch {
		case err != nil:
			return false, fmt.Errorf("mirror: %w", err)
		case it != nil:
			return true, nil
		case time.Since(begun) >= c.opts.Patience:
			return false, c.noteBehind()
		}
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-time.After(min(c.opts.Patience, 200*time.Millisecond)):
		}
	}
}

// noteBehind notes that the mirror ends before the source does, unless it deleted everything: then nobody can tell.
func (c *comparison) noteBehind() error {
	if c.p.Compared == 0 && c.p.Mirror.Start > 0 {
		return errMirrorDeleted
	}
	next := &c.source.items[0]
	c.differ(next, nil, fmt.Sprintf("the mirror is behind by %d offsets", c.source.end-next.record.Offset))
	return nil
}

// explain notes a difference, and whether it looks like records left out or doubled.
func (c *comparison) explain(ctx context.Context, a, b *item, what string) error {
	onSource, err := c.source.window(ctx, windowSize)
	if err != nil {
		return fmt.Errorf("source: %w", err)
	}
	onMirror, err := c.mirror.window(ctx, windowSize)
	if err != nil {
		return fmt.Errorf("mirror: %w", err)
	}
	for i := 1; i < windowSize; i++ {
		if i < len(onSource) && prefixEqual(onSource[i:], onMirror) {
			what = fmt.Sprintf("%d records are not on the mirror", i)
			break
		}
		if i < len(onMirror) && prefixEqual(onSource, onMirror[i:]) {
			what = fmt.Sprintf("%d records on the mirror are not on the source", i)
			break
		}
	}
	c.differ(&onSource[0], &onMirror[0], what)
	return nil
}

func (c *comparison) differ(a, b *item, what string) {
	d := &Difference{SourceOffset: -1, MirrorOffset: -1, What: what}
	if a != nil {
		d.SourceOffset = a.record.Offset
	}
	if b != nil {
		d.MirrorOffset = b.record.Offset
	}
	c.p.Result, c.p.Difference = Different, d
}

// finish copies the counts and digests into the partition's entry.
func (c *comparison) finish() {
	c.p.Foreign = c.mirror.foreign
	c.p.SourceSHA = c.sum.text()
	c.p.MirrorSHA = c.p.SourceSHA
	c.p.SameOffsets = c.p.SameOffsets && c.p.Compared > 0
}

// differ names what is different between two records, "" if nothing is. null and empty are different.
func differ(a, b *kgo.Record) string {
	switch {
	case !sameBytes(a.Key, b.Key):
		return "the keys differ"
	case !sameBytes(a.Value, b.Value):
		return "the values differ"
	case !a.Timestamp.Equal(b.Timestamp):
		return fmt.Sprintf("the timestamps differ: %d and %d", a.Timestamp.UnixMilli(), b.Timestamp.UnixMilli())
	case len(a.Headers) != len(b.Headers):
		return "the headers differ"
	}
	for i := range a.Headers {
		if a.Headers[i].Key != b.Headers[i].Key || !sameBytes(a.Headers[i].Value, b.Headers[i].Value) {
			return "the headers differ"
		}
	}
	return ""
}

func sameBytes(a, b []byte) bool { return (a == nil) == (b == nil) && bytes.Equal(a, b) }

// digest is a SHA-256 over records, each field with its length before it.
type digest struct {
	sum     hash.Hash
	scratch [8]byte
}

func newDigest() digest { return digest{sum: sha256.New()} }

func (d *digest) add(r *kgo.Record) {
	d.bytes(r.Key)
	d.bytes(r.Value)
	d.number(r.Timestamp.UnixMilli())
	d.number(int64(len(r.Headers)))
	for _, h := range r.Headers {
		d.bytes([]byte(h.Key))
		d.bytes(h.Value)
	}
}

func (d *digest) number(n int64) {
	binary.BigEndian.PutUint64(d.scratch[:], uint64(n))
	d.sum.Write(d.scratch[:]) // a hash never fails
}

// bytes writes the length, -1 for null, and the content.
func (d *digest) bytes(b []byte) {
	if b == nil {
		d.number(-1)
		return
	}
	d.number(int64(len(b)))
	d.sum.Write(b)
}

func (d *digest) text() string { return hex.EncodeToString(d.sum.Sum(nil)) }
