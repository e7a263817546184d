package compaction

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

const patience = 2 * time.Minute

// clusters are a source and a mirror whose cleaners are never at rest.
func clusters(t *testing.T, mirrorOpts ...kafkatest.Option) (source, mirror *kafkatest.RealCluster) {
	t.Helper()
	busy := []kafkatest.Option{kafkatest.Config("log.cleaner.backoff.ms", "100"), kafkatest.Config("log.cleaner.threads", "1")}
	return kafkatest.Real(t, busy...), kafkatest.Real(t, append(busy, mirrorOpts...)...)
}

// compactedTopic makes one that is cleaned as soon as it can be; its tombstones stay for tombstones.
func compactedTopic(t *testing.T, c kafkatest.Cluster, topic string, tombstones time.Duration) {
	t.Helper()
	kafkatest.CreateTopic(t, c, topic, 1, 1, "cleanup.policy", "compact", "segment.ms", "100", "min.cleanable.dirty.ratio", "0.001",
		"min.compaction.lag.ms", "0", "delete.retention.ms", strconv.FormatInt(tombstones.Milliseconds(), 10))
}

// history writes records whose values count up, over a few keys, so that the order of values is the order of the source's log.
type history struct {
	t      testing.TB
	cl     *kgo.Client
	random *rand.Rand
	n      int
	keys   int
}

func newHistory(t testing.TB, seeds []string, topic string, opts ...kgo.Opt) *history {
	return &history{
		t: t, random: testbed.NewRandom(testbed.NewSeed(t), "history"), keys: 40,
		cl: testbed.NewWriter(t, seeds, topic, append([]kgo.Opt{kgo.ProducerLinger(2 * time.Millisecond), kgo.RequestRetries(1000)}, opts...)...),
	}
}

// write writes n records, one in ten a tombstone, and waits for them.
func (h *history) write(n int) {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(h.t.Context(), patience)
	defer cancel()
	for range n {
		r := &kgo.Record{Key: fmt.Append(nil, "key-", h.random.IntN(h.keys)), Value: fmt.Append(nil, h.n), Headers: []kgo.RecordHeader{{Key: "n", Value: fmt.Append(nil, h.n)}}}
		if h.random.IntN(10) == 0 {
			r.Value = nil
		}
		h.n++
		h.cl.Produce(ctx, r, func(_ *kgo.Record, err error) {
			if err != nil {
				h.t.Errorf("write: %v", err)
			}
		})
	}
	if err := h.cl.Flush(ctx); err != nil {
		h.t.Fatal(err)
	}
}

// number is the place of a record in the history.
func number(t testing.TB, r *kgo.Record) int {
	t.Helper()
	n, err := strconv.Atoi(string(r.Headers[0].Value))
	if err != nil {
		t.Fatalf("record at offset %d: header %q", r.Offset, r.Headers[0].Value)
	}
	return n
}

// waitCleaned waits until the cleaner has left fewer than most records of a topic, and that the newest batches are dense.
func waitCleaned(t testing.TB, c kafkatest.Cluster, topic string, most int) {
	t.Helper()
	kafkatest.Eventually(t, patience, func() error {
		if n := len(kafkatest.ReadAll(t, c, topic, 0)); n > most {
			return fmt.Errorf("the log holds %d records, want at most %d after cleaning", n, most)
		}
		return nil
	})
}

// finalMap is what a reader from the beginning knows in the end.
func finalMap(records []*kgo.Record) map[string]string {
	m := map[string]string{}
	for _, r := range records {
		if r.Value == nil {
			delete(m, string(r.Key))
		} else {
			m[string(r.Key)] = string(r.Value)
		}
	}
	return m
}

// check compares: what the source still holds is on the mirror; there each record stands once, in order; the final maps are equal.
func check(t testing.TB, source, mirror kafkatest.Cluster, topic string) {
	t.Helper()
	want, got := kafkatest.ReadAll(t, source, topic, 0), kafkatest.ReadAll(t, mirror, topic, 0)
	last := -1
	onMirror := map[int]bool{}
	for _, r := range got {
		n := number(t, r)
		if n <= last {
			t.Fatalf("record %d stands behind %d on the mirror, at offset %d", n, last, r.Offset)
		}
		last, onMirror[n] = n, true
	}
	var missing []string
	for _, r := range want {
		if n := number(t, r); !onMirror[n] {
			missing = append(missing, strconv.Itoa(n))
		}
	}
	if len(missing) > 0 {
		t.Errorf("records of the source that aren't on the mirror: %s", strings.Join(missing[:min(20, len(missing))], " "))
	}
	a, b := finalMap(want), finalMap(got)
	for key, value := range a {
		if b[key] != value {
			t.Errorf("%s is %q in the end on the source, %q on the mirror", key, value, b[key])
		}
	}
	for key, value := range b {
		if _, ok := a[key]; !ok {
			t.Errorf("%s is gone in the end on the source, %q on the mirror", key, value)
		}
	}
	t.Logf("source %d records, mirror %d, last %d, %d keys", len(want), len(got), last, len(a))
}

var errNoOwner = errors.New("no instance has the partition")

// equalMaps compares what readers know in the end, where the mirror's cleaner runs too.
func equalMaps(t testing.TB, source, mirror kafkatest.Cluster, topic string) {
	t.Helper()
	a, b := finalMap(kafkatest.ReadAll(t, source, topic, 0)), finalMap(kafkatest.ReadAll(t, mirror, topic, 0))
	if !maps.Equal(a, b) {
		t.Errorf("in the end the source has %v, the mirror %v", a, b)
	}
}

// checkOffsets asks kmirror offsets for every record, both ways.
func checkOffsets(t testing.TB, in *testbed.Instance, source, mirror kafkatest.Cluster, topic string) {
	t.Helper()
	onSource := map[int]int64{}
	for _, r := range kafkatest.ReadAll(t, source, topic, 0) {
		onSource[number(t, r)] = r.Offset
	}
	var asked []string
	var pairs [][2]int64 // source, mirror
	for _, r := range kafkatest.ReadAll(t, mirror, topic, 0) {
		if offset, ok := onSource[number(t, r)]; ok {
			pairs, asked = append(pairs, [2]int64{offset, r.Offset}), append(asked, fmt.Sprint(r.Offset))
		}
	}
	ask := func(from string, offsets []string) (answers []offsetAnswer) {
		code, out := testbed.Run(t, "offsets", "--json", "--name", strings.TrimPrefix(in.Group(), "kmirror."), "--source", strings.Join(source.Seeds(), ","),
			"--mirror", strings.Join(mirror.Seeds(), ","), "--topic", topic, "--from", from, "--offset", strings.Join(offsets, ","))
		if code != 0 {
			t.Fatalf("kmirror offsets exits with %d: %s", code, out)
		}
		for lines := json.NewDecoder(strings.NewReader(out)); ; {
			var a offsetAnswer
			if err := lines.Decode(&a); err == io.EOF {
				return answers
			} else if err != nil {
				t.Fatalf("kmirror offsets: %v: %s", err, out)
			}
			answers = append(answers, a)
		}
	}
	back := make([]string, len(pairs))
	for i, a := range ask("mirror", asked) {
		if a.Source != pairs[i][0] || !a.Same {
			t.Errorf("mirror offset %d is source %+v, want offset %d", pairs[i][1], a, pairs[i][0])
		}
		back[i] = fmt.Sprint(a.Source)
	}
	for i, a := range ask("source", back) {
		if a.Mirror != pairs[i][1] || !a.Same {
			t.Errorf("source offset %s is mirror %+v, want offset %d", back[i], a, pairs[i][1])
		}
	}
	t.Logf("%d offsets mapped both ways", len(pairs))
}

type offsetAnswer struct {
	Source int64 `json:"source_offset"`
	Mirror int64 `json:"mirror_offset"`
	Same   bool  `json:"same_record"`
}
