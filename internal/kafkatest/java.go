package kafkatest

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

var errNoCompiler = errors.New("a Java program needs javac (Debian: openjdk-17-jdk-headless); `make deps` installs it")

// JavaProgram is a program of the repository's own that uses Kafka's jars.
type JavaProgram struct {
	inst    installation
	classes string // folder
}

// CompileJava compiles every source in a folder. It skips the test where there is no compiler, and fails it on CI.
func CompileJava(t testing.TB, sources string) JavaProgram {
	t.Helper()
	return compileJava(t, needKafka(t), sources)
}

func compileJava(t testing.TB, inst installation, sources string) JavaProgram {
	t.Helper()
	p := JavaProgram{inst: inst, classes: t.TempDir()}
	files, err := filepath.Glob(filepath.Join(sources, "*.java"))
	if err != nil || len(files) == 0 {
		t.Fatalf("kafkatest: no Java sources in %s: %v", sources, err)
	}
	javac, err := exec.LookPath("javac")
	if err != nil {
		if os.Getenv("CI") == "" {
			t.Skipf("kafkatest: %v", errNoCompiler)
		}
		t.Fatalf("kafkatest: %v", errNoCompiler)
	}
	args := append([]string{"-J-XX:TieredStopAtLevel=1", "-nowarn", "-Xlint:-removal", "-proc:none", "-cp", p.inst.jars, "-d", p.classes}, files...)
	if out, err := exec.CommandContext(t.Context(), javac, args...).CombinedOutput(); err != nil {
		t.Fatalf("kafkatest: javac: %v\n%s", err, out)
	}
	return p
}

// Command returns the command that runs a class of the program. It's killed when the test ends.
func (p JavaProgram) Command(t testing.TB, class string, args ...string) *exec.Cmd {
	flags := append(toolFlags(p.inst, scratch(t)), "-Xmx256m", "-cp", p.inst.jars+":"+p.classes, class)
	return exec.CommandContext(t.Context(), p.inst.java, append(flags, args...)...)
}
