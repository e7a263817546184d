package forwarder

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sort"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/zap"

	"kmirror/protocol"
)

// OffsetMap tells for one partition which source offset is which mirror offset, both ways. It takes that from the mirror alone: the segments and positions
// topics, and the headers of the batches in the mirror's log. It writes nothing. Its methods are for one goroutine at a time.
type OffsetMap struct {
	source, mirror *kgo.Client
	resolver       resolver
	question       question
	start, end     int64                  // of the mirror's log, as of the opening
	probed         map[int64]*mappedBatch // answers of batchFrom, so that many offsets cost little more than one; at most maxProbed
	dense          map[int64]*numbering   // by producer ID
	begun          map[fenceKey]int       // rank of a beginning, in the order of the mirror's log; a generation's has epoch 0
	from           []int64                // by rank: the least source offset at which that beginning or a later one begins; not descending
	fenced         map[fenceKey][]stretch // by base sequence
}

// fenceKey names a fenced session.
type fenceKey struct {
	producerID int64
	epoch      int16
}

// stretch is what one record of the positions topic says.
type stretch struct {
	base int64 // sequence
	runs []protocol.Run
}

// MappedOffset is an offset on the other side.
type MappedOffset struct {
	Offset int64 `json:"offset"`
	// Same says that the same record is there. Else there is none (a marker, a record that was compacted away, that the source lost when it truncated its log, or of somebody else),
	// and Offset is that of the first mirrored record behind it.
	Same bool `json:"same_record"`
	// Beyond says that there is no such record either: Offset is where the next one will be, unless others write there.
	Beyond bool `json:"beyond_the_end"`
}

// mappedBatch is one batch of the stream on the mirror.
type mappedBatch struct {
	base, end int64
	runs      []protocol.Run
	rank      int // of its beginning
}

// OpenOffsetMap asks both clusters about a partition, which a kmirror of opts.Name mirrors. Of opts it takes Name, Source, Mirror, Rename and Repartition. mirrorPartition is
// the same partition, unless topics are repartitioned: then the map is of those records that went there.
func OpenOffsetMap(ctx context.Context, opts Options, topic string, partition, mirrorPartition int32) (m *OffsetMap, err error) {
	m = &OffsetMap{probed: map[int64]*mappedBatch{}, dense: map[int64]*numbering{}, fenced: map[fenceKey][]stretch{}}
	defer func() {
		if err != nil {
			m.Close()
		}
	}()
	if m.source, err = kgo.NewClient(clientOptions(opts.Source, "kmirror-offsets")...); err != nil {
		return m, err
	}
	if m.mirror, err = kgo.NewClient(clientOptions(opts.Mirror, "kmirror-offsets")...); err != nil {
		return m, err
	}
	source, err := askView(ctx, m.source, []string{topic})
	if err != nil {
		return m, fmt.Errorf("source: %w", err)
	}
	from, err := partitionOf(source, topic, partition)
	if err != nil {
		return m, fmt.Errorf("source: %w", err)
	}
	registry := newRegistry(m.mirror, opts.Name, source.clusterID, "", 0, zap.NewNop())
	registry.begun = map[identity][]begin{}
	registry.segments.made.Store(true) // or there is nothing to read
	registry.runs.made.Store(true)
	mirrorTopic := renaming(opts.Rename).mirrorName(topic)
	mirror, err := askView(ctx, m.mirror, []string{mirrorTopic, registry.segments.topic, registry.runs.topic})
	if err != nil {
		return m, fmt.Errorf("mirror: %w", err)
	}
	to, err := partitionOf(mirror, mirrorTopic, mirrorPartition)
	if err != nil {
		return m, fmt.Errorf("mirror: %w", err)
	}
	if t := mirror.topics[registry.segments.topic]; t == nil || t.err != nil {
		return m, fmt.Errorf("mirror: topic %s isn't there: nothing was mirrored under the name %s", registry.segments.topic, opts.Name)
	}
	if err := registry.refresh(ctx); err != nil {
		return m, err
	}
	id := identity{sourceCluster: source.clusterID, topicID: from.id, partition: partition, mirrorTopicID: to.id}
	if opts.Repartition {
		id.to, id.of = mirrorPartition, int32(len(to.partitions))
	}
	if err := m.know(registry, id); err != nil {
		return m, err
	}
	if t := mirror.topics[registry.runs.topic]; t != nil && t.err == nil {
		if err := m.readStretches(ctx, registry); err != nil {
			return m, err
		}
	}
	leader := to.partitions[mirrorPartition]
	c, err := dialConn(ctx, mirror.brokers[leader.leader], "kmirror-offsets", opts.Mirror)
	if err != nil {
		return m, fmt.Errorf("mirror: %w", err)
	}
	m.resolver = resolver{conn: c, fetchBytes: 64 << 10}
	m.question.topic, m.question.topicID, m.question.partition, m.question.epoch = mirrorTopic, to.id, mirrorPartition, -1
	return m, m.ends(ctx)
}

// partitionOf checks that a view has the partition, with a leader.
func partitionOf(view *clusterView, topic string, partition int32) (*topicView, error) {
	t := view.topics[topic]
	switch {
	case t == nil:
		return nil, fmt.Errorf("topic %s: %w", topic, kerr.UnknownTopicOrPartition)
	case t.err != nil:
		return nil, fmt.Errorf("topic %s: %w", topic, t.err)
	case partition < 0 || int(partition) >= len(t.partitions):
		return nil, fmt.Errorf("topic %s has %d partitions, no partition %d", topic, len(t.partitions), partition)
	case t.partitions[partition].leader < 0:
		return nil, fmt.Errorf("topic %s partition %d has no leader now", topic, partition)
	}
	return t, nil
}

// know takes the stream's generations and producer IDs.
func (m *OffsetMap) know(registry *registry, id identity) error {
	generations, fencers := registry.generations(id)
	if len(generations) == 0 {
		return errors.New("this partition was never mirrored")
	}
	m.question.ours = fencers
	for i := range generations {
		n := &generations[i]
		m.dense[n.producerID] = n
		m.question.ours = append(m.question.ours, n.producerID)
	}
	begun := registry.beginnings(id)
	m.begun, m.from = make(map[fenceKey]int, len(begun)), make([]int64, len(begun))
	least := int64(math.MaxInt64)
	for rank := len(begun) - 1; rank >= 0; rank-- {
		b := &begun[rank]
		least = min(least, b.source)
		m.begun[fenceKey{b.producerID, b.epoch}], m.from[rank] = rank, least
	}
	return nil
}

// replacedFrom is the source offset from which on a later beginning appended anew what one of that rank had, after the source had truncated its log.
func (m *OffsetMap) replacedFrom(rank int) int64 {
	if rank+1 < len(m.from) {
		return m.from[rank+1]
	}
	return math.MaxInt64
}

// readStretches reads the positions topic for the stream's fenced sessions.
func (m *OffsetMap) readStretches(ctx context.Context, registry *registry) error {
	_, err := registry.runs.read(ctx, place{0, -1}, func(rec *kgo.Record) {
		r, err := parseRunsRecord(rec.Value)
		if err != nil || !slices.Contains(m.question.ours, r.producerID) {
			return
		}
		if runs, err := r.decode(); err == nil {
			key := fenceKey{r.producerID, r.epoch}
			m.fenced[key] = append(m.fenced[key], stretch{r.base, runs})
		}
	})
	for _, list := range m.fenced {
		slices.SortFunc(list, func(a, b stretch) int { return cmp.Compare(a.base, b.base) })
	}
	return err
}

func (m *OffsetMap) ends(ctx context.Context) error {
	questions, answers := []question{m.question}, make([]answer, 1)
	err := m.resolver.listOffsets(ctx, questions, answers, earliestOffset, -1, func(_ *answer, offset int64) { m.start = offset })
	if err == nil {
		err = m.resolver.listOffsets(ctx, questions, answers, latestOffset, -1, func(_ *answer, offset int64) { m.end = offset })
	}
	if err = errors.Join(err, answers[0].err); err != nil {
		return fmt.Errorf("mirror: %w", err)
	}
	return nil
}

// Close ends the connections.
func (m *OffsetMap) Close() {
	for _, client := range []*kgo.Client{m.source, m.mirror} {
		if client != nil {
			client.Close()
		}
	}
	if m.resolver.conn != nil {
		m.resolver.conn.close(errConnClosed)
	}
}

// ToMirror returns where on the mirror the record at a source offset is, or the first one behind it. Of records that had the same source offset, since the source truncated its log, it's
// the last, which the source has.
func (m *OffsetMap) ToMirror(ctx context.Context, source int64) (MappedOffset, error) {
	// What begins later is all behind source; what began earlier and isn't below it was appended anew.
	rank := max(0, sort.Search(len(m.from), func(i int) bool { return m.from[i] > source })-1)
	for {
		b, err := m.firstFrom(ctx, rank, source)
		if err != nil || b == nil {
			return MappedOffset{Offset: m.end, Beyond: true}, err
		}
		at := b.base
		for _, run := range b.runs {
			if first := max(source, run.Source); first < min(run.Source+run.Count, m.replacedFrom(b.rank)) {
				return MappedOffset{Offset: at + first - run.Source, Same: first == source}, nil
			}
			at += run.Count
		}
		rank = b.rank + 1
	}
}

// firstFrom returns the first batch of beginnings from rank on that isn't below a source offset in that of rank, nil if there is none.
func (m *OffsetMap) firstFrom(ctx context.Context, rank int, source int64) (*mappedBatch, error) {
	// Invariant: all of ours below from is of earlier beginnings or source offsets below source; at to or behind it is the answer, or nothing.
	from, to := m.start, m.end
	for from < to {
		middle := from + (to-from)/2
		b, err := m.batchFrom(ctx, middle)
		if err != nil {
			return nil, err
		}
		if b != nil && (b.rank < rank || b.rank == rank && b.lastSource() < source) {
			from = min(b.end, to)
		} else {
			to = middle
		}
	}
	return m.batchFrom(ctx, from)
}

// ToSource returns which source offset the record at a mirror offset has, or the first one of ours behind it that the source wasn't truncated to before.
func (m *OffsetMap) ToSource(ctx context.Context, mirror int64) (MappedOffset, error) {
	b, err := m.batchFrom(ctx, max(mirror, m.start))
	for err == nil && b != nil {
		at := b.base
		for _, run := range b.runs {
			first := run.Source + max(0, mirror-at)
			if first < min(run.Source+run.Count, m.replacedFrom(b.rank)) {
				return MappedOffset{Offset: first, Same: mirror >= at}, nil
			}
			at += run.Count
		}
		b, err = m.firstFrom(ctx, b.rank+1, 0) // what is left of this beginning is replaced too
	}
	if err != nil {
		return MappedOffset{}, err
	}
	return m.sourceEnd(ctx)
}

// sourceEnd is the source offset behind the last mirrored record that the source has.
func (m *OffsetMap) sourceEnd(ctx context.Context) (MappedOffset, error) {
	var last *mappedBatch
	for at := m.start; ; at = last.end {
		// Halve what is left until the last batch of ours is found.
		b, err := m.batchFrom(ctx, at)
		if err != nil {
			return MappedOffset{}, err
		}
		if b == nil {
			break
		}
		last = b
		for from, to := last.end, m.end; from < to; {
			middle := from + (to-from)/2
			if b, err = m.batchFrom(ctx, middle); err != nil {
				return MappedOffset{}, err
			}
			if b == nil {
				to = middle
			} else {
				last, from = b, b.end
			}
		}
	}
	if last == nil {
		return MappedOffset{Offset: m.birth(), Beyond: true}, nil
	}
	return MappedOffset{Offset: min(last.lastSource()+1, m.replacedFrom(last.rank)), Beyond: true}, nil
}

// birth is the source offset at which the stream's newest generation began.
func (m *OffsetMap) birth() int64 {
	newest := &numbering{generation: -1}
	for _, n := range m.dense {
		if n.generation > newest.generation {
			newest = n
		}
	}
	return newest.birth()
}

func (b *mappedBatch) lastSource() int64 {
	last := b.runs[len(b.runs)-1]
	return last.Source + last.Count - 1
}

const maxProbed = 1 << 16

// batchFrom returns the first batch of ours that ends behind a mirror offset, nil if there is none.
func (m *OffsetMap) batchFrom(ctx context.Context, offset int64) (*mappedBatch, error) {
	if b, ok := m.probed[offset]; ok {
		return b, nil
	}
	b, err := m.findBatch(ctx, offset)
	if err == nil && len(m.probed) < maxProbed {
		m.probed[offset] = b
	}
	return b, err
}

func (m *OffsetMap) findBatch(ctx context.Context, offset int64) (found *mappedBatch, err error) {
	for offset < m.end && found == nil && err == nil {
		next := offset
		var bad error
		err = m.resolver.fetch(ctx, m.question, offset, func(b protocol.Batch) {
			if found == nil && bad == nil && b.EndOffset() > offset && b.BaseOffset() < m.end && m.question.isOurs(b) {
				found, bad = m.mapBatch(b)
			}
			next = max(next, b.EndOffset())
		})
		if err = errors.Join(err, bad); err == nil && next == offset {
			return nil, fmt.Errorf("the mirror's log gives nothing at offset %d below its end %d", offset, m.end)
		}
		offset = next
	}
	return found, err
}

// mapBatch finds the source offsets of a batch's records.
func (m *OffsetMap) mapBatch(b protocol.Batch) (*mappedBatch, error) {
	found := &mappedBatch{base: b.BaseOffset(), end: b.EndOffset()}
	if n := m.dense[b.ProducerID()]; n != nil {
		found.rank = m.begun[fenceKey{producerID: b.ProducerID()}]
		found.runs = n.runs(positionOf(int32(b.ProducerEpoch()), b.BaseSequence()), offsetsOf(b))
		return found, nil
	}
	key := fenceKey{b.ProducerID(), b.ProducerEpoch()}
	found.rank = m.begun[key]
	skip, left := int64(b.BaseSequence()), offsetsOf(b)
	for _, s := range m.fenced[key] {
		at := s.base
		for _, run := range s.runs {
			first, last := max(skip, at), min(skip+left, at+run.Count)
			if first < last {
				found.runs = protocol.AppendRun(found.runs, run.Source+first-at, last-first)
				skip, left = last, left-(last-first)
			}
			at += run.Count
		}
	}
	if left > 0 {
		return nil, fmt.Errorf("the positions topic doesn't know the batch at mirror offset %d", found.base)
	}
	return found, nil
}
