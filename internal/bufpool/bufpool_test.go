package bufpool

import "testing"

func TestGetGivesTheLengthAskedFor(t *testing.T) {
	for _, n := range []int{0, 1, 512, 513, 4096, 4097, 1 << 24, 1<<24 + 1} {
		b := Get(n)
		if len(b.B) != n || cap(b.B) != max(Footprint(n), n) {
			t.Errorf("Get(%d): length %d, capacity %d, Footprint %d", n, len(b.B), cap(b.B), Footprint(n))
		}
		b.Release()
	}
}

func TestMemoryGoesBackWithTheLastOwner(t *testing.T) {
	b := Get(100)
	b.Retain()
	b.Release()
	b.B[0] = 1 // still ours
	b.Release()
	panics(t, "Release", b.Release)
	panics(t, "Retain", b.Retain)
}

func panics(t *testing.T, name string, misuse func()) {
	t.Helper()
	defer func() {
		if recover() == nil {
			t.Errorf("%s after the last Release didn't panic", name)
		}
	}()
	misuse()
}
