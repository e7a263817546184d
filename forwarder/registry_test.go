package forwarder

import (
	"encoding/hex"
	"encoding/json"
	"reflect"
	"testing"

	"go.uber.org/zap"

	"kmirror/protocol"
)

// N6: of two owners who go different ways at once, one ending the fenced generation and one fencing it anew, the one whose record stands first wins
// (registry.go: insert, endsGeneration); otherwise both would append.
func TestN6TheFirstRecordDecidesHowItGoesOn(t *testing.T) {
	id := identity{sourceCluster: "source", topicID: protocol.TopicID{1}, mirrorTopicID: protocol.TopicID{2}}
	record := func(generation int32, birth bool, source, position int64, under *fence) segmentRecord {
		r := segmentRecord{
			SourceCluster: "source", TopicID: hex.EncodeToString(id.topicID[:]), MirrorTopicID: hex.EncodeToString(id.mirrorTopicID[:]),
			Generation: generation, Birth: birth, Source: source, Position: position,
		}
		if under != nil {
			r.Fence = newFenceRecord(under)
		}
		return r
	}
	five, seven := &fence{producerID: 9, epoch: 5, behind: noLandmark}, &fence{producerID: 9, epoch: 7, behind: landmark{9, 5, 3}}
	born := record(0, true, 10, 10, nil)
	fenced5, fenced7 := record(0, false, 20, 0, five), record(0, false, 23, 0, seven)
	for _, c := range []struct {
		name       string
		records    []segmentRecord
		generation int32
		fence      *fence // with source
		segments   int
	}{
		{"a fence", []segmentRecord{born, fenced5}, 0, five, 1},
		{"a segment of a dense owner comes late", []segmentRecord{born, fenced5, record(0, false, 30, 25, nil)}, 0, five, 1},
		{"a newer fence", []segmentRecord{born, fenced5, fenced7}, 0, seven, 1},
		{"an older fence comes late", []segmentRecord{born, fenced7, fenced5}, 0, seven, 1},
		{"the generation is ended under the newest fence", []segmentRecord{born, fenced5, record(1, true, 23, 0, five)}, 1, nil, 1},
		{"it was fenced anew before", []segmentRecord{born, fenced5, fenced7, record(1, true, 23, 0, five)}, 0, seven, 1},
		{"a fence comes after its end", []segmentRecord{born, fenced5, record(1, true, 23, 0, five), fenced7}, 1, nil, 1},
		{"a dense owner ends a fenced generation", []segmentRecord{born, fenced5, record(1, true, 23, 0, nil)}, 0, five, 1},
		{"a fence that doesn't count ends nothing", []segmentRecord{born, record(1, true, 23, 0, five)}, 0, nil, 1},
		{"a dense owner opens a generation", []segmentRecord{born, record(1, true, 23, 0, nil)}, 1, nil, 1},
	} {
		r := newRegistry(nil, "test", "source", "", 1, zap.NewNop())
		for i := range c.records {
			value, err := json.Marshal(&c.records[i])
			if err == nil {
				err = r.applyValue(value)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		n, ok := r.lookUp(id)
		if !ok || n.generation != c.generation || len(n.segments) != c.segments || (n.fence == nil) != (c.fence == nil) || n.fence != nil && !n.fence.same(c.fence) {
			t.Errorf("%s: numbering %+v with fence %+v; want generation %d, fence %+v", c.name, n, n.fence, c.generation, c.fence)
		}
		if n.fence != nil && n.fence.behind != c.fence.behind {
			t.Errorf("%s: behind %+v, want %+v", c.name, n.fence.behind, c.fence.behind)
		}
	}
}

func TestRunsReadBackAsWritten(t *testing.T) {
	runs := []protocol.Run{{Source: 100, Count: 3}, {Source: 110, Count: 1}, {Source: 1 << 40, Count: 1 << 20}}
	written := runsRecord{producerID: 4711, epoch: 3, base: 50, source: 100, runs: encodeRuns(runs)}
	r, err := parseRunsRecord(written.append(nil))
	if err != nil || r.producerID != 4711 || r.epoch != 3 {
		t.Fatalf("read back %+v, %v; want %+v", r, err, written)
	}
	if got, err := r.decode(); err != nil || !reflect.DeepEqual(got, runs) {
		t.Fatalf("decoded %v, %v; want %v", got, err, runs)
	}
	for sequence, want := range map[int64]int64{49: -1, 50: 100, 52: 102, 53: 110, 54: 1 << 40, 53 + 1<<20: 1<<40 + 1<<20 - 1, 54 + 1<<20: -1} {
		got, ok, err := r.sourceAt(sequence)
		if err != nil || ok != (want >= 0) || ok && got != want {
			t.Errorf("sequence %d is source offset %d, %t, %v; want %d", sequence, got, ok, err, want)
		}
	}
	for _, damaged := range [][]byte{nil, {0x80}, r.runs[:1:1], append(r.runs[:len(r.runs):len(r.runs)], 5)} {
		x := r
		x.runs = damaged
		if got, err := x.decode(); err == nil && len(damaged) != 1 {
			t.Errorf("runs %x were taken as %v", damaged, got)
		}
	}
	for _, damaged := range [][]byte{nil, written.append(nil)[:runsHeadSize], append([]byte{1}, written.append(nil)[1:]...)} {
		if got, err := parseRunsRecord(damaged); err == nil {
			t.Errorf("record %x was taken as %+v", damaged, got)
		}
	}
}

func TestSplitRuns(t *testing.T) {
	runs := []protocol.Run{{Source: 1, Count: 2}, {Source: 10, Count: 3}}
	for count, want := range map[int64][2][]protocol.Run{
		1: {{{Source: 1, Count: 1}}, {{Source: 2, Count: 1}, {Source: 10, Count: 3}}},
		2: {{{Source: 1, Count: 2}}, {{Source: 10, Count: 3}}},
		4: {{{Source: 1, Count: 2}, {Source: 10, Count: 2}}, {{Source: 12, Count: 1}}},
	} {
		if left, right := splitRuns(runs, count); !reflect.DeepEqual(left, want[0]) || !reflect.DeepEqual(right, want[1]) {
			t.Errorf("split behind %d: %v and %v, want %v", count, left, right, want)
		}
	}
}
