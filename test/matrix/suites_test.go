package matrix

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// whole is set by `make suites`.
var whole = flag.Bool("kmirror.suites", false, "run whole test suites of clients, which takes minutes, not a part of them")

// partOfKgo are tests of kgo that talk to brokers and are done within seconds: groups of both kinds, share groups, regular expressions, large records.
var partOfKgo = []string{
	"TestAddRemovePartitions", "TestClient_ProduceLargeMessages", "TestDirectPartitionPurge", "TestIssue1505", "TestIssue325", "TestIssue769", "TestIssue810",
	"TestPauseIssue489", "TestShareGroup", "TestUnknownGroupOffsetFetchPinned",
}

// TestSuites runs franz-go's own test suites, of kgo and kadm, with nothing but the proxy's address as seed, beside a direct run: a test that fails
// through the proxy must fail directly too. Topics and groups have random names, so both runs can go on at the same time.
func TestSuites(t *testing.T) {
	options := []kafkatest.Option{kafkatest.Brokers(3)}
	for key, value := range newGroups {
		options = append(options, kafkatest.Config(key, value))
	}
	source := kafkatest.Real(t, options...)
	in := testbed.Start(t, source, source, "--roles", "proxy")
	filter := "^(" + strings.Join(partOfKgo, "|") + ")$"
	least := len(partOfKgo)
	if *whole {
		filter, least = ".", 100
	}
	ends := make([]map[string]string, 2)
	outputs := make([]string, 2)
	t.Run("runs", func(t *testing.T) {
		for i, seeds := range [][]string{source.Seeds(), in.Seeds()} {
			t.Run([]string{"direct", "through the proxy"}[i], func(t *testing.T) {
				t.Parallel()
				ends[i], outputs[i] = suite(t, seeds, filter)
			})
		}
	})
	direct, through := ends[0], ends[1]
	passed := 0
	for _, name := range slices.Sorted(maps.Keys(through)) {
		switch {
		case through[name] == "pass":
			passed++
		case through[name] == direct[name]:
			t.Logf("%s: %s on both ways", name, direct[name])
		default:
			t.Errorf("%s: %s through the proxy, %s directly", name, through[name], direct[name])
		}
	}
	if passed < least {
		t.Errorf("%d tests passed, want %d at least", passed, least)
	}
	t.Logf("%d of %d tests passed through the proxy", passed, len(through))
	if t.Failed() {
		t.Log(outputs[1])
	}
}

// suite runs the tests that filter selects, and tells how each ended and what the failed ones printed.
func suite(t *testing.T, seeds []string, filter string) (ends map[string]string, failures string) {
	records := "500"
	if *whole {
		records = "20000"
	}
	cmd := exec.CommandContext(t.Context(), "go", "test", "-json", "-count=1", "-timeout=20m", "-run", filter, "github.com/twmb/franz-go/pkg/kgo", "github.com/twmb/franz-go/pkg/kadm")
	cmd.Env = append(os.Environ(), "KGO_SEEDS="+strings.Join(seeds, ","), "KGO_TEST_RF=3", "KGO_TEST_RECORDS="+records, "KGO_TEST_MAX_TOPIC_PARTS=7", "KGO_LOG_LEVEL=none")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := kafkatest.Spawn(cmd); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // a test that failed; what is missing is counted
	ends = make(map[string]string)
	printed := make(map[string]*strings.Builder)
	for lines := bufio.NewScanner(&out); lines.Scan(); {
		var event struct{ Action, Package, Test, Output string }
		if json.Unmarshal(lines.Bytes(), &event) != nil || event.Test == "" {
			continue
		}
		name := event.Package[strings.LastIndexByte(event.Package, '/')+1:] + "." + event.Test
		switch event.Action {
		case "pass", "fail", "skip":
			ends[name] = event.Action
		case "output":
			if printed[name] == nil {
				printed[name] = new(strings.Builder)
			}
			printed[name].WriteString(event.Output)
		}
	}
	if len(ends) == 0 {
		t.Fatalf("no test ended: %s", errs.String())
	}
	for name, end := range ends {
		if end == "fail" {
			failures += fmt.Sprintf("%s\n%s\n", name, printed[name])
		}
	}
	return ends, failures
}
