package forwarder

import (
	"strings"
	"testing"
	"time"
)

func TestSizeLimit(t *testing.T) {
	for name, c := range map[string]struct {
		settings topicSettings
		limit    int64
		setting  string
	}{
		"not readable":         {nil, 0, ""},
		"of the topic":         {topicSettings{maxMessageBytes: {"200000", true}, segmentBytes: {"1073741824", false}}, 200000, maxMessageBytes},
		"of the brokers":       {topicSettings{maxMessageBytes: {"1048588", false}}, 1048588, "max.message.bytes (message.max.bytes of its brokers)"},
		"segments are smaller": {topicSettings{maxMessageBytes: {"10485760", true}, segmentBytes: {"1048576", true}}, 1048576, segmentBytes},
	} {
		if limit, setting := sizeLimit(c.settings); limit != c.limit || setting != c.setting {
			t.Errorf("%s: sizeLimit = %d, %q, want %d, %q", name, limit, setting, c.limit, c.setting)
		}
	}
}

func TestTimestampReasonNamesTheRecord(t *testing.T) {
	now := time.UnixMilli(1_800_000_000_000)
	hour := int64(3_600_000)
	window := topicSettings{timestampBefore: {"7200000", true}, timestampAfter: {"3600000", true}}
	times := []int64{now.UnixMilli(), now.UnixMilli() - 3*hour, now.UnixMilli() + 2*hour}
	for name, c := range map[string]struct {
		bad      []int32
		settings topicSettings
		want     []string
	}{
		"the broker names it":   {[]int32{2}, window, []string{"source offset 102:", "1800007200000", "in the future", "after.max.ms=3600000"}},
		"found by the window":   {nil, window, []string{"source offset 101:", "1799989200000", "in the past", "before.max.ms=7200000"}},
		"nothing is known":      {nil, nil, []string{"[100, 103)", "can't be read"}},
		"the broker names more": {[]int32{7}, nil, []string{"[100, 103)"}},
	} {
		got := timestampReason(100, 103, times, c.bad, c.settings, now)
		for _, want := range c.want {
			if !strings.Contains(got, want) {
				t.Errorf("%s: %q lacks %q", name, got, want)
			}
		}
	}
}
