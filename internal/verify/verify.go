// Package verify compares a source and its mirror, partition by partition, record by record.
//
// It asks the two clusters and nobody else: it shares no state and no reading code with the forwarder, and believes no position that
// kmirror recorded. It repairs nothing.
//
//	report, err := verify.Run(ctx, verify.Options{Source: source, Mirror: mirror, Topics: wanted})
//
// What is compared: the committed records (read_committed) of the source up to its end at the start of Run, with the records that
// kmirror wrote on the mirror, by count, keys, values, headers, timestamps and order. kmirror's record batches are known by their
// producer IDs, which no broker allocates, or which the segments topic names as a fenced session's; what others wrote to the mirror is
// counted and left out. Both sides are streamed, with what two fetches of 512 KiB decompress to, 16 MiB at most, held for each of Parallel
// partitions; a single batch may unpack to 256 MiB, one partition at a time.
//
// The two sides needn't begin at the same record: see align.go. What compaction takes from either side is told from losses: see compact.go.
package verify

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"
)

// Result is the outcome for a partition or for all.
type Result string

// The results.
const (
	Equal     Result = "equal"
	Different Result = "different"
	Unknown   Result = "unknown" // it could not be told; the reason says why
)

// Options say what to compare and how.
type Options struct {
	Source *kgo.Client
	Mirror *kgo.Client
	Topics func(name string) bool // the topics that are mirrored
	// Rename is the template of names on the mirror, with {topic} for the source's; "": the same.
	Rename string
	// FromEarliest says that the copy began with the source's first record, so that one which lacks the first records
	// differs, unless the mirror deleted records itself.
	FromEarliest bool
	// Patience is how long a mirror that is behind may stand still before it counts as different.
	Patience time.Duration
	Parallel int // partitions at a time
	// Segments is kmirror's topic on the mirror that names the producer IDs of fenced sessions; "": there are none.
	Segments string
	Keys     int // of compacted topics that are held in memory at a time; 0: half a million
	// Repartition says that each source partition is spread over all of the mirror's; see spread.go.
	Repartition bool
}

// Range is [Start, End) of a log: its first offset and its last stable offset.
type Range struct {
	Start int64 `json:"start"`
	End   int64 `json:"end"`
}

// Partition is what the comparison of one partition found. Counts are records.
type Partition struct {
	Topic     string `json:"topic"`
	Partition int32  `json:"partition"`
	// MirrorPartition is the same but where the topic is repartitioned: the entry is then about what one gives to the other.
	MirrorPartition int32  `json:"mirror_partition"`
	Result          Result `json:"result"`
	Reason          string `json:"reason,omitempty"`
	Source          Range  `json:"source"`
	Mirror          Range  `json:"mirror"`
	Compared        int64  `json:"compared"`
	// NotMirrored counts the source offsets before the first record of the mirror's copy.
	NotMirrored int64 `json:"not_mirrored"`
	// OnlyMirror counts records of kmirror from before the source's log start.
	OnlyMirror  int64 `json:"only_mirror"`
	Foreign     int64 `json:"foreign"` // records of others on the mirror
	SameOffsets bool  `json:"same_offsets"`
	// Compacted says that the last record of each key was compared, since compaction took others. Keys counts the keys that have one, Changed
	// those that were left out because the source wrote them again meanwhile, or from another partition.
	Compacted  bool        `json:"compacted,omitempty"`
	Keys       int64       `json:"keys,omitempty"`
	Changed    int64       `json:"changed,omitempty"`
	SourceSHA  string      `json:"source_sha256"` // over the compared records, chained in order
	MirrorSHA  string      `json:"mirror_sha256"`
	Difference *Difference `json:"difference,omitempty"` // the first
}

// Difference is where the two sides part. An offset is -1 where that side has no more records.
type Difference struct {
	SourceOffset int64  `json:"source_offset"`
	MirrorOffset int64  `json:"mirror_offset"`
	What         string `json:"what"`
}

// Report is what Run found, by topic and partition.
type Report struct {
	Result Result `json:"result"`
	// Repartitioned says that there is an entry for each pair of a source and a mirror partition.
	Repartitioned bool        `json:"repartitioned,omitempty"`
	Partitions    []Partition `json:"partitions"`
}

var errNoTopic = errors.New("the source has none of the topics")

// Run compares every partition of the wanted topics. The error is about the clusters as a whole; what happens to one partition is in
// its entry.
func Run(ctx context.Context, opts Options) (Report, error) {
	// The mirror's ends are asked before the source's, so that what the mirror holds up to there must be on the source.
	mirror, err := openCluster(ctx, opts.Mirror, func(name string) bool {
		source, ok := opts.sourceName(name)
		return ok && opts.Topics(source)
	})
	if err != nil {
		return Report{Result: Unknown}, fmt.Errorf("mirror: %w", err)
	}
	if err := mirror.readFences(ctx, opts.Segments); err != nil {
		return Report{Result: Unknown}, fmt.Errorf("mirror: topic %s: %w", opts.Segments, err)
	}
	source, err := openCluster(ctx, opts.Source, opts.Topics)
	if err != nil {
		return Report{Result: Unknown}, fmt.Errorf("source: %w", err)
	}
	if len(source.logs) == 0 {
		return Report{Result: Unknown}, errNoTopic
	}
	report := Report{Repartitioned: opts.Repartition}
	for _, key := range source.partitions() {
		for _, to := range opts.targets(key, mirror) {
			report.Partitions = append(report.Partitions, Partition{Topic: key.topic, Partition: key.partition, MirrorPartition: to})
		}
	}
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(max(opts.Parallel, 1))
	for i := range report.Partitions {
		group.Go(func() error {
			comparePartition(groupCtx, opts, source, mirror, &report.Partitions[i])
			return nil
		})
	}
	_ = group.Wait() // no function fails
	report.Result = overall(report.Partitions)
	return report, ctx.Err()
}

// overall is Different if any partition is, else Unknown if any is.
func overall(partitions []Partition) Result {
	result := Equal
	for _, p := range partitions {
		switch {
		case p.Result == Different:
			return Different
		case p.Result == Unknown:
			result = Unknown
		}
	}
	return result
}

// comparePartition fills in p.
func comparePartition(ctx context.Context, opts Options, source, mirror *cluster, p *Partition) {
	key := partitionKey{p.Topic, p.Partition}
	mirrorKey := partitionKey{opts.mirrorName(p.Topic), p.MirrorPartition}
	from, to := source.logs[key], mirror.logs[mirrorKey]
	p.Source, p.Mirror = from.Range, to.Range
	switch {
	case from.err != nil:
		p.Result, p.Reason = Unknown, fmt.Sprintf("source: %v", from.err)
		return
	case to.err != nil:
		p.Result, p.Reason = Unknown, fmt.Sprintf("mirror: %v", to.err)
		return
	case !to.exists:
		p.Result, p.Reason = Different, "the mirror has no such partition"
		p.NotMirrored = from.End - from.Start
		return
	}
	allowance := &allowance{lock: &source.unpacking}
	defer allowance.release()
	c := comparison{
		p: p, opts: opts,
		source: newReader(source, key, from.Range, nil, allowance),
		mirror: newReader(mirror, mirrorKey, to.Range, mirror.ours, allowance),
	}
	if opts.Repartition {
		c.source.share = keptBy(key, p.MirrorPartition, mirror.partitionCount(mirrorKey.topic))
		c.mirror.share = mirror.copiedFrom(key)
	}
	err := c.runAgain(ctx)
	c.finish()
	if err != nil {
		p.Result, p.Reason = Unknown, err.Error()
	}
}

// mirrorName is what a source topic is called on the mirror.
func (o *Options) mirrorName(topic string) string {
	if o.Rename == "" {
		return topic
	}
	return strings.Replace(o.Rename, "{topic}", topic, 1)
}

// sourceName is the other way round; false for a name that doesn't follow the template.
func (o *Options) sourceName(mirrorTopic string) (string, bool) {
	if o.Rename == "" {
		return mirrorTopic, true
	}
	before, after, _ := strings.Cut(o.Rename, "{topic}")
	name, ok := strings.CutPrefix(mirrorTopic, before)
	if !ok {
		return "", false
	}
	return strings.CutSuffix(name, after)
}

// isOurs tells whether a producer ID is one of kmirror's: bit 62 is set, which no ID that a broker allocates reaches.
func isOurs(producerID int64) bool { return producerID >= 1<<62 }

// Summary says the result in a line.
func (p Partition) Summary() string {
	parts := []string{fmt.Sprintf("%d compared", p.Compared)}
	add := func(n int64, what string) {
		if n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, what))
		}
	}
	add(p.NotMirrored, "before the mirror's first")
	add(p.OnlyMirror, "on the mirror from before the source's log start")
	add(p.Foreign, "of others on the mirror")
	if p.Compacted {
		parts = append(parts, fmt.Sprintf("compacted: the last records of %d keys", p.Keys))
		add(p.Changed, "keys changed meanwhile")
	}
	if p.Reason != "" {
		parts = append(parts, p.Reason)
	}
	if d := p.Difference; d != nil {
		parts = append(parts, fmt.Sprintf("first difference at source offset %s, mirror offset %s: %s", offsetText(d.SourceOffset), offsetText(d.MirrorOffset), d.What))
	}
	return strings.Join(parts, "; ")
}

func offsetText(offset int64) string {
	if offset < 0 {
		return "none"
	}
	return fmt.Sprint(offset)
}
