package forwarder

import (
	"maps"
	"slices"
	"strings"
	"testing"
)

func ptr(s string) *string { return &s }

func TestSyncPlan(t *testing.T) {
	const name = "retention.ms"
	set := func(value string) topicSettings { return topicSettings{name: {value, true}} }
	byDefault := topicSettings{name: {"604800000", false}}
	for _, tt := range []struct {
		name           string
		source, mirror topicSettings
		base           map[string]*string
		changes, next  map[string]*string
		left           []string
	}{
		{"in step", set("1"), set("1"), map[string]*string{name: ptr("1")}, nil, map[string]*string{name: ptr("1")}, nil},
		{"source changed", set("2"), set("1"), map[string]*string{name: ptr("1")}, map[string]*string{name: ptr("2")}, map[string]*string{name: ptr("2")}, nil},
		{"source set what it hadn't", set("2"), byDefault, map[string]*string{name: nil}, map[string]*string{name: ptr("2")}, map[string]*string{name: ptr("2")}, nil},
		{"source went back to its default", byDefault, set("1"), map[string]*string{name: ptr("1")}, map[string]*string{name: nil}, map[string]*string{name: nil}, nil},
		{"owner of the mirror changed it", set("2"), set("9"), map[string]*string{name: ptr("1")}, nil, map[string]*string{name: ptr("1")}, []string{name}},
		{"owner of the mirror changed it to the same", set("2"), set("2"), map[string]*string{name: ptr("1")}, nil, map[string]*string{name: ptr("2")}, nil},
		{"kmirror never set it", set("2"), set("9"), nil, nil, nil, nil},
	} {
		changes, next, left := syncPlan(tt.source, tt.mirror, tt.base, []string{name})
		if !maps.EqualFunc(changes, tt.changes, same) || !maps.EqualFunc(next, tt.next, same) || !slices.Equal(left, tt.left) {
			t.Errorf("%s: syncPlan = %v, %v, %v; want %v, %v, %v", tt.name, changes, next, left, tt.changes, tt.next, tt.left)
		}
	}
}

// TestSyncPlanBatchSize: what is in force counts for max.message.bytes, wherever it is set.
func TestSyncPlanBatchSize(t *testing.T) {
	source := topicSettings{maxMessageBytes: {"10", false}}
	changes, _, _ := syncPlan(source, topicSettings{maxMessageBytes: {"5", true}}, map[string]*string{maxMessageBytes: ptr("5")}, nil)
	if got := changes[maxMessageBytes]; got == nil || *got != "10" {
		t.Errorf("changes = %v, want the source's 10 bytes", changes)
	}
}

func TestHazards(t *testing.T) {
	source := topicSettings{
		maxMessageBytes: {"1000", false}, compressionType: {"gzip", true}, timestampType: {"LogAppendTime", true}, timestampBefore: {"500", false},
		timestampAfter: {"500", false}, retentionTime: {"-1", true}, cleanupPolicy: {"delete", false}, minInSync: {"2", false},
	}
	good := topicSettings{
		maxMessageBytes: {"1000", false}, compressionType: {"producer", false}, timestampType: {"CreateTime", false}, timestampBefore: {"500", false},
		timestampAfter: {"900", true}, retentionTime: {"-1", true}, cleanupPolicy: {"delete", false}, minInSync: {"1", false},
	}
	if got := hazards(source, good, 1); len(got) > 0 {
		t.Errorf("hazards of good settings = %v, want none", got)
	}
	for name, tt := range map[string]struct {
		value   string
		mends   string // "": a person's matter
		because string
	}{
		maxMessageBytes: {"999", "1000", "1000 bytes"},
		compressionType: {"lz4", "producer", "anew"},
		timestampType:   {"LogAppendTime", "CreateTime", "arrival"},
		timestampBefore: {"499", "500", "refused"},
		timestampAfter:  {"1", "500", "refused"},
		retentionTime:   {"86400000", "", "vanish"},
		cleanupPolicy:   {"compact", "", "without a key"},
		minInSync:       {"2", "", "every append"},
	} {
		bad := maps.Clone(good)
		bad[name] = topicSetting{tt.value, true}
		got := hazards(source, bad, 1)
		if len(got) != 1 || got[0].name != name || !strings.Contains(got[0].text, name+"="+tt.value) || !strings.Contains(got[0].text, tt.because) {
			t.Errorf("%s=%s: hazards = %v, want one that says %q", name, tt.value, got, tt.because)
			continue
		}
		if fix := got[0].fix; (fix == nil) != (tt.mends == "") || fix != nil && *fix != tt.mends {
			t.Errorf("%s=%s: mended by %v, want %q", name, tt.value, fix, tt.mends)
		}
	}
}

func TestMirrorName(t *testing.T) {
	for template, want := range map[string]string{"": "orders", "dr.{topic}": "dr.orders", "{topic}-copy": "orders-copy"} {
		if got := renaming(template).mirrorName("orders"); got != want {
			t.Errorf("mirrorName with %q = %q, want %q", template, got, want)
		}
	}
}
