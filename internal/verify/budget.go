package verify

import (
	"errors"
	"fmt"
	"sync"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/unpack"
	"kmirror/protocol"
)

// Compressed records can unpack to a thousand times their size. What one answer unpacks to is bounded; a batch that is larger by itself
// gets batchBudget, but only one partition at a time does.
const (
	answerBudget = 16 << 20
	batchBudget  = 256 << 20
	recordBytes  = 256 // what a decoded record takes beside its content, about
)

var errTooMuch = fmt.Errorf("a batch unpacks to more than %d MiB", batchBudget>>20)

// allowance is what the readers of one partition may unpack.
type allowance struct {
	lock     *sync.Mutex
	extended bool
}

func (a *allowance) bytes() int64 {
	if a.extended {
		return batchBudget
	}
	return answerBudget
}

// extend waits until this partition may unpack large batches; false if it already may.
func (a *allowance) extend() bool {
	if a.extended {
		return false
	}
	a.lock.Lock()
	a.extended = true
	return true
}

func (a *allowance) release() {
	if a.extended {
		a.lock.Unlock()
		a.extended = false
	}
}

// budget is what is left for one answer. It is kgo's Decompressor for it.
type budget struct {
	left     int64
	exceeded bool
}

// fit returns the batches, from the first on, whose records, once decoded, leave room for their content.
func (b *budget) fit(batches []byte) []byte {
	for rest := batches; ; {
		batch, behind, err := protocol.ParseBatch(rest)
		if err != nil { // cut off, or of an old format, whose messages are at least 26 bytes each
			return batches
		}
		if need := int64(batch.RecordCount()) * recordBytes; need > b.left {
			b.exceeded = true
			return batches[:len(batches)-len(rest)]
		} else if need > 0 {
			b.left -= need
		}
		rest = behind
	}
}

// Decompress takes also what kgo's own refuses: lz4 as producers before Kafka 0.10 framed it.
func (b *budget) Decompress(src []byte, codec kgo.CompressionCodecType) ([]byte, error) {
	if codec == kgo.CodecLz4 {
		src = protocol.FixLZ4Header(src)
	}
	out, err := unpack.Records(int(codec), src, max(b.left, 1))
	b.left -= int64(len(out))
	b.exceeded = b.exceeded || errors.Is(err, unpack.ErrTooLarge)
	return out, err
}
