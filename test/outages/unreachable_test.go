package outages

import (
	"testing"
	"time"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// TestUnreachableMirrorLeavesNothingBehind: while the mirror can't be used, each try leaves neither a goroutine nor a socket, dials are
// rare, producers see no error, and memory stays within its bound. Then the mirror is there, and all arrives from the source's log.
func TestUnreachableMirrorLeavesNothingBehind(t *testing.T) {
	source, _ := kafkatest.Shared(t)
	for _, unreachable := range []struct {
		name       string
		begin, end func(t *testing.T, mirror *kafkatest.Broker)
		args       []string // of kmirror, until the end
	}{
		{name: "closed", begin: kill, end: start},
		{name: "silent", begin: killAndBeSilent, end: start},
		{name: "refuses-sasl", args: []string{"--mirror.sasl.mechanism", "PLAIN", "--mirror.sasl.username", "nobody", "--mirror.sasl.password", "wrong"}},
	} {
		t.Run(unreachable.name, func(t *testing.T) {
			t.Parallel()
			mirror := kafkatest.Real(t)
			topic := "unreachable-" + unreachable.name
			kafkatest.CreateTopic(t, source, topic, 4, 1)
			in := testbed.New(t, source, mirror, "--topics", topic, "--mirror_memory", "16MiB")
			usual := in.Args
			in.Args = append(usual[:len(usual):len(usual)], unreachable.args...)
			in.Start()
			l := testbed.StartLedger(t, topic, testbed.LedgerOptions{Writers: 4, PerSecond: 1000, Size: 1000, From: time.Now()}, in.Seeds())
			l.WaitAcks(1000)
			t.Run("unreachable", func(outage *testing.T) { // what begin sets up ends with it
				if unreachable.begin != nil {
					testbed.WaitLive(outage, in, topic, 4)
					unreachable.begin(outage, mirror.Broker(1))
				}
				wantSteady(outage, in, l)
			})
			if unreachable.end != nil {
				unreachable.end(t, mirror.Broker(1))
			}
			if unreachable.args != nil {
				in.Stop()
				in.Args = usual
				in.Start()
			}
			l.WaitAcks(2000)
			l.Stop()
			in.WaitSettled(time.Now())
			l.Check(source, mirror, kafkatest.SameOffsets())
		})
	}
}

// wantSteady watches kmirror for 20 s that begin 10 s from now: goroutines and file descriptors don't grow, the resident memory is
// bounded, and a broker is dialled once a second at most.
func wantSteady(t *testing.T, in *testbed.Instance, l *testbed.Ledger) {
	t.Helper()
	const seconds, spare, dialsPerSecond = 20, 10, 1
	testbed.Pause(t, 10*time.Second)
	first := in.Metrics()
	watch := map[string]float64{}
	var memory int64
	for range seconds {
		testbed.Pause(t, time.Second)
		now := in.Metrics()
		for _, name := range []string{"go_goroutines", "process_open_fds"} {
			watch[name] = max(watch[name], now[name])
		}
		memory = max(memory, in.RSS())
	}
	for name, most := range watch {
		t.Logf("%s: %v, then %v at most", name, first[name], most)
		if most > first[name]+spare {
			t.Errorf("%s grew from %v to %v in %d s", name, first[name], most, seconds)
		}
	}
	const dials = "kmirror_forwarder_dial_errors_total"
	tries := in.Metrics()[dials] - first[dials]
	t.Logf("%v dials failed in %d s; %d MiB resident", tries, seconds, memory>>20)
	if tries > seconds*dialsPerSecond+spare {
		t.Errorf("%v dials of a broker that can't be used, want %d at most", tries, seconds*dialsPerSecond+spare)
	}
	if limit := int64(16<<20 + 100<<20); memory > limit {
		t.Errorf("%d MiB resident, want %d at most", memory>>20, limit>>20)
	}
	if n := l.Failed.Load(); n > 0 {
		t.Errorf("producers saw %d errors", n)
	}
}
