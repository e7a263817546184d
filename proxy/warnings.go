package proxy

import (
	"maps"
	"sync"
	"time"

	"go.uber.org/zap"
)

const (
	// warnEvery is how often the same kind of trouble with the same peer is logged.
	warnEvery = 10 * time.Second
	// maxWarned is how many lines of a kind there are in warnEvery, about different peers: more would be an attacker's log.
	maxWarned = 16
)

// warnings limits log lines about peers by kind and by whom or what they are about: the first at once, then one every warnEvery. A kind's next
// line tells how many of it were left out.
type warnings struct {
	log *zap.Logger

	mu   sync.Mutex
	kind map[string]*warning // closed set
}

type warning struct {
	last    map[string]time.Time // of the lines of the last warnEvery, by what they are about
	omitted int
}

// warn logs a line. about is whom or what it's about, "" where a kind has one only.
func (w *warnings) warn(kind, about, message string, fields ...zap.Field) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.kind == nil {
		w.kind = make(map[string]*warning)
	}
	k := w.kind[kind]
	if k == nil {
		k = &warning{last: make(map[string]time.Time)}
		w.kind[kind] = k
	}
	now := time.Now()
	maps.DeleteFunc(k.last, func(_ string, at time.Time) bool { return now.Sub(at) >= warnEvery })
	if _, recent := k.last[about]; recent || len(k.last) >= maxWarned {
		k.omitted++
		return
	}
	if k.omitted > 0 {
		fields = append(fields, zap.Int("omitted_before", k.omitted))
	}
	k.last[about], k.omitted = now, 0
	w.log.Warn(message, fields...)
}

// flush tells of what was left out since the last line of each kind.
func (w *warnings) flush() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for kind, k := range w.kind {
		if k.omitted > 0 {
			w.log.Warn("warnings left out", zap.String("kind", kind), zap.Int("omitted_before", k.omitted))
			k.omitted = 0
		}
	}
}
