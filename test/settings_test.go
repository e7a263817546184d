package test

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// TestServerLists is case C33: blanks and dead servers in the list delay nothing, and are named.
func TestServerLists(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 1, 1)
	closed := fmt.Sprintf("127.0.0.1:%d", kafkatest.PortBlock(t, 1))
	const unresolvable = "no-such-host.invalid:9092"
	t.Run("one good", func(t *testing.T) {
		in := testbed.Start(t, source, mirror, "--topics", topic, "--source", fmt.Sprintf(" %s , %s, %s ,", unresolvable, closed, source.Seeds()[0]))
		testbed.Write(t, in.Seeds(), topic, "good", 10)
		kafkatest.WaitEqual(t, source, mirror, topic, 30*time.Second, kafkatest.SameOffsets())
		for _, dead := range []string{unresolvable, closed} {
			if n := testbed.CountLines(in.Log(), "bootstrap broker can't be reached", dead); n != 1 {
				t.Errorf("%d warnings about %s, want 1", n, dead)
			}
		}
	})
	t.Run("none good", func(t *testing.T) {
		base := kafkatest.PortBlock(t, 1)
		begun := time.Now()
		code, out := testbed.Run(t, "proxy", "--source", unresolvable+","+closed, "--mirror", mirror.Seeds()[0],
			"--listen", fmt.Sprintf("127.0.0.1:%d", base), "--admin.listen=", "--topics", topic)
		if code == 0 || time.Since(begun) > 40*time.Second {
			t.Errorf("exit code %d after %v, want a failure within half a minute", code, time.Since(begun))
		}
		last := out[strings.LastIndex(strings.TrimSpace(out), "kmirror:")+1:]
		for _, dead := range []string{unresolvable, closed} {
			if !strings.Contains(last, dead) {
				t.Errorf("the failure doesn't name %s:\n%s", dead, out)
			}
		}
	})
}

// TestMistakesEndTheStart is case C33: a mistake in the settings is named with the nearest valid key, before anything listens.
func TestMistakesEndTheStart(t *testing.T) {
	listen := fmt.Sprintf("127.0.0.1:%d", kafkatest.PortBlock(t, 1))
	for name, mistake := range map[string]struct{ text, want string }{
		"misspelt key": {"sorce: {bootstrap: [a:9092]}\nmirror: {bootstrap: [b:9092]}\n", "sorce: unknown key, did you mean source?"},
		"wrong type":   {"source: {bootstrap: [a:9092]}\nmirror: {bootstrap: [b:9092]}\ngrace: soon\n", "grace"},
		"no mirror":    {"source: {bootstrap: [a:9092]}\n", "mirror.bootstrap"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "kmirror.yaml")
			if err := os.WriteFile(file, []byte(mistake.text+"proxy: {listen: \""+listen+"\"}\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			code, out := testbed.Run(t, "proxy", "--config", file)
			if code == 0 || !strings.Contains(out, mistake.want) || strings.Contains(out, "proxy listens") {
				t.Errorf("exit code %d, want a failure that names %s before it listens:\n%s", code, mistake.want, out)
			}
		})
	}
}

// TestMirrorDownAtStart is case C33: producers don't depend on the mirror, at the start either.
func TestMirrorDownAtStart(t *testing.T) {
	source, _ := kafkatest.Shared(t)
	mirror := kafkatest.Real(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 2, 1)
	mirror.Stop(t)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	testbed.Write(t, in.Seeds(), topic, "early", 1000)
	mirror.Start(t)
	in.WaitCaughtUp(time.Minute)
	kafkatest.WaitEqual(t, source, mirror, topic, 30*time.Second, kafkatest.SameOffsets())
}

// TestReadyOnlyWithAllBrokers: an instance is ready once the port of every broker is bound, not before.
func TestReadyOnlyWithAllBrokers(t *testing.T) {
	source := kafkatest.Real(t)
	_, mirror := kafkatest.Shared(t)
	source.Stop(t)
	in := testbed.New(t, source, mirror, "--topics", testbed.TopicName(t))
	if err := in.Launch(); err != nil {
		t.Fatal(err)
	}
	kafkatest.Eventually(t, 10*time.Second, func() error {
		conn, err := net.Dial("tcp", in.AdminAddr())
		if err == nil {
			conn.Close()
		}
		return err
	})
	if code, body := getPage(t, in, "/readyz"); code == 200 {
		t.Errorf("GET /readyz = %d %q while the source is down, want 503", code, body)
	}
	if code, _ := getPage(t, in, "/healthz"); code != 200 {
		t.Errorf("GET /healthz = %d while the source is down, want 200", code)
	}
	source.Start(t)
	kafkatest.Eventually(t, 30*time.Second, func() error {
		if code, body := getPage(t, in, "/readyz"); code != 200 {
			return fmt.Errorf("GET /readyz = %d %q", code, body)
		}
		return nil
	})
	conn, err := net.Dial("tcp", in.BrokerAddr(1))
	if err != nil {
		t.Fatalf("ready, but the broker's port isn't bound: %v", err)
	}
	conn.Close()
}
