package forwarder

import (
	"testing"
	"time"
)

// queued returns a partition of birth 0 with n queued batches of one record each.
func queued(state State, n int, timestamp int64) *partition {
	p := &partition{state: state, holeFrom: -1, expireAge: 23 * time.Hour, mergeBytes: 1 << 20, quiet: true, stateFresh: true}
	p.numbering = numbering{segments: []segment{{0, 0}}}
	for range n {
		b := modelBatch(p.next, 1, timestamp)
		p.take(entry{base: p.next, end: p.next + 1, maxTimestamp: timestamp, batch: b})
	}
	return p
}

func TestWhatIsMerged(t *testing.T) {
	now := time.UnixMilli(1_700_000_000_000)
	fresh, old := now.UnixMilli(), now.Add(-72*time.Hour).UnixMilli()
	flying := func(p *partition, n int) *partition {
		p.solo = false
		for range n {
			p.send()
		}
		return p
	}
	hole := queued(StateCatchUp, 3, fresh)
	hole.queue[2].base++
	hole.queue[2].end++
	epoch := queued(StateCatchUp, 0, fresh)
	epoch.segments = []segment{{0, 1<<sequenceBits - 2}}
	for range 4 {
		epoch.take(entry{base: epoch.next, end: epoch.next + 1, maxTimestamp: fresh, batch: modelBatch(epoch.next, 1, fresh)})
	}
	small := queued(StateCatchUp, 5, fresh)
	small.mergeBytes = 3 * small.queue[0].sizeBytes()
	never := queued(StateCatchUp, 5, fresh)
	never.mergeBytes = 0
	packed := func(p *partition) *partition {
		for _, e := range p.queue {
			e.batch[22] |= 2 // snappy
		}
		return p
	}
	mixed := queued(StateCatchUp, 5, fresh)
	mixed.queue[2].batch[22] |= 2
	large := packed(queued(StateCatchUp, 5, fresh))
	large.queue[2].batch = append(large.queue[2].batch, make([]byte, maxPackedBatch)...)
	for _, test := range []struct {
		name string
		p    *partition
		want int
	}{
		{"tiny compressed batches", packed(queued(StateCatchUp, 5, fresh)), 5},
		{"compressed batches up to one that isn't tiny", large, 2},
		{"live compressed batches with a full pipeline", flying(packed(queued(StateLive, 10, fresh)), 4), 6},
		{"up to another codec", mixed, 2},
		{"a single batch", queued(StateCatchUp, 1, fresh), 1},
		{"what waits in catch-up", queued(StateCatchUp, 5, fresh), 5},
		{"less waiting than in flight", flying(queued(StateCatchUp, 5, fresh), 3), 1},
		{"live goes as it came", queued(StateLive, 5, fresh), 1},
		{"live with a full pipeline", flying(queued(StateLive, 10, fresh), 4), 6},
		{"live with old data", queued(StateLive, 5, old), 5},
		{"up to a hole", hole, 2},
		{"up to the end of a producer epoch", epoch, 2},
		{"up to the bound", small, 3},
		{"bound 0", never, 1},
	} {
		if got := test.p.mergeable(now); got != test.want {
			t.Errorf("%s: mergeable = %d, want %d", test.name, got, test.want)
		}
	}
}

func TestReplaceKeepsTheQueueInOrder(t *testing.T) {
	p := queued(StateCatchUp, 5, 0)
	was := p.replace(3, entry{base: 0, end: 3, batch: modelBatch(0, 3, 0)})
	if len(was) != 3 || len(p.queue) != 3 || p.queue[0].end != p.queue[1].base {
		t.Fatalf("replaced %d, %d left", len(was), len(p.queue))
	}
	size := int64(0)
	for i := range p.queue {
		size += p.queue[i].sizeBytes()
	}
	if p.queuedBytes != size {
		t.Fatalf("queuedBytes = %d, want %d", p.queuedBytes, size)
	}
}
