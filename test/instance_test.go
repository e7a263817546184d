package test

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

func TestMain(m *testing.M) { kafkatest.Main(m, removeProgram) }

const (
	readyTimeout = 30 * time.Second
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

// kmirrorPath builds kmirror and returns where it is.
func kmirrorPath(t testing.TB) string {
	t.Helper()
	program.once.Do(func() {
		if program.dir, program.err = os.MkdirTemp("", "kmirror-test-bin-"); program.err != nil {
			return
		}
		program.path = filepath.Join(program.dir, "kmirror")
		out, err := exec.Command("go", "build", "-o", program.path, "../cmd/kmirror").CombinedOutput()
		if err != nil {
			program.err = fmt.Errorf("go build: %w\n%s", err, out)
		}
	})
	if program.err != nil {
		t.Fatal(program.err)
	}
	return program.path
}

func removeProgram() {
	if program.dir != "" {
		os.RemoveAll(program.dir)
	}
}

// instance is kmirror as a process of its own, always on the same ports and under the same name, however often it is
// killed and started. It dies with the test. Its methods are for one goroutine at a time, but for PID and RSS.
type instance struct {
	t       testing.TB
	program string
	name    string
	args    []string
	base    int    // bootstrap listener, then the brokers', then the admin listener
	logFile string // of every start, one after the other

	mu     sync.Mutex
	cmd    *exec.Cmd
	exited chan struct{} // closed once cmd was waited for
}

// startKmirror starts `kmirror proxy` between two clusters and waits until it is ready. args are further flags, and may
// override those that it chooses.
func startKmirror(t testing.TB, source, mirror kafkatest.Cluster, args ...string) *instance {
	t.Helper()
	in := newInstance(t, source, mirror, args...)
	in.Start()
	return in
}

// newInstance is startKmirror without a start.
func newInstance(t testing.TB, source, mirror kafkatest.Cluster, args ...string) *instance {
	t.Helper()
	in := &instance{
		t: t, program: kmirrorPath(t), base: kafkatest.PortBlock(t, brokerPorts+2),
		name:    strings.ToLower(strings.NewReplacer("/", "-", "#", "-").Replace(t.Name())),
		logFile: filepath.Join(t.TempDir(), "kmirror.log"),
	}
	for i, arg := range args {
		if arg == "--name" {
			in.name = args[i+1]
		}
	}
	in.args = append([]string{
		"proxy", "--name", in.name,
		"--source", strings.Join(source.Seeds(), ","), "--mirror", strings.Join(mirror.Seeds(), ","),
		"--listen", in.Seeds()[0], "--broker-port-base", strconv.Itoa(in.base + 1), "--admin", in.AdminAddr(),
	}, args...)
	t.Cleanup(func() {
		in.end()
		if t.Failed() {
			t.Log(in.LogTail(loggedLines))
		}
	})
	return in
}

// Start starts the process and waits until it is ready.
func (in *instance) Start() {
	in.t.Helper()
	if err := in.Launch(); err != nil {
		in.t.Fatal(err)
	}
	kafkatest.Eventually(in.t, readyTimeout, in.Ready)
}

// Launch starts the process and waits for nothing.
func (in *instance) Launch() error {
	log, err := os.OpenFile(in.logFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o666)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(in.program, in.args...)
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
func (in *instance) Ready() error {
	select {
	case <-in.exited:
		return fmt.Errorf("kmirror ended: %v", in.cmd.ProcessState)
	default:
	}
	_, err := in.get("/readyz")
	return err
}

// Signal sends a signal to the process.
func (in *instance) Signal(sig syscall.Signal) {
	in.t.Helper()
	if err := in.cmd.Process.Signal(sig); err != nil {
		in.t.Errorf("%v for kmirror: %v", sig, err)
	}
}

// Kill is kill -9. It returns after the process has ended.
func (in *instance) Kill() {
	in.t.Helper()
	in.Signal(syscall.SIGKILL)
	<-in.exited
}

// Freeze stops the process as SIGSTOP does: its connections stay open and nothing moves.
func (in *instance) Freeze() { in.t.Helper(); in.Signal(syscall.SIGSTOP) }

// Thaw ends a Freeze.
func (in *instance) Thaw() { in.t.Helper(); in.Signal(syscall.SIGCONT) }

// Stop ends the process with SIGTERM and returns its exit code, which the test expects to be 0.
func (in *instance) Stop() int {
	in.t.Helper()
	in.Signal(syscall.SIGTERM)
	code := in.Wait(stopTimeout)
	if code != 0 {
		in.t.Errorf("kmirror's exit code after SIGTERM = %d, want 0", code)
	}
	return code
}

// Wait waits for the process to end by itself and returns its exit code.
func (in *instance) Wait(timeout time.Duration) int {
	in.t.Helper()
	select {
	case <-in.exited:
	case <-time.After(timeout):
		in.t.Fatalf("kmirror didn't end within %v", timeout)
	}
	return in.cmd.ProcessState.ExitCode()
}

// end kills what runs, frozen or not.
func (in *instance) end() {
	if in.cmd != nil {
		_ = in.cmd.Process.Kill() // it may have ended
		<-in.exited
	}
}

// Seeds is what producers bootstrap from.
func (in *instance) Seeds() []string { return []string{loopback(in.base)} }

// BrokerAddr is the listener that stands for a broker of the source.
func (in *instance) BrokerAddr(id int32) string { return loopback(in.base + 1 + int(id)) }

// AdminAddr is the HOST:PORT of /metrics and the rest.
func (in *instance) AdminAddr() string { return loopback(in.base + 1 + brokerPorts) }

// Group is the consumer group on the source.
func (in *instance) Group() string { return "kmirror." + in.name }

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// get asks the admin listener; any answer but 200 is an error.
func (in *instance) get(path string) ([]byte, error) {
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

// instanceStatus is what tests read of /api/status.
type instanceStatus struct {
	Ready    bool              `json:"ready"`
	NotReady string            `json:"not_ready"`
	Mirror   *forwarder.Status `json:"mirror"`
}

// Status asks /api/status.
func (in *instance) Status() instanceStatus {
	in.t.Helper()
	s, err := in.status()
	if err != nil {
		in.t.Fatal(err)
	}
	return s
}

func (in *instance) status() (s instanceStatus, err error) {
	body, err := in.get("/api/status")
	if err == nil {
		err = json.Unmarshal(body, &s)
	}
	return s, err
}

// Metrics returns every sample of /metrics by its name with labels, as in kmirror_forwarder_partitions{state="live"}.
func (in *instance) Metrics() map[string]float64 {
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
func (in *instance) WaitCaughtUp(timeout time.Duration) {
	in.t.Helper()
	if code, out := runKmirror(in.t, "status", "--admin", in.AdminAddr(), "--until-caught-up", "--timeout", timeout.String()); code != 0 {
		in.t.Fatalf("not caught up within %v: exit code %d\n%s", timeout, code, out)
	}
}

// PID is the process ID of the last start.
func (in *instance) PID() int {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.cmd.Process.Pid
}

// RSS is the process's resident memory in bytes, 0 if it isn't running.
func (in *instance) RSS() int64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", in.PID()))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, _ := strconv.ParseInt(strings.Fields(value)[0], 10, 64)
			return kib << 10
		}
	}
	return 0
}

// Log is what the process wrote, over all its starts.
func (in *instance) Log() string {
	text, err := os.ReadFile(in.logFile)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// LogTail returns the last n lines of Log.
func (in *instance) LogTail(n int) string {
	lines := strings.Split(strings.TrimRight(in.Log(), "\n"), "\n")
	return fmt.Sprintf("%s, the last of its log:\n%s", in.name, strings.Join(lines[max(0, len(lines)-n):], "\n"))
}

// runKmirror runs a command of kmirror's to its end.
func runKmirror(t testing.TB, args ...string) (exitCode int, output string) {
	t.Helper()
	out, err := exec.Command(kmirrorPath(t), args...).CombinedOutput()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return exit.ExitCode(), string(out)
	}
	if err != nil {
		t.Fatal(err)
	}
	return 0, string(out)
}
