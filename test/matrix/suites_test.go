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

	"github.com/twmb/franz-go/pkg/kadm"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// whole is set by `make suites`.
var whole = flag.Bool("kmirror.suites", false, "run whole test suites of clients, which takes minutes, not a part of them")

// partOfKgo are tests of kgo that talk to brokers and are done within seconds: groups of both kinds, share groups, regular expressions, large records.
var partOfKgo = []string{
	"TestAddRemovePartitions", "TestClient_ProduceLargeMessages", "TestDirectPartitionPurge", "TestIssue1505", "TestIssue325", "TestIssue769", "TestIssue810",
	"TestPauseIssue489", "TestShareGroup", "TestUnknownGroupOffsetFetchPinned", "TestSCRAMAuth", "TestSCRAMAuthBadCredentials", "TestOAuthAuth",
}

// notOfKgo are tests of kgo that fail now and then on a real broker, whatever is between, by what they assume, and so aren't run.
var notOfKgo = []string{
	"Test848RegexBrokerResolves", // stops reading when it saw records of as many topics as it waits for, and counts __consumer_offsets among them
}

// TestSuites runs franz-go's own test suites, of kgo and kadm, with nothing but the proxy's address as seed, beside a direct run: a test that fails
// through the proxy must fail directly too. Topics and groups have random names, so both runs can go on at the same time.
func TestSuites(t *testing.T) {
	options := []kafkatest.Option{kafkatest.Brokers(3), kafkatest.Listener("SASL", "SASL_PLAINTEXT")}
	for key, value := range map[string]string{
		"listener.name.sasl.sasl.enabled.mechanisms":        "SCRAM-SHA-256,OAUTHBEARER",
		"listener.name.sasl.scram-sha-256.sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required;",
		"listener.name.sasl.oauthbearer.sasl.jaas.config":   `org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";`,
	} {
		options = append(options, kafkatest.Config(key, value))
	}
	for key, value := range newGroups {
		options = append(options, kafkatest.Config(key, value))
	}
	source := kafkatest.Real(t, options...)
	altered, err := kadm.NewClient(source.Client(t)).AlterUserSCRAMs(t.Context(), nil, []kadm.UpsertSCRAM{{User: superuser, Mechanism: kadm.ScramSha256, Iterations: 4096, Password: password}})
	if err != nil || altered.Error() != nil {
		t.Fatal(err, altered.Error())
	}
	in := testbed.Start(t, source, source, "--roles", "proxy")
	sasl := testbed.Start(t, loggedIn{source}, source, "--roles", "proxy", "--name", "suites-sasl", "--source.sasl.mechanism", "SCRAM-SHA-256", "--source.sasl.username", superuser,
		"--source.sasl.password", password)
	filter := "^(" + strings.Join(partOfKgo, "|") + ")$"
	least := len(partOfKgo)
	if *whole {
		filter, least = ".", 500
	}
	ends := make([]map[string]string, 2)
	outputs := make([]string, 2)
	t.Run("runs", func(t *testing.T) {
		for i, seeds := range [][2][]string{{source.Seeds(), loggedIn{source}.Seeds()}, {in.Seeds(), sasl.Seeds()}} {
			t.Run([]string{"direct", "through the proxy"}[i], func(t *testing.T) {
				t.Parallel()
				ends[i], outputs[i] = suite(t, seeds[0], seeds[1], filter)
			})
		}
	})
	direct, through := ends[0], ends[1]
	passed := 0
	names := maps.Clone(direct)
	maps.Copy(names, through)
	for _, name := range slices.Sorted(maps.Keys(names)) {
		switch {
		case through[name] == "pass":
			if passed++; direct[name] != "pass" {
				t.Logf("%s: passed through the proxy, %q directly", name, direct[name])
			}
		case through[name] == direct[name]:
			t.Logf("%s: %s on both ways", name, direct[name])
		default: // which may be no end at all
			t.Errorf("%s: %q through the proxy, %q directly", name, through[name], direct[name])
		}
	}
	if passed < least {
		t.Errorf("%d tests passed, want %d at least", passed, least)
	}
	t.Logf("%d of %d tests passed through the proxy", passed, len(through))
	if t.Failed() || *whole {
		t.Logf("failed directly:\n%s\nfailed through the proxy:\n%s", outputs[0], outputs[1])
	}
}

// suite runs the tests that filter selects, some of which log in at other seeds, and tells how each ended and what the failed ones printed.
func suite(t *testing.T, seeds, logInSeeds []string, filter string) (ends map[string]string, failures string) {
	records := "500"
	if *whole {
		records = "20000"
	}
	cmd := exec.CommandContext(t.Context(), "go", "test", "-json", "-count=1", "-timeout=20m", "-run", filter, "-skip", "^("+strings.Join(notOfKgo, "|")+")$", "github.com/twmb/franz-go/pkg/kgo", "github.com/twmb/franz-go/pkg/kadm")
	cmd.Env = append(os.Environ(), "KGO_SEEDS="+strings.Join(seeds, ","), "KGO_TEST_RF=3", "KGO_TEST_RECORDS="+records, "KGO_TEST_MAX_TOPIC_PARTS=7", "KGO_LOG_LEVEL=none",
		"KGO_TEST_SCRAM="+superuser+":"+password, "KGO_TEST_SCRAM_SEEDS="+strings.Join(logInSeeds, ","), "KGO_TEST_OAUTH_SEEDS="+strings.Join(logInSeeds, ","))
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := kafkatest.Spawn(cmd); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // a test that failed; what is missing is counted
	ends = make(map[string]string)
	printed := make(map[string]*strings.Builder)
	lines := bufio.NewScanner(&out)
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
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
	if err := lines.Err(); err != nil || len(ends) == 0 {
		t.Fatalf("%d tests ended, %v: %s", len(ends), err, errs.String())
	}
	for name, end := range ends {
		if end == "fail" {
			failures += fmt.Sprintf("%s\n%s\n", name, printed[name])
		}
	}
	return ends, failures
}
