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
	for _, s := range socketsOf(append(childrenOf(w.pid), w.pid)...) {
		if s.remotePort != 0 {
			w.ports[s.remotePort] = true
		}
	}
}

// socket is a TCP socket as /proc/net/tcp has it.
type socket struct {
	remotePort int
	state      string // two hexadecimal digits, as in the kernel's tcp_states.h
}

const closeWait = "08"

// socketsOf lists the TCP sockets of processes.
func socketsOf(pids ...int) (sockets []socket) {
	inodes := map[string]bool{}
	for _, pid := range pids {
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
			if port, err := strconv.ParseInt(hex, 16, 32); err == nil {
				sockets = append(sockets, socket{int(port), fields[3]})
			}
		}
		f.Close()
	}
	return sockets
}

// CloseWaits is how many sockets of the process wait for it to close them: the peer did long ago.
func (in *Instance) CloseWaits() (n int) {
	for _, s := range socketsOf(in.PID()) {
		if s.state == closeWait {
			n++
		}
	}
	return n
}

// Descriptors is how many file descriptors the process has open.
func (in *Instance) Descriptors() int {
	in.t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", in.PID()))
	if err != nil {
		in.t.Fatal(err)
	}
	return len(entries)
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
