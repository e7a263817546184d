package matrix

import (
	"bytes"
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

const (
	superuser = "admin"
	password  = "secret-of-admin"
	patience  = 3 * time.Minute // for one program
)

// cluster is what the matrix runs against: three brokers with rules of access and a listener for log-ins, and a kmirror before each listener.
// Its tee is on: what is produced through it goes the way of mirrored records.
type cluster struct {
	source *kafkatest.RealCluster
	mirror *kafkatest.RealCluster
	plain  *testbed.Instance
	sasl   *testbed.Instance
}

// newGroups lets members of groups of the new kinds learn of changes soon: they do by heartbeats, which come each 5 s unless told otherwise.
var newGroups = map[string]string{
	"group.consumer.heartbeat.interval.ms":     "300",
	"group.consumer.min.heartbeat.interval.ms": "300",
	"group.share.heartbeat.interval.ms":        "300",
	"group.share.min.heartbeat.interval.ms":    "300",
}

// loggedIn is a cluster's listener for log-ins.
type loggedIn struct{ *kafkatest.RealCluster }

func (c loggedIn) Seeds() (seeds []string) {
	for _, b := range c.Brokers() {
		seeds = append(seeds, b.Listener("SASL"))
	}
	return seeds
}

func startCluster(t testing.TB) cluster {
	t.Helper()
	options := []kafkatest.Option{kafkatest.Brokers(3), kafkatest.Listener("SASL", "SASL_PLAINTEXT")}
	for key, value := range map[string]string{
		"listener.name.sasl.sasl.enabled.mechanisms": "PLAIN",
		"listener.name.sasl.plain.sasl.jaas.config": fmt.Sprintf(
			`org.apache.kafka.common.security.plain.PlainLoginModule required user_%s="%s";`, superuser, password),
		"authorizer.class.name":       "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
		"super.users":                 "User:ANONYMOUS;User:" + superuser,
		"delegation.token.secret.key": "of the matrix",
	} {
		options = append(options, kafkatest.Config(key, value))
	}
	for key, value := range newGroups {
		options = append(options, kafkatest.Config(key, value))
	}
	c := cluster{source: kafkatest.Real(t, options...), mirror: kafkatest.Real(t)}
	c.plain = testbed.Start(t, c.source, c.mirror, "--topics", "/kept-.*/", "--topics.replication_factor", "1")
	c.sasl = testbed.Start(t, loggedIn{c.source}, c.mirror, "--name", "matrix-sasl", "--roles", "proxy", "--source.sasl.mechanism", "PLAIN",
		"--source.sasl.username", superuser, "--source.sasl.password", password)
	return c
}

// way is one of the two ways to a cluster.
type way struct {
	name      string              // also the prefix of names that a program makes there
	seeds     []string            // bootstrap servers
	addresses map[string]string   // what each HOST:PORT on this way stands for
	topicIDs  map[string][16]byte // of the topics that a program makes there
}

// ways returns both ways to the brokers' listener that source gives the addresses of, with kmirror in on the second.
func ways(source kafkatest.Cluster, in *testbed.Instance, name string) [2]way {
	direct := way{name: "direct-" + name + "-", seeds: source.Seeds(), addresses: map[string]string{}}
	through := way{name: "proxied-" + name + "-", seeds: in.Seeds(), addresses: map[string]string{}}
	for i, address := range source.Seeds() {
		broker := fmt.Sprintf("broker-%d:9092", i+1)
		direct.addresses[address] = broker
		through.addresses[in.BrokerAddr(int32(i+1))] = broker
	}
	return [2]way{direct, through}
}

// ways returns both ways for clients that don't log in.
func (c cluster) ways(name string) [2]way {
	return ways(c.source, c.plain, strings.Map(func(r rune) rune {
		if r == ' ' || r == '\'' {
			return '-'
		}
		return r
	}, name))
}

// generated are IDs that clusters and clients make up: UUIDs, and topic IDs as Kafka prints them.
var generated = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|TopicId: \S+`)

// addressWords are the forms in which programs print an address: in one word, and in two.
var addressWords = regexp.MustCompile(`127\.0\.0\.1(:| +)([0-9]+)`)

// normalized puts what may differ between two runs into words that are the same. An address of the other way stays, so that it's seen.
func (w way) normalized(transcript string) []string {
	transcript = strings.ReplaceAll(transcript, w.name, "RUN-")
	transcript = generated.ReplaceAllString(transcript, "UUID")
	transcript = addressWords.ReplaceAllStringFunc(transcript, func(address string) string {
		parts := addressWords.FindStringSubmatch(address)
		if name, ok := w.addresses["127.0.0.1:"+parts[2]]; ok {
			return name
		}
		return address
	})
	return strings.Split(strings.TrimRight(transcript, "\n"), "\n")
}

// run runs a program to its end and returns what it printed. What it writes to standard error is shown when it fails.
func run(t testing.TB, cmd *exec.Cmd) string {
	t.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := kafkatest.Spawn(cmd); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(patience, func() { cmd.Process.Kill() })
	defer timer.Stop()
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%s: %v\n%s\n%s", cmd, err, out.String(), errs.String())
	}
	return out.String()
}

// agree runs a program on both ways, one after the other, and fails unless both transcripts are the same and have as many lines as expected at least.
func agree(t *testing.T, both [2]way, lines int, program func(w way) string) {
	t.Helper()
	direct, through := both[0].normalized(program(both[0])), both[1].normalized(program(both[1]))
	if len(direct) < lines {
		t.Errorf("the direct transcript has %d lines, want %d at least:\n%s", len(direct), lines, strings.Join(direct, "\n"))
	}
	if difference := diff(direct, through); difference != "" {
		t.Errorf("through the proxy it goes otherwise than directly:\n%s", difference)
	}
}

// diff lists the lines that only one transcript has, in order: "-" direct, "+" through the proxy.
func diff(direct, through []string) string {
	// longest[i][j] is the length of the longest common subsequence of direct[i:] and through[j:].
	longest := make([][]int, len(direct)+1)
	for i := range longest {
		longest[i] = make([]int, len(through)+1)
	}
	for i := len(direct) - 1; i >= 0; i-- {
		for j := len(through) - 1; j >= 0; j-- {
			if direct[i] == through[j] {
				longest[i][j] = longest[i+1][j+1] + 1
			} else {
				longest[i][j] = max(longest[i+1][j], longest[i][j+1])
			}
		}
	}
	var out strings.Builder
	for i, j := 0, 0; i < len(direct) || j < len(through); {
		switch {
		case i < len(direct) && j < len(through) && direct[i] == through[j]:
			i, j = i+1, j+1
		case j == len(through) || i < len(direct) && longest[i+1][j] >= longest[i][j+1]:
			fmt.Fprintf(&out, "- %s\n", direct[i])
			i++
		default:
			fmt.Fprintf(&out, "+ %s\n", through[j])
			j++
		}
	}
	return out.String()
}
