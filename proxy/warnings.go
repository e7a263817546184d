package proxy

import (
	"sync"
	"time"

	"go.uber.org/zap"
)

// warnEvery is how often the same kind of trouble is logged.
const warnEvery = 10 * time.Second

// warnings limits log lines about clients by kind: the first of a kind at once, then one every warnEvery with the number of
// those left out.
type warnings struct {
	log *zap.Logger

	mu   sync.Mutex
	kind map[string]*warning // closed set
}

type warning struct {
	last    time.Time
	omitted int
}

func (w *warnings) warn(kind, message string, fields ...zap.Field) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.kind == nil {
		w.kind = make(map[string]*warning)
	}
	k := w.kind[kind]
	if k == nil {
		k = &warning{}
		w.kind[kind] = k
	}
	now := time.Now()
	if !k.last.IsZero() && now.Sub(k.last) < warnEvery {
		k.omitted++
		return
	}
	if k.omitted > 0 {
		fields = append(fields, zap.Int("omitted_before", k.omitted))
	}
	k.last, k.omitted = now, 0
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
