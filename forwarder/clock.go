package forwarder

import (
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// bootTime is a clock that goes on while the process is stopped and while the machine sleeps (rule S2); only differences count.
func bootTime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic(fmt.Sprintf("CLOCK_BOOTTIME: %v", err)) // Linux has it since 2.6.39
	}
	return time.Duration(ts.Nano())
}

// process identifies a process beyond its life: a checkpoint carries it, so that a successor on the same host can tell whether the last
// owner is dead (rule W2). Process IDs mean something only within their boot and their namespace.
type process struct {
	boot      string // boot ID
	namespace string // PID namespace
	pid       int
	started   uint64 // clock ticks since boot
}

// thisProcess reads the identity of the running process; fields that can't be read stay empty and compare as unknown.
func thisProcess() process {
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	namespace, _ := os.Readlink("/proc/self/ns/pid")
	p := process{boot: strings.TrimSpace(string(boot)), namespace: namespace, pid: os.Getpid()}
	p.started, _ = startTime(p.pid)
	return p
}

// startTime is field 22 of /proc/PID/stat; the command name before it may hold blanks and parentheses.
func startTime(pid int) (ticks uint64, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	if len(fields) < 20 {
		return 0, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	_, err = fmt.Sscan(fields[19], &ticks)
	return ticks, err
}

func (p process) String() string {
	return fmt.Sprintf("%s,%s,%d,%d", p.boot, strings.Trim(strings.TrimPrefix(p.namespace, "pid:"), "[]"), p.pid, p.started)
}

func parseProcess(s string) (p process, err error) {
	f := strings.Split(s, ",")
	if len(f) != 4 {
		return p, fmt.Errorf("process %q: not 4 fields", s)
	}
	p.boot, p.namespace = f[0], "pid:["+f[1]+"]"
	if _, err := fmt.Sscan(f[2], &p.pid); err != nil {
		return p, fmt.Errorf("process %q: %w", s, err)
	}
	_, err = fmt.Sscan(f[3], &p.started)
	return p, err
}

// knownDead reports whether p ran in this process's boot and PID namespace and runs no more.
func (p process) knownDead(self process) bool {
	if p.boot == "" || p.boot != self.boot || p.namespace != self.namespace || p.started == 0 {
		return false
	}
	started, err := startTime(p.pid)
	return os.IsNotExist(err) || err == nil && started != p.started
}
