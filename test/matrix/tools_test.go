package matrix

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"kmirror/internal/kafkatest"
)

// tools runs Kafka's command line tools, and the programs that its own system tests drive clients by.
func (c cluster) tools(t *testing.T, program kafkatest.JavaProgram) {
	agree(t, c.ways("tools"), 150, func(w way) string { return run(t, program.Command(t, "Tools", w.seeds[0], w.name)) })
}

// kcat runs Debian's kcat with Debian's librdkafka.
func (c cluster) kcat(t *testing.T) {
	agree(t, c.ways("kcat"), 100, func(w way) string {
		topic := w.name + "topic"
		kafkatest.CreateTopic(t, c.source, topic, 1, 3)
		var transcript strings.Builder
		kcat := func(stdin string, args ...string) {
			cmd := exec.CommandContext(t.Context(), "kcat", append([]string{"-b", w.seeds[0]}, args...)...)
			if cmd.Err != nil {
				if os.Getenv("CI") != "" {
					t.Fatal(cmd.Err)
				}
				t.Skipf("%v; `make deps` installs it", cmd.Err)
			}
			cmd.Stdin = strings.NewReader(stdin)
			fmt.Fprintf(&transcript, "== kcat %s\n%s", strings.Join(args, " "), run(t, cmd))
		}
		var lines strings.Builder
		for i := range 20 {
			fmt.Fprintf(&lines, "key%d:value%d\n", i, i)
		}
		for _, codec := range []string{"none", "gzip", "snappy", "lz4", "zstd"} {
			kcat(lines.String(), "-P", "-t", topic, "-p", "0", "-K:", "-z", codec, "-H", "codec="+codec)
		}
		kcat("", "-C", "-t", topic, "-o", "beginning", "-e", "-q", "-f", "%p@%o %k=%s %h\n")
		kcat("", "-C", "-t", topic, "-o", "-5", "-e", "-q", "-f", "%p@%o %k=%s\n")
		kcat("", "-Q", "-t", topic+":0:-1", "-t", topic+":0:-2", "-t", topic+":0:1")
		kcat("", "-X", "auto.offset.reset=earliest", "-c", "100", "-q", "-f", "%p@%o %s\n", "-G", w.name+"group", topic)
		// Which broker is the first topic's leader, and which is the controller, is another in every run.
		metadata := run(t, exec.CommandContext(t.Context(), "kcat", "-b", w.seeds[0], "-L", "-t", topic))
		for line := range strings.Lines(metadata) {
			if strings.HasPrefix(strings.TrimSpace(line), "broker ") {
				transcript.WriteString(strings.Replace(line, " (controller)", "", 1))
			}
		}
		return sortedBrokers(transcript.String())
	})
}

// sortedBrokers puts the last lines of kcat -L, one for each broker, in order.
func sortedBrokers(transcript string) string {
	lines := strings.Split(strings.TrimRight(transcript, "\n"), "\n")
	slices.Sort(lines[len(lines)-3:])
	return strings.Join(lines, "\n")
}
