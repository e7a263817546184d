package proxy

import "sync"

// maxTopicNames bounds the names that are remembered; clients choose them.
const maxTopicNames = 50_000

// topicNames turns names in frames into strings, each allocated once.
type topicNames struct {
	mu    sync.RWMutex
	names map[string]string
}

// name returns b as a string; "" for nil.
func (t *topicNames) name(b []byte) string {
	if len(b) == 0 {
		return ""
	}
	t.mu.RLock()
	s, ok := t.names[string(b)]
	t.mu.RUnlock()
	if ok {
		return s
	}
	s = string(b)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.names == nil {
		t.names = make(map[string]string)
	}
	if len(t.names) < maxTopicNames {
		t.names[s] = s
	}
	return s
}
