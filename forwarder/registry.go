package forwarder

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/zap"

	"kmirror/protocol"
)

// segmentRecord is one record of the segments topic: source offsets from Source on have the positions from Position on, in that
// generation of that stream (rules N3 to N5). Of several births of a stream and generation, and of several segments at one source
// offset, the first in the log counts, whoever wrote it.
type segmentRecord struct {
	SourceCluster string `json:"source_cluster"`
	Topic         string `json:"topic"` // for people; the ID decides
	TopicID       string `json:"topic_id"`
	Partition     int32  `json:"partition"`
	MirrorTopicID string `json:"mirror_topic_id"`
	Generation    int32  `json:"generation"`
	Source        int64  `json:"source_offset"`
	Position      int64  `json:"position"`
	Birth         bool   `json:"birth"` // else a hole's end, or a fence
	// Fence with a birth is the one in force, which the new generation ends; else the session's that begins at Source (rule N6).
	Fence *fenceRecord `json:"fence,omitempty"`
	// Partitions is how many the source topic had, with a birth: one above it is new in a topic that was mirrored before.
	Partitions int32 `json:"partitions,omitempty"`
	// To and Of are, of a share, its mirror partition and how many the mirror topic has.
	To     int32  `json:"mirror_partition,omitempty"`
	Of     int32  `json:"mirror_partitions,omitempty"`
	Writer string `json:"writer"` // for people
}

// fenceRecord is a fence in a segmentRecord.
type fenceRecord struct {
	ProducerID int64 `json:"producer_id"`
	Epoch      int16 `json:"epoch"`
	// Behind is our last batch on the mirror as the session begins: producer ID (-1: none), epoch, and the sequence behind it.
	Behind   [3]int64 `json:"behind"`
	Settled  bool     `json:"settled"`
	RunsFrom int64    `json:"runs_from"` // offset in the positions topic
	// MirrorEnd is the end of the mirror's log as the session begins, in leader epoch MirrorEpoch.
	MirrorEnd   int64 `json:"mirror_end"`
	MirrorEpoch int32 `json:"mirror_epoch"`
}

func newFenceRecord(f *fence) *fenceRecord {
	return &fenceRecord{
		ProducerID: f.producerID, Epoch: f.epoch, Behind: [3]int64{f.behind.producerID, int64(f.behind.epoch), f.behind.end},
		Settled: f.settled, RunsFrom: f.runsFrom, MirrorEnd: f.mirrorEnd, MirrorEpoch: f.mirrorEpoch,
	}
}

func (r *fenceRecord) fence(source int64) *fence {
	return &fence{
		producerID: r.ProducerID, epoch: r.Epoch, source: source, settled: r.Settled, runsFrom: r.RunsFrom, mirrorEnd: r.MirrorEnd, mirrorEpoch: r.MirrorEpoch,
		behind: landmark{r.Behind[0], int16(r.Behind[1]), r.Behind[2]},
	}
}

func (r *segmentRecord) identity() (id identity, err error) {
	id = identity{sourceCluster: r.SourceCluster, partition: r.Partition, generation: r.Generation, to: r.To, of: r.Of}
	if id.topicID, err = parseTopicID(r.TopicID); err == nil {
		id.mirrorTopicID, err = parseTopicID(r.MirrorTopicID)
	}
	return id, err
}

// settingsRecord says what kmirror last set on a mirror topic (null: back to the default). The last one in the log counts.
type settingsRecord struct {
	SourceCluster string             `json:"source_cluster"`
	Topic         string             `json:"topic"` // for people; the ID decides
	TopicID       string             `json:"topic_id"`
	MirrorTopicID string             `json:"mirror_topic_id"`
	Settings      map[string]*string `json:"settings"` // never null: it tells this kind of record from the others
	Writer        string             `json:"writer"`   // for people

	mirrorName string
}

func newSettingsRecord(source, mirror *topicView, settings map[string]*string) settingsRecord {
	return settingsRecord{
		Topic: source.name, TopicID: hex.EncodeToString(source.id[:]), MirrorTopicID: hex.EncodeToString(mirror.id[:]), Settings: settings,
		mirrorName: mirror.name,
	}
}

// topicPair is a source topic and its mirror topic.
type topicPair struct{ source, mirror protocol.TopicID }

// pairing is what is known of a topicPair.
type pairing struct {
	settings   map[string]*string // as kmirror left them, nil: it set none
	born       bool               // with a stream
	partitions int32              // of the source topic at the first birth, 0: not known
	of         int32              // mirror partitions that it is spread over, 0: partition to partition
}

// pairing returns the entry of a pair, made if there is none. r.mu is held.
func (r *registry) pairing(pair topicPair) *pairing {
	p := r.pairs[pair]
	if p == nil {
		p = &pairing{}
		r.pairs[pair] = p
	}
	return p
}

// registry is the segments topic on the mirror, read to its end whenever asked. Safe for concurrent use.
type registry struct {
	source string // source cluster ID
	writer string
	log    *zap.Logger

	segments journal
	runs     journal       // see positions.go
	reading  chan struct{} // size 1: taken by who reads the segments topic on from position
	position place         // up to which it was read; who holds reading has it

	// mu guards the fields below. It is never held over a question to a broker: the loop looks things up, and a broker that doesn't answer must
	// not hold it up.
	mu      sync.Mutex
	known   map[identity]*numbering
	latest  map[identity]int32   // identity of generation 0 -> highest generation seen
	fencers map[identity][]int64 // identity of generation 0 -> the producer IDs of its fences
	pairs   map[topicPair]*pairing
	// begun are a stream's beginnings in force, in their order; nil where nobody asks for them, since those of a compacted topic are many.
	begun map[identity][]begin
}

// begin is the birth of a generation, or the fence of a session: what is appended from there on is of source offsets from source on. Where the source truncated its log these aren't above
// all that was appended before.
type begin struct {
	producerID int64
	epoch      int16 // of a fence, 0: a generation
	source     int64
}

func newRegistry(client *kgo.Client, name, source, writer string, rf int16, log *zap.Logger) *registry {
	return &registry{
		source: source, writer: writer, log: log,
		segments: journal{client: client, topic: "__kmirror." + name + ".segments", rf: rf},
		runs:     journal{client: client, topic: "__kmirror." + name + ".positions", rf: rf},
		reading:  make(chan struct{}, 1),
		position: place{0, -1},
		known:    map[identity]*numbering{}, latest: map[identity]int32{}, fencers: map[identity][]int64{}, pairs: map[topicPair]*pairing{},
	}
}

// refresh reads the topic to its end. Every session does so before it starts.
func (r *registry) refresh(ctx context.Context) error {
	if err := r.segments.make(ctx); err != nil {
		return err
	}
	return r.readToEnd(ctx)
}

// readToEnd takes what the topic holds as of now. One reads at a time, so that each record is read and taken once, in order; whoever waits for that needs
// the same broker's answer.
func (r *registry) readToEnd(ctx context.Context) error {
	select {
	case r.reading <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("topic %s: %w", r.segments.topic, context.Cause(ctx))
	}
	defer func() { <-r.reading }()
	next, err := r.segments.read(ctx, r.position, r.apply)
	if errors.Is(err, errCutOff) {
		return r.readAnew(ctx)
	}
	r.position = next
	return err
}

// readAnew judges the topic as it stands now, as all instances do (rule N5), and only then forgets what was read before an unclean election: nobody may see a stream without its birth
// meanwhile.
func (r *registry) readAnew(ctx context.Context) error {
	r.log.Warn("the segments topic lost its end, or a new leader wrote while it was read; reading it from its start", zap.String("topic", r.segments.topic))
	fresh := newRegistry(r.segments.client, "", r.source, r.writer, 0, r.log)
	if r.begun != nil {
		fresh.begun = map[identity][]begin{}
	}
	next, err := r.segments.read(ctx, fresh.position, fresh.apply)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.known, r.latest, r.fencers, r.pairs, r.begun = fresh.known, fresh.latest, fresh.fencers, fresh.pairs, fresh.begun
	r.position = next
	return nil
}

// lookUp returns a copy of the numbering of the stream's latest generation; false if it was never born. id's generation is ignored.
func (r *registry) lookUp(id identity) (numbering, bool) {
	id.generation = 0
	r.mu.Lock()
	defer r.mu.Unlock()
	generation, ok := r.latest[id]
	if !ok {
		return numbering{}, false
	}
	fencers := slices.Clone(r.fencers[id])
	id.generation = generation
	n := *r.known[id]
	n.segments, n.fencers = slices.Clone(n.segments), fencers
	return n, true
}

// generations returns copies of all generations of a stream, and the producer IDs of its fences. id's generation is ignored.
func (r *registry) generations(id identity) (all []numbering, fencers []int64) {
	id.generation = 0
	r.mu.Lock()
	defer r.mu.Unlock()
	fencers = slices.Clone(r.fencers[id])
	for other, n := range r.known {
		id.generation = other.generation
		if other == id {
			generation := *n
			generation.segments = slices.Clone(n.segments)
			all = append(all, generation)
		}
	}
	return all, fencers
}

// settings returns what kmirror last set on a mirror topic; false if it never set anything there.
func (r *registry) settings(source, mirror protocol.TopicID) (map[string]*string, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.pairs[topicPair{source, mirror}]
	if p == nil {
		return nil, false
	}
	return p.settings, p.settings != nil
}

// bornWith returns how many partitions a source topic had when its first stream into a mirror topic was born, 0 if that isn't known.
func (r *registry) bornWith(source, mirror protocol.TopicID) int32 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.pairs[topicPair{source, mirror}]; p != nil {
		return p.partitions
	}
	return 0
}

// spreadOver returns over how many mirror partitions a source topic is spread, 0: partition to partition; false if nothing of it was mirrored there.
func (r *registry) spreadOver(source, mirror protocol.TopicID) (of int32, born bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.pairs[topicPair{source, mirror}]; p != nil && p.born {
		return p.of, true
	}
	return 0, false
}

// lives tells of a mirror topic whether the source topic has a stream in it, and whether topics that had the same place before do.
func (r *registry) lives(source, mirror protocol.TopicID) (this, others bool) {
	if mirror == (protocol.TopicID{}) {
		return false, false // a mirror that is older than topic IDs
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for pair, p := range r.pairs {
		if pair.mirror == mirror && p.born {
			this, others = this || pair.source == source, others || pair.source != source
		}
	}
	return this, others
}

// adopt writes the segments, reads to the end and leaves in force, for each stream and source offset, what stands first.
func (r *registry) adopt(ctx context.Context, segments []segmentRecord) error {
	return r.write(ctx, len(segments), func(i int) any {
		segments[i].SourceCluster, segments[i].Writer = r.source, r.writer
		return &segments[i]
	})
}

// keepSettings writes what kmirror has set.
func (r *registry) keepSettings(ctx context.Context, records []settingsRecord) error {
	return r.write(ctx, len(records), func(i int) any {
		records[i].SourceCluster, records[i].Writer = r.source, r.writer
		return &records[i]
	})
}

// write appends n records in one request and reads to the end.
func (r *registry) write(ctx context.Context, n int, record func(i int) any) error {
	if err := r.segments.make(ctx); err != nil {
		return err
	}
	values := make([][]byte, n)
	for i := range values {
		value, err := json.Marshal(record(i))
		if err != nil {
			return err
		}
		values[i] = value
	}
	if err := r.segments.append(ctx, values); err != nil {
		return err
	}
	return r.readToEnd(ctx)
}

// apply takes one record. What isn't kmirror's was written by somebody who had no business here; it decides nothing.
func (r *registry) apply(rec *kgo.Record) {
	if err := r.applyValue(rec.Value); err != nil {
		r.log.Warn("record that isn't kmirror's in its segments topic; ignored", zap.String("topic", rec.Topic), zap.Int64("offset", rec.Offset), zap.Error(err))
	}
}

func (r *registry) applyValue(value []byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var kept settingsRecord
	if err := json.Unmarshal(value, &kept); err != nil {
		return err
	}
	if kept.Settings != nil {
		return r.insertSettings(&kept)
	}
	var s segmentRecord
	if err := json.Unmarshal(value, &s); err != nil {
		return err
	}
	id, err := s.identity()
	if err == nil {
		r.insert(id, &s)
		if s.Birth && s.SourceCluster == r.source {
			if p := r.pairing(topicPair{id.topicID, id.mirrorTopicID}); !p.born {
				p.born, p.partitions, p.of = true, s.Partitions, s.Of
			}
		}
	}
	return err
}

func (r *registry) insertSettings(kept *settingsRecord) error {
	source, err := parseTopicID(kept.TopicID)
	if err != nil {
		return err
	}
	mirror, err := parseTopicID(kept.MirrorTopicID)
	if err == nil && kept.SourceCluster == r.source {
		r.pairing(topicPair{source, mirror}).settings = kept.Settings
	}
	return err
}

// insert keeps a birth, a segment or a fence, unless an earlier record decided it: all instances judge the records in the topic's order, so of
// two owners who go different ways at once the one whose record stands first wins.
func (r *registry) insert(id identity, rec *segmentRecord) {
	first := id
	first.generation = 0
	latest := id
	generation, any := r.latest[first]
	latest.generation = generation
	n := r.known[id]
	switch {
	case rec.Birth && n == nil:
		// A fenced generation is ended by the owner of its newest fence alone.
		if any && !endsGeneration(r.known[latest].fence, rec.Fence) {
			return
		}
		n = &numbering{generation: id.generation, producerID: id.producerID()}
		r.known[id] = n
		r.latest[first] = max(generation, id.generation)
		r.began(first, begin{n.producerID, 0, rec.Source})
	case n == nil, rec.Birth: // its birth was never written: nothing was appended by it; or the second birth
		return
	case rec.Fence != nil:
		if id != latest || n.fence != nil && n.fence.producerID == rec.Fence.ProducerID && n.fence.epoch >= rec.Fence.Epoch {
			return
		}
		n.fence = rec.Fence.fence(rec.Source)
		r.began(first, begin{n.fence.producerID, n.fence.epoch, rec.Source})
		if !slices.Contains(r.fencers[first], n.fence.producerID) {
			r.fencers[first] = append(r.fencers[first], n.fence.producerID)
		}
		return
	case n.fence != nil, rec.Source <= n.segments[len(n.segments)-1].source:
		return
	}
	n.segments = append(n.segments, segment{rec.Source, rec.Position})
}

// began is called with r.mu held.
func (r *registry) began(first identity, b begin) {
	if r.begun != nil {
		r.begun[first] = append(r.begun[first], b)
	}
}

// beginnings returns a stream's births and fences in force, in their order. id's generation is ignored.
func (r *registry) beginnings(id identity) []begin {
	id.generation = 0
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.begun[id])
}

// endsGeneration reports whether a birth of the next generation counts: there is no fence, or it was written under that one.
func endsGeneration(inForce *fence, under *fenceRecord) bool {
	if inForce == nil || under == nil {
		return inForce == nil && under == nil
	}
	return inForce.producerID == under.ProducerID && inForce.epoch == under.Epoch
}
