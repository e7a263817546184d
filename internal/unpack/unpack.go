// Package unpack decompresses the records of Kafka batches to a bound, in the framings that producers use. It decodes no records.
//
//	records, err := unpack.Records(batch.Codec(), batch.Records(), 128<<20)
package unpack

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
)

// ErrTooLarge says that a batch unpacks to more than the bound.
var ErrTooLarge = errors.New("compressed records unpack to more than the memory bound allows")

// Records decompresses what a codec, numbered as in batch attributes, made. It says ErrTooLarge before it holds more than limit bytes and the
// codec's own buffers. Without a codec the result aliases records.
func Records(codec int, records []byte, limit int64) ([]byte, error) {
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
	const first, most = 64 << 10, 4 << 20
	var chunks [][]byte // not one buffer that grows by doubling, which would take three times the limit
	for left, size := limit+1, int64(first); left > 0; size = min(2*size, most) {
		chunk := make([]byte, 0, min(size, left))
		for len(chunk) < cap(chunk) {
			n, err := r.Read(chunk[len(chunk):cap(chunk)])
			chunk = chunk[:len(chunk)+n]
			switch {
			case err == io.EOF && left > int64(len(chunk)):
				return slices.Concat(append(chunks, chunk)...), nil
			case err != nil && err != io.EOF:
				return nil, err
			}
		}
		chunks, left = append(chunks, chunk), left-int64(len(chunk))
	}
	return nil, fmt.Errorf("%d bytes: %w", limit, ErrTooLarge)
}

// unpackZstd takes windows as large as the limit; Kafka's own consumers read 128 MiB.
func unpackZstd(records []byte, limit int64) ([]byte, error) {
	r, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxMemory(uint64(limit)))
	if err != nil {
		return nil, err
	}
	defer r.Close()
	out, err := r.DecodeAll(records, nil)
	if errors.Is(err, zstd.ErrDecoderSizeExceeded) || errors.Is(err, zstd.ErrWindowSizeExceeded) {
		err = fmt.Errorf("%d bytes: %w", limit, ErrTooLarge)
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
		return nil, fmt.Errorf("%d bytes: %w", limit, ErrTooLarge)
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
