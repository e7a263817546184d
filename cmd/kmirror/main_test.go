package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/kafkatest"
)

// childVariable makes the test binary be kmirror.
const childVariable = "KMIRROR_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(childVariable) != "" {
		main()
	}
	os.Exit(m.Run())
}

// process is kmirror as a process of its own.
type process struct {
	cmd    *exec.Cmd
	output syncBuffer
	exited chan struct{}
}

type syncBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

func start(t *testing.T, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(os.Args[0], args...), exited: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), childVariable+"=1")
	p.cmd.Stdout, p.cmd.Stderr = &p.output, &p.output
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = p.cmd.Wait() // the exit code is in ProcessState
		close(p.exited)
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // it may have ended
		<-p.exited
		if t.Failed() {
			t.Logf("kmirror %s:\n%s", strings.Join(args, " "), p.output.String())
		}
	})
	return p
}

// wait returns the exit code.
func (p *process) wait(t *testing.T, limit time.Duration) int {
	t.Helper()
	select {
	case <-p.exited:
	case <-time.After(limit):
		t.Fatalf("kmirror did not end within %v", limit)
	}
	return p.cmd.ProcessState.ExitCode()
}

func (p *process) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// run runs a command of kmirror to its end.
func run(t *testing.T, args ...string) (code int, output string) {
	t.Helper()
	p := start(t, args...)
	code = p.wait(t, time.Minute)
	return code, p.output.String()
}

// freePort returns the address of a free port; the three behind it are free too, for the listeners of the brokers.
func freePort(t *testing.T) string {
	t.Helper()
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(kafkatest.PortBlock(t, 4)))
}

func waitReady(t *testing.T, adminAddress string) {
	t.Helper()
	kafkatest.Eventually(t, 20*time.Second, func() error {
		_, err := adminPage(adminAddress, "/readyz")
		return err
	})
}

// adminPage gets a page of the operator's listener; one that isn't OK is an error with its text.
func adminPage(adminAddress, path string) (string, error) {
	resp, err := http.Get("http://" + adminAddress + path)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = errors.New(string(body))
	}
	return string(body), err
}

// produce writes n records through a bootstrap address.
func produce(t *testing.T, address, topic string, n int) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(address), kgo.DefaultProduceTopic(topic))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for i := range n {
		if err := client.ProduceSync(ctx, &kgo.Record{Value: fmt.Append(nil, "record ", i)}).FirstErr(); err != nil {
			t.Fatalf("record %d: %v", i, err)
		}
	}
}

func TestProduceMirrorStatusVerify(t *testing.T) {
	t.Run("kfake", func(t *testing.T) {
		source, mirror := kafkatest.Fake(t, kafkatest.Brokers(3)), kafkatest.Fake(t)
		produceMirrorStatusVerify(t, source, mirror)
		source.Close()
		if code, output := run(t, "verify", "--patience", "0s", "--source", source.Seeds()[0], "--mirror", mirror.Seeds()[0]); code != 2 {
			t.Errorf("verify = exit code %d: %s, want 2 when a cluster is down", code, output)
		}
	})
	t.Run("kafka", func(t *testing.T) { produceMirrorStatusVerify(t, kafkatest.Real(t), kafkatest.Real(t)) })
}

func produceMirrorStatusVerify(t *testing.T, source, mirror kafkatest.Cluster) {
	kafkatest.CreateTopic(t, source, "orders", 3, 1)
	listen, admin := freePort(t), freePort(t)
	clusters := []string{"--source", fmt.Sprintf("%s , %s,", freePort(t), source.Seeds()[0]), "--mirror", mirror.Seeds()[0], "--topics", "orders"}
	verify := append([]string{"verify", "--patience", "0s"}, clusters...)
	p := start(t, append([]string{"proxy", "--listen", listen, "--admin", admin, "--name", "test"}, clusters...)...)
	waitReady(t, admin)
	produce(t, listen, "orders", 50)
	if code, output := run(t, "status", "--admin", admin, "--until-caught-up", "--timeout", "30s"); code != 0 || !strings.Contains(output, "caught up") {
		t.Fatalf("status = exit code %d: %s, want 0", code, output)
	}
	if code, output := run(t, verify...); code != 0 || !strings.Contains(output, "50 compared") || strings.Contains(output, "shifted") {
		t.Fatalf("verify = exit code %d: %s, want 0 and the same offsets", code, output)
	}
	p.signal(t, syscall.SIGTERM)
	if code := p.wait(t, 30*time.Second); code != 0 {
		t.Fatalf("exit code after SIGTERM = %d, want 0", code)
	}
	lag, err := kadm.NewClient(source.Client(t)).Lag(t.Context(), "kmirror.test")
	if err != nil || lag.Error() != nil || lag["kmirror.test"].Lag.Total() != 0 || len(lag["kmirror.test"].Lag["orders"]) != 3 {
		t.Errorf("lag of group kmirror.test = %+v, %v, want 0 on 3 partitions", lag, err)
	}
	produce(t, source.Seeds()[0], "orders", 1)
	if code, output := run(t, verify...); code != 1 || !strings.Contains(output, "behind by 1 offsets") {
		t.Errorf("verify = exit code %d: %s, want 1 and what is missing", code, output)
	}
}

func TestMirrorThatIsDownAtTheStartDoesNotStopProducers(t *testing.T) {
	source := kafkatest.Fake(t, kafkatest.FakeOpts(kfake.SeedTopics(1, "orders")))
	listen, admin := freePort(t), freePort(t)
	p := start(t, "proxy", "--listen", listen, "--admin", admin, "--source", source.Seeds()[0], "--mirror", freePort(t), "--grace", "10s")
	waitReady(t, admin)
	produce(t, listen, "orders", 20)
	if code, output := run(t, "status", "--admin", admin, "--until-caught-up", "--timeout", "1s"); code != 1 {
		t.Errorf("status = exit code %d: %s, want 1 while the mirror is down", code, output)
	}
	p.signal(t, syscall.SIGTERM)
	if code := p.wait(t, 20*time.Second); code != 0 {
		t.Errorf("exit code = %d, want 0", code)
	}
}

func TestSecondSignalEndsAtOnce(t *testing.T) {
	source := kafkatest.Fake(t, kafkatest.FakeOpts(kfake.SeedTopics(1, "orders")))
	listen, admin := freePort(t), freePort(t)
	p := start(t, "proxy", "--roles", "proxy", "--listen", listen, "--admin", admin, "--source", source.Seeds()[0], "--grace", "10m")
	waitReady(t, admin)
	produce(t, listen, "orders", 1)
	reached, release := make(chan struct{}), make(chan struct{})
	source.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		close(reached)
		<-release
		return nil, nil, false
	})
	client, err := kgo.NewClient(kgo.SeedBrokers(listen), kgo.DefaultProduceTopic("orders"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	client.Produce(ctx, &kgo.Record{Value: []byte("in flight")}, nil)
	<-reached
	p.signal(t, syscall.SIGTERM)
	kafkatest.Eventually(t, 10*time.Second, func() error {
		conn, err := net.Dial("tcp", listen)
		if err != nil {
			return nil
		}
		conn.Close()
		return errors.New("the listener is still open")
	})
	select {
	case <-p.exited:
		t.Error("kmirror ended while a request was in flight")
	default:
	}
	p.signal(t, syscall.SIGTERM)
	if code := p.wait(t, 10*time.Second); code != 1 {
		t.Errorf("exit code = %d, want 1", code)
	}
	cancel()
	close(release)
	client.Close()
}

func TestMistakesEndBeforeListening(t *testing.T) {
	listen := freePort(t)
	file := t.TempDir() + "/kmirror.yaml"
	text := "source: {bootstap: [a:9092]}\nmirror: {bootstrap: [c:9092]}\nproxy: {listen: \"" + listen + "\"}\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, command := range [][]string{{"proxy"}, {"config", "check"}} {
		code, output := run(t, append(command, "--config", file)...)
		if code != 1 || !strings.Contains(output, "source.bootstap: unknown key, did you mean source.bootstrap?") {
			t.Errorf("%v = exit code %d: %s, want 1 and the nearest key", command, code, output)
		}
	}
	if code, output := run(t, "config", "check", "--source=a:1", "--mirror=b:1", "--listen=:0", "--source.sasl.mechanism=PLAIN",
		"--source.sasl.username=u", "--source.sasl.password=hunter2", "--show"); code != 0 || strings.Contains(output, "hunter2") {
		t.Errorf("config check --show = exit code %d: %s, want 0 and no password", code, output)
	}
}

func TestDemoEndsCleanly(t *testing.T) {
	p := start(t, "demo")
	kafkatest.Eventually(t, 20*time.Second, func() error {
		if !strings.Contains(p.output.String(), "after it was sent") {
			return errors.New("nothing arrived on the mirror yet")
		}
		return nil
	})
	p.signal(t, syscall.SIGINT)
	if code := p.wait(t, 20*time.Second); code != 0 {
		t.Errorf("exit code = %d, want 0", code)
	}
}
