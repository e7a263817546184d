package bench

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
)

var (
	enabled  = flag.Bool("kmirror.bench", false, "run the benchmarks")
	rounds   = flag.Int("kmirror.bench.rounds", 3, "how often each measurement is repeated")
	scale    = flag.Float64("kmirror.bench.scale", 1, "factor for the number of records")
	steady   = flag.Duration("kmirror.bench.steady", 15*time.Second, "length of each steady measurement")
	program  = flag.String("kmirror.bench.binary", "../../bin/kmirror", "kmirror's `file`")
	peers    = flag.String("kmirror.bench.peers", ".", "only peers whose names match this `regexp`")
	jsonFile = flag.String("kmirror.bench.json", "", "`file` for all figures")
)

const (
	pollEvery    = 50 * time.Millisecond
	readyTimeout = 2 * time.Minute
	copyTimeout  = 3 * time.Minute
)

// world is what the benchmarks run on: two clusters of one broker, and the programs.
type world struct {
	source, mirror        kafkatest.Cluster
	mirrorAdmin           *kadm.Client
	kmirror, naive, relay string // programs
	jars                  string // folder of the Java peers
	runs                  int    // kmirrors started so far
}

// TestBench is `make bench`. Its parts can be chosen: -run 'TestBench/catch-up'.
func TestBench(t *testing.T) {
	if !*enabled {
		t.Skip("benchmarks run with -kmirror.bench")
	}
	r := newReport()
	parts := []struct {
		name string
		run  func(*testing.T, *world, *report)
	}{
		{"catch-up", benchCatchUp},
		{"produce", benchProduce},
		{"ack-latency", benchLatency},
		{"replication", benchReplication},
		{"idle", benchIdle},
		{"connections", benchConnections},
		{"verify", benchVerify},
		{"compression", benchCompression},
	}
	for _, part := range parts {
		t.Run(part.name, func(t *testing.T) { part.run(t, newWorld(t), r) })
	}
	r.write(os.Stdout)
	if *jsonFile != "" {
		r.save(t, *jsonFile)
	}
}

// newWorld starts both clusters anew, so that no part finds what another left.
func newWorld(t *testing.T) *world {
	t.Helper()
	kmirror, err := filepath.Abs(*program)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{kmirror: kmirror, naive: buildTool(t, "naive"), relay: buildTool(t, "relay"), jars: fetchJars(t)}
	opts := []kafkatest.Option{
		kafkatest.Optimized(), kafkatest.Heap("700m"),
		kafkatest.Config("broker.session.timeout.ms", "30000"), // a broker that waits for the processor isn't dead
	}
	w.source = kafkatest.Real(t, opts...)
	w.mirror = kafkatest.Real(t, opts...)
	w.mirrorAdmin = kadm.NewClient(w.mirror.Client(t, kgo.MetadataMinAge(10*time.Millisecond))) // sees new topics at once
	return w
}

// wanted keeps the peers that the command line names.
func wanted[T any](t *testing.T, all []T, name func(T) string) []T {
	t.Helper()
	pattern, err := regexp.Compile(*peers)
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(all, func(x T) bool { return !pattern.MatchString(name(x)) })
}
