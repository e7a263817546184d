package kafkatest

import (
	"bytes"
	"os/exec"
	"testing"
	"time"
)

// toolTimeout bounds a Tool.
const toolTimeout = 3 * time.Minute

// Tool runs the main class of one of Kafka's command line tools and returns what it printed. The test fails if it ends
// with an error. For example org.apache.kafka.tools.ProducerPerformance, org.apache.kafka.tools.consumer.ConsoleConsumer,
// org.apache.kafka.tools.consumer.group.ConsumerGroupCommand, kafka.tools.DumpLogSegments.
func Tool(t testing.TB, class string, args ...string) string {
	t.Helper()
	cmd := ToolCommand(t, class, args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := Spawn(cmd); err != nil {
		t.Fatalf("kafkatest: %s: %v", class, err)
	}
	timer := time.AfterFunc(toolTimeout, func() { cmd.Process.Kill() })
	defer timer.Stop()
	if err := cmd.Wait(); err != nil {
		t.Fatalf("kafkatest: %s %q: %v\n%s", class, args, err, out.String())
	}
	return out.String()
}

// ToolCommand returns the command of a Tool to be started with Spawn, for tools that run beside the test. It's killed
// when the test ends.
func ToolCommand(t testing.TB, class string, args ...string) *exec.Cmd {
	t.Helper()
	inst := needKafka(t)
	flags := append(toolFlags(inst, scratch(t)), "-Xmx256m", "-cp", inst.jars, class)
	return exec.CommandContext(t.Context(), inst.java, append(flags, args...)...)
}
