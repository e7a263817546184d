package records

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// bombSize is what each bomb unpacks to: more than kmirror re-encodes, and more than verify reads.
const bombSize = 300 << 20

// TestBombs: batches of some hundred KiB that unpack to 300 MiB pass as bytes, live and from the log, in the memory of other batches. Where a batch must be
// re-encoded its partition stops and names it, the others go on, and memory stays bounded; verify says that it can't tell, in bounded memory too.
func TestBombs(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	const plain, stamped = "bombs-plain", "bombs-stamped"
	kafkatest.CreateTopic(t, source, plain, 1, 1, "max.message.bytes", "4194304")
	kafkatest.CreateTopic(t, source, stamped, 7, 1, "max.message.bytes", "4194304", "message.timestamp.type", "LogAppendTime")
	in := testbed.Start(t, source, mirror, "--topics", "/bombs-.*/", "--mirror_memory", "16MiB")
	testbed.WaitLive(t, in, plain, 1)
	bombs := map[int][]byte{}
	for _, codec := range []int{1, 3, 4} {
		bombs[codec] = pack(t, codec, oneValue(bombSize))
		produceRaw(t, in.Seeds(), plain, 0, codec, 1, bombs[codec])
		produceRaw(t, source.Seeds(), plain, 0, codec, 1, bombs[codec])
		t.Logf("codec %d: %d KiB", codec, len(bombs[codec])>>10)
	}
	in.WaitCaughtUp(time.Minute)
	wantSameBytes(t, source, mirror, plain)
	if peak := in.PeakRSS(); peak > (16+100)<<20 {
		t.Errorf("kmirror held %d MiB while bombs passed, want 116 at most", peak>>20)
	} else {
		t.Logf("kmirror held %d MiB at most while bombs passed", peak>>20)
	}

	for partition, codec := range []int{1, 3, 4, 1, 3, 4} {
		produce(t, in.Seeds(), stamped, int32(partition), numbered("before", 5, 0))
		produceRaw(t, in.Seeds(), stamped, int32(partition), codec, 1, bombs[codec])
	}
	produce(t, in.Seeds(), stamped, 6, numbered("beside", 100, 0))
	for partition := range int32(6) {
		waitReason(t, in, stamped, partition, "batch at [5, 6)", "unpack")
	}
	kafkatest.Eventually(t, 30*time.Second, func() error {
		if s, err := streamOf(in, stamped, 6); err != nil || s.Next != 100 {
			return fmt.Errorf("partition 6 beside: %+v, %v", s, err)
		}
		return nil
	})
	const reencoding = 3 * 128 << 20 // one batch at a time, what it is copied to, and what the collector hasn't taken yet: not six
	if peak := in.PeakRSS(); peak > reencoding+(16+100)<<20 {
		t.Errorf("kmirror held %d MiB while bombs were unpacked, want %d at most", peak>>20, (reencoding>>20)+116)
	} else {
		t.Logf("kmirror held %d MiB at most while bombs were unpacked", peak>>20)
	}

	code, out, peak := testbed.RunMeasured(t, "verify", "--source", source.Seeds()[0], "--mirror", mirror.Seeds()[0], "--topics", plain, "--parallel", "4")
	if code != 2 || !strings.Contains(out, "unpacks to more than 256 MiB") {
		t.Errorf("verify: exit code %d, want 2 and that the batch unpacks to too much\n%s", code, out)
	}
	if peak > 400<<20 {
		t.Errorf("verify held %d MiB, want 400 at most", peak>>20)
	} else {
		t.Logf("verify held %d MiB at most", peak>>20)
	}
}
