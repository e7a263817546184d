package protocol

import (
	"hash/crc32"
	"math/rand"
	"testing"
)

// randomBatch returns a batch with a correct CRC, random header fields and n bytes of records.
func randomBatch(r *rand.Rand, n int) Batch {
	b := make(Batch, BatchHeaderSize+n)
	r.Read(b)
	b[atMagic] = 2
	putLength(b)
	reseal(b)
	return b
}

func TestStampPatchesTheChecksumOfEverySize(t *testing.T) {
	r := rand.New(rand.NewSource(1))
	for i := range 2000 {
		n := i
		if i > 1000 {
			n = r.Intn(1 << 20)
		}
		b := randomBatch(r, n)
		b.Stamp(r.Int63(), int16(r.Intn(1<<15)), r.Int31())
		if !b.VerifyCRC() {
			t.Fatalf("records of %d bytes: Stamp left CRC %08x, want %08x", n, b.CRC(), crc32.Checksum(b[atAttributes:], castagnoli))
		}
		if b.BaseOffset() != 0 || b.LeaderEpoch() != -1 || b.Transactional() || b.Attributes()&AttrDeleteHorizon != 0 {
			t.Fatalf("Stamp left base offset %d, leader epoch %d, attributes %x", b.BaseOffset(), b.LeaderEpoch(), b.Attributes())
		}
	}
}

func TestStampKeepsAWrongChecksumWrong(t *testing.T) {
	b := randomBatch(rand.New(rand.NewSource(2)), 500)
	b[300] ^= 1
	b.Stamp(7, 1, 2)
	if b.VerifyCRC() {
		t.Fatal("Stamp made the CRC of damaged records right")
	}
}

func TestStampAllocatesNothing(t *testing.T) {
	b := randomBatch(rand.New(rand.NewSource(3)), 500)
	if n := testing.AllocsPerRun(100, func() { b.Stamp(7, 1, 2) }); n != 0 {
		t.Fatalf("Stamp allocates %v times, want 0", n)
	}
}

func BenchmarkStamp(b *testing.B) {
	batch := randomBatch(rand.New(rand.NewSource(4)), 1<<20)
	b.SetBytes(int64(len(batch)))
	for b.Loop() {
		batch.Stamp(7, 1, 2)
	}
}
