package forwarder

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
	"github.com/twmb/franz-go/pkg/kgo"
)

// minUnpackedBytes is what a batch may unpack to at least, however little memory is configured: Kafka's own default limits let a batch of 1 MiB
// hold that without being built to do harm.
const minUnpackedBytes = 128 << 20

// errUnpackedTooLarge says that a batch unpacks to more than memory is meant to hold.
var errUnpackedTooLarge = errors.New("compressed records unpack to more than the memory bound allows")

// recordCodec is protocol.Codec for the batches that must be re-encoded. It unpacks to no more than limit bytes (0:
// minUnpackedBytes) and says errUnpackedTooLarge before it holds more.
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
	switch codec {
	case 0:
		return records, nil
	case 1:
		r, err := gzip.NewReader(bytes.NewReader(records))
		if err != nil {
			return nil, err
		}
		return readUpTo(r, limit)
	case 2:
		return unpackSnappy(records, limit)
	case 3:
		return readUpTo(lz4.NewReader(bytes.NewReader(records)), limit)
	case 4:
		return unpackZstd(records, limit)
	}
	return nil, fmt.Errorf("compression codec %d is unknown", codec)
}

func readUpTo(r io.Reader, limit int64) ([]byte, error) {
	var out bytes.Buffer
	n, err := out.ReadFrom(io.LimitReader(r, limit+1))
	if n > limit {
		return nil, fmt.Errorf("%d bytes: %w", limit, errUnpackedTooLarge)
	}
	return out.Bytes(), err
}

// unpackZstd takes windows as large as the limit: at least the 128 MiB that Kafka's own consumers read.
func unpackZstd(records []byte, limit int64) ([]byte, error) {
	r, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxMemory(uint64(limit)))
	if err != nil {
		return nil, err
	}
	defer r.Close()
	out, err := r.DecodeAll(records, nil)
	if errors.Is(err, zstd.ErrDecoderSizeExceeded) {
		err = fmt.Errorf("%d bytes: %w", limit, errUnpackedTooLarge)
	}
	return out, err
}

// xerialMagic begins the framing of Java's snappy stream: 16 bytes of header, then blocks behind their big endian lengths. Other producers
// send one raw block.
var xerialMagic = []byte("\x82SNAPPY\x00")

const xerialHeaderSize = 16

func unpackSnappy(records []byte, limit int64) (out []byte, err error) {
	if !bytes.HasPrefix(records, xerialMagic) || len(records) < xerialHeaderSize {
		return unpackSnappyBlock(nil, records, limit)
	}
	for b := records[xerialHeaderSize:]; len(b) > 0; {
		if len(b) < 4 {
			return nil, io.ErrUnexpectedEOF
		}
		n := binary.BigEndian.Uint32(b)
		if b = b[4:]; uint64(n) > uint64(len(b)) {
			return nil, io.ErrUnexpectedEOF
		}
		if out, err = unpackSnappyBlock(out, b[:n], limit); err != nil {
			return nil, err
		}
		b = b[n:]
	}
	return out, nil
}

func unpackSnappyBlock(out, block []byte, limit int64) ([]byte, error) {
	n, err := s2.DecodedLen(block)
	if err != nil {
		return nil, err
	}
	if int64(len(out)+n) > limit {
		return nil, fmt.Errorf("%d bytes: %w", limit, errUnpackedTooLarge)
	}
	unpacked, err := s2.Decode(nil, block)
	if err != nil {
		return nil, err
	}
	if out == nil {
		return unpacked, nil
	}
	return append(out, unpacked...), nil
}
