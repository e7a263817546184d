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
// not counted, so neither is the copier's start.
func measureCopy(t *testing.T, w *world, c copier, load workload) []metric {
	t.Helper()
	ctx := t.Context()
	begin := time.Now()
	p := c.start(t, w, load.topic)
	want := int64(load.records)
	var startedAt time.Time
	var had int64
	var cpuBefore time.Duration
	timeout := time.After(copyTimeout)
	poll := time.NewTicker(pollEvery)
	defer poll.Stop()
	for {
		select {
		case <-poll.C:
		case <-timeout:
			t.Fatalf("%s copied %d of %d records in %v", c.name, endOffsets(ctx, w.mirrorAdmin, load.topic), want, copyTimeout)
		}
		p.running(t)
		n, now := endOffsets(ctx, w.mirrorAdmin, load.topic), time.Now()
		if had == 0 {
			had, startedAt, cpuBefore = n, now, p.cpu(t)
			continue
		}
		if n < want {
			continue
		}
		if had >= want {
			t.Fatalf("%s copied %d records before the first poll saw any: too few to measure", c.name, want)
		}
		elapsed, cpu := now.Sub(startedAt).Seconds(), (p.cpu(t) - cpuBefore).Seconds()
		_, peak := p.memory(t)
		p.stop(t)
		deleteTopics(t, w.mirrorAdmin)
		records := float64(want - had)
		gb := records * float64(load.size) / 1e9
		return []metric{
			{"records/s", records / elapsed},
			{"MB/s", gb * 1000 / elapsed},
			{"CPU s/GB", cpu / gb},
			{"CPU s/M records", cpu / records * 1e6},
			{"peak RSS MiB", peak},
			{"start s", startedAt.Sub(begin).Seconds()},
		}
	}
}
