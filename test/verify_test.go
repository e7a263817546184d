package test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/internal/verify"
	"kmirror/test/testbed"
)

// TestVerifyOnLiveTopics: while producers write, kmirror mirrors and cleaners run, verify compares what was there when it began. A record
// that is missing is found all the same.
func TestVerifyOnLiveTopics(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	kafkatest.CreateTopic(t, source, "live-plain", 4, 1)
	kafkatest.CreateTopic(t, source, "live-compacted", 1, 1, "cleanup.policy", "compact", "segment.ms", "500", "min.cleanable.dirty.ratio", "0.01")
	in := testbed.Start(t, source, mirror, "--topics", "/live-.*/")
	testbed.WaitLive(t, in, "live-plain", 4)
	testbed.WaitLive(t, in, "live-compacted", 1)
	plain := testbed.StartLoad(t, in.Seeds(), "live-plain", 2, 2000, 200)
	compacted := testbed.StartLoad(t, in.Seeds(), "live-compacted", 1, 500, 200)
	keys := testbed.NewWriter(t, in.Seeds(), "live-compacted")
	for i := range 2000 {
		if err := keys.ProduceSync(t.Context(), &kgo.Record{Key: fmt.Append(nil, "k", i%20), Value: fmt.Append(nil, i)}).FirstErr(); err != nil {
			t.Fatal(err)
		}
		if i%400 == 399 {
			verifyLive(t, in, source, mirror, i == 1999)
		}
	}
	plain.WaitAcked(1000)
	plain.Stop()
	compacted.Stop()
	kafkatest.WaitEqual(t, source, mirror, "live-plain", time.Minute, kafkatest.SameOffsets())
	in.Stop()
	testbed.Write(t, source.Seeds(), "live-plain", "missing", 1)
	if code, out := runVerify(t, in, source, mirror); code != 1 || !strings.Contains(out, "the mirror is behind by 1 offsets") {
		t.Errorf("verify with a record missing: exit code %d, want 1 and that record named\n%s", code, out)
	}
}

func runVerify(t *testing.T, in *testbed.Instance, source, mirror kafkatest.Cluster, args ...string) (int, string) {
	t.Helper()
	name, _ := strings.CutPrefix(in.Group(), "kmirror.")
	return testbed.Run(t, append([]string{"verify", "--name", name, "--source", source.Seeds()[0], "--mirror", mirror.Seeds()[0], "--topics", "/live-.*/",
		"--patience", "3s"}, args...)...)
}

// verifyLive fails unless verify finds everything equal, up to a cut that is no older than the question.
func verifyLive(t *testing.T, in *testbed.Instance, source, mirror kafkatest.Cluster, last bool) {
	t.Helper()
	before := kafkatest.LogOffsets(t, source, "live-plain")
	code, out := runVerify(t, in, source, mirror, "--json")
	var report verify.Report
	if err := json.Unmarshal([]byte(out), &report); err != nil || code != 0 {
		t.Fatalf("verify: exit code %d, %v, want 0\n%s", code, err, out)
	}
	for _, found := range report.Partitions {
		if p := found.Partition; found.Topic == "live-plain" && (found.Source.End < before[p].End || found.Compared != found.Source.End) {
			t.Errorf("partition %d: %d compared up to %d, the source had %d before: want all up to the cut", p, found.Compared, found.Source.End, before[p].End)
		}
	}
	if last {
		t.Log(out)
	}
}
