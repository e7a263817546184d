package forwarder

import (
	"bytes"
	"errors"
	"math/rand"
	"testing"

	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"

	"kmirror/internal/unpack"
)

func TestCodecReadsWhatItWrites(t *testing.T) {
	r := rand.New(rand.NewSource(1))
	for codec := range 5 {
		for _, size := range []int{0, 1, 100, 40_000, 3 << 20} {
			records := make([]byte, size)
			r.Read(records[:size/2])
			packed, err := recordCodec{}.Compress(codec, records)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := (recordCodec{}).Decompress(codec, packed); err != nil || !bytes.Equal(got, records) {
				t.Errorf("codec %d: %d bytes became %d, %v", codec, size, len(got), err)
			}
		}
	}
}

// TestCodecReadsOtherFramings: one raw block of snappy, as librdkafka sends it, and zstd with the largest window.
func TestCodecReadsOtherFramings(t *testing.T) {
	records := bytes.Repeat([]byte("some records, "), 100_000)
	if got, err := (recordCodec{}).Decompress(2, s2.EncodeSnappy(nil, records)); err != nil || !bytes.Equal(got, records) {
		t.Errorf("raw snappy: %d bytes, %v", len(got), err)
	}
	for _, window := range []int{zstd.MinWindowSize, 1 << 23, 1 << 27} {
		var packed bytes.Buffer
		w, err := zstd.NewWriter(&packed, zstd.WithWindowSize(window), zstd.WithEncoderConcurrency(1), zstd.WithSingleSegment(false))
		if err != nil {
			t.Fatal(err)
		}
		w.Write(records)
		w.Flush() // so that the frame doesn't tell its size
		w.Close()
		if got, err := (recordCodec{}).Decompress(4, packed.Bytes()); err != nil || !bytes.Equal(got, records) {
			t.Errorf("zstd with a window of %d: %d bytes, %v", window, len(got), err)
		}
	}
}

// TestCodecBoundsWhatItUnpacks: what unpacks to more is refused, with an error that says so, for every codec.
func TestCodecBoundsWhatItUnpacks(t *testing.T) {
	const limit = 4 << 20
	bomb := make([]byte, limit+1)
	for codec := 1; codec <= 4; codec++ {
		packed, err := recordCodec{}.Compress(codec, bomb)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := (recordCodec{limit: limit}).Decompress(codec, packed); !errors.Is(err, unpack.ErrTooLarge) {
			t.Errorf("codec %d: %v, want %v", codec, err, unpack.ErrTooLarge)
		}
		if got, err := (recordCodec{limit: limit + 1}).Decompress(codec, packed); err != nil || len(got) != len(bomb) {
			t.Errorf("codec %d within a larger limit: %d bytes, %v", codec, len(got), err)
		}
	}
}

func TestCodecRefusesDamage(t *testing.T) {
	r := rand.New(rand.NewSource(2))
	for codec := 1; codec <= 4; codec++ {
		packed, _ := recordCodec{}.Compress(codec, bytes.Repeat([]byte("records "), 1000))
		for range 300 {
			bad := bytes.Clone(packed)[:r.Intn(len(packed)+1)]
			if len(bad) > 0 {
				bad[r.Intn(len(bad))] ^= byte(1 + r.Intn(255))
			}
			_, _ = recordCodec{}.Decompress(codec, bad) // no panic
		}
	}
}
