package testbed

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kmirror/forwarder"
	"kmirror/internal/kafkatest"
)

const (
	ReadyTimeout = 30 * time.Second
	stopTimeout  = 40 * time.Second // more than kmirror's grace time
	brokerPorts  = 6                // brokers 0 to 5
	loggedLines  = 200              // last lines of the log that a failed test shows
)

// program is the built kmirror, made once for all tests of this process.
var program struct {
	once sync.Once
	dir  string
	path string
	err  error
}

// Program builds kmirror and returns where it is.
func Program(t testing.TB) string {
	t.Helper()
	program.once.Do(func() {
		if program.dir, program.err = os.MkdirTemp("", "kmirror-test-bin-"); program.err != nil {
			return
		}
		program.path = filepath.Join(program.dir, "kmirror")
		build := exec.Command("go", "build", "-o", program.path, "./cmd/kmirror")
		build.Dir = kafkatest.Root(t)
		out, err := build.CombinedOutput()
		if err != nil {
			program.err = fmt.Errorf("go build: %w\n%s", err, out)
		}
	})
	if program.err != nil {
		t.Fatal(program.err)
	}
	return program.path
}

func RemoveProgram() {
	if program.dir != "" {
		os.RemoveAll(program.dir)
	}
}

// Instance is kmirror as a process of its own, always on the same ports and under the same name, however often it is
// killed and started. It dies with the test. Its methods are for one goroutine at a time, but for PID and RSS.
type Instance struct {
	t       testing.TB
	program string
	name    string
	Args    []string // of the next start
	Env     []string // more of the environment of the next start, as in NAME=value
	base    int      // bootstrap listener, then the brokers', then the admin listener
	logFile string   // of every start, one after the other

	captured *Capture // nil where it isn't allowed

	mu     sync.Mutex
	cmd    *exec.Cmd
	exited chan struct{} // closed once cmd was waited for
}

// Start starts `kmirror proxy` between two clusters and waits until it is ready. args are further flags, and may
// override those that it chooses.
func Start(t testing.TB, source, mirror kafkatest.Cluster, args ...string) *Instance {
	t.Helper()
	in := New(t, source, mirror, args...)
	in.Start()
	return in
}

// New is startKmirror without a start.
func New(t testing.TB, source, mirror kafkatest.Cluster, args ...string) *Instance {
	t.Helper()
	in := &Instance{
		t: t, program: Program(t), base: kafkatest.PortBlock(t, brokerPorts+2),
		name:    strings.ToLower(strings.NewReplacer("/", "-", "#", "-").Replace(t.Name())),
		logFile: filepath.Join(t.TempDir(), "kmirror.log"),
	}
	for i, arg := range args {
		if arg == "--name" {
			in.name = args[i+1]
		}
	}
	in.Args = append([]string{
		"proxy", "--name", in.name,
		"--source", strings.Join(source.Seeds(), ","), "--mirror", strings.Join(mirror.Seeds(), ","),
		"--listen", in.Seeds()[0], "--broker-port-base", strconv.Itoa(in.base + 1), "--admin", in.AdminAddr(),
	}, args...)
	if _, benchmark := t.(*testing.B); !benchmark {
		in.capture(t, source)
	}
	t.Cleanup(func() {
		in.end()
		if t.Failed() {
			t.Log(in.LogTail(loggedLines))
		}
	})
	return in
}

// Start starts the process and waits until it is ready.
func (in *Instance) Start() {
	in.t.Helper()
	if err := in.Launch(); err != nil {
		in.t.Fatal(err)
	}
	kafkatest.Eventually(in.t, ReadyTimeout, in.Ready)
}

// Launch starts the process and waits for nothing.
func (in *Instance) Launch() error {
	log, err := os.OpenFile(in.logFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o666)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(in.program, in.Args...)
	cmd.Env = append(os.Environ(), in.Env...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := kafkatest.Spawn(cmd); err != nil {
		return fmt.Errorf("start kmirror: %w", err)
	}
	exited := make(chan struct{})
	in.mu.Lock()
	in.cmd, in.exited = cmd, exited
	in.mu.Unlock()
	go func() {
		_ = cmd.Wait() // how it ended is in ProcessState
		close(exited)
	}()
	return nil
}

// Ready is nil once /readyz says so.
func (in *Instance) Ready() error {
	select {
	case <-in.exited:
		return fmt.Errorf("kmirror ended: %v", in.cmd.ProcessState)
	default:
	}
	_, err := in.get("/readyz")
	return err
}

// Signal sends a signal to the process.
func (in *Instance) Signal(sig syscall.Signal) {
	in.t.Helper()
	if err := in.cmd.Process.Signal(sig); err != nil {
		in.t.Errorf("%v for kmirror: %v", sig, err)
	}
}

// Kill is kill -9. It returns after the process has ended.
func (in *Instance) Kill() {
	in.t.Helper()
	in.Signal(syscall.SIGKILL)
	<-in.exited
}

// Freeze stops the process as SIGSTOP does: its connections stay open and nothing moves.
func (in *Instance) Freeze() { in.t.Helper(); in.Signal(syscall.SIGSTOP) }

// Thaw ends a Freeze.
func (in *Instance) Thaw() { in.t.Helper(); in.Signal(syscall.SIGCONT) }

// Stop ends the process with SIGTERM and returns its exit code, which the test expects to be 0.
func (in *Instance) Stop() int {
	in.t.Helper()
	in.Signal(syscall.SIGTERM)
	code := in.Wait(stopTimeout)
	if code != 0 {
		in.t.Errorf("kmirror's exit code after SIGTERM = %d, want 0", code)
	}
	return code
}

// Wait waits for the process to end by itself and returns its exit code.
func (in *Instance) Wait(timeout time.Duration) int {
	in.t.Helper()
	select {
	case <-in.exited:
	case <-time.After(timeout):
		in.t.Fatalf("kmirror didn't end within %v", timeout)
	}
	return in.cmd.ProcessState.ExitCode()
}

// end kills what runs, frozen or not.
func (in *Instance) end() {
	if in.cmd != nil {
		_ = in.cmd.Process.Kill() // it may have ended
		<-in.exited
	}
}

// Seeds is what producers bootstrap from.
func (in *Instance) Seeds() []string { return []string{Loopback(in.base)} }

// BrokerAddr is the listener that stands for a broker of the source.
func (in *Instance) BrokerAddr(id int32) string { return Loopback(in.base + 1 + int(id)) }

// AdminAddr is the HOST:PORT of /metrics and the rest.
func (in *Instance) AdminAddr() string { return Loopback(in.base + 1 + brokerPorts) }

// Group is the consumer group on the source.
func (in *Instance) Group() string { return "kmirror." + in.name }

func Loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// get asks the admin listener; any answer but 200 is an error.
func (in *Instance) get(path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+in.AdminAddr()+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", path, resp.Status, body)
	}
	return body, err
}

// State is what tests read of /api/status.
type State struct {
	Ready    bool              `json:"ready"`
	NotReady string            `json:"not_ready"`
	Mirror   *forwarder.Status `json:"mirror"`
}

// Status asks /api/status.
func (in *Instance) Status() State {
	in.t.Helper()
	s, err := in.AskStatus()
	if err != nil {
		in.t.Fatal(err)
	}
	return s
}

// AskStatus is Status for a kmirror that may not be there.
func (in *Instance) AskStatus() (s State, err error) {
	body, err := in.get("/api/status")
	if err == nil {
		err = json.Unmarshal(body, &s)
	}
	return s, err
}

// Metrics returns every sample of /metrics by its name with labels, as in kmirror_forwarder_partitions{state="live"}.
func (in *Instance) Metrics() map[string]float64 {
	in.t.Helper()
	body, err := in.get("/metrics")
	if err != nil {
		in.t.Fatal(err)
	}
	samples := make(map[string]float64)
	for lines := bufio.NewScanner(bytes.NewReader(body)); lines.Scan(); {
		line := lines.Text()
		i := strings.LastIndexByte(line, ' ')
		if i < 0 || line[0] == '#' {
			continue
		}
		if samples[line[:i]], err = strconv.ParseFloat(line[i+1:], 64); err != nil {
			in.t.Fatalf("/metrics: %q: %v", line, err)
		}
	}
	return samples
}

// WaitCaughtUp waits until all that the source holds now is on the mirror, as `kmirror status --until-caught-up` says it.
func (in *Instance) WaitCaughtUp(timeout time.Duration) {
	in.t.Helper()
	if code, out := Run(in.t, "status", "--admin", in.AdminAddr(), "--until-caught-up", "--timeout", timeout.String()); code != 0 {
		in.t.Fatalf("not caught up within %v: exit code %d\n%s", timeout, code, out)
	}
}

// WaitSettled waits until kmirror is ready and says that it has caught up.
func (in *Instance) WaitSettled(since time.Time) {
	in.t.Helper()
	kafkatest.Eventually(in.t, ReadyTimeout, in.Ready)
	in.WaitCaughtUp(2 * time.Minute)
	in.t.Logf("caught up after %v", time.Since(since).Round(time.Millisecond))
}

// WaitForwarded waits until the proxy says that n requests are with the brokers.
func (in *Instance) WaitForwarded(n float64) {
	in.t.Helper()
	kafkatest.Eventually(in.t, 10*time.Second, func() error {
		if got := in.Metrics()["kmirror_proxy_requests_in_flight"]; got != n {
			return fmt.Errorf("%v requests in flight, want %v", got, n)
		}
		return nil
	})
}

// WaitLive waits until every partition of topic is live.
func WaitLive(t testing.TB, in *Instance, topic string, partitions int) {
	t.Helper()
	kafkatest.Eventually(t, 30*time.Second, func() error {
		status := in.Status().Mirror
		if status == nil {
			return fmt.Errorf("no mirror in the status")
		}
		live := 0
		for _, s := range status.Streams {
			if s.Topic == topic && s.State == "live" {
				live++
			}
		}
		if live != partitions {
			return fmt.Errorf("%d of %d partitions of %s are live: %+v", live, partitions, topic, status.Streams)
		}
		return nil
	})
}

// Hide adds addresses of brokers that no client may read; those that the source had at first are.
func (in *Instance) Hide(addresses ...string) {
	if in.captured != nil {
		in.captured.Hide(addresses...)
	}
}

// PID is the process ID of the last start.
func (in *Instance) PID() int {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.cmd.Process.Pid
}

// RSS is the process's resident memory in bytes, 0 if it isn't running.
func (in *Instance) RSS() int64 { return memoryOf(in.PID(), "VmRSS:") }

// PeakRSS is the largest resident memory that the running process ever had.
func (in *Instance) PeakRSS() int64 { return memoryOf(in.PID(), "VmHWM:") }

// memoryOf reads a size from a process's status, 0 if it isn't there.
func memoryOf(pid int, name string) int64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, name); ok {
			kib, _ := strconv.ParseInt(strings.Fields(value)[0], 10, 64)
			return kib << 10
		}
	}
	return 0
}

// Log is what the process wrote, over all its starts.
func (in *Instance) Log() string {
	text, err := os.ReadFile(in.logFile)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// LogTail returns the last n lines of Log.
func (in *Instance) LogTail(n int) string {
	lines := strings.Split(strings.TrimRight(in.Log(), "\n"), "\n")
	return fmt.Sprintf("%s, the last of its log:\n%s", in.name, strings.Join(lines[max(0, len(lines)-n):], "\n"))
}

// CountLines counts the lines of text with all of the parts.
func CountLines(text string, parts ...string) (n int) {
	for line := range strings.Lines(text) {
		all := true
		for _, part := range parts {
			all = all && strings.Contains(line, part)
		}
		if all {
			n++
		}
	}
	return n
}

// Run runs a command of kmirror's to its end.
func Run(t testing.TB, args ...string) (exitCode int, output string) {
	t.Helper()
	exitCode, output, _ = RunMeasured(t, args...)
	return exitCode, output
}

// RunMeasured is Run that also tells the largest resident memory that was seen, looking each 10 ms.
func RunMeasured(t testing.TB, args ...string) (exitCode int, output string, peak int64) {
	t.Helper()
	var out bytes.Buffer
	cmd := exec.Command(Program(t), args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := kafkatest.Spawn(cmd); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	look := time.NewTicker(10 * time.Millisecond)
	defer look.Stop()
	for {
		select {
		case err := <-ended:
			if _, failed := errors.AsType[*exec.ExitError](err); err != nil && !failed {
				t.Fatal(err)
			}
			return cmd.ProcessState.ExitCode(), out.String(), peak
		case <-look.C:
			peak = max(peak, memoryOf(cmd.Process.Pid, "VmHWM:"))
		}
	}
}
