package clients

import (
	"bytes"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"kmirror/internal/kafkatest"
)

func TestMain(m *testing.M) { kafkatest.Main(m) }

// TestClientsDoWhatIsAsked runs each client against a broker without kmirror, so that a failure elsewhere isn't the client's.
func TestClientsDoWhatIsAsked(t *testing.T) {
	source, _ := kafkatest.Shared(t)
	for _, c := range All() {
		t.Run(c.Name, func(t *testing.T) {
			kafkatest.CreateTopic(t, source, c.Name, 1, 1)
			var want []string
			for i, codec := range c.Codecs {
				p := Production{Bootstrap: source.Seeds()[0], Topic: c.Name, Prefix: codec, Count: 50, Acks: []string{"all", "1", "0"}[i%3], Codec: codec, Idempotent: i == 0}
				run(t, c.Producer(t, p))
				for n := range p.Count {
					want = append(want, fmt.Sprintf("%s-%d", codec, n))
				}
			}
			var got []string
			used := map[string]bool{} // codecs that a record came with
			for i, r := range kafkatest.ReadAll(t, source, c.Name, 0) {
				got = append(got, string(r.Value))
				codec := allCodecs[r.Attrs.CompressionType()]
				used[codec] = true
				// What doesn't shrink, as a batch of one record, goes without a codec.
				if i < len(want) && codec != "none" && !strings.HasPrefix(want[i], codec+"-") {
					t.Fatalf("record %d has codec %s, want that of %s", i, codec, want[i])
				}
			}
			for _, codec := range c.Codecs {
				if !used[codec] {
					t.Errorf("no record came with codec %s", codec)
				}
			}
			if !slices.Equal(got, want) {
				t.Fatalf("the topic has %q, want %q", got, want)
			}
			out := run(t, c.Consumer(t, source.Seeds()[0], c.Name, "readers-"+c.Name, len(want)))
			if got := strings.Fields(out); !slices.Equal(got, want) {
				t.Fatalf("the consumer printed %q, want %q", out, want)
			}
		})
	}
}

func run(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := kafkatest.Spawn(cmd); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%s: %v\n%s%s", cmd, err, out.String(), errs.String())
	}
	return out.String()
}
