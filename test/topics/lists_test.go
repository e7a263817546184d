package topics

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// TestListsAreReloaded: topic lists change while kmirror runs, by the file and by SIGHUP; what is no longer wanted stops, and goes on where it was when it
// is wanted again; unusable settings change nothing.
func TestListsAreReloaded(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	file := filepath.Join(t.TempDir(), "kmirror.yaml")
	lists := func(include, exclude string) {
		t.Helper()
		text := fmt.Sprintf("topics: {include: [%s], exclude: [%s]}\n", include, exclude)
		if err := os.WriteFile(file+".new", []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	lists(`"/reload\\..*/"`, "reload.b")
	for _, topic := range []string{"reload.a", "reload.b", "reload.c"} {
		kafkatest.CreateTopic(t, source, topic, 2, 1)
	}
	in := testbed.Start(t, source, mirror, "--config", file, "--timing.refresh", "1s")
	write := func(prefix string) {
		for _, topic := range []string{"reload.a", "reload.b", "reload.c"} {
			testbed.Write(t, in.Seeds(), topic, prefix, 100)
		}
	}
	write("first")
	wantStreams(t, in, "reload.a", "reload.c")
	in.WaitCaughtUp(soon)

	lists(`"/reload\\..*/"`, "reload.c") // b is new, c is left out
	wantStreams(t, in, "reload.a", "reload.b")
	write("second")
	in.WaitCaughtUp(soon)
	if got := len(kafkatest.ReadAll(t, mirror, "reload.c", 0)) + len(kafkatest.ReadAll(t, mirror, "reload.c", 1)); got != 100 {
		t.Errorf("reload.c has %d records on the mirror, want the 100 from before it was left out", got)
	}
	lists(`"/reload\\..*/", "__no"`, "") // unusable
	in.Signal(syscall.SIGHUP)
	kafkatest.Eventually(t, soon, func() error {
		if !strings.Contains(in.Log(), "settings not taken") {
			return fmt.Errorf("no log line about unusable settings")
		}
		return nil
	})
	wantStreams(t, in, "reload.a", "reload.b")

	lists(`"/reload\\..*/"`, "")
	in.Signal(syscall.SIGHUP)
	wantStreams(t, in, "reload.a", "reload.b", "reload.c")
	write("third")
	in.WaitCaughtUp(soon)
	for _, topic := range []string{"reload.a", "reload.b", "reload.c"} {
		kafkatest.WaitEqual(t, source, mirror, topic, soon, kafkatest.SameOffsets())
	}
}

// wantStreams waits until exactly these topics have streams.
func wantStreams(t testing.TB, in *testbed.Instance, topics ...string) {
	t.Helper()
	kafkatest.Eventually(t, soon, func() error {
		var got []string
		for _, s := range in.Status().Mirror.Streams {
			got = append(got, s.Topic)
		}
		if got = slices.Compact(got); !slices.Equal(got, topics) {
			return fmt.Errorf("streams of %v, want %v", got, topics)
		}
		return nil
	})
}

// TestRenamedTopics: names on the mirror follow the template; everything else is as ever, after a restart too.
func TestRenamedTopics(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 3, 1)
	args := []string{"--topics", topic, "--topics.rename", "dr.{topic}.copy", "--timing.refresh", "1s"}
	in := testbed.Start(t, source, mirror, args...)
	testbed.Write(t, in.Seeds(), topic, "first", 300)
	in.WaitCaughtUp(soon)
	in.Kill()
	testbed.Write(t, source.Seeds(), topic, "second", 300)
	in.Start()
	if _, err := admin(t, source).UpdatePartitions(t.Context(), 5, topic); err != nil {
		t.Fatal(err)
	}
	testbed.WaitLive(t, in, topic, 5)
	testbed.Write(t, in.Seeds(), topic, "third", 300)
	in.WaitCaughtUp(soon)
	kafkatest.WaitEqual(t, source, mirror, topic, soon, kafkatest.SameOffsets(), kafkatest.MirrorTopic("dr."+topic+".copy"))
	names, err := admin(t, mirror).ListTopics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if slices.Contains(names.Names(), topic) {
		t.Errorf("the mirror has %s under its own name too", topic)
	}
	code, out := testbed.Run(t, append([]string{"verify", "--source", source.Seeds()[0], "--mirror", mirror.Seeds()[0]}, args[:4]...)...)
	if code != 0 {
		t.Errorf("verify's exit code = %d, want 0\n%s", code, out)
	}
}

// TestPartitionsOfTheMirrorAreKept: with topics.partitions: preserve a mirror topic that has too few is named and left as it is.
func TestPartitionsOfTheMirrorAreKept(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 3, 1)
	kafkatest.CreateTopic(t, mirror, topic, 2, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic, "--topics.partitions", "preserve", "--timing.refresh", "500ms")
	kafkatest.Eventually(t, soon, func() error {
		streams := in.Status().Mirror.Streams
		if len(streams) != 3 || !strings.Contains(streams[0].Reason, "2 partitions") {
			return fmt.Errorf("streams = %+v, want a reason that names the mirror's 2 partitions", streams)
		}
		return nil
	})
	if _, err := admin(t, mirror).UpdatePartitions(t.Context(), 4, topic); err != nil { // one more than the source's
		t.Fatal(err)
	}
	testbed.WaitLive(t, in, topic, 3)
	testbed.Write(t, in.Seeds(), topic, "n", 100)
	in.WaitCaughtUp(soon)
	for p, records := range kafkatest.ReadTopic(t, source, topic) {
		if got := kafkatest.ReadAll(t, mirror, topic, int32(p)); len(got) != len(records) {
			t.Errorf("partition %d has %d records on the mirror, want %d", p, len(got), len(records))
		}
	}
}
