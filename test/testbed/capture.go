package testbed

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"kmirror/internal/kafkatest"
)

// Capture reads every byte that leaves some ports of this machine over its loopback, and looks for addresses that must not be there. It sits beside the
// connections, not in them, and needs CAP_NET_RAW. What TLS hides it can't see: clients that speak it read through Watch.
type Capture struct {
	fd    int
	stop  chan struct{}
	ended sync.WaitGroup

	mu      sync.Mutex
	secrets []secret
	flows   map[flow][]byte // the last bytes of each, since an address may be cut in two
	found   []string
	bytes   int64
}

// watchedConn is a client's connection of whose bytes, as the client reads them, each is searched.
type watchedConn struct {
	net.Conn
	c *Capture
	f flow
}

// Watch returns conn with a Read that searches.
func (c *Capture) Watch(conn net.Conn) net.Conn {
	port := func(a net.Addr) uint16 { return uint16(a.(*net.TCPAddr).Port) }
	return watchedConn{conn, c, flow{port(conn.RemoteAddr()), port(conn.LocalAddr())}}
}

func (w watchedConn) Read(b []byte) (int, error) {
	n, err := w.Conn.Read(b)
	w.c.search(w.f, b[:n])
	return n, err
}

// flow is one direction of a connection.
type flow struct{ from, to uint16 }

// secret is an address in the forms that answers can hold it in.
type secret struct {
	address string
	wire    []byte // host and port as the protocol has them, without the host's length
	text    []byte
}

// StartCapture captures what leaves the ports.
func StartCapture(ports ...int) (*Capture, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	c := &Capture{fd: fd, stop: make(chan struct{}), flows: make(map[flow][]byte)}
	if err := c.open(ports); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("capture: %w", err)
	}
	c.ended.Go(c.run)
	return c, nil
}

func (c *Capture) open(ports []int) error {
	program, err := bpf.Assemble(fromPorts(ports))
	if err != nil {
		return err
	}
	filter := make([]unix.SockFilter, len(program))
	for i, in := range program {
		filter[i] = unix.SockFilter{Code: in.Op, Jt: in.Jt, Jf: in.Jf, K: in.K}
	}
	if err := unix.SetsockoptSockFprog(c.fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}); err != nil {
		return err
	}
	if err := unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 256<<20); err != nil {
		return err
	}
	loopback, err := net.InterfaceByName("lo")
	if err != nil {
		return err
	}
	wait := unix.NsecToTimeval(int64(50 * time.Millisecond))
	if err := unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
		return err
	}
	return unix.Bind(c.fd, &unix.SockaddrLinklayer{Protocol: bigEndian(unix.ETH_P_ALL), Ifindex: loopback.Index})
}

func bigEndian(n uint16) uint16 { return n<<8 | n>>8 }

// fromPorts takes TCP from one of the ports, once: loopback shows each packet as it leaves and as it arrives.
func fromPorts(ports []int) []bpf.Instruction {
	const comparisons = 13 // where they begin
	drop := func(from int) uint8 { return uint8(comparisons + len(ports) - from - 1) }
	program := []bpf.Instruction{
		bpf.LoadExtension{Num: bpf.ExtType},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.PACKET_OUTGOING, SkipTrue: drop(1)},
		bpf.LoadExtension{Num: bpf.ExtProto},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.ETH_P_IPV6, SkipTrue: 6},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.ETH_P_IP, SkipTrue: drop(4)},
		bpf.LoadAbsolute{Off: 9, Size: 1}, // protocol
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.IPPROTO_TCP, SkipTrue: drop(6)},
		bpf.LoadMemShift{Off: 0},          // length of the IP header
		bpf.LoadIndirect{Off: 0, Size: 2}, // source port
		bpf.Jump{Skip: 3},
		bpf.LoadAbsolute{Off: 6, Size: 1}, // next header of IPv6
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.IPPROTO_TCP, SkipTrue: drop(11)},
		bpf.LoadAbsolute{Off: ipv6Header, Size: 2}, // source port
	}
	for i, port := range ports {
		program = append(program, bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(port), SkipTrue: uint8(len(ports) - i)})
	}
	return append(program, bpf.RetConstant{Val: 0}, bpf.RetConstant{Val: 1 << 18})
}

const ipv6Header = 40

// Hide adds host:port addresses that must not be seen.
func (c *Capture) Hide(addresses ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, address := range addresses {
		host, port, err := net.SplitHostPort(address)
		n, atoiErr := strconv.Atoi(port)
		if err != nil || atoiErr != nil || slices.ContainsFunc(c.secrets, func(s secret) bool { return s.address == address }) {
			continue
		}
		c.secrets = append(c.secrets, secret{address, binary.BigEndian.AppendUint32([]byte(host), uint32(n)), []byte(address)})
	}
}

func (c *Capture) run() {
	packet := make([]byte, 1<<18)
	for {
		n, _, err := unix.Recvfrom(c.fd, packet, 0)
		switch err {
		case nil:
			c.look(packet[:n])
		case syscall.EAGAIN, syscall.EINTR: // nothing more is there
			select {
			case <-c.stop:
				return
			default:
			}
		default:
			return
		}
	}
}

// look searches one IP packet.
func (c *Capture) look(packet []byte) {
	if len(packet) < ipv6Header {
		return
	}
	tcp := packet[int(packet[0]&15)*4:]
	if packet[0]>>4 == 6 {
		tcp = packet[ipv6Header:]
	}
	if len(tcp) < 20 || len(tcp) < int(tcp[12]>>4)*4 {
		return
	}
	c.search(flow{binary.BigEndian.Uint16(tcp), binary.BigEndian.Uint16(tcp[2:])}, tcp[int(tcp[12]>>4)*4:])
}

// search looks for what must not be there in the next bytes of a flow.
func (c *Capture) search(f flow, payload []byte) {
	if len(payload) == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.bytes += int64(len(payload))
	const kept = 300 // more than an address has
	seen := append(c.flows[f], payload...)
	for _, s := range c.secrets {
		if i := bytes.Index(seen, s.wire); i >= 0 {
			c.report(f, s, seen, i)
		}
		for at := 0; ; {
			i := bytes.Index(seen[at:], s.text)
			if i < 0 {
				break
			}
			// A broker's own settings (DescribeConfigs: listeners) hold it with a scheme.
			if at += i; !bytes.HasSuffix(seen[:at], []byte("://")) {
				c.report(f, s, seen, at)
				break
			}
			at += len(s.text)
		}
	}
	c.flows[f] = append(c.flows[f][:0], seen[max(0, len(seen)-kept):]...)
}

func (c *Capture) report(f flow, s secret, seen []byte, at int) {
	if len(c.found) < 10 {
		c.found = append(c.found, fmt.Sprintf("%s in what port %d sent to port %d: %q", s.address, f.from, f.to, seen[max(0, at-40):min(len(seen), at+40)]))
	}
}

// Done ends the capture and returns how many bytes it saw, how many packets came faster than it could read, and what of the bytes must not be there.
func (c *Capture) Done() (seen, missed int64, found []string) {
	close(c.stop)
	c.ended.Wait()
	if stats, err := unix.GetsockoptTpacketStats(c.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS); err == nil {
		missed = int64(stats.Drops)
	}
	unix.Close(c.fd)
	return c.bytes, missed, c.found
}

// capture watches all that this kmirror's clients read, for the length of the test.
func (in *Instance) capture(t testing.TB, source kafkatest.Cluster) {
	ports := in.clientPorts()
	if far := in.base + 1 + 1001; !slices.Contains(PortsOf(t, source.Seeds()), far) {
		ports = append(ports, far) // a broker with a far ID, in some tests
	}
	c, err := StartCapture(ports...)
	if err != nil {
		t.Logf("what clients read isn't searched for brokers' addresses: %v", err)
		return
	}
	c.Hide(source.Seeds()...)
	c.Hide(source.Listeners()...)
	in.captured = c
	t.Cleanup(func() {
		in.end()
		seen, missed, found := c.Done()
		if len(found) > 0 {
			t.Errorf("clients were shown the brokers' own addresses:\n%q", found)
		}
		if missed > 0 {
			t.Errorf("%d packets that clients read came faster than they could be searched for brokers' addresses", missed)
		}
		t.Logf("%d bytes that clients read were searched for brokers' addresses", seen)
	})
}

// clientPorts are the ports that clients of this kmirror come to, as its flags have them.
func (in *Instance) clientPorts() (ports []int) {
	last := func(flag string) (value string) {
		for i, arg := range in.Args {
			if arg == flag {
				value = in.Args[i+1]
			}
		}
		return value
	}
	if _, port, err := net.SplitHostPort(last("--listen")); err == nil {
		n, _ := strconv.Atoi(port) // kmirror checks it
		ports = append(ports, n)
	}
	if base, _ := strconv.Atoi(last("--broker-port-base")); base != 0 { // all behind one port otherwise
		for id := range brokerPorts {
			ports = append(ports, base+id)
		}
	}
	return ports
}

// TLS makes a franz-go client speak TLS, and searches what it reads.
func (in *Instance) TLS(config *tls.Config) kgo.Opt {
	return kgo.Dialer(func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := (&tls.Dialer{Config: config}).DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return in.Watch(conn), nil
	})
}

// Watch returns a client's connection whose bytes are searched as they are read, for those that the network shows encrypted.
func (in *Instance) Watch(conn net.Conn) net.Conn {
	if in.captured == nil {
		return conn
	}
	return in.captured.Watch(conn)
}
