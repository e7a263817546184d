package bench

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"kmirror/internal/kafkatest"
)

const (
	stopGrace     = 20 * time.Second // from SIGTERM to SIGKILL
	ticksPerSec   = 100              // USER_HZ of /proc/PID/stat, the same on every Linux
	loggedOnError = 3000             // last bytes of a process's output that a failed benchmark shows
)

// process is one program under measurement.
type process struct {
	name   string
	cmd    *exec.Cmd
	output string // file that gets stdout and stderr
	done   chan struct{}
}

// start runs a program until the test ends or stop is called.
func start(t testing.TB, name, program string, args ...string) *process {
	t.Helper()
	file, err := os.CreateTemp(t.TempDir(), name+"-*.log")
	if err != nil {
		t.Fatal(err)
	}
	p := &process{name: name, cmd: exec.Command(program, args...), output: file.Name(), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = file, file
	if err := kafkatest.Spawn(p.cmd); err != nil {
		t.Fatalf("start %s: %v", name, err)
	}
	go p.wait()
	t.Cleanup(func() {
		p.stop(t)
		file.Close()
		if t.Failed() {
			t.Logf("last output of %s:\n%s", name, p.tail())
		}
	})
	return p
}

func (p *process) wait() {
	_ = p.cmd.Wait() // how it ended is in its output
	close(p.done)
}

// stop ends the process, by force after a grace time, and returns when it is gone. It may be called again.
func (p *process) stop(t testing.TB) {
	t.Helper()
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(stopGrace):
		t.Logf("%s didn't end within %v", p.name, stopGrace)
		_ = p.cmd.Process.Kill()
		<-p.done
	}
}

// running fails the test when the process ended by itself.
func (p *process) running(t testing.TB) {
	t.Helper()
	select {
	case <-p.done:
		t.Fatalf("%s ended: %v", p.name, p.cmd.ProcessState)
	default:
	}
}

func (p *process) tail() string {
	b, err := os.ReadFile(p.output)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-loggedOnError):])
}

// cpu is the processor time that the process has used, user and system, to 10 ms.
func (p *process) cpu(t testing.TB) time.Duration {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	// The second field is the program's name in parentheses, which may itself hold blanks: utime and stime are
	// fields 14 and 15 (proc_pid_stat(5)), so 11 and 12 behind the last parenthesis.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	var ticks int64
	for _, f := range fields[11:13] {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * time.Second / ticksPerSec
}

// memory returns the resident set now and at its peak, in MiB.
func (p *process) memory(t testing.TB) (now, peak float64) {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		var kib float64
		if name == "VmRSS" || name == "VmHWM" {
			if _, err := fmt.Sscanf(value, "%f kB", &kib); err != nil {
				t.Fatal(err)
			}
		}
		switch name {
		case "VmRSS":
			now = kib / 1024
		case "VmHWM":
			peak = kib / 1024
		}
	}
	return now, peak
}

// buildTool compiles a command of this folder.
func buildTool(t testing.TB, name string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), name)
	if out, err := exec.Command("go", "build", "-o", program, "./"+name).CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", name, err, out)
	}
	return program
}

// errNotYet says that a condition that is waited for doesn't hold.
var errNotYet = errors.New("not yet")
