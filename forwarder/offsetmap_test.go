package forwarder_test

import (
	"testing"

	"kmirror/forwarder"
	"kmirror/internal/scripted"
	"kmirror/protocol"
)

// checkOffsets compares the map with both logs, whose values are all different, record by record and at every offset between.
func (r *rig) checkOffsets(ours int) {
	r.t.Helper()
	m, err := forwarder.OpenOffsetMap(r.t.Context(), forwarder.Options{
		Name: "test", Source: forwarder.ClusterOptions{Seeds: r.source.Seeds()}, Mirror: forwarder.ClusterOptions{Seeds: r.mirror.Seeds()},
	}, "orders", 0, 0)
	if err != nil {
		r.t.Fatal(err)
	}
	defer m.Close()
	type pair struct{ source, mirror int64 }
	at := map[string]int64{}
	for _, rec := range r.source.Records("orders", 0) {
		if !rec.Control && !rec.Aborted {
			at[string(rec.Value)] = rec.Offset
		}
	}
	var pairs []pair
	for _, rec := range r.mirror.Records("orders", 0) {
		if source, ok := at[string(rec.Value)]; ok && !rec.Control {
			pairs = append(pairs, pair{source, rec.Offset})
		}
	}
	if len(pairs) != ours {
		r.t.Fatalf("the mirror holds %d records of the source's, want %d", len(pairs), ours)
	}
	sourceEnd, mirrorEnd := r.source.Offsets("orders", 0).LogEnd, r.mirror.Offsets("orders", 0).LogEnd
	want := func(offset int64, of func(pair) (int64, int64), end int64) forwarder.MappedOffset {
		for _, p := range pairs {
			if here, there := of(p); here >= offset {
				return forwarder.MappedOffset{Offset: there, Same: here == offset}
			}
		}
		return forwarder.MappedOffset{Offset: end, Beyond: true}
	}
	for offset := int64(0); offset <= sourceEnd; offset++ {
		expected := want(offset, func(p pair) (int64, int64) { return p.source, p.mirror }, mirrorEnd)
		if got, err := m.ToMirror(r.t.Context(), offset); err != nil || got != expected {
			r.t.Errorf("source offset %d is mirror %+v, %v; want %+v", offset, got, err, expected)
		}
	}
	behind := pairs[len(pairs)-1].source + 1
	for offset := int64(0); offset <= mirrorEnd; offset++ {
		expected := want(offset, func(p pair) (int64, int64) { return p.mirror, p.source }, behind)
		if got, err := m.ToSource(r.t.Context(), offset); err != nil || got != expected {
			r.t.Errorf("mirror offset %d is source %+v, %v; want %+v", offset, got, err, expected)
		}
	}
}

// The map is exact on every shape of log: dense, behind transaction markers, through compaction's holes, beside the writes of others, after a loss.
func TestOffsetMap(t *testing.T) {
	t.Run("dense", func(t *testing.T) {
		r := newRig(t, scripted.Options{})
		r.write(0, "a", "b", "c")
		f, _ := r.start(nil)
		r.equal(f)
		r.checkOffsets(3)
	})
	t.Run("markers and foreign writes", func(t *testing.T) {
		r := newRig(t, scripted.Options{})
		r.mirror.CreateTopic("orders", 1)
		r.mirror.AppendForeign("orders", 0, "x", "y")
		for i, commit := range []bool{true, false, true} {
			r.source.Append("orders", 0, scripted.Batch{
				ProducerID: 5, ProducerEpoch: 1, BaseSequence: int32(2 * i), Attributes: protocol.AttrTransactional, Values: []string{string(rune('a' + 2*i)), string(rune('b' + 2*i))},
			})
			r.source.AppendMarker("orders", 0, 5, 1, commit)
		}
		f, _ := r.start(nil)
		waitCaughtUp(t, f)
		r.mirror.AppendForeign("orders", 0, "z")
		r.write(0, "p", "q")
		waitCaughtUp(t, f)
		r.mirror.AppendForeign("orders", 0, "z2")
		r.checkOffsets(6)
	})
	t.Run("holes", func(t *testing.T) {
		r := newRig(t, scripted.Options{})
		r.compacted()
		f, _ := r.start(nil)
		r.wantAll(f, "a b f g i l w x")
		r.write(0, "y", "z")
		r.wantAll(f, "a b f g i l w x y z")
		r.checkOffsets(10)
	})
}

// regrown mirrors what the source has, lets it truncate its log to end, and mirrors what it then takes in the same places.
func (r *rig) regrown(end int64, count int, values ...string) {
	r.t.Helper()
	f, stop := r.start(nil)
	waitCaughtUp(r.t, f)
	stop()
	r.source.UncleanElection("orders", 0, 1, end, true)
	if len(values) > 0 {
		r.write(0, values...)
	}
	f, stop = r.start(nil)
	waitCaughtUp(r.t, f)
	stop()
	r.checkOffsets(count)
}

// Where the source truncated its log and topics.on_divergence is continue, two records on the mirror have the same source offset: the last is the one that the source has
// (offsetmap.go: replacedFrom).
func TestOffsetMapOfATruncatedSource(t *testing.T) {
	t.Run("dense", func(t *testing.T) {
		r := newRig(t, scripted.Options{})
		r.write(0, "a", "b", "c", "d", "e", "f")
		r.regrown(3, 5, "g", "h")
		r.regrown(2, 5, "i", "j", "k")
		r.regrown(4, 7, "l", "m", "n")
		r.regrown(5, 5)
	})
	t.Run("markers", func(t *testing.T) {
		r := newRig(t, scripted.Options{})
		r.write(0, "a")
		r.source.Append("orders", 0, scripted.Batch{ProducerID: 5, ProducerEpoch: 1, Attributes: protocol.AttrTransactional, Values: []string{"b", "c"}})
		r.source.AppendMarker("orders", 0, 5, 1, true)
		r.write(0, "d", "e")
		r.regrown(4, 5, "f", "g")
		r.regrown(1, 3, "h", "i")
	})
	t.Run("holes", func(t *testing.T) {
		r := newRig(t, scripted.Options{})
		r.compacted()
		r.write(0, "y", "z")
		f, stop := r.start(nil)
		waitCaughtUp(t, f)
		stop()
		log := r.source.Log("orders", 0)
		r.regrown(log[2].EndOffset(), len(r.sourceBelow(log[2].EndOffset()))+2, "p", "q")
	})
}

// sourceBelow are the source's records below an offset.
func (r *rig) sourceBelow(end int64) (values []string) {
	for _, rec := range r.source.Records("orders", 0) {
		if !rec.Control && !rec.Aborted && rec.Offset < end {
			values = append(values, string(rec.Value))
		}
	}
	return values
}
