package forwarder

import (
	"encoding/binary"
	"flag"
	"fmt"
	"hash/crc32"
	"math/rand"
	"slices"
	"testing"
	"time"

	"kmirror/protocol"
)

var (
	modelSeed  = flag.Int64("model.seed", 1, "first seed of the stream model's schedules")
	modelCases = flag.Int("model.cases", 3000, "how many schedules of the stream model to run")
)

// modelBatch is a record batch of count records without bytes, sealed with a CRC.
func modelBatch(base int64, count int, timestamp int64) protocol.Batch {
	b := make(protocol.Batch, protocol.BatchHeaderSize+8)
	binary.BigEndian.PutUint64(b, uint64(base))
	binary.BigEndian.PutUint32(b[8:], uint32(len(b)-12))
	b[16] = 2
	binary.BigEndian.PutUint32(b[23:], uint32(count-1))
	binary.BigEndian.PutUint64(b[35:], uint64(timestamp))
	binary.BigEndian.PutUint32(b[57:], uint32(count))
	binary.BigEndian.PutUint64(b[61:], uint64(base)) // the payload names the source offset
	binary.BigEndian.PutUint32(b[17:], crc32.Checksum(b[21:], crc32.MakeTable(crc32.Castagnoli)))
	return b
}

// modelState is what a broker knows of a producer (facts F1 to F3).
type modelState struct {
	epoch int16
	last  []span // base and end are sequences; of the last five batches
}

// modelMirror is one mirror partition: the log as source ranges, and producer state.
type modelMirror struct {
	log    []span // base and end are source offsets
	ends   []int64
	states map[int64]*modelState
}

// apply appends a batch as Kafka's ProducerAppendInfo would, or refuses it.
func (m *modelMirror) apply(b protocol.Batch) (baseOffset int64, ok bool) {
	base, count := int64(binary.BigEndian.Uint64(b[61:])), int64(b.RecordCount())
	first, end := int64(b.BaseSequence()), int64(b.BaseSequence())+count
	st := m.states[b.ProducerID()]
	if st != nil && st.epoch == b.ProducerEpoch() {
		for _, s := range st.last {
			if s.base == first && s.end == end {
				return int64(s.crc), true // an exact repeat: success, with the old offset
			}
		}
	}
	if st != nil {
		want := int64(0)
		if st.epoch == b.ProducerEpoch() {
			want = st.last[len(st.last)-1].end
		}
		if b.ProducerEpoch() < st.epoch || first != want {
			return 0, false
		}
	}
	if st == nil || st.epoch != b.ProducerEpoch() {
		st = &modelState{epoch: b.ProducerEpoch()}
		m.states[b.ProducerID()] = st
	}
	at := m.logEnd()
	st.last = append(st.last, span{base: first, end: end, crc: uint32(at), maxTimestamp: b.MaxTimestamp()})
	if len(st.last) > 5 {
		st.last = st.last[1:]
	}
	m.log = append(m.log, span{base: base, end: base + count})
	m.ends = append(m.ends, positionOf(int32(b.ProducerEpoch()), b.BaseSequence())+count)
	return at, true
}

func (m *modelMirror) logEnd() (end int64) {
	for _, s := range m.log {
		end += s.end - s.base
	}
	return end
}

// modelWorld is one schedule: a source log, a mirror, one stream in several lives, and requests on their way.
type modelWorld struct {
	t       *testing.T
	r       *rand.Rand
	now     time.Time
	source  []protocol.Batch // pristine
	mirror  modelMirror
	p       *partition
	wire    []protocol.Batch // of the present connection, in order
	answers []modelAnswer
	late    []protocol.Batch // of connections that broke: may still be applied, in order, or lost
	old     bool             // some records are three days old
	trace   []string
}

type modelAnswer struct {
	baseOffset int64
	ok         bool
}

func newModelWorld(t *testing.T, seed int64) *modelWorld {
	r := rand.New(rand.NewSource(seed))
	w := &modelWorld{t: t, r: r, now: time.UnixMilli(1_700_000_000_000), old: r.Intn(2) == 0}
	w.mirror.states = map[int64]*modelState{}
	// Births near a change of the producer epoch too (N2).
	base := []int64{0, 7, 1<<sequenceBits - 6, 3<<sequenceBits - 1}[r.Intn(4)]
	for range 3 + r.Intn(12) {
		count := 1 + r.Intn(4)
		if room := epochRoom(base); int64(count) > room {
			count = int(room) // recoding splits there; the model's batches can't be split
		}
		timestamp := w.now.UnixMilli()
		if w.old && r.Intn(2) == 0 {
			timestamp -= (72 * time.Hour).Milliseconds()
		}
		w.source = append(w.source, modelBatch(base, count, timestamp))
		base += int64(count)
	}
	w.open()
	return w
}

// note keeps the schedule for the failure text.
func (w *modelWorld) note(format string, args ...any) {
	w.trace = append(w.trace, fmt.Sprintf(format, args...))
}

// open begins a session as recovery does: resolve, then solo. What may still arrive decides about quiet (S5).
func (w *modelWorld) open() {
	birth := w.source[0].BaseOffset()
	p := &partition{expireAge: 23 * time.Hour, holeFrom: -1}
	p.numbering = numbering{producerID: ProducerIDBit | 5, segments: []segment{{birth, birth}}}
	next := birth
	if n := len(w.mirror.ends); n > 0 {
		next = p.offset(w.mirror.ends[n-1])
	}
	st := w.mirror.states[p.producerID]
	p.next, p.acked, p.mirrorEnd, p.solo = next, next, w.mirror.logEnd(), true
	if n := len(w.mirror.log); n > 0 {
		p.lastOld = p.old(w.source[n-1].MaxTimestamp(), w.now)
	}
	p.stateFresh = st != nil && !p.lastOld || len(w.mirror.log) == 0 && len(w.late) == 0
	p.quiet = len(w.late) == 0
	w.p = p
	w.note("session: next %d quiet %v", next, p.quiet)
}

func (w *modelWorld) entryOf(b protocol.Batch) entry {
	c := protocol.Batch(slices.Clone(b))
	return entry{base: c.BaseOffset(), end: c.EndOffset(), crc: c.CRC(), maxTimestamp: c.MaxTimestamp(), batch: c}
}

// step does one random thing that can happen.
func (w *modelWorld) step() {
	switch w.r.Intn(12) {
	case 0, 1, 2: // an offer: any batch, so early, late and repeated ones too
		e := w.entryOf(w.source[w.r.Intn(len(w.source))])
		v := w.p.offer(e)
		w.p.linkUp(func(entry) {})
		w.note("offer [%d, %d): %d", e.base, e.end, v)
	case 3, 4: // a fetch from next
		for _, b := range w.source {
			if b.EndOffset() > w.p.next && w.p.judgeFetched(b.BaseOffset(), b.EndOffset()) == taken {
				w.p.take(w.entryOf(b))
				w.p.linkUp(func(entry) {})
				w.note("fetched [%d, %d)", b.BaseOffset(), b.EndOffset())
				break
			}
		}
	case 5, 6, 7:
		w.send()
	case 8, 9: // the broker takes a request
		if len(w.wire) > 0 {
			at, ok := w.mirror.apply(w.wire[0])
			w.note("broker takes [%d: %v %d", binary.BigEndian.Uint64(w.wire[0][61:]), ok, at)
			w.wire = w.wire[1:]
			w.answers = append(w.answers, modelAnswer{at, ok})
		}
	case 10:
		w.answer()
	case 11:
		w.disturb()
	}
	w.check()
}

func (w *modelWorld) send() {
	switch w.p.maySend(w.now) {
	case ready:
		e := w.p.send()
		w.wire = append(w.wire, e.batch)
		w.note("sent [%d, %d) in flight %d", e.base, e.end, len(w.p.flight))
	case unquiet:
		w.note("waits until nothing is on its way")
		w.settleLate()
		w.open()
		w.wire, w.answers = nil, nil
	}
}

func (w *modelWorld) answer() {
	if len(w.answers) == 0 {
		return
	}
	a := w.answers[0]
	w.answers = w.answers[1:]
	if !a.ok {
		w.note("refused")
		w.breakOff(true)
		return
	}
	if _, l := w.p.acknowledge(a.baseOffset, w.now); l == before {
		w.note("answered below the expected offset")
		w.breakOff(true)
	} else if l == behind {
		w.fail("answered above the expected offset, and no one else writes")
	}
}

// disturb breaks the connection, restarts kmirror or lets the broker forget.
func (w *modelWorld) disturb() {
	switch w.r.Intn(4) {
	case 0:
		w.note("connection breaks")
		w.breakOff(false)
	case 1:
		if n := len(w.mirror.log); n > 0 && w.p.old(w.source[n-1].MaxTimestamp(), w.now) { // F3
			w.note("broker forgets")
			clear(w.mirror.states)
		}
	case 2:
		if len(w.late) > 0 {
			w.applyLate()
		}
	case 3: // a refusal before the check: too few replicas, not the leader yet
		if len(w.wire) > 0 {
			w.note("broker refuses without a check")
			w.wire = w.wire[1:]
			w.answers = append(w.answers, modelAnswer{})
		}
	}
}

// breakOff ends the session. After a drain everything sent is answered; else it may still arrive.
func (w *modelWorld) breakOff(drained bool) {
	if drained {
		for _, b := range w.wire {
			w.mirror.apply(b)
			w.check()
		}
	} else {
		w.late = append(w.late, w.wire...)
	}
	w.wire, w.answers = nil, nil
	w.open()
}

func (w *modelWorld) applyLate() {
	_, ok := w.mirror.apply(w.late[0])
	w.note("late request [%d: %v", binary.BigEndian.Uint64(w.late[0][61:]), ok)
	w.late = w.late[1:]
	w.check()
}

// settleLate is S5's wait: what is on its way arrives or is lost.
func (w *modelWorld) settleLate() {
	for len(w.late) > 0 {
		if w.r.Intn(2) == 0 {
			w.late = nil
			return
		}
		w.applyLate()
	}
}

// check: the mirror holds a prefix of the source, in order, each once.
func (w *modelWorld) check() {
	next := w.source[0].BaseOffset()
	for _, s := range w.mirror.log {
		if s.base != next {
			w.fail(fmt.Sprintf("the mirror has [%d, %d) where %d was due", s.base, s.end, next))
		}
		next = s.end
	}
}

func (w *modelWorld) fail(why string) {
	for _, line := range w.trace {
		w.t.Log(line)
	}
	w.t.Fatal(why)
}

// TestStreamModel runs random schedules of offers in any order, repeats, holes, fetches, refusals, broken connections with requests that arrive late, restarts
// and brokers that forget. Afterwards everything is on the mirror.
func TestStreamModel(t *testing.T) {
	for seed := *modelSeed; seed < *modelSeed+int64(*modelCases); seed++ {
		w := newModelWorld(t, seed)
		w.note("seed %d, old %v", seed, w.old)
		for range 20 + w.r.Intn(150) {
			w.step()
		}
		for range 4000 { // and in peace it ends
			if len(w.mirror.log) == len(w.source) {
				break
			}
			switch w.r.Intn(4) {
			case 0:
				if b := w.source[w.r.Intn(len(w.source))]; w.p.judgeFetched(b.BaseOffset(), b.EndOffset()) == taken {
					w.p.take(w.entryOf(b))
				}
			case 1:
				w.send()
			case 2:
				if len(w.wire) > 0 {
					at, ok := w.mirror.apply(w.wire[0])
					w.wire = w.wire[1:]
					w.answers = append(w.answers, modelAnswer{at, ok})
				}
			case 3:
				w.answer()
			}
			w.check()
		}
		if len(w.mirror.log) != len(w.source) {
			w.fail(fmt.Sprintf("the mirror has %d of %d batches", len(w.mirror.log), len(w.source)))
		}
	}
}
