package forwarder

import (
	"bytes"
	"fmt"
	"sync"

	"github.com/twmb/franz-go/pkg/kgo"
)

// recordCodec is franz-go's compression as protocol.Codec, for the few batches that must be re-encoded.
type recordCodec struct{}

var decompressor = kgo.DefaultDecompressor()

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

func (recordCodec) Decompress(codec int, records []byte) ([]byte, error) {
	return decompressor.Decompress(records, kgo.CompressionCodecType(codec))
}
