package security

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/pires/go-proxyproto"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// dialedNames dials the proxy whatever the host's name, as DNS would make it, and notes the names.
type dialedNames struct {
	port  string
	tls   *tls.Config
	watch func(net.Conn) net.Conn

	mu    sync.Mutex
	hosts []string
}

func (d *dialedNames) dial(ctx context.Context, network, address string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil || port != d.port {
		return nil, fmt.Errorf("address %s isn't at port %s (%v)", address, d.port, err)
	}
	d.mu.Lock()
	d.hosts = append(d.hosts, host)
	d.mu.Unlock()
	config := d.tls.Clone()
	config.ServerName = host
	conn, err := (&tls.Dialer{Config: config}).DialContext(ctx, network, "127.0.0.1:"+d.port)
	if err != nil {
		return nil, err
	}
	return d.watch(conn), nil
}

func (d *dialedNames) seen(host string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Contains(d.hosts, host)
}

// TestProxyProtocolAndIPv6: clients behind a load balancer that writes PROXY protocol headers, over IPv6.
func TestProxyProtocolAndIPv6(t *testing.T) {
	if ln, err := net.Listen("tcp", "[::1]:0"); err != nil {
		t.Fatalf("this machine has no IPv6 loopback: %v", err)
	} else {
		ln.Close()
	}
	source, mirror := kafkatest.Shared(t)
	kafkatest.CreateTopic(t, source, "six", 3, 1)
	base := kafkatest.PortBlock(t, 6)
	listen := fmt.Sprintf("[::1]:%d", base)
	in := testbed.New(t, source, mirror, "--topics", "six", "--listen", listen, "--broker-port-base", fmt.Sprint(base+1), "--proxy.proxy_protocol", "required",
		"--log.level", "debug")
	in.Start()
	client := &net.TCPAddr{IP: net.ParseIP("2001:db8::7"), Port: 4321}
	var mu sync.Mutex
	var dialed []string
	behind := kgo.Dialer(func(ctx context.Context, network, address string) (net.Conn, error) {
		mu.Lock()
		dialed = append(dialed, address)
		mu.Unlock()
		c, err := (&net.Dialer{}).DialContext(ctx, network, address)
		if err == nil {
			_, err = proxyproto.HeaderProxyFromAddrs(2, client, c.RemoteAddr()).WriteTo(c)
		}
		return c, err
	})
	testbed.Write(t, []string{listen}, "six", "n", 300, behind)
	in.WaitCaughtUp(time.Minute)
	kafkatest.WaitEqual(t, source, mirror, "six", time.Minute, kafkatest.SameOffsets())
	mu.Lock()
	defer mu.Unlock()
	if !slices.Contains(dialed, fmt.Sprintf("[::1]:%d", base+2)) {
		t.Errorf("the client dialled %v, want broker 1 at [::1]:%d among them", dialed, base+2)
	}
	cl := testbed.NewWriter(t, []string{listen}, "", kgo.RetryTimeout(time.Second)) // without a header
	if _, err := kadm.NewClient(cl).BrokerMetadata(t.Context()); err == nil {
		t.Error("a client without a header is served")
	}
}
