package forwarder

import (
	"bytes"
	"fmt"
	"sync"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/unpack"
)

// minUnpackedBytes is what a batch may unpack to at least, however little memory is configured: Kafka's own default limits let a batch of 1 MiB
// hold that without being built to do harm.
const minUnpackedBytes = 128 << 20

// recordCodec is protocol.Codec for the batches that must be re-encoded. It unpacks to no more than limit bytes (0:
// minUnpackedBytes) and says unpack.ErrTooLarge before it holds more.
type recordCodec struct{ limit int64 }

// compressors holds one compressor a codec, made when first needed.
var compressors = [...]func() (kgo.Compressor, error){
	1: sync.OnceValues(func() (kgo.Compressor, error) { return kgo.DefaultCompressor(kgo.GzipCompression()) }),
	2: sync.OnceValues(func() (kgo.Compressor, error) { return kgo.DefaultCompressor(kgo.SnappyCompression()) }),
	3: sync.OnceValues(func() (kgo.Compressor, error) { return kgo.DefaultCompressor(kgo.Lz4Compression()) }),
	4: sync.OnceValues(func() (kgo.Compressor, error) { return kgo.DefaultCompressor(kgo.ZstdCompression()) }),
}

func (recordCodec) Compress(codec int, records []byte) ([]byte, error) {
	if codec == 0 {
		return records, nil
	}
	if codec >= len(compressors) {
		return nil, fmt.Errorf("compression codec %d is unknown", codec)
	}
	c, err := compressors[codec]()
	if err != nil {
		return nil, err
	}
	out, used := c.Compress(new(bytes.Buffer), records)
	if int(used) != codec {
		return nil, fmt.Errorf("compression codec %d became %d", codec, used)
	}
	return bytes.Clone(out), nil
}

func (c recordCodec) Decompress(codec int, records []byte) ([]byte, error) {
	limit := c.limit
	if limit == 0 {
		limit = minUnpackedBytes
	}
	return unpack.Records(codec, records, limit)
}
