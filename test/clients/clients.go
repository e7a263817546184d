// Package clients runs producers and consumers of other makes, to see that kmirror serves them unchanged: kcat and
// confluent-kafka (librdkafka), kafka-python, aiokafka and kafkajs. It doesn't run Kafka's own Java tools; kafkatest.Tool does.
//
// A producer writes COUNT records with key "key-N", value "PREFIX-N" and, but for kcat, header n=N, and ends with an error
// unless each was acknowledged. A consumer reads COUNT records in a group from the topic's beginning and prints their values,
// a line each. The scripts beside this file take the arguments
//
//	produce BOOTSTRAP TOPIC PREFIX COUNT ACKS CODEC IDEMPOTENT
//	consume BOOTSTRAP TOPIC GROUP COUNT
//	transcript BOOTSTRAP PREFIX
//	leader-change BOOTSTRAP TOPIC COUNT (confluent.py)
//
// where transcript goes through all that a client is used for, under names with a prefix, and prints what it sees: equal for two equal clusters.
// They find their libraries where `make deps` puts them, in .cache.
package clients

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"kmirror/internal/kafkatest"
)

// Client is one client library.
type Client struct {
	Name   string
	Codecs []string // those that it can write here, by Kafka's names
	script string   // beside this file; none for kcat
	debian bool     // by Debian's Python, with the libraries of Debian's packages
	old    bool     // with librdkafka 1.6 (2021) in the place of Debian's 2.0
}

var allCodecs = []string{"none", "gzip", "snappy", "lz4", "zstd"}

// All lists the clients.
func All() []Client {
	return []Client{
		{Name: "kcat", Codecs: allCodecs},
		{Name: "confluent-kafka", Codecs: allCodecs, script: "confluent.py"},
		{Name: "kafka-python", Codecs: allCodecs, script: "kafka_python.py"},
		{Name: "aiokafka", Codecs: allCodecs, script: "aio.py"},
		{Name: "kafkajs", Codecs: []string{"none", "gzip"}, script: "kafkajs.js"},
	}
}

// Scripted lists the clients that have a transcript.
func Scripted() []Client {
	return append(All()[1:], Client{Name: "Debian's confluent-kafka", script: "confluent.py", debian: true},
		Client{Name: "librdkafka 1.6", script: "confluent.py", debian: true, old: true}, Client{Name: "sarama", script: "sarama"})
}

// Kcats lists kcat with the versions of librdkafka that there are.
func Kcats() []Client {
	return []Client{{Name: "kcat"}, {Name: "kcat with librdkafka 1.6", old: true}}
}

// Kcat returns a command of kcat's with args.
func (c Client) Kcat(t testing.TB, args ...string) *exec.Cmd {
	t.Helper()
	return c.command(t, args...)
}

// Production is what a producer shall do.
type Production struct {
	Bootstrap, Topic, Prefix string
	Count                    int
	Acks                     string // "0", "1" or "all"
	Codec                    string // one of the client's
	Idempotent               bool   // only with acks=all
}

// Producer returns a command that carries p out, to be started with kafkatest.Spawn or run. It's killed when the test ends.
func (c Client) Producer(t testing.TB, p Production) *exec.Cmd {
	t.Helper()
	if c.script != "" {
		return c.command(t, "produce", p.Bootstrap, p.Topic, p.Prefix, strconv.Itoa(p.Count), p.Acks, p.Codec, strconv.FormatBool(p.Idempotent))
	}
	cmd := c.command(t, "-P", "-b", p.Bootstrap, "-t", p.Topic, "-K", ":", "-z", p.Codec, "-X", "acks="+p.Acks,
		"-X", "enable.idempotence="+strconv.FormatBool(p.Idempotent))
	var lines strings.Builder
	for i := range p.Count {
		fmt.Fprintf(&lines, "key-%d:%s-%d\n", i, p.Prefix, i)
	}
	cmd.Stdin = strings.NewReader(lines.String())
	return cmd
}

// Consumer returns a command that reads count records of topic as a member of group and prints their values.
func (c Client) Consumer(t testing.TB, bootstrap, topic, group string, count int) *exec.Cmd {
	t.Helper()
	if c.script != "" {
		return c.command(t, "consume", bootstrap, topic, group, strconv.Itoa(count))
	}
	return c.command(t, "-b", bootstrap, "-X", "auto.offset.reset=earliest", "-c", strconv.Itoa(count), "-q", "-G", group, topic)
}

// Transcript returns a command that prints one.
func (c Client) Transcript(t testing.TB, bootstrap, prefix string) *exec.Cmd {
	t.Helper()
	return c.command(t, "transcript", bootstrap, prefix)
}

// LeaderChange returns a command of confluent-kafka's that writes and reads a partition while its leader changes.
func (c Client) LeaderChange(t testing.TB, bootstrap, topic string, count int) *exec.Cmd {
	t.Helper()
	return c.command(t, "leader-change", bootstrap, topic, strconv.Itoa(count))
}

// command is the client's program with args. Where it isn't installed, the test is skipped, or fails on CI.
func (c Client) command(t testing.TB, args ...string) *exec.Cmd {
	t.Helper()
	root := kafkatest.Root(t)
	script := filepath.Join(root, "test", "clients", c.script)
	program := "kcat"
	var env []string
	var err error
	switch {
	case c.debian:
		program, args = "/usr/bin/python3", append([]string{"-B", script}, args...)
		_, err = os.Stat("/usr/lib/python3/dist-packages/confluent_kafka")
	case filepath.Ext(c.script) == ".py":
		program, args = filepath.Join(root, ".cache", "venv", "bin", "python"), append([]string{"-B", script}, args...)
	case filepath.Ext(c.script) == ".js":
		program, args = "node", append([]string{script}, args...)
		env = append(os.Environ(), "NODE_PATH="+filepath.Join(root, ".cache", "node", "node_modules"))
	case c.script == "sarama":
		program = buildModule(t, script)
	}
	if err == nil && c.old {
		library := filepath.Join(root, ".cache", "librdkafka-1.6")
		env = append(os.Environ(), "LD_LIBRARY_PATH="+library)
		_, err = os.Stat(filepath.Join(library, "librdkafka.so.1"))
	}
	if err == nil {
		_, err = exec.LookPath(program)
	}
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatalf("%s: %v", c.Name, err)
		}
		t.Skipf("%s: %v; `make deps` installs it", c.Name, err)
	}
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Env = env
	return cmd
}

// buildModule builds the program of a Go module of its own, which keeps its dependencies out of kmirror's.
func buildModule(t testing.TB, dir string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), filepath.Base(dir))
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".")
	build.Dir = dir
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build in %s: %v\n%s", dir, err, out)
	}
	return program
}
