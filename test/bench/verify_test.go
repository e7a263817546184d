package bench

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// benchVerify compares a topic that kmirror copied, whole.
func benchVerify(t *testing.T, w *world, r *report) {
	load := workload{name: "1M x 1 KiB", topic: "verified", records: 1_000_000, size: 1024}.scaled(*scale)
	load.load(t, w.source)
	k := startKmirror(t, w, load.topic)
	k.awaitReady(t)
	k.awaitStreams(t, partitions)
	k.stop(t)
	for range *rounds {
		begin := time.Now()
		p := start(t, "verify", w.kmirror, "verify", "--name", k.mirrorOf, "--source", w.source.Seeds()[0], "--mirror", w.mirror.Seeds()[0], "--topics", load.topic)
		peak := p.untilDone()
		took := time.Since(begin).Seconds()
		if code := p.cmd.ProcessState.ExitCode(); code != 0 {
			t.Fatalf("kmirror verify ended with %d:\n%s", code, p.tail())
		}
		cpu := p.cmd.ProcessState.UserTime() + p.cmd.ProcessState.SystemTime()
		r.add("verify", load.name, nameKmirror, metric{"records/s", float64(load.records) / took}, metric{"MB/s", load.bytes() / 1e6 / took},
			metric{"CPU s/M records", cpu.Seconds() / float64(load.records) * 1e6}, metric{"peak RSS MiB", peak})
	}
}

// untilDone waits for the process's end and returns its largest resident set in MiB, as far as it was seen. (What wait tells includes
// the set of the process that started it.)
func (p *process) untilDone() (peak float64) {
	poll := time.NewTicker(pollEvery)
	defer poll.Stop()
	for {
		select {
		case <-p.done:
			return peak
		case <-poll.C:
		}
		status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid)) // none: it has just ended
		_, value, _ := strings.Cut(string(status), "VmHWM:")
		var kib float64
		if _, err := fmt.Sscanf(value, "%f kB", &kib); err == nil {
			peak = max(peak, kib/1024)
		}
	}
}
