package verify

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Compaction takes from either log what a later record of the same key supersedes, whenever it likes, also while it is read. So where the
// records of a compacted topic aren't simply equal, three things are compared:
//
//  1. The final map: the last record of each key before the cut is the same on both sides. A tombstone and no record at all are the same.
//     A key that the source wrote again behind the cut is left out: its record from before the cut may be cleaned at any moment.
//  2. The order of those last records.
//  3. Where only one side is compacted, its records, all of them, are a subsequence of the other's. Where the mirror's batches carry
//     positions, these rise.
//
// The map takes bounded memory: once it holds Options.Keys keys it keeps those whose hash is in the lower half, and both logs are read
// again for the others.

// defaultKeys take about 60 MiB.
const defaultKeys = 1 << 19

type keyHash [16]byte

func (k keyHash) class() uint64 { return binary.BigEndian.Uint64(k[:]) }

// lastRecord is the last record of a key on one side; offset -1: none.
type lastRecord struct {
	offset int64
	sum    uint64 // of the whole record; 0: a tombstone, which is as good as none
}

type keyState struct {
	source, mirror lastRecord
	changed        bool // behind the cut, or of several source partitions
}

// keyMap holds the keys whose hash is in [from, to].
type keyMap struct {
	from, to uint64
	limit    int
	keys     map[keyHash]*keyState
}

func newKeyMap(from uint64, limit int) *keyMap {
	return &keyMap{from: from, to: math.MaxUint64, limit: limit, keys: map[keyHash]*keyState{}}
}

// state returns the entry of a record's key, nil if another pass is for it. A record without a key has no place in a map.
func (m *keyMap) state(r *kgo.Record, insert bool) *keyState {
	if r.Key == nil {
		return nil
	}
	sum := sha256.Sum256(r.Key)
	key := keyHash(sum[:16])
	if class := key.class(); class < m.from || class > m.to {
		return nil
	}
	if s := m.keys[key]; s != nil || !insert {
		return s
	}
	s := &keyState{source: lastRecord{offset: -1}, mirror: lastRecord{offset: -1}}
	m.keys[key] = s
	for len(m.keys) > m.limit && m.to > m.from {
		m.to = m.from + (m.to-m.from)/2
		for key := range m.keys {
			if key.class() > m.to {
				delete(m.keys, key)
			}
		}
	}
	return s
}

func lastOf(r *kgo.Record) lastRecord {
	if r.Value == nil {
		return lastRecord{offset: r.Offset}
	}
	d := newDigest()
	d.add(r)
	return lastRecord{r.Offset, max(binary.BigEndian.Uint64(d.sum.Sum(nil)), 1)}
}

// differing returns the keys whose last records differ, the first on the source first, and how many there are.
func (m *keyMap) differing(p *Partition) (n int64, first *keyState) {
	for _, s := range m.keys {
		retained := s.source.offset < 0 && p.Source.Start > 0 || s.mirror.offset < 0 && p.Mirror.Start > 0 // deleted with its segment
		if s.changed || s.source.sum == s.mirror.sum || retained {
			continue
		}
		if n++; first == nil || s.source.offset < first.source.offset {
			first = s
		}
	}
	return n, first
}

// outOfOrder returns two keys whose last records have changed places, nil if there are none.
func (m *keyMap) outOfOrder() (a, b *keyState) {
	var both []*keyState
	for _, s := range m.keys {
		if !s.changed && s.source.sum != 0 && s.source.sum == s.mirror.sum {
			both = append(both, s)
		}
	}
	slices.SortFunc(both, func(a, b *keyState) int { return cmp.Compare(a.source.offset, b.source.offset) })
	for i := range len(both) - 1 {
		if both[i].mirror.offset > both[i+1].mirror.offset {
			return both[i], both[i+1]
		}
	}
	return nil, nil
}

// runCompacted compares the sides of a topic of which at least one is compacted.
func (c *comparison) runCompacted(ctx context.Context, sourceCompacted, mirrorCompacted bool) error {
	*c.p = Partition{Topic: c.p.Topic, Partition: c.p.Partition, MirrorPartition: c.p.MirrorPartition, Source: c.p.Source, Mirror: c.p.Mirror, Compacted: true}
	c.sum = newDigest()
	limit := c.opts.Keys
	if limit <= 0 {
		limit = defaultKeys
	}
	for from := uint64(0); ; {
		m := newKeyMap(from, limit)
		if err := c.compareKeys(ctx, m); err != nil || c.p.Result != "" {
			return err
		}
		if m.to == math.MaxUint64 {
			break
		}
		from = m.to + 1
	}
	c.restart()
	var missing *item
	var err error
	switch {
	case !mirrorCompacted:
		if missing, err = c.subsequence(ctx, c.source, c.mirror, c.awaitMirror); missing != nil {
			c.differ(missing, nil, "the mirror, which isn't compacted, lacks this record or has it in another place")
		}
	case !sourceCompacted:
		if missing, err = c.subsequence(ctx, c.mirror, c.source, nil); missing != nil {
			c.differ(nil, missing, "the source, which isn't compacted, lacks this record or has it in another place")
		}
	}
	if err == nil && c.p.Result == "" {
		c.p.Result = Equal
	}
	return err
}

// restart lets both sides be read from the log's start again.
func (c *comparison) restart() {
	c.source = c.source.clone(c.source.first)
	c.mirror = c.mirror.clone(c.mirror.first)
	c.source.end = c.p.Source.End
}

// compareKeys is one pass over both logs for the keys that m holds in the end.
func (c *comparison) compareKeys(ctx context.Context, m *keyMap) error {
	c.restart()
	if err := drain(ctx, c.source, func(it *item) {
		if s := m.state(it.record, true); s != nil {
			s.source = lastOf(it.record)
		}
	}); err != nil {
		return fmt.Errorf("source: %w", err)
	}
	c.mirror.other = func(r *kgo.Record) { // compaction keeps the last record of a key whatever source partition it came from
		if s := m.state(r, false); s != nil {
			s.changed = true
		}
	}
	rising := positionCheck{}
	best, since := int64(math.MaxInt64), time.Now()
	for {
		if err := c.readOn(ctx, m, &rising); err != nil {
			return err
		}
		n, first := m.differing(c.p)
		switch {
		case rising.bad != nil:
			c.differ(nil, rising.bad, "it stands twice, or behind a later one")
			return nil
		case n == 0:
			return c.noteKeys(m)
		case n < best:
			best, since = n, time.Now()
		case time.Since(since) >= c.opts.Patience:
			c.p.Result = Different
			c.p.Difference = &Difference{first.source.offset, first.mirror.offset, fmt.Sprintf("%d keys have another last record", n)}
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(min(c.opts.Patience, 200*time.Millisecond)):
		}
	}
}

// noteKeys checks the order and counts the keys of a pass.
func (c *comparison) noteKeys(m *keyMap) error {
	for _, s := range m.keys {
		if s.changed {
			c.p.Changed++
		} else if s.source.sum != 0 {
			c.p.Keys++
		}
	}
	if a, b := m.outOfOrder(); a != nil {
		c.p.Result = Different
		c.p.Difference = &Difference{b.source.offset, b.mirror.offset, fmt.Sprintf("it stands before the record of mirror offset %d", a.mirror.offset)}
	}
	return nil
}

// readOn reads what both sides have now. The mirror goes first: what it has from behind the cut is then on the source too.
func (c *comparison) readOn(ctx context.Context, m *keyMap, rising *positionCheck) error {
	end, err := c.mirror.cluster.lastStableOffset(ctx, c.mirror.key)
	if err != nil {
		return fmt.Errorf("mirror: %w", err)
	}
	c.mirror.end = max(c.mirror.end, end)
	if err := drain(ctx, c.mirror, func(it *item) {
		rising.look(it)
		if s := m.state(it.record, true); s != nil {
			s.mirror = lastOf(it.record)
		}
	}); err != nil {
		return fmt.Errorf("mirror: %w", err)
	}
	if end, err = c.source.cluster.lastStableOffset(ctx, c.source.key); err != nil {
		return fmt.Errorf("source: %w", err)
	}
	c.source.end = max(c.source.end, end)
	if err := drain(ctx, c.source, func(it *item) {
		if s := m.state(it.record, true); s != nil {
			s.changed = true
		}
	}); err != nil {
		return fmt.Errorf("source: %w", err)
	}
	return nil
}

// positionCheck finds records of kmirror whose positions don't rise within one producer ID.
type positionCheck struct {
	producerID, position int64
	bad                  *item
}

func (p *positionCheck) look(it *item) {
	if it.position < 0 || p.bad != nil {
		return
	}
	if it.record.ProducerID == p.producerID && it.position <= p.position {
		bad := *it
		p.bad = &bad
	}
	p.producerID, p.position = it.record.ProducerID, it.position
}

// subsequence finds every record of few, in order, among those of many. It returns the first that isn't there.
func (c *comparison) subsequence(ctx context.Context, few, many *reader, await func(context.Context) (bool, error)) (missing *item, err error) {
	for {
		want, err := few.peek(ctx)
		if err != nil || want == nil {
			return nil, err
		}
		got, err := many.peek(ctx)
		if err != nil {
			return nil, err
		}
		switch {
		case got != nil && differ(want.record, got.record) == "":
			c.p.Compared++
			few.take()
			many.take()
		case got != nil:
			many.take()
		case await == nil:
			return want, nil
		default:
			if grown, err := await(ctx); err != nil || !grown {
				return want, err
			}
		}
	}
}

// drain hands every record up to the reader's end to f.
func drain(ctx context.Context, r *reader, f func(*item)) error {
	for {
		it, err := r.peek(ctx)
		if err != nil || it == nil {
			return err
		}
		f(it)
		r.take()
	}
}

// policies tells whether the sides' topics are compacted.
func (c *comparison) policies(ctx context.Context) (source, mirror bool, err error) {
	source, err = c.source.cluster.compacted(ctx, c.source.key.topic)
	if err != nil {
		return false, false, fmt.Errorf("source: whether it is compacted isn't known: %w", err)
	}
	mirror, err = c.mirror.cluster.compacted(ctx, c.mirror.key.topic)
	if err != nil {
		return false, false, fmt.Errorf("mirror: whether it is compacted isn't known: %w", err)
	}
	return source, mirror, nil
}

var errNoSuchConfig = errors.New("cleanup.policy isn't among the topic's settings")

// compacted asks for the topic's cleanup policy.
func (c *cluster) compacted(ctx context.Context, topic string) (bool, error) {
	configs, err := kadm.NewClient(c.client).DescribeTopicConfigs(ctx, topic)
	if err != nil {
		return false, err
	}
	of, err := configs.On(topic, nil)
	if err == nil {
		err = of.Err
	}
	if err != nil {
		return false, err
	}
	for _, config := range of.Configs {
		if config.Key == "cleanup.policy" {
			return strings.Contains(config.MaybeValue(), "compact"), nil
		}
	}
	return false, errNoSuchConfig
}
