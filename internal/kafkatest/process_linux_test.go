package kafkatest

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestProcessesDieWithTheTestProcess kills a test process that had started a sleep.
func TestProcessesDieWithTheTestProcess(t *testing.T) {
	const child = "KMIRROR_TEST_CHILD"
	if os.Getenv(child) != "" {
		sleep := exec.Command("sleep", "1000")
		if err := Spawn(sleep); err != nil {
			t.Fatal(err)
		}
		fmt.Printf("sleeping %d\n", sleep.Process.Pid)
		sleep.Wait()
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestProcessesDieWithTheTestProcess$")
	cmd.Env = append(os.Environ(), child+"=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := Spawn(cmd); err != nil {
		t.Fatal(err)
	}
	pid := 0
	for lines := bufio.NewScanner(out); pid == 0 && lines.Scan(); {
		if text, ok := strings.CutPrefix(lines.Text(), "sleeping "); ok {
			if pid, err = strconv.Atoi(text); err != nil {
				t.Fatal(err)
			}
		}
	}
	if pid == 0 || syscall.Kill(pid, 0) != nil {
		t.Fatalf("no child sleeps (process %d)", pid)
	}
	cmd.Process.Kill()
	cmd.Wait()
	Eventually(t, 10*time.Second, func() error {
		if ended(pid) {
			return nil
		}
		return fmt.Errorf("process %d lives on", pid)
	})
}

// ended says whether a process is gone, or dead and not waited for by whoever inherited it.
func ended(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

func TestPortBlockIsFreeAndReserved(t *testing.T) {
	base := PortBlock(t, 5)
	for port := base; port < base+5; port++ {
		if !portFree(port) {
			t.Errorf("port %d isn't free", port)
		}
		if port >= ephemeralLow() {
			t.Errorf("port %d is one that the kernel hands out, which begin at %d", port, ephemeralLow())
		}
	}
	ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", base))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if portFree(base) {
		t.Errorf("portFree(%d) = true with a listener there", base)
	}
	if reserveBlock(portsFolder(), base+1, 1) {
		t.Errorf("port %d was reserved twice", base+1)
	}
}

func TestFoldersOfDeadProcessesAreRemoved(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	mine, err := newFolder()
	if err != nil {
		t.Fatal(err)
	}
	dead, err := os.MkdirTemp("", folderPattern)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dead+"/"+inUse, nil, 0o666); err != nil { // not locked: its process is gone
		t.Fatal(err)
	}
	if _, err := newFolder(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(mine); err != nil {
		t.Errorf("the folder of a living process: %v", err)
	}
	if _, err := os.Stat(dead); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder of a dead process: %v, want it removed", err)
	}
}
