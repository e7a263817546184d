package protocol

import (
	"math/rand"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"
)

func TestKeysGoWhereOtherClientsSendThem(t *testing.T) {
	random := rand.New(rand.NewSource(1))
	other := kgo.StickyKeyPartitioner(nil).ForTopic("")
	for range 10_000 {
		key := make([]byte, random.Intn(40))
		random.Read(key)
		n := 1 + random.Intn(100)
		if got, want := KeyPartition(key, int32(n)), other.Partition(&kgo.Record{Key: key}, n); int(got) != want {
			t.Fatalf("KeyPartition(%x, %d) = %d, want %d", key, n, got, want)
		}
	}
	// From Kafka's UtilsTest.testMurmur2.
	for key, want := range map[string]int32{"21": -973932308, "foobar": -790332482, "a-little-bit-long-string": -985981536, "abc": 479470107} {
		if got := int32(murmur2([]byte(key))); got != want {
			t.Errorf("murmur2(%q) = %d, want %d", key, got, want)
		}
	}
}
