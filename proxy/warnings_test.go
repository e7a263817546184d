package proxy

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
)

// TestWarningsAreLimitedByPeer: each peer's first trouble of a kind is named, its next ones are counted, and a crowd can't fill the log.
func TestWarningsAreLimitedByPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, logs := observed()
		w := warnings{log: log}
		warn := func(kind, about string) {
			w.warn(kind, about, "closed", zap.String("kind", kind), zap.String("about", about))
		}
		wantLines := func(when string, want ...string) {
			t.Helper()
			var got []string
			for _, e := range logs.TakeAll() {
				line := fmt.Sprint(e.ContextMap()["about"])
				if n, ok := e.ContextMap()["omitted_before"]; ok {
					line += fmt.Sprintf(" +%d", n)
				}
				got = append(got, line)
			}
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("%s: lines = %q, want %q", when, got, want)
			}
		}
		for range 3 {
			warn("frame", "a")
			warn("frame", "b")
			warn("tls", "a")
		}
		wantLines("each peer of each kind", "a", "b", "a")
		time.Sleep(warnEvery)
		warn("frame", "b")
		wantLines("after a while", "b +4")
		for i := range 1000 {
			warn("frame", fmt.Sprint(i))
		}
		if n := len(logs.TakeAll()); n != maxWarned-1 {
			t.Errorf("%d lines about 1000 peers, want %d", n, maxWarned-1)
		}
		time.Sleep(warnEvery)
		warn("frame", "c")
		wantLines("after the crowd", fmt.Sprintf("c +%d", 1000-(maxWarned-1)))
		if n := len(w.kind["frame"].last); n != 1 {
			t.Errorf("%d peers are remembered, want the last one", n)
		}
		warn("frame", "c")
		w.flush()
		if n := logs.FilterField(zap.Int("omitted_before", 1)).Len(); n != 1 {
			t.Errorf("flush told of %d kinds, want 1", n)
		}
	})
}
