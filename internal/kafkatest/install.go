package kafkatest

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// errMissing is wrapped by everything that an unprepared machine lacks.
var errMissing = errors.New("real Kafka needs Java 17 or newer (Debian: openjdk-17-jre-headless) and, once, Maven (Debian: maven)")

// installation is what running one of Kafka's classes takes.
type installation struct {
	java    string
	jars    string // class path
	archive string // class data sharing archive; the JVM goes on without it when it doesn't fit
}

// needKafka returns the installation, which the first caller on a machine makes. It skips the test where that can't be,
// and fails it on CI.
func needKafka(t testing.TB) installation {
	t.Helper()
	inst, err := installed()
	switch {
	case err == nil:
	case errors.Is(err, errMissing) && os.Getenv("CI") == "":
		t.Skipf("kafkatest: %v", err)
	default:
		t.Fatalf("kafkatest: %v", err)
	}
	return inst
}

var installed = sync.OnceValues(func() (installation, error) {
	root, err := repositoryRoot()
	if err != nil {
		return installation{}, err
	}
	java, err := exec.LookPath("java")
	if err != nil {
		return installation{}, fmt.Errorf("%w: %w", errMissing, err)
	}
	if java, err = filepath.EvalSymlinks(java); err != nil {
		return installation{}, err
	}
	dir := filepath.Join(root, ".cache", "kafka")
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return installation{}, err
	}
	unlock, err := lockFile(dir + ".lock")
	if err != nil {
		return installation{}, err
	}
	defer unlock()

	pom := filepath.Join(root, "internal", "kafkatest", "kafka", "pom.xml")
	if err := fetchJars(java, pom, dir); err != nil {
		return installation{}, err
	}
	jars, err := filepath.Glob(filepath.Join(dir, "*.jar"))
	if err != nil {
		return installation{}, err
	}
	inst := installation{java: java, jars: strings.Join(jars, ":"), archive: filepath.Join(dir, "classes.jsa")}
	if _, err := os.Stat(inst.archive); err != nil {
		if err := makeArchive(inst); err != nil {
			return installation{}, fmt.Errorf("class archive: %w", err)
		}
	}
	return inst, nil
})

// fetchJars copies the jars that pom names into dir, unless they came from the same pom for the same Java before.
func fetchJars(java, pom, dir string) error {
	text, err := os.ReadFile(pom)
	if err != nil {
		return err
	}
	stamp := fmt.Sprintf("%x %s\n", sha256.Sum256(text), java)
	stampFile := filepath.Join(dir, "stamp")
	if have, err := os.ReadFile(stampFile); err == nil && string(have) == stamp {
		return nil
	}
	mvn, err := exec.LookPath("mvn")
	if err != nil {
		return fmt.Errorf("%w: %w", errMissing, err)
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	fmt.Fprintln(os.Stderr, "kafkatest: fetching Apache Kafka with Maven into .cache/"+filepath.Base(dir)+" (once)")
	cmd := exec.Command(mvn, "-q", "-B", "-f", pom, "dependency:copy-dependencies", "-DincludeScope=runtime", "-DoutputDirectory="+dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("mvn dependency:copy-dependencies: %w\n%s", err, out)
	}
	return os.WriteFile(stampFile, []byte(stamp), 0o666)
}

// Root returns the repository's root folder.
func Root(t testing.TB) string {
	t.Helper()
	root, err := repositoryRoot()
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// repositoryRoot is the nearest folder upwards that has a go.mod.
func repositoryRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("kafkatest: no go.mod in this folder or above")
		}
		dir = parent
	}
}

// lockFile waits for an exclusive lock between processes.
func lockFile(name string) (unlock func(), err error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o666)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", name, err)
	}
	return func() { f.Close() }, nil
}
