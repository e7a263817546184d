package topics

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

const soon = 30 * time.Second

func admin(t testing.TB, c kafkatest.Cluster) *kadm.Client { return kadm.NewClient(c.Client(t)) }

// setting returns a topic's setting that is in force, and whether it is set on the topic itself.
func setting(t testing.TB, c kafkatest.Cluster, topic, name string) (value string, own bool) {
	t.Helper()
	configs, err := admin(t, c).DescribeTopicConfigs(t.Context(), topic)
	if err != nil {
		t.Fatal(err)
	}
	for _, res := range configs {
		for _, x := range res.Configs {
			if x.Key == name {
				return x.MaybeValue(), x.Source.String() == "DYNAMIC_TOPIC_CONFIG"
			}
		}
	}
	return "", false
}

func wantSetting(t testing.TB, c kafkatest.Cluster, topic, name, want string) {
	t.Helper()
	kafkatest.Eventually(t, soon, func() error {
		if got, _ := setting(t, c, topic, name); got != want {
			return fmt.Errorf("%s of %s = %q, want %q", name, topic, got, want)
		}
		return nil
	})
}

// set changes a topic's setting; an empty value sets it back to its default.
func set(t testing.TB, c kafkatest.Cluster, topic, name, value string) {
	t.Helper()
	change := kadm.AlterConfig{Op: kadm.SetConfig, Name: name, Value: &value}
	if value == "" {
		change = kadm.AlterConfig{Op: kadm.DeleteConfig, Name: name}
	}
	responses, err := admin(t, c).AlterTopicConfigs(t.Context(), []kadm.AlterConfig{change}, topic)
	if err == nil {
		_, err = responses.On(topic, nil)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestTopicIsMadeBeforeItsFirstRecord is case C18: though the mirror makes topics by itself, with one partition, when it is asked for them, the copy
// has the source's partitions and settings as soon as anything can be read.
func TestTopicIsMadeBeforeItsFirstRecord(t *testing.T) {
	source, _ := kafkatest.Shared(t)
	mirror := kafkatest.Real(t, kafkatest.Config("auto.create.topics.enable", "true"), kafkatest.Config("num.partitions", "1"))
	topic := testbed.TopicName(t)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	value := func(s string) *string { return &s }
	_, err := kadm.NewClient(testbed.NewWriter(t, in.Seeds(), "")).CreateTopic(ctx, 7, 1, map[string]*string{
		"cleanup.policy": value("compact,delete"), "retention.ms": value("86400000"), "max.message.bytes": value("2000000"),
	}, topic)
	if err != nil {
		t.Fatal(err)
	}
	testbed.Write(t, in.Seeds(), topic, "at-once", 500)
	onMirror := admin(t, mirror)
	kafkatest.Eventually(t, soon, func() error {
		offsets, err := onMirror.ListEndOffsets(ctx, topic)
		if err != nil {
			return err
		}
		var sum int64
		offsets.Each(func(o kadm.ListedOffset) { sum += max(o.Offset, 0) })
		if sum == 0 {
			return fmt.Errorf("the mirror has no record yet")
		}
		return nil
	})
	details, err := onMirror.ListTopics(ctx, topic)
	if err != nil || len(details[topic].Partitions) != 7 {
		t.Errorf("the mirror topic has %d partitions (error %v), want 7", len(details[topic].Partitions), err)
	}
	for name, want := range map[string]string{
		"cleanup.policy": "compact,delete", "retention.ms": "86400000", "max.message.bytes": "2000000", "compression.type": "producer",
	} {
		if got, _ := setting(t, mirror, topic, name); got != want {
			t.Errorf("%s on the mirror = %q, want %q", name, got, want)
		}
	}
	kafkatest.WaitEqual(t, source, mirror, topic, soon, kafkatest.SameOffsets())
}

// TestSettingsStayInStep: what the source's owner changes is changed on the mirror, what the mirror's owner changes stays, also when kmirror wasn't there.
func TestSettingsStayInStep(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 1, 1, "retention.ms", "100000000", "retention.bytes", "1000000000")
	in := testbed.Start(t, source, mirror, "--topics", topic, "--timing.settings", "500ms")
	testbed.WaitLive(t, in, topic, 1)
	wantSetting(t, mirror, topic, "retention.ms", "100000000")

	set(t, source, topic, "retention.ms", "200000000")
	wantSetting(t, mirror, topic, "retention.ms", "200000000")
	set(t, source, topic, "max.message.bytes", "3000000")
	wantSetting(t, mirror, topic, "max.message.bytes", "3000000")
	set(t, source, topic, "retention.bytes", "") // back to the default
	wantSetting(t, mirror, topic, "retention.bytes", "-1")

	set(t, mirror, topic, "retention.ms", "900000000") // the mirror's owner
	set(t, mirror, topic, "segment.ms", "60000")
	in.Stop()
	set(t, source, topic, "retention.ms", "300000000")
	set(t, source, topic, "delete.retention.ms", "50000")
	in.Start()
	wantSetting(t, mirror, topic, "delete.retention.ms", "50000") // so kmirror has looked, and
	if got, _ := setting(t, mirror, topic, "retention.ms"); got != "900000000" {
		t.Errorf("retention.ms, which the mirror's owner had set, = %s, want 900000000", got)
	}
	if got, _ := setting(t, mirror, topic, "segment.ms"); got != "60000" {
		t.Errorf("segment.ms, which kmirror has nothing to do with, = %s, want 60000", got)
	}
	if n := strings.Count(in.Log(), fmt.Sprintf(`aren't kept in step any more	{"topic": %q, "error": "retention.ms"}`, topic)); n < 1 || n > 2 {
		t.Errorf("%d log lines say that a setting isn't kept in step, want one for each start at most, and one at least", n)
	}
}

// TestHazardousSettingsAreNamed: a topic that others made on the mirror, with settings that alter what is copied, is named before the first append;
// with topics.fix_settings it is mended.
func TestHazardousSettingsAreNamed(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	bad := []string{"compression.type", "gzip", "message.timestamp.type", "LogAppendTime", "retention.ms", "1000000"}
	for _, fix := range []bool{false, true} {
		t.Run(map[bool]string{false: "named", true: "fixed"}[fix], func(t *testing.T) {
			topic := testbed.TopicName(t)
			kafkatest.CreateTopic(t, source, topic, 1, 1)
			kafkatest.CreateTopic(t, mirror, topic, 1, 1, bad...)
			in := testbed.Start(t, source, mirror, "--topics", topic, "--timing.settings", "500ms", "--topics.fix_settings", fmt.Sprint(fix))
			testbed.WaitLive(t, in, topic, 1)
			testbed.Write(t, in.Seeds(), topic, "n", 10)
			in.WaitCaughtUp(soon)
			want := []string{"compression.type=gzip", "message.timestamp.type=LogAppendTime", "retention.ms=1000000"}
			if fix {
				want = want[2:]
				wantSetting(t, mirror, topic, "compression.type", "producer")
				kafkatest.WaitEqual(t, source, mirror, topic, soon, kafkatest.SameOffsets())
			}
			kafkatest.Eventually(t, soon, func() error {
				status := in.Status().Mirror
				if len(status.Topics) != 1 || len(status.Topics[0].Hazards) != len(want) {
					return fmt.Errorf("topics in the status = %+v, want %d hazards", status.Topics, len(want))
				}
				all := strings.Join(status.Topics[0].Hazards, "\n")
				for _, w := range want {
					if !strings.Contains(all, w) {
						return fmt.Errorf("hazards %q don't name %s", all, w)
					}
				}
				return nil
			})
			if got := in.Metrics()[fmt.Sprintf(`kmirror_forwarder_topic_hazards{topic=%q}`, topic)]; got != float64(len(want)) {
				t.Errorf("kmirror_forwarder_topic_hazards = %v, want %d", got, len(want))
			}
		})
	}
}
