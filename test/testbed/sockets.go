package testbed

import (
	"bufio"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// SocketWatch notes which TCP ports a process and its children have connections to, as the kernel tells.
type SocketWatch struct {
	pid   int
	stop  chan struct{}
	ended sync.WaitGroup
	ports map[int]bool // remote ports seen
}

// WatchSockets looks every few milliseconds until Done is called. Kafka clients keep their connections for as long as they live; a short
// life may be missed where the machine is busy, so conclusions are drawn from several.
func WatchSockets(pid int) *SocketWatch {
	w := &SocketWatch{pid: pid, stop: make(chan struct{}), ports: map[int]bool{}}
	w.ended.Go(func() {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for {
			w.look()
			select {
			case <-w.stop:
				return
			case <-tick.C:
			}
		}
	})
	return w
}

// Done ends the watch and returns the ports that were seen, ascending.
func (w *SocketWatch) Done() []int {
	close(w.stop)
	w.ended.Wait()
	return slices.Sorted(maps.Keys(w.ports))
}

func (w *SocketWatch) look() {
	inodes := map[string]bool{}
	for _, pid := range append(childrenOf(w.pid), w.pid) {
		addSocketInodes(pid, inodes)
	}
	for _, table := range []string{"tcp", "tcp6"} {
		// Any process of this network namespace shows the same table.
		f, err := os.Open("/proc/net/" + table)
		if err != nil {
			continue
		}
		lines := bufio.NewScanner(f)
		for lines.Scan() {
			fields := strings.Fields(lines.Text())
			if len(fields) < 10 || !inodes[fields[9]] {
				continue
			}
			_, hex, _ := strings.Cut(fields[2], ":")
			if port, err := strconv.ParseInt(hex, 16, 32); err == nil && port != 0 {
				w.ports[int(port)] = true
			}
		}
		f.Close()
	}
}

func addSocketInodes(pid int, inodes map[string]bool) {
	links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, link := range links {
		target, err := os.Readlink(link)
		if inode, ok := strings.CutPrefix(target, "socket:["); err == nil && ok {
			inodes[strings.TrimSuffix(inode, "]")] = true
		}
	}
}

func childrenOf(pid int) (children []int) {
	lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, list := range lists {
		text, _ := os.ReadFile(list)
		for _, field := range strings.Fields(string(text)) {
			if child, err := strconv.Atoi(field); err == nil {
				children = append(append(children, child), childrenOf(child)...)
			}
		}
	}
	return children
}

// PortsOf returns the ports of addresses.
func PortsOf(t testing.TB, addresses []string) (ports []int) {
	t.Helper()
	for _, address := range addresses {
		_, text, err := net.SplitHostPort(address)
		port, atoiErr := strconv.Atoi(text)
		if err != nil || atoiErr != nil {
			t.Fatalf("address %q has no port", address)
		}
		ports = append(ports, port)
	}
	return ports
}

// WantOnlyProxy fails if a client had a connection to one of the source's brokers itself, or none to the proxy.
func WantOnlyProxy(t testing.TB, client string, seen []int, brokers, proxy []string) {
	t.Helper()
	for _, port := range PortsOf(t, brokers) {
		if slices.Contains(seen, port) {
			t.Errorf("%s had a connection to port %d, which is a broker's own", client, port)
		}
	}
	if !slices.ContainsFunc(PortsOf(t, proxy), func(port int) bool { return slices.Contains(seen, port) }) {
		t.Errorf("%s had connections to ports %v, none of them the proxy's %v", client, seen, proxy)
	}
}
