package verify

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/unpack"
	"kmirror/protocol"
)

// parse reads records as "a1 b2 a-": a key and a value each, - for a tombstone.
func parse(text string) (records []*kgo.Record) {
	for word := range strings.FieldsSeq(text) {
		r := &kgo.Record{Key: []byte(word[:1]), Value: []byte(word[1:]), Timestamp: time.UnixMilli(1_700_000_000_000)}
		if word[1:] == "-" {
			r.Value = nil
		}
		records = append(records, r)
	}
	return records
}

// write gives the source the records, one a batch, and the mirror others, as kmirror would have copied them.
func (p pair) write(t *testing.T, onSource, onMirror string) {
	t.Helper()
	copies := pair{source: p.source, topic: p.topic + "-copies"}
	if _, err := kadm.NewClient(p.source).CreateTopic(t.Context(), 1, 1, nil, copies.topic); err != nil {
		t.Fatal(err)
	}
	copies.produceEach(t, onMirror)
	p.produceEach(t, onSource)
	for i, b := range copies.batches(t) {
		p.mirrorBatch(t, b, producerID+int64(i), 0)
	}
}

func (p pair) produceEach(t *testing.T, text string) {
	t.Helper()
	for _, r := range parse(text) {
		r.Topic = p.topic
		if err := p.source.ProduceSync(t.Context(), r).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestCompactedTopics(t *testing.T) {
	cases := map[string]struct {
		source, mirror string
		policies       [2]string
		want           Result
		what           string
		allAtOnce      bool // needs all keys in one pass
	}{
		"source cleaned since":            {source: "b1 a2 c1", mirror: "a1 b1 a2 c1", want: Equal, what: "last records of 3 keys"},
		"mirror cleaned":                  {source: "a1 b1 a2 c1", mirror: "b1 a2 c1", want: Equal, what: "last records of 3 keys"},
		"both cleaned":                    {source: "a1 b1 a2 c1", mirror: "a0 b1 a2 c0 c1", want: Equal, what: "last records of 3 keys"},
		"lost":                            {source: "a1 b1 c1", mirror: "a1 c1", want: Different, what: "1 keys have another last record"},
		"stale":                           {source: "a1 a2 b1", mirror: "a2 a1 b1", want: Different, what: "1 keys have another last record"},
		"reordered":                       {source: "a1 b1 c1", mirror: "b1 a1 c1", want: Different, what: "stands before", allAtOnce: true},
		"tombstone cleaned on the source": {source: "b1 c1", mirror: "a1 a- b1 c1", want: Equal, what: "last records of 2 keys"},
		"tombstone cleaned on the mirror": {source: "a1 a- b1 c1", mirror: "b1 c1", want: Equal, what: "last records of 2 keys"},
		"tombstone that never came":       {source: "b1 c1", mirror: "a1 b1 c1", want: Different, what: "1 keys have another last record"},
		"mirror plain":                    {source: "b1 a2", mirror: "a1 b1 a2", policies: [2]string{"compact", "delete"}, want: Equal, what: "last records of 2 keys"},
		"mirror plain and lacks one":      {source: "a1 a2 b1", mirror: "a2 b1", policies: [2]string{"compact", "delete"}, want: Different, what: "lacks this record"},
		"source plain":                    {source: "a1 a2 b1", mirror: "a2 b1", policies: [2]string{"delete", "compact"}, want: Equal, what: "last records of 2 keys"},
		"source plain and one was added":  {source: "a1 a2 b1", mirror: "a3 a2 b1", policies: [2]string{"delete", "compact"}, want: Different, what: "lacks this record"},
		"neither is":                      {source: "a1 a2 b1", mirror: "a2 b1", policies: [2]string{"delete", "delete"}, want: Different, what: "first records are not on the mirror"},
	}
	eachPair(t, func(t *testing.T, fresh func(t *testing.T) pair) {
		for name, tc := range cases {
			t.Run(name, func(t *testing.T) {
				p := fresh(t)
				if tc.policies == [2]string{} {
					tc.policies = [2]string{"compact", "compact"}
				}
				p.write(t, tc.source, tc.mirror)
				setPolicy(t, p.source, p.topic, tc.policies[0])
				setPolicy(t, p.mirror, p.topic, tc.policies[1])
				for _, keys := range []int{0, 1} {
					if tc.allAtOnce && keys > 0 {
						continue
					}
					got := p.verify(t, func(o *Options) { o.Keys = keys })
					if got.Result != tc.want || !strings.Contains(got.Summary(), tc.what) {
						t.Errorf("with %d keys at a time: verify = %s: %s, want %s: %s", keys, got.Result, got.Summary(), tc.want, tc.what)
					}
				}
			})
		}
	})
}

// TestKeysChangedBehindTheCutAreLeftOut: the cut is fixed, what the source writes behind it can clean what stood before.
func TestKeysChangedBehindTheCutAreLeftOut(t *testing.T) {
	m := newKeyMap(0, 10)
	for _, r := range parse("a1 b1 c1") {
		m.state(r, true).source = lastOf(r)
	}
	for _, r := range parse("a2 b1 c1") { // a2 was written behind the cut
		m.state(r, true).mirror = lastOf(r)
	}
	if n, _ := m.differing(&Partition{}); n != 1 {
		t.Errorf("%d keys differ, want 1", n)
	}
	m.state(parse("a2")[0], true).changed = true
	if n, _ := m.differing(&Partition{}); n != 0 {
		t.Errorf("%d keys differ, want 0: a was written again", n)
	}
}

func TestKeyMapIsBounded(t *testing.T) {
	const keys, limit = 1000, 64
	seen := map[keyHash]int{}
	for from := uint64(0); ; {
		m := newKeyMap(from, limit)
		for i := range keys {
			m.state(&kgo.Record{Key: fmt.Append(nil, i)}, true)
			if len(m.keys) > limit {
				t.Fatalf("%d keys are held, want %d at most", len(m.keys), limit)
			}
		}
		for key := range m.keys {
			seen[key]++
		}
		if from = m.to + 1; from == 0 {
			break
		}
	}
	if len(seen) != keys {
		t.Errorf("the passes saw %d keys, want %d", len(seen), keys)
	}
	for key, n := range seen {
		if n != 1 {
			t.Errorf("key %x is in %d passes, want 1", key, n)
		}
	}
}

func TestPositionsThatDoNotRise(t *testing.T) {
	at := func(producerID, position int64) *item {
		return &item{record: &kgo.Record{ProducerID: producerID}, position: position}
	}
	var check positionCheck
	for _, it := range []*item{at(7, 5), at(7, 6), at(8, 0), at(8, 1), at(9, -1)} {
		check.look(it)
	}
	if check.bad != nil {
		t.Errorf("position %d of %d is said to be wrong", check.bad.position, check.bad.record.ProducerID)
	}
	if check.look(at(8, 1)); check.bad == nil {
		t.Error("a position that stands twice isn't found")
	}
}

// TestUnpackingIsBounded: what one answer may unpack to, by bytes and by records.
func TestUnpackingIsBounded(t *testing.T) {
	compressor, err := kgo.DefaultCompressor(kgo.ZstdCompression())
	if err != nil {
		t.Fatal(err)
	}
	packed, codec := compressor.Compress(new(bytes.Buffer), make([]byte, 1<<20))
	room := budget{left: 1 << 20}
	if out, err := room.Decompress(packed, codec); err != nil || len(out) != 1<<20 || room.exceeded {
		t.Errorf("Decompress = %d bytes, %v, exceeded %v; want it to fit", len(out), err, room.exceeded)
	}
	if _, err := room.Decompress(packed, codec); !errors.Is(err, unpack.ErrTooLarge) || !room.exceeded {
		t.Errorf("Decompress = %v, exceeded %v; want ErrTooLarge, since nothing is left", err, room.exceeded)
	}
	batch := func(count byte) []byte {
		b := make([]byte, protocol.BatchHeaderSize)
		b[11], b[16], b[26], b[60] = byte(len(b)-12), 2, count-1, count
		return b
	}
	three := bytes.Join([][]byte{batch(10), batch(10), batch(10)}, nil)
	room = budget{left: 25 * recordBytes}
	if got := room.fit(three); len(got) != 2*protocol.BatchHeaderSize || !room.exceeded {
		t.Errorf("%d bytes fit, exceeded %v; want two batches of ten records in room for 25", len(got), room.exceeded)
	}
}

func setPolicy(t *testing.T, client *kgo.Client, topic, policy string) {
	t.Helper()
	changes := []kadm.AlterConfig{{Op: kadm.SetConfig, Name: "cleanup.policy", Value: &policy}}
	responses, err := kadm.NewClient(client).AlterTopicConfigs(t.Context(), changes, topic)
	if err == nil {
		err = responses[0].Err
	}
	if err != nil {
		t.Fatal(err)
	}
}
