package compaction

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// TestCleanedBeforeItIsRead: a log full of holes, between batches and in them, arrives record by record; then the copy goes on as it arrives, and holes that
// the cleaner makes while kmirror is down are passed too.
func TestCleanedBeforeItIsRead(t *testing.T) {
	t.Parallel()
	source, mirror := clusters(t)
	topic := testbed.TopicName(t)
	compactedTopic(t, source, topic, time.Hour)
	kafkatest.CreateTopic(t, mirror, topic, 1, 1) // keeps everything: what is doubled shows
	h := newHistory(t, source.Seeds(), topic)
	for range 5 {
		h.write(400)
		time.Sleep(150 * time.Millisecond) // segment.ms: the next write rolls
	}
	h.write(5)
	waitCleaned(t, source, topic, 800)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	in.WaitCaughtUp(patience)
	check(t, source, mirror, topic)
	checkOffsets(t, in, source, mirror, topic)
	testbed.WaitLive(t, in, topic, 1)

	through := newHistory(t, in.Seeds(), topic)
	through.n = h.n
	through.write(100)
	in.WaitCaughtUp(patience)
	check(t, source, mirror, topic)
	in.Stop()
	h.n = through.n
	before := h.n
	for range 3 {
		h.write(300)
		time.Sleep(150 * time.Millisecond)
	}
	h.write(5)
	waitCleaned(t, source, topic, 700)
	in.Start()
	in.WaitCaughtUp(patience)
	check(t, source, mirror, topic)
	name, _ := strings.CutPrefix(in.Group(), "kmirror.")
	if code, out := testbed.Run(t, "verify", "--name", name, "--source", source.Seeds()[0], "--mirror", mirror.Seeds()[0], "--topics", topic); code != 0 ||
		!strings.Contains(out, "compacted: the last records of") { // the mirror holds what the source has cleaned since
		t.Errorf("verify: exit code %d\n%s", code, out)
	}
	in.Kill() // the map needs no kmirror
	checkOffsets(t, in, source, mirror, topic)
	if got := kafkatest.ReadAll(t, mirror, topic, 0); len(got) >= h.n || number(t, got[len(got)-1]) != h.n-1 {
		t.Errorf("the mirror holds %d records of %d, the last %d: the cleaner had nothing to do since %d", len(got), h.n, number(t, got[len(got)-1]), before)
	}
}

// TestBecomesCompactedAndBack: a plain topic, mirrored as it arrives, is set to be compacted, is cleaned while kmirror is away, and is set back.
func TestBecomesCompactedAndBack(t *testing.T) {
	t.Parallel()
	source, mirror := clusters(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 1, 1, "segment.ms", "100", "min.cleanable.dirty.ratio", "0.001")
	kafkatest.CreateTopic(t, mirror, topic, 1, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	testbed.WaitLive(t, in, topic, 1)
	h := newHistory(t, in.Seeds(), topic)
	burst := func() {
		for range 3 {
			h.write(200)
			time.Sleep(150 * time.Millisecond) // segment.ms: the next write rolls
		}
		h.write(5)
	}
	burst()
	kafkatest.WaitEqual(t, source, mirror, topic, patience, kafkatest.SameOffsets())
	in.Stop()
	h.cl.Close()
	direct := newHistory(t, source.Seeds(), topic)
	direct.n, h = h.n, direct
	setPolicy(t, source, topic, "compact")
	burst()
	waitCleaned(t, source, topic, 500)
	in.Start()
	in.WaitCaughtUp(patience)
	check(t, source, mirror, topic)

	setPolicy(t, source, topic, "delete")
	burst()
	in.WaitCaughtUp(patience)
	check(t, source, mirror, topic)
	in.Kill()
	burst()
	in.Start()
	in.WaitCaughtUp(patience)
	check(t, source, mirror, topic)
	checkOffsets(t, in, source, mirror, topic)
}

func setPolicy(t testing.TB, c kafkatest.Cluster, topic, policy string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	answers, err := kadm.NewClient(c.Client(t)).AlterTopicConfigs(ctx, []kadm.AlterConfig{{Op: kadm.SetConfig, Name: "cleanup.policy", Value: &policy}}, topic)
	if err == nil {
		_, err = answers.On(topic, nil)
	}
	if err != nil {
		t.Fatal(err)
	}
}
