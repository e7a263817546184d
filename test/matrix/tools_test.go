package matrix

import (
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"kmirror/internal/kafkatest"
	"kmirror/test/clients"
)

// tools runs Kafka's command line tools, and the programs that its own system tests drive clients by.
func (c cluster) tools(t *testing.T, program kafkatest.JavaProgram) {
	agree(t, c.ways("tools"), 150, func(w way) string { return run(t, program.Command(t, "Tools", w.seeds[0], w.name)) })
}

// kcat runs Debian's kcat, with Debian's librdkafka or an old one, to which brokers of today refuse some: it asks for the log's end in ListOffsets v0.
func (c cluster) kcat(t *testing.T, client clients.Client) {
	run, least := run, 200
	if client.Name != "kcat" {
		run, least = runOrError, 16
	}
	agree(t, c.ways(client.Name), least, func(w way) string {
		topic := w.name + "topic"
		kafkatest.CreateTopic(t, c.source, topic, 1, 3)
		var transcript strings.Builder
		kcat := func(stdin string, args ...string) {
			cmd := client.Kcat(t, append([]string{"-b", w.seeds[0]}, args...)...)
			cmd.Stdin = strings.NewReader(stdin)
			fmt.Fprintf(&transcript, "== kcat %s\n%s", strings.Join(args, " "), run(t, cmd))
		}
		var lines strings.Builder // each shrinks by every codec, even as a batch of its own: librdkafka sends what doesn't shrink uncompressed
		for i := range 20 {
			fmt.Fprintf(&lines, "key%d:value%d%s\n", i, i, strings.Repeat("-", 200))
		}
		for _, codec := range []string{"none", "gzip", "snappy", "lz4", "zstd"} {
			kcat(lines.String(), "-P", "-t", topic, "-p", "0", "-K:", "-z", codec, "-H", "codec="+codec)
		}
		records := kafkatest.ReadAll(t, c.source, topic, 0)
		for i, r := range records { // a client that misses a version in the list sends uncompressed, and doesn't say so
			if got, want := int(r.Attrs.CompressionType()), i/20; got != want {
				t.Errorf("record %d of %s has codec %d, want %d", i, topic, got, want)
			}
		}
		if len(records) != 100 {
			t.Errorf("%s has %d records, want 100", topic, len(records))
		}
		kcat("", "-C", "-t", topic, "-o", "beginning", "-e", "-q", "-f", "%p@%o %k=%s %h\n")
		kcat("", "-C", "-t", topic, "-o", "-5", "-e", "-q", "-f", "%p@%o %k=%s\n")
		kcat("", "-Q", "-t", topic+":0:-1", "-t", topic+":0:-2", "-t", topic+":0:1")
		kcat("", "-X", "auto.offset.reset=earliest", "-c", "100", "-q", "-f", "%p@%o %s\n", "-G", w.name+"group", topic)
		// Which broker is the first topic's leader, and which is the controller, is another in every run.
		metadata := run(t, client.Kcat(t, "-b", w.seeds[0], "-L", "-t", topic))
		for line := range strings.Lines(metadata) {
			if strings.HasPrefix(strings.TrimSpace(line), "broker ") {
				transcript.WriteString(strings.Replace(line, " (controller)", "", 1))
			}
		}
		return sortedBrokers(transcript.String())
	})
}

// runOrError is run for a program that may fail: what it says last is part of its transcript.
func runOrError(t testing.TB, cmd *exec.Cmd) string {
	t.Helper()
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		lines := strings.Split(strings.TrimSpace(errs.String()), "\n")
		return fmt.Sprintf("%s%v: %s\n", out, err, lines[len(lines)-1])
	}
	return string(out)
}

// sortedBrokers puts the last lines of kcat -L, one for each broker, in order.
func sortedBrokers(transcript string) string {
	lines := strings.Split(strings.TrimRight(transcript, "\n"), "\n")
	slices.Sort(lines[len(lines)-3:])
	return strings.Join(lines, "\n")
}
