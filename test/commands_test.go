package test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// TestVerifyTellsEqualFromDifferent uses kmirror verify as an operator does: 0 equal, 1 different, 2 could not tell.
func TestVerifyTellsEqualFromDifferent(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 3, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	testbed.Write(t, in.Seeds(), topic, "verified", 3000)
	in.WaitCaughtUp(30 * time.Second)

	clusters := []string{"--source", source.Seeds()[0], "--topics", topic, "--patience", "1s"}
	verify := func(t *testing.T, want int, args ...string) string {
		t.Helper()
		code, out := testbed.Run(t, append(append([]string{"verify"}, clusters...), args...)...)
		if code != want {
			t.Errorf("kmirror verify exits %d, want %d:\n%s", code, want, out)
		}
		return out
	}
	reach := []string{"--mirror", mirror.Seeds()[0]}
	verify(t, 0, reach...)
	var report struct {
		Result     string
		Partitions []struct {
			Compared    int64
			Foreign     int64
			SameOffsets bool   `json:"same_offsets"`
			SourceSHA   string `json:"source_sha256"`
			MirrorSHA   string `json:"mirror_sha256"`
		}
	}
	if err := json.Unmarshal([]byte(verify(t, 0, append(reach, "--json")...)), &report); err != nil {
		t.Fatal(err)
	}
	compared := int64(0)
	for _, p := range report.Partitions {
		compared += p.Compared
		if !p.SameOffsets || p.SourceSHA != p.MirrorSHA || p.SourceSHA == "" {
			t.Errorf("partition = %+v, want equal digests and offsets", p)
		}
	}
	if report.Result != "equal" || compared != 3000 || len(report.Partitions) != 3 {
		t.Errorf("report = %+v, want 3000 records compared in 3 partitions, equal", report)
	}

	in.Stop()
	testbed.Write(t, mirror.Seeds(), topic, "foreign", 10) // others' records are theirs
	verify(t, 0, reach...)
	testbed.Write(t, source.Seeds(), topic, "missing", 10, kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if out := verify(t, 1, reach...); !strings.Contains(out, "behind by 10") {
		t.Errorf("kmirror verify doesn't say that 10 records are missing:\n%s", out)
	}
	verify(t, 2, "--mirror", "127.0.0.1:1")
}

// TestStatusUntilCaughtUp: exit 0 once all is on the mirror, 1 with what lags after the timeout.
func TestStatusUntilCaughtUp(t *testing.T) {
	source, _ := kafkatest.Shared(t)
	mirror := kafkatest.Real(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 2, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	status := func(args ...string) (int, string) {
		return testbed.Run(t, append([]string{"status", "--admin", in.AdminAddr(), "--until-caught-up"}, args...)...)
	}
	for round := range 5 {
		testbed.Write(t, source.Seeds(), topic, fmt.Sprintf("bypass%d", round), 500)
		if code, out := status("--timeout", "30s"); code != 0 {
			t.Fatalf("kmirror status exits %d, want 0:\n%s", code, out)
		}
		// It said so: then it is so, without waiting.
		kafkatest.Equal(t, source, mirror, topic, kafkatest.SameOffsets())
	}
	mirror.Stop(t)
	testbed.Write(t, in.Seeds(), topic, "outage", 100)
	code, out := status("--timeout", "3s")
	if code != 1 || !strings.Contains(out, topic) || !strings.Contains(out, "not caught up") {
		t.Errorf("kmirror status exits %d, want 1 with the streams that lag:\n%s", code, out)
	}
	mirror.Start(t)
	if code, out := status("--timeout", "60s"); code != 0 {
		t.Errorf("kmirror status exits %d after the outage, want 0:\n%s", code, out)
	}
	kafkatest.Equal(t, source, mirror, topic, kafkatest.SameOffsets())
}

// TestOperatorsView: the consumer group shows the true lag in Kafka's own tool, /metrics tells the same, and the health pages answer.
func TestOperatorsView(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	const partitions = 2
	kafkatest.CreateTopic(t, source, topic, partitions, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	testbed.WaitLive(t, in, topic, partitions)
	testbed.Write(t, in.Seeds(), topic, "seen", 1000)
	describe := func() map[int]int64 {
		return groupLag(t, kafkatest.Tool(t, "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand", "--bootstrap-server", source.Seeds()[0],
			"--describe", "--group", in.Group()), topic)
	}
	in.WaitCaughtUp(30 * time.Second)
	kafkatest.Eventually(t, 30*time.Second, func() error { // checkpoints are written every second
		if lag := describe(); len(lag) != partitions || lag[0]+lag[1] != 0 {
			return fmt.Errorf("lags of group %s = %v, want %d times 0", in.Group(), lag, partitions)
		}
		return nil
	})
	in.Freeze()
	testbed.Write(t, source.Seeds(), topic, "behind", 300)
	if lag := describe(); lag[0]+lag[1] != 300 {
		t.Errorf("lags of group %s = %v while kmirror is frozen, want 300 in all", in.Group(), lag)
	}
	in.Thaw()
	in.WaitCaughtUp(30 * time.Second)

	m := in.Metrics()
	for p := range partitions {
		labels := fmt.Sprintf(`{partition="%d",topic="%s"}`, p, topic)
		end := float64(kafkatest.LogOffsets(t, source, topic)[p].End)
		for name, want := range map[string]float64{
			"kmirror_forwarder_lag_records": 0, "kmirror_forwarder_source_end_offset": end, "kmirror_forwarder_next_source_offset": end,
		} {
			if got, ok := m[name+labels]; !ok || got != want {
				t.Errorf("%s%s = %v (there: %v), want %v", name, labels, got, ok, want)
			}
		}
	}
	if got := m["kmirror_forwarder_mirrored_records_total"]; got != 1300 {
		t.Errorf("kmirror_forwarder_mirrored_records_total = %v, want 1300", got)
	}
	for page, want := range map[string]string{"/healthz": "ok", "/readyz": "ready", "/api/status": `"caught_up":true`, "/": "<html"} {
		if code, body := getPage(t, in, page); code != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("GET %s = %d %q, want 200 with %q", page, code, body, want)
		}
	}
}

func getPage(t testing.TB, in *testbed.Instance, path string) (int, string) {
	t.Helper()
	resp, err := http.Get("http://" + in.AdminAddr() + path)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}
