package unpack

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/iotest"
)

// TestReadUpTo: whatever the reader's pieces are, content up to the limit is whole, and an error isn't taken for an end.
func TestReadUpTo(t *testing.T) {
	for _, size := range []int{0, 1, 64 << 10, 64<<10 + 1, 192 << 10, 5 << 20} {
		content := bytes.Repeat([]byte("0123456"), size/7+1)[:size]
		for name, r := range map[string]io.Reader{
			"whole": bytes.NewReader(content), "halves": iotest.HalfReader(bytes.NewReader(content)), "end with data": iotest.DataErrReader(bytes.NewReader(content)),
		} {
			if got, err := readUpTo(r, int64(size)); err != nil || !bytes.Equal(got, content) {
				t.Errorf("%d bytes, %s: got %d, %v", size, name, len(got), err)
			}
		}
		if size == 0 {
			continue
		}
		if _, err := readUpTo(iotest.DataErrReader(bytes.NewReader(content)), int64(size-1)); !errors.Is(err, ErrTooLarge) {
			t.Errorf("%d bytes with a limit one below: %v, want ErrTooLarge", size, err)
		}
		cut := io.MultiReader(bytes.NewReader(content), iotest.ErrReader(io.ErrUnexpectedEOF))
		if _, err := readUpTo(cut, int64(size)); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%d bytes that are cut off: %v, want ErrUnexpectedEOF", size, err)
		}
	}
}
