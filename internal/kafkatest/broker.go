package kafkatest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// readyTimeout bounds a broker's start. It takes about a second where nothing else runs.
const readyTimeout = 90 * time.Second

// Broker is one process of a RealCluster: a broker and a controller of the quorum. Its port and folder stay the same
// over restarts. Methods are safe for concurrent use with those of other brokers, not of the same.
type Broker struct {
	ID   int32
	Addr string // HOST:PORT of its listener

	listeners map[string]string // HOST:PORT of those that Listener added
	inst      installation
	flags     []string // of the JVM
	dir       string

	mu     sync.Mutex
	config map[string]string
	cmd    *exec.Cmd
	exited chan struct{} // closed when cmd was waited for
	exit   error
}

// Listener is the HOST:PORT of a listener that the option of that name added.
func (b *Broker) Listener(name string) string { return b.listeners[name] }

// DataDir is the folder of its logs: DataDir/TOPIC-PARTITION/*.log.
func (b *Broker) DataDir() string { return filepath.Join(b.dir, "data") }

// LogFile is where the process's output goes, over restarts.
func (b *Broker) LogFile() string { return filepath.Join(b.dir, "broker.log") }

// PID is the process ID of the running broker, 0 when it isn't running.
func (b *Broker) PID() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.running() {
		return 0
	}
	return b.cmd.Process.Pid
}

// SetConfig changes a setting from the next start on.
func (b *Broker) SetConfig(key, value string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.config[key] = value
}

// Stop ends the broker cleanly (SIGTERM) and waits for its end.
func (b *Broker) Stop(t testing.TB) { b.end(t, syscall.SIGTERM) }

// Kill ends the broker with kill -9 and waits for its end.
func (b *Broker) Kill(t testing.TB) { b.end(t, syscall.SIGKILL) }

// Freeze stops the process as SIGSTOP does: its connections stay open and nothing answers.
func (b *Broker) Freeze(t testing.TB) { b.signal(t, syscall.SIGSTOP) }

// Thaw ends a Freeze.
func (b *Broker) Thaw(t testing.TB) { b.signal(t, syscall.SIGCONT) }

// Start starts a broker that was stopped or killed and waits until it serves. After Kill that takes as long as its old
// session with the controller lasts (broker.session.timeout.ms, here 3 s).
func (b *Broker) Start(t testing.TB) {
	t.Helper()
	if err := b.start(); err != nil {
		t.Fatal(err)
	}
	if err := b.waitReady([]int32{b.ID}); err != nil {
		t.Fatal(err)
	}
}

// Restart is Stop and Start.
func (b *Broker) Restart(t testing.TB) {
	t.Helper()
	b.Stop(t)
	b.Start(t)
}

func (b *Broker) end(t testing.TB, sig syscall.Signal) {
	t.Helper()
	b.signal(t, sig)
	if sig == syscall.SIGTERM {
		b.signal(t, syscall.SIGCONT) // a frozen process gets SIGTERM only when it goes on
	}
	select {
	case <-b.exited:
	case <-time.After(readyTimeout):
		t.Errorf("kafkatest: broker %d didn't end by itself within %v\n%s", b.ID, readyTimeout, b.LogTail(20))
		b.signal(t, syscall.SIGKILL)
		<-b.exited
	}
}

func (b *Broker) signal(t testing.TB, sig syscall.Signal) {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.running() {
		t.Errorf("kafkatest: %v for broker %d, which isn't running", sig, b.ID)
		return
	}
	if err := b.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("kafkatest: %v for broker %d: %v", sig, b.ID, err)
	}
}

// kill is Kill without a test, also when nothing runs.
func (b *Broker) kill() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.running() {
		b.cmd.Process.Kill()
		<-b.exited
	}
}

// running says whether the process was started and not waited for. The caller holds mu.
func (b *Broker) running() bool {
	if b.cmd == nil {
		return false
	}
	select {
	case <-b.exited:
		return false
	default:
		return true
	}
}

// start starts the process and waits for nothing.
func (b *Broker) start() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.running() {
		return fmt.Errorf("kafkatest: broker %d is running already", b.ID)
	}
	properties := filepath.Join(b.dir, "server.properties")
	if err := writeProperties(properties, b.config); err != nil {
		return err
	}
	log, err := os.OpenFile(b.LogFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o666)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(b.inst.java, append(slices.Clone(b.flags), "-cp", b.inst.jars, "kafka.Kafka", properties)...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = b.dir, log, log
	if err := Spawn(cmd); err != nil {
		return fmt.Errorf("kafkatest: broker %d: %w", b.ID, err)
	}
	exited := make(chan struct{})
	b.cmd, b.exited = cmd, exited
	go func() {
		b.exit = cmd.Wait()
		close(exited)
	}()
	return nil
}

// waitReady waits until the broker answers and knows the brokers ids as alive.
func (b *Broker) waitReady(ids []int32) error {
	cl, err := kgo.NewClient(kgo.SeedBrokers(b.Addr), kgo.DialTimeout(time.Second))
	if err != nil {
		return err
	}
	defer cl.Close()
	err = poll(readyTimeout, func() error { return b.serves(cl, ids) })
	select {
	case <-b.exited:
		err = fmt.Errorf("it ended: %v", b.exit)
	default:
	}
	if err != nil {
		return fmt.Errorf("kafkatest: broker %d not ready: %w\n%s", b.ID, err, b.LogTail(40))
	}
	return nil
}

func (b *Broker) serves(cl *kgo.Client, ids []int32) error {
	select {
	case <-b.exited:
		return nil // no need to wait on; waitReady says it
	default:
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	req := kmsg.NewPtrMetadataRequest()
	req.Topics = []kmsg.MetadataRequestTopic{}
	resp, err := cl.SeedBrokers()[0].Request(ctx, req)
	if err != nil {
		return err
	}
	var alive []int32
	for _, broker := range resp.(*kmsg.MetadataResponse).Brokers {
		alive = append(alive, broker.NodeID)
	}
	for _, id := range ids {
		if !slices.Contains(alive, id) {
			return fmt.Errorf("it knows brokers %v, want also %d", alive, id)
		}
	}
	return nil
}

// LogTail returns the last n lines of the process's output, without the bodies of stack traces.
func (b *Broker) LogTail(n int) string {
	text, err := os.ReadFile(b.LogFile())
	if err != nil {
		return fmt.Sprintf("broker %d: no log: %v", b.ID, err)
	}
	lines := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	lines = slices.DeleteFunc(lines, func(line string) bool { return strings.HasPrefix(line, "\tat ") })
	lines = lines[max(0, len(lines)-n):]
	return fmt.Sprintf("broker %d, the last of %s:\n%s", b.ID, b.LogFile(), strings.Join(lines, "\n"))
}

func writeProperties(name string, config map[string]string) error {
	var text strings.Builder
	for key, value := range config {
		fmt.Fprintf(&text, "%s=%s\n", key, value)
	}
	return os.WriteFile(name, []byte(text.String()), 0o666)
}
