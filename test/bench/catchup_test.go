package bench

import (
	"testing"
	"time"
)

// benchCatchUp lets each copier fill an empty mirror from a full source, one after the other, several times.
func benchCatchUp(t *testing.T, w *world, r *report) {
	for _, load := range workloads {
		load = load.scaled(*scale)
		load.load(t, w.source)
		all := copiers(t)
		measureCopy(t, w, all[0], load) // the brokers' code gets compiled
		for range *rounds {
			for _, c := range all {
				r.add("catch-up", load.name, c.name, measureCopy(t, w, c, load)...)
			}
		}
	}
}

// measureCopy measures from the first poll that sees records on the mirror to the first that sees all. What was there at the first is
// not counted, so neither is the copier's start. Where it is much already, the poll before counts, which saw
// nothing: that makes the figures worse than they are, never better.
func measureCopy(t *testing.T, w *world, c copier, load workload) []metric {
	t.Helper()
	ctx := t.Context()
	want := int64(load.records)
	begin := time.Now()
	p := c.start(t, w, load.topic)
	from := progress{at: begin}
	timeout := time.After(copyTimeout)
	poll := time.NewTicker(pollEvery)
	defer poll.Stop()
	for {
		select {
		case <-poll.C:
		case <-timeout:
			t.Fatalf("%s copied %d of %d records in %v", c.name, from.records, want, copyTimeout)
		}
		p.running(t)
		records, err := endOffsets(ctx, w.mirrorAdmin, load.topic)
		now := progress{records: records, at: time.Now(), cpu: p.cpu(t)}
		switch {
		case err != nil: // the topic isn't there yet
		case now.records >= want:
			_, peak := p.memory(t)
			p.stop(t)
			deleteTopics(t, w.mirrorAdmin)
			return append(from.until(now, load.size), metric{"peak RSS MiB", peak}, metric{"start s", from.at.Sub(begin).Seconds()})
		case from.records == 0 && now.records < want/4:
			from = now
		}
	}
}

// progress is how far a copy is.
type progress struct {
	records int64
	at      time.Time
	cpu     time.Duration // that the copier has used
}

// until computes what the copier did between two moments.
func (from progress) until(to progress, recordSize int) []metric {
	records, seconds, cpu := float64(to.records-from.records), to.at.Sub(from.at).Seconds(), (to.cpu - from.cpu).Seconds()
	gb := records * float64(recordSize) / 1e9
	return []metric{
		{"records/s", records / seconds},
		{"MB/s", gb * 1000 / seconds},
		{"CPU s/GB", cpu / gb},
		{"CPU s/M records", cpu / records * 1e6},
	}
}
