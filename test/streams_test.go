package test

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// TestThousandsOfStreams: 2,000 partitions on one pair of brokers, 50 of them busy. Goroutines and connections don't grow with the
// partitions, and the idle ones cost next to nothing.
func TestThousandsOfStreams(t *testing.T) {
	source, mirror := kafkatest.Real(t), kafkatest.Real(t)
	const topics, each = 20, 100
	few := testbed.Start(t, source, mirror, "--topics", "many-0")
	kafkatest.CreateTopic(t, source, "many-0", each, 1)
	testbed.WaitLive(t, few, "many-0", each)
	testbed.Write(t, few.Seeds(), "many-0", "few", 1000)
	few.WaitCaughtUp(30 * time.Second)
	goroutines := few.Metrics()["go_goroutines"]
	few.Stop()

	names := make([]string, topics)
	for i := range topics {
		names[i] = fmt.Sprintf("many-%d", i)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	if _, err := kadm.NewClient(source.Client(t)).CreateTopics(ctx, each, 1, nil, names[1:]...); err != nil {
		t.Fatal(err)
	}
	in := testbed.New(t, source, mirror, "--topics", "/many-.*/")
	allLive := func(what string, begin func()) {
		t.Helper()
		begun := time.Now()
		begin()
		kafkatest.Eventually(t, 2*time.Minute, func() error {
			if n := in.Metrics()[`kmirror_forwarder_partitions{state="live"}`]; n != topics*each {
				return fmt.Errorf("%v streams are live, want %d", n, topics*each)
			}
			return nil
		})
		t.Logf("%d streams live %v after %s", topics*each, time.Since(begun).Round(100*time.Millisecond), what)
	}
	allLive("the first start", in.Start)

	l := testbed.StartLoad(t, in.Seeds(), "many-7", 4, 1000, 100, kgo.RecordPartitioner(kgo.BasicConsistentPartitioner(func(string) func(*kgo.Record, int) int {
		n := 0
		return func(*kgo.Record, int) int { n++; return n % 50 }
	})))
	l.WaitAcked(3000)
	busy := in.Metrics()["go_goroutines"]
	l.Stop()
	in.WaitCaughtUp(time.Minute)
	for _, name := range []string{"many-7", "many-0", "many-19"} {
		kafkatest.WaitEqual(t, source, mirror, name, time.Minute, kafkatest.SameOffsets())
	}
	t.Logf("goroutines: %v with %d streams, %v with %d and 50 busy", goroutines, each, busy, topics*each)
	if busy > goroutines+50 { // a few for each of the clients that write now
		t.Errorf("goroutines grew from %v with %d streams to %v with %d", goroutines, each, busy, topics*each)
	}
	idle := idleCPU(t, in, 10*time.Second)
	t.Logf("idle with %d streams: %.1f%% of a core, %d MiB resident", topics*each, idle, in.RSS()>>20)
	if idle > 10 { // it's the machine's too: a bound for mistakes, the figure is in the log
		t.Errorf("kmirror takes %.1f%% of a core when idle", idle)
	}

	mirror.Stop(t)
	t.Logf("with the mirror down: %.1f%% of a core", idleCPU(t, in, 10*time.Second))
	allLive("the mirror's start", func() { mirror.Start(t) })
	in.Kill()
	allLive("kill -9", in.Start)
	testbed.Write(t, in.Seeds(), "many-7", "restarted", 1000)
	in.WaitCaughtUp(time.Minute)
	kafkatest.WaitEqual(t, source, mirror, "many-7", time.Minute, kafkatest.SameOffsets())
}

// idleCPU measures the processor time that kmirror takes, in percent of a core.
func idleCPU(t testing.TB, in *testbed.Instance, length time.Duration) float64 {
	t.Helper()
	before, begun := cpuTime(t, in.PID()), time.Now()
	select {
	case <-t.Context().Done():
	case <-time.After(length): // what is measured, not a wait for something
	}
	return 100 * (cpuTime(t, in.PID()) - before).Seconds() / time.Since(begun).Seconds()
}

// cpuTime is the user and system time that a process has taken.
func cpuTime(t testing.TB, pid int) time.Duration {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), ") ") // the name before may hold spaces
	fields := strings.Fields(rest)
	ticks := 0
	for _, field := range fields[11:13] { // utime and stime, in ticks of 10 ms
		n, err := strconv.Atoi(field)
		if err != nil {
			t.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}
