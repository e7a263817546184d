package records

import (
	"bytes"
	"fmt"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// console lets Java's console producer write lines with headers, keys and values; NULL stands for null.
func console(t *testing.T, bootstrap, topic, codec string, lines ...string) {
	t.Helper()
	cmd := kafkatest.ToolCommand(t, "org.apache.kafka.tools.ConsoleProducer", "--bootstrap-server", bootstrap, "--topic", topic, "--compression-codec", codec,
		"--reader-property", "parse.headers=true", "--reader-property", "parse.key=true", "--reader-property", "null.marker=NULL")
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	run(t, cmd)
}

func run(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	timer := time.AfterFunc(2*time.Minute, func() { cmd.Process.Kill() })
	defer timer.Stop()
	if out, err := cmd.CombinedOutput(); err != nil || bytes.Contains(out, []byte("ERROR")) {
		t.Fatalf("%s: %v\n%s", cmd, err, out)
	}
}

// kafkaJS lets kafkajs write what headers.js says.
func kafkaJS(t *testing.T, bootstrap, topic string) {
	t.Helper()
	root := kafkatest.Root(t)
	if _, err := exec.LookPath("node"); err != nil && os.Getenv("CI") == "" {
		t.Skipf("%v; `make deps` installs it", err)
	}
	cmd := exec.CommandContext(t.Context(), "node", filepath.Join(root, "test", "records", "headers.js"), bootstrap, topic)
	cmd.Env = append(os.Environ(), "NODE_PATH="+filepath.Join(root, ".cache", "node", "node_modules"))
	run(t, cmd)
}

// TestHeadersOfOtherClients is C14 with Java and kafkajs: headers in order and twice, null beside empty, every byte, timestamps from 0 on, live and
// from the log. On a topic with create times all bytes of the records are the source's, snappy in Java's framing and zstd as Java writes it.
func TestHeadersOfOtherClients(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	in := testbed.Start(t, source, mirror, "--topics", "/headers-.*/")
	for _, kind := range []string{"CreateTime", "LogAppendTime"} {
		topic := "headers-" + strings.ToLower(kind)
		kafkatest.CreateTopic(t, source, topic, 1, 1, "message.timestamp.type", kind, "retention.ms", "-1")
		testbed.WaitLive(t, in, topic, 1)
		for i, seeds := range [][]string{in.Seeds(), source.Seeds()} {
			lines := []string{"a:1,a:2,a:1\tk\tv", "NULL\tk\tNULL", "NULL\tNULL\tv", "ü:ö,e:\tschlüssel-キー\t", "n:NULL\t\tv"}
			for n := range 200 { // or it doesn't shrink
				lines = append(lines, fmt.Sprintf("h:%d\tk\t%s", n, strings.Repeat("compressible ", 20)))
			}
			console(t, seeds[0], topic, []string{"snappy", "zstd"}[i], lines...)
			console(t, seeds[0], topic, "zstd", "h:1\tk\t"+strings.Repeat("z", 5000))
			kafkaJS(t, seeds[0], topic)
			kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
			if kind == "CreateTime" && i == 0 { // from the log small batches may be merged
				wantSameBytes(t, source, mirror, topic)
			}
		}
		codecs := map[int]int{}
		for _, b := range rawLog(t, mirror, topic) {
			if codecs[b.Codec()]++; b.Codec() == 2 && !bytes.HasPrefix(b.Records(), []byte("\x82SNAPPY\x00")) && kind == "CreateTime" {
				t.Error("a snappy batch isn't framed as Java does it")
			}
		}
		if codecs[2] == 0 || codecs[4] == 0 {
			t.Errorf("%s: batches by codec %v, want some of snappy (2) and zstd (4)", topic, codecs)
		}
		found := kafkatest.ReadAll(t, mirror, topic, 0)
		wantHeaders(t, topic, found, "a=1 a=2 a=1", "ü=ö e=", "n=null", "twice=1 twice=2 bytes="+everyByte())
	}
}

func everyByte() string {
	b := make([]byte, 256)
	for i := range b {
		b[i] = byte(i)
	}
	return fmt.Sprintf("%x", b)
}

// wantHeaders fails unless a record has each of the header lists.
func wantHeaders(t *testing.T, topic string, records []*kgo.Record, lists ...string) {
	t.Helper()
	have := map[string]bool{}
	for _, r := range records {
		var list []string
		for _, h := range r.Headers {
			switch {
			case h.Value == nil:
				list = append(list, h.Key+"=null")
			case len(h.Value) == 256:
				list = append(list, fmt.Sprintf("%s=%x", h.Key, h.Value))
			default:
				list = append(list, h.Key+"="+string(h.Value))
			}
		}
		have[strings.Join(list, " ")] = true
	}
	for _, list := range lists {
		if !have[list] {
			t.Errorf("%s: no record on the mirror has the headers %s", topic, list)
		}
	}
}

// TestZstdWindows: frames of any window that a broker takes, up to 128 MiB, pass as bytes; where they must be re-encoded (append times) they are read, too.
func TestZstdWindows(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	in := testbed.Start(t, source, mirror, "--topics", "/windows-.*/", "--mirror_memory", "16MiB")
	noise := make([]byte, 8<<10) // tiny compressed batches that wait would be merged
	rand.New(rand.NewSource(1)).Read(noise)
	for _, kind := range []string{"CreateTime", "LogAppendTime"} {
		topic := "windows-" + strings.ToLower(kind)
		kafkatest.CreateTopic(t, source, topic, 1, 1, "message.timestamp.type", kind)
		testbed.WaitLive(t, in, topic, 1)
		for _, window := range []int{zstd.MinWindowSize, 1 << 20, 1 << 23, 1 << 27} {
			packed := pack(t, 4, oneValue(3<<20, noise...), zstd.WithWindowSize(window))
			produceRaw(t, in.Seeds(), topic, 0, 4, 1, packed)
			produceRaw(t, source.Seeds(), topic, 0, 4, 1, packed)
		}
		kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
		if kind == "CreateTime" {
			wantSameBytes(t, source, mirror, topic)
		}
	}
	if peak := in.PeakRSS(); peak > (16+100)<<20 {
		t.Errorf("kmirror held %d MiB, want 116 at most", peak>>20)
	}
	name, _ := strings.CutPrefix(in.Group(), "kmirror.")
	if code, out := testbed.Run(t, "verify", "--name", name, "--source", source.Seeds()[0], "--mirror", mirror.Seeds()[0], "--topics", "/windows-.*/"); code != 0 {
		t.Errorf("verify: exit code %d\n%s", code, out)
	}
}
