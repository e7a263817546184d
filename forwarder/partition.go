package forwarder

import (
	"math"
	"slices"
	"time"

	"kmirror/protocol"
)

const (
	maxInFlight = 5 // batches of one stream without an answer: what a broker remembers of a producer (F2)
	// Compressed batches of at most maxPackedBatch bytes are merged too, up to maxPackedMerge, when more of them wait than are in flight: each
	// costs the mirror about the same whatever its size.
	maxPackedBatch = 4 << 10
	maxPackedMerge = 64 << 10
	// maxEarly bounds the offers that wait for a hole to close; past it they are dropped and read from the source instead.
	maxEarly      = 4096
	maxEarlyBytes = 8 << 20
	// recentBatches is how far back a producer's retry is recognised by what was mirrored; an older one asks the source.
	recentBatches = 128

	// A stream whose offers leave tailHoles holes within tailWindow has writers that bypass the proxy.
	tailHoles  = 3
	tailWindow = 30 * time.Second
)

// entry is one record batch on its way, with the source offsets [base, end).
type entry struct {
	base, end    int64
	crc          uint32         // as the producer sealed it
	maxTimestamp int64          // ms
	runs         []protocol.Run // the source offsets of its records, nil: all of [base, end)
	batch        protocol.Batch
	memory       protocol.Releaser // nil: the garbage collector's
	merged       bool              // of several source batches
	holeData     bool              // the hole below it holds aborted records, not only markers
	charge       int64             // bytes to give back to the memory budget with it
}

func (e *entry) sizeBytes() int64 { return int64(len(e.batch)) }

// records is how many records the batch has: as many as offsets, since a mirror takes no other.
func (e *entry) records() int64 { return int64(e.batch.RecordCount()) }

// span is what is remembered of a batch without its bytes.
type span struct {
	base, end    int64
	records      int64
	crc          uint32
	maxTimestamp int64
}

// verdict says what became of a batch.
type verdict int8

const (
	taken     verdict = iota // queued for the mirror
	held                     // kept until the hole below it closes
	duplicate                // on its way or on the mirror already
	doubtful                 // below next, but not what was mirrored there: ask the source (rule T1)
	refused                  // not kept: read it from the source
	straddles                // begins below next and ends above it: re-encode from next on (rule R5)
	overHole                 // begins above next: the hole must be explained first
)

// partition is the pure part of a stream: what to do with each batch, and what may be sent when. It does no I/O, takes no lock and
// reads no clock.
//
// Invariant: [birth, acked) is on the mirror, [acked, next) is in flight and then queued, in order and without a gap but the holes that
// the numbering knows.
type partition struct {
	state State
	numbering
	next   int64
	acked  int64
	queue  []entry // waiting to be sent, contiguous, ending at next
	flight []span  // sent and unanswered, oldest first
	early  []entry // offered above next, ascending and disjoint
	// earlyBytes is the size of early.
	earlyBytes int64

	mergeBytes int64 // bound of a merged batch; smaller once the mirror found one too large
	batchLimit int64 // what the mirror topic takes, as it showed by a refusal; 0: it took everything
	// queuedBytes is the size of queue.
	queuedBytes int64
	// A fenced session's records count from 0 (rule N6): sent have gone out, and the source offsets of the first covered are durable.
	sent, covered int64
	draining      bool // nothing more may go out in this session: it is to be fenced anew
	// Holes are filled, so that offsets on the mirror are the source's (fill.go); those with aborted records too, if fillData. While filling, nothing is sent.
	fills, fillData, filling bool
	// holeData says that the hole that ends at next holds aborted records.
	holeData bool
	// holeFrom is where the hole begins that ends at next, -1: none. What follows it needs a segment first (rule N3).
	holeFrom int64

	mirrorEnd  int64  // expected base offset on the mirror of the next append to be answered (rule S4)
	solo       bool   // no success yet in this session (rule S3)
	stateFresh bool   // the broker knows our producer and won't forget it soon, or nothing was ever sent
	quiet      bool   // nothing of an earlier session can still arrive (rule S5)
	lastOld    bool   // the batch that the broker's producer state rests on is old
	recent     []span // ring of the last recentBatches taken
	recentAt   int
	holes      []time.Time // when live mode last met one
	expireAge  time.Duration
}

// old reports whether a batch's timestamp is one that brokers may forget a producer for (F3).
func (p *partition) old(maxTimestamp int64, now time.Time) bool {
	return now.UnixMilli()-maxTimestamp > p.expireAge.Milliseconds()
}

// offer decides about a batch that the source acknowledged. It only keeps the entry for taken and held.
func (p *partition) offer(e entry) verdict {
	switch {
	case e.end <= p.next:
		return p.judgeBelow(e)
	case e.base < p.next:
		return doubtful
	case e.base == p.next && p.holeFrom < 0:
		if _, fits := p.mayQueue(e.end - e.base); !fits || !p.fitsMirror(len(e.batch)) {
			return refused
		}
		p.take(e)
		return taken
	case !p.fitsMirror(len(e.batch)):
		return refused
	}
	return p.hold(e)
}

// fitsMirror reports whether a batch of that size is worth sending.
func (p *partition) fitsMirror(sizeBytes int) bool {
	return p.batchLimit == 0 || int64(sizeBytes) <= p.batchLimit
}

// judgeBelow tells a producer's retry from a batch that isn't what was mirrored at its offsets.
func (p *partition) judgeBelow(e entry) verdict {
	for _, s := range p.recent {
		if s.base == e.base && s.end == e.end {
			if s.crc == e.crc {
				return duplicate
			}
			return doubtful
		}
	}
	return doubtful
}

// take queues a batch at next, and what waited for it.
func (p *partition) take(e entry) {
	e.holeData, p.holeData = p.holeData, false
	p.queue = append(p.queue, e)
	p.queuedBytes += e.sizeBytes()
	p.next = e.end
	s := span{e.base, e.end, e.records(), e.crc, e.maxTimestamp}
	if len(p.recent) < recentBatches {
		p.recent = append(p.recent, s)
		return
	}
	p.recent[p.recentAt] = s
	p.recentAt = (p.recentAt + 1) % recentBatches
}

// hold keeps a batch above next, in order.
func (p *partition) hold(e entry) verdict {
	i := len(p.early)
	for i > 0 && p.early[i-1].base > e.base {
		i--
	}
	switch {
	case i > 0 && p.early[i-1].base == e.base && p.early[i-1].end == e.end && p.early[i-1].crc == e.crc:
		return duplicate
	case i > 0 && p.early[i-1].end > e.base, i < len(p.early) && p.early[i].base < e.end:
		return doubtful
	case len(p.early) >= maxEarly || p.earlyBytes+e.sizeBytes() > maxEarlyBytes:
		return refused
	}
	p.early = append(p.early, entry{})
	copy(p.early[i+1:], p.early[i:])
	p.early[i] = e
	p.earlyBytes += e.sizeBytes()
	return held
}

// linkUp takes what waits in early and now fits, and drops what the source log has given meanwhile.
func (p *partition) linkUp(drop func(entry)) {
	n := 0
	for ; n < len(p.early); n++ {
		e := p.early[n]
		_, fits := p.mayQueue(e.end - e.base)
		if e.base > p.next || e.base == p.next && (p.holeFrom >= 0 || !fits) {
			break
		}
		p.earlyBytes -= e.sizeBytes()
		if e.base == p.next {
			p.take(e)
		} else {
			drop(e)
		}
		p.early[n] = entry{}
	}
	if p.early = p.early[n:]; len(p.early) == 0 {
		p.early = nil
	}
}

// judgeFetched decides about the offsets [base, end) of a batch read from the source log. It keeps nothing.
func (p *partition) judgeFetched(base, end int64) verdict {
	switch {
	case end <= p.next:
		return duplicate
	case base < p.next:
		return straddles
	case base > p.next:
		return overHole
	}
	return taken
}

// skip passes over the offsets up to end, which hold nothing for a reader: markers and, if data, records of aborted transactions.
func (p *partition) skip(end int64, data bool) {
	p.holeData = p.holeData || data
	if p.holeFrom < 0 && p.fence == nil {
		p.holeFrom = p.next
	}
	p.next = end
	if len(p.flight) == 0 && len(p.queue) == 0 {
		p.acked = end
	}
}

// mayQueue reports whether the batch at next fits into its producer epoch; otherwise it must be split after the returned count.
func (p *partition) mayQueue(count int64) (room int64, ok bool) {
	if p.fence != nil {
		return math.MaxInt64, true
	}
	room = epochRoom(p.position(p.next))
	return room, count <= room
}

// readiness is what keeps a stream from sending.
type readiness int8

const (
	ready     readiness = iota
	idle                // nothing to send
	busy                // an answer must come first
	unquiet             // an earlier session's requests must be out of the way first (rule S5)
	uncovered           // the source offsets of the next records must be durable first (rule N6)
	unfilled            // the mirror's log doesn't end where the head begins: a hole is to be filled
)

// maySend decides about the head of the queue. Rules S3 and S5.
func (p *partition) maySend(now time.Time) readiness {
	if len(p.queue) == 0 {
		return idle
	}
	head := &p.queue[0]
	old := p.old(head.maxTimestamp, now)
	if !p.quiet && (old || !p.stateFresh) {
		return unquiet
	}
	if p.draining || p.filling {
		return busy
	}
	if p.fence != nil && p.sent+head.records() > p.covered {
		return uncovered
	}
	n := len(p.flight)
	if n == 0 {
		if p.fills && p.fence == nil && head.base != p.mirrorEnd {
			return unfilled
		}
		return ready
	}
	if p.fills && p.hasSegment(head.base) {
		return busy // a hole before it
	}
	if n >= maxInFlight || p.solo || p.lastOld || old {
		return busy
	}
	for i := range p.flight {
		if p.old(p.flight[i].maxTimestamp, now) {
			return busy
		}
	}
	// A new producer epoch starts at sequence 0: drain before it (rule N2).
	if p.fence == nil && p.position(head.base)&sequenceMask == 0 {
		return busy
	}
	return ready
}

// mergeable is how many batches at the head of the queue are to go as one: neighbours with the same codec, up to mergeBytes, within one
// producer epoch. One means: as it is. Merging is for what waits (DESIGN's coalescing): in live mode a batch goes as the producer
// sent it unless the pipeline is full, and old data, which has one batch in flight at a time, always goes in large ones (rule S3).
func (p *partition) mergeable(now time.Time) int {
	old := p.lastOld || len(p.queue) > 0 && p.old(p.queue[0].maxTimestamp, now)
	full := len(p.flight) == maxInFlight-1 // with this one
	if len(p.queue) < 2 || !old && (p.state == StateLive && !full || len(p.queue) <= len(p.flight)) {
		return 1
	}
	head := &p.queue[0]
	codec := head.batch.Codec()
	room, size := p.mergeRoom(head), head.sizeBytes()
	most, each := p.mergeBytes, p.mergeBytes
	if codec != 0 && !old { // to unpack and pack again costs more than it saves, unless the batches are tiny
		most, each = min(p.mergeBytes, maxPackedMerge), min(p.mergeBytes, maxPackedBatch)
	}
	if size > each {
		return 1
	}
	n, records := 1, head.records()
	for ; n < len(p.queue); n++ {
		e := &p.queue[n]
		size += e.sizeBytes()
		records += e.records()
		apart := e.base != p.queue[n-1].end && p.fence == nil
		if apart || e.batch.Codec() != codec || e.sizeBytes() > each || size > most || records > room {
			break
		}
	}
	return n
}

// mergeRoom is how many records a batch that begins with head may have.
func (p *partition) mergeRoom(head *entry) int64 {
	if p.fence != nil {
		return p.covered - p.sent
	}
	return epochRoom(p.position(head.base))
}

// replace puts one merged batch in the place of the first n of the queue and returns those.
func (p *partition) replace(n int, merged entry) []entry {
	was := slices.Clone(p.queue[:n])
	for i := range was {
		p.queuedBytes -= was[i].sizeBytes()
		p.queue[i] = entry{}
	}
	p.queue = p.queue[n-1:]
	p.queue[0] = merged
	p.queuedBytes += merged.sizeBytes()
	return was
}

// send stamps the head of the queue with its position, moves it into flight and returns it.
func (p *partition) send() entry {
	e := p.queue[0]
	if p.fence != nil {
		e.batch.Stamp(p.fence.producerID, p.fence.epoch, int32(p.sent))
		p.sent += e.records()
	} else {
		epoch, base := sequence(p.position(e.base))
		e.batch.Stamp(p.producerID, epoch, base)
	}
	p.queuedBytes -= e.sizeBytes()
	p.queue[0] = entry{}
	if p.queue = p.queue[1:]; len(p.queue) == 0 {
		p.queue = nil
	}
	p.flight = append(p.flight, span{e.base, e.end, e.records(), e.crc, e.maxTimestamp})
	return e
}

// landing says how an append that the mirror answered with success lies in its log.
type landing int8

const (
	inPlace landing = iota
	behind          // above what was expected: others wrote in between
	before          // below: a repeat, or the log lost its tail
)

// acknowledge applies a success for the oldest batch in flight, appended on the mirror at baseOffset.
func (p *partition) acknowledge(baseOffset int64, now time.Time) (s span, l landing) {
	s = p.flight[0]
	p.flight = append(p.flight[:0], p.flight[1:]...)
	switch {
	case baseOffset < p.mirrorEnd:
		return s, before
	case baseOffset > p.mirrorEnd:
		l = behind
	}
	p.mirrorEnd = baseOffset + s.records
	p.acked = s.end
	if len(p.flight) == 0 && len(p.queue) == 0 {
		p.acked = p.next // a hole ends what was taken: nothing of it will ever be sent
	}
	p.solo = false
	p.lastOld = p.old(s.maxTimestamp, now)
	p.stateFresh = !p.lastOld
	return s, l
}

// release lets go of everything that isn't in flight.
func (p *partition) release(drop func(entry)) {
	for _, e := range p.queue {
		drop(e)
	}
	p.dropEarly(drop)
	p.queue, p.queuedBytes, p.holeFrom, p.holeData = nil, 0, -1, false
	if p.next = p.acked; len(p.flight) > 0 {
		p.next = p.flight[len(p.flight)-1].end
	}
}

// uncoveredRuns returns the runs of what waits and isn't covered, and up to which record it is covered with them.
func (p *partition) uncoveredRuns() (runs []protocol.Run, upTo int64) {
	upTo = p.sent
	for i := range p.queue {
		e := &p.queue[i]
		upTo += e.records()
		switch {
		case upTo <= p.covered:
		case e.runs == nil:
			runs = protocol.AppendRun(runs, e.base, e.end-e.base)
		default:
			for _, run := range e.runs {
				runs = protocol.AppendRun(runs, run.Source, run.Count)
			}
		}
	}
	return runs, upTo
}

// ackedPosition is the position of acked, also in the middle of a hole whose segment isn't written; of a fenced stream, which has none, 0.
func (p *partition) ackedPosition() int64 {
	if p.fence != nil {
		return 0
	}
	if p.holeFrom >= 0 && p.acked > p.holeFrom {
		return p.position(p.holeFrom)
	}
	return p.position(p.acked)
}

// dropEarly lets go of the offers above next.
func (p *partition) dropEarly(drop func(entry)) {
	for _, e := range p.early {
		drop(e)
	}
	p.early, p.earlyBytes = nil, 0
}

// sawHole notes a hole met in live mode, and reports whether writers seem to bypass the proxy.
func (p *partition) sawHole(now time.Time) (bypassed bool) {
	kept := p.holes[:0]
	for _, t := range p.holes {
		if now.Sub(t) < tailWindow {
			kept = append(kept, t)
		}
	}
	p.holes = append(kept, now)
	return len(p.holes) >= tailHoles
}
