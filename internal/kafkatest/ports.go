package kafkatest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// Ports lie below the range that the kernel hands out by itself, so no outgoing connection takes one while its broker is
// down. A locked file for each port, held for the life of this process, keeps test processes apart from each other.
const lowestPort = 14000

// PortBlock reserves n neighbouring ports that nothing listens on and returns the first, for listeners that must be found
// again at the same place. They stay reserved until the test process ends.
func PortBlock(t testing.TB, n int) int {
	t.Helper()
	base, err := reservePorts(n)
	if err != nil {
		t.Fatal(err)
	}
	return base
}

func reservePorts(n int) (base int, err error) {
	dir := portsFolder()
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return 0, fmt.Errorf("kafkatest: ports: %w", err)
	}
	span := ephemeralLow() - lowestPort - n
	for range 1000 {
		base := lowestPort + rand.IntN(span)
		if reserveBlock(dir, base, n) {
			return base, nil
		}
	}
	return 0, fmt.Errorf("kafkatest: no %d free ports in [%d, %d)", n, lowestPort, ephemeralLow())
}

// portsFolder holds the lock files of this user.
func portsFolder() string {
	return filepath.Join(os.TempDir(), fmt.Sprintf("kmirror-test-ports-%d", os.Getuid()))
}

// reserveBlock locks and probes [base, base+n). When one is taken it lets go of those before it.
func reserveBlock(dir string, base, n int) bool {
	var locks []*os.File
	for port := base; port < base+n; port++ {
		lock, err := os.OpenFile(filepath.Join(dir, strconv.Itoa(port)), os.O_CREATE|os.O_RDWR, 0o666)
		if err != nil {
			break
		}
		locks = append(locks, lock)
		if syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil || !portFree(port) {
			break
		}
		if port == base+n-1 {
			keepOpen(locks)
			return true
		}
	}
	for _, lock := range locks {
		lock.Close()
	}
	return false
}

func portFree(port int) bool {
	ln, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return false
	}
	ln.Close()
	return true
}

// ephemeralLow is the first port that the kernel chooses for outgoing connections.
func ephemeralLow() int {
	text, _ := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if fields := strings.Fields(string(text)); len(fields) == 2 {
		if low, err := strconv.Atoi(fields[0]); err == nil && low > lowestPort+1000 {
			return low
		}
	}
	return 32768
}
