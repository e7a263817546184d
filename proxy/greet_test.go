package proxy

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pires/go-proxyproto"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"kmirror/protocol"
)

func observed() (*zap.Logger, *observer.ObservedLogs) {
	core, logs := observer.New(zap.DebugLevel)
	return zap.New(core), logs
}

// TestProxyHeaders: with and without a header, in one piece or byte by byte, the requests behind it arrive, and the log names the real client.
func TestProxyHeaders(t *testing.T) {
	client, server := &net.TCPAddr{IP: net.ParseIP("198.51.100.7"), Port: 4321}, &net.TCPAddr{IP: net.ParseIP("203.0.113.1"), Port: 9092}
	client6, server6 := &net.TCPAddr{IP: net.ParseIP("2001:db8::7"), Port: 4321}, &net.TCPAddr{IP: net.ParseIP("2001:db8::1"), Port: 9092}
	header := func(version byte, from, to net.Addr) []byte {
		b, err := proxyproto.HeaderProxyFromAddrs(version, from, to).Format()
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, tt := range []struct {
		name   string
		way    ProxyHeader
		header []byte
		client string // "": its own
		closed string // reason
	}{
		{"off, none", ProxyHeaderOff, nil, "", ""},
		{"off, one", ProxyHeaderOff, header(1, client, server), "", reasonBadFrame},
		{"allowed, none", ProxyHeaderAllowed, nil, "", ""},
		{"allowed, v1", ProxyHeaderAllowed, header(1, client, server), "198.51.100.7:4321", ""},
		{"required, v1, IPv6", ProxyHeaderRequired, header(1, client6, server6), "[2001:db8::7]:4321", ""},
		{"required, v2", ProxyHeaderRequired, header(2, client, server), "198.51.100.7:4321", ""},
		{"required, v2, IPv6", ProxyHeaderRequired, header(2, client6, server6), "[2001:db8::7]:4321", ""},
		{"required, v2, health check", ProxyHeaderRequired, header(2, nil, nil), "", ""},
		{"required, v1, unknown", ProxyHeaderRequired, []byte("PROXY UNKNOWN\r\n"), "", ""},
		{"required, none", ProxyHeaderRequired, nil, "", reasonProxyHeader},
		{"allowed, wrong", ProxyHeaderAllowed, []byte("PROXY TCP4 nonsense\r\n"), "", reasonProxyHeader},
		{"allowed, endless", ProxyHeaderAllowed, bytes.Repeat([]byte("P"), 500), "", reasonProxyHeader},
	} {
		t.Run(tt.name, func(t *testing.T) {
			log, logs := observed()
			s := startBefore(t, script(t, nil), Options{ProxyHeader: tt.way, Logger: log})
			c := dialRaw(t, s.Addr())
			for _, b := range tt.header { // each byte in a segment of its own
				c.Write([]byte{b})
			}
			request := rawRequest(68, 0, 7, []byte("hello"))
			if tt.closed != "" {
				c.Write(request)
				c.wantClosed(tt.name)
				eventually(t, "the reason is logged", func() bool {
					return logs.FilterField(zap.String("reason", tt.closed)).Len() > 0
				})
				return
			}
			c.send(request)
			c.receive()
			own := c.LocalAddr().String()
			c.Close()
			eventually(t, "the end is logged with the client's address", func() bool {
				for _, e := range logs.FilterMessage("connection ended").All() {
					if got := e.ContextMap()["client"]; got == tt.client || tt.client == "" && got == own {
						return true
					}
				}
				return false
			})
		})
	}
}

// TestHealthChecksAreNoWarning: who connects and closes without a byte, as load balancers do, isn't reported as a wrong header or handshake.
func TestHealthChecksAreNoWarning(t *testing.T) {
	cert, _ := certificate(t)
	secure := &tls.Config{Certificates: []tls.Certificate{cert}}
	for name, o := range map[string]Options{
		"header required": {ProxyHeader: ProxyHeaderRequired}, "TLS": {DownstreamTLS: secure}, "both": {ProxyHeader: ProxyHeaderAllowed, DownstreamTLS: secure}, "plain": {},
	} {
		t.Run(name, func(t *testing.T) {
			log, logs := observed()
			o.Logger = log
			s := startBefore(t, script(t, nil), o)
			for _, linger := range []int{-1, 0} { // closed, reset
				c := dialRaw(t, s.Addr())
				c.Conn.(*net.TCPConn).SetLinger(linger)
				c.Close()
			}
			eventually(t, "both ends are logged", func() bool { return logs.FilterMessage("connection ended").Len() == 2 })
			if n := logs.FilterLevelExact(zap.WarnLevel).Len(); n != 0 {
				t.Errorf("%d warnings: %v, want none", n, logs.FilterLevelExact(zap.WarnLevel).All())
			}
			c := dialRaw(t, s.Addr()) // half a word is one
			c.Write([]byte("\x16\x03"))
			c.Close()
			if name != "plain" {
				eventually(t, "a handshake or header that breaks off is warned of", func() bool { return logs.FilterLevelExact(zap.WarnLevel).Len() == 1 })
			}
		})
	}
}

// TestWhatIsNotTLSIsNamed: a listener that speaks TLS says who came with something else, and what that likely is; what a client sent isn't shown.
func TestWhatIsNotTLSIsNamed(t *testing.T) {
	cert, _ := certificate(t)
	secure := &tls.Config{Certificates: []tls.Certificate{cert}}
	for _, tt := range []struct {
		name, bytes string
		o           Options
		cause       string
	}{
		{"Kafka without TLS", string(requestFrame(kmsg.NewPtrApiVersionsRequest(), 1)), Options{DownstreamTLS: secure}, "a Kafka client without TLS"},
		{"HTTP", "GET /?token=s3cret HTTP/1.1\r\n\r\n", Options{DownstreamTLS: secure}, "an HTTP request"},
		{"PROXY header", "PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n", Options{DownstreamTLS: secure}, "a PROXY protocol header"},
		{"junk", "blah blah", Options{DownstreamTLS: secure}, "not a client that speaks TLS"},
		{"nothing more", "\x16", Options{DownstreamTLS: secure, FrameTimeout: 50 * time.Millisecond}, "no TLS handshake in time"},
		{"HTTP where a PROXY header is due", "POST /?token=s3cret HTTP/1.1\r\n\r\n", Options{ProxyHeader: ProxyHeaderRequired}, "PROXY protocol header"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			log, logs := observed()
			tt.o.Logger = log
			s := startBefore(t, script(t, nil), tt.o)
			for range 5 {
				c := dialRaw(t, s.Addr())
				c.Write([]byte(tt.bytes))
				io.Copy(io.Discard, c)
				c.Close()
			}
			eventually(t, "connections are gone", func() bool { return s.connections() == 0 })
			lines := logs.FilterMessage("connection closed").All()
			if len(lines) != 1 || !strings.Contains(fmt.Sprint(lines[0].ContextMap()["error"]), tt.cause) || !strings.Contains(fmt.Sprint(lines[0].ContextMap()["client"]), "127.0.0.1") {
				t.Errorf("logged %v, want one line with the client and %q", lines, tt.cause)
			}
			for _, e := range logs.All() {
				if strings.Contains(e.Message+fmt.Sprint(e.ContextMap()), "s3cret") {
					t.Errorf("the log shows what the client sent: %v", e.ContextMap())
				}
			}
		})
	}
}

// TestSendProxyHeader: the source's side is told the client's address before anything else.
func TestSendProxyHeader(t *testing.T) {
	for _, version := range []int{1, 2} {
		ln := listen(t)
		defer ln.Close()
		got := make(chan string, 16)
		go func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					p := proxyproto.NewConn(c)
					b := make([]byte, 100)
					if n, _ := p.Read(b); n > 0 {
						got <- p.RemoteAddr().String() + " " + string(b[:n])
					}
				}()
			}
		}()
		s := start(t, Options{Seeds: []string{ln.Addr().String()}, SendProxyHeader: version})
		c := dialRaw(t, s.Addr())
		request := rawRequest(68, 0, 7, []byte("hello"))
		c.send(request)
		if want := c.LocalAddr().String() + " " + string(request); <-got != want {
			t.Errorf("version %d: the source got something else than %q", version, want)
		}
	}
}

// TestServerNames: one port, and the TLS server name chooses the broker. Clients are told each broker's name with that port.
func TestServerNames(t *testing.T) {
	cert, _ := certificate(t)
	first, second := script(t, answerAs("first")), script(t, answerAs("second"))
	log, logs := observed()
	s := start(t, Options{
		Seeds: []string{first.ln.Addr().String()}, DownstreamTLS: &tls.Config{Certificates: []tls.Certificate{cert}},
		SNI: SNI{Pattern: "broker-{id}.example.com", Port: 9093}, Advertise: "kafka.example.com", Logger: log,
	})
	learn := func(id int32, b *scripted) {
		at := b.ln.Addr().(*net.TCPAddr)
		k, ok := s.brokers.learn(id, []byte(at.IP.String()), int32(at.Port))
		if !ok || k.host != s.o.SNI.host(id) || k.port != 9093 {
			t.Fatalf("broker %d is at %+v, want its name and port 9093", id, k)
		}
	}
	learn(1, first)
	learn(1001, second)
	for name, want := range map[string]string{
		"kafka.example.com": "first", "broker-1.example.com": "first", "broker-1001.example.com": "second", "BROKER-1001.example.com": "second", "": "first",
		"broker-7.example.com": "", "broker-01.example.com": "", "other.example.com": "",
	} {
		c := dialRaw(t, s.Addr())
		c.Conn = tls.Client(c.Conn, &tls.Config{InsecureSkipVerify: true, ServerName: name})
		c.r.Reset(c.Conn)
		c.Write(rawRequest(68, 0, 7, nil))
		if want == "" {
			if _, err := c.r.ReadByte(); err == nil {
				t.Errorf("server name %q is served, want it refused", name)
			}
			continue
		}
		if got := string(c.receive()[8:]); got != want {
			t.Errorf("server name %q leads to %q, want %q", name, got, want)
		}
	}
	if logs.FilterField(zap.String("reason", reasonServerName)).Len() == 0 {
		t.Error("no log line about a server name that leads nowhere")
	}
	if n := s.Status().Brokers[1]; n.Listen != "broker-1001.example.com:9093" {
		t.Errorf("status says broker 1001 listens on %s", n.Listen)
	}
}

// listed is a BrokerLister whose answer a test changes.
type listed struct {
	mu    sync.Mutex
	list  []Broker
	asked int
}

func (l *listed) Brokers(context.Context) (string, []Broker, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asked++
	return "cluster", slices.Clone(l.list), nil
}

func (l *listed) add(id int32, b *scripted) {
	l.mu.Lock()
	defer l.mu.Unlock()
	at := b.ln.Addr().(*net.TCPAddr)
	l.list = append(l.list, Broker{ID: id, Host: at.IP.String(), Port: int32(at.Port)})
}

func (l *listed) times() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.asked
}

// TestServerNameOfANewBroker: a client that learned of a broker from another replica, before this one did, is served. Names that clients make up
// don't have the source asked for each.
func TestServerNameOfANewBroker(t *testing.T) {
	cert, _ := certificate(t)
	first, second := script(t, answerAs("first")), script(t, answerAs("second"))
	source := &listed{}
	source.add(1, first)
	log, logs := observed()
	s := start(t, Options{
		Seeds: []string{first.ln.Addr().String()}, DownstreamTLS: &tls.Config{Certificates: []tls.Certificate{cert}},
		SNI: SNI{Pattern: "broker-{id}.example.com", Port: 9093}, Advertise: "kafka.example.com", Brokers: source, RefreshEvery: time.Hour, Logger: log,
	})
	eventually(t, "the brokers are listed", s.Ready)
	source.add(2, second)
	ask := func(name string) *rawClient {
		c := dialRaw(t, s.Addr())
		c.Conn = tls.Client(c.Conn, &tls.Config{InsecureSkipVerify: true, ServerName: name})
		c.r.Reset(c.Conn)
		c.Write(rawRequest(68, 0, 7, nil))
		return c
	}
	if got := string(ask("broker-2.example.com").receive()[8:]); got != "second" {
		t.Errorf("the new broker's name leads to %q, want second", got)
	}
	before := source.times()
	for range 20 {
		if _, err := ask("broker-3.example.com").r.ReadByte(); err == nil {
			t.Error("a broker that isn't there is served")
		}
	}
	if n := source.times() - before; n > 5 {
		t.Errorf("the source was asked %d times for 20 clients of a made-up name", n)
	}
	for _, name := range []string{"broker-4.example.com", "other.example.com"} {
		ask(name)
		eventually(t, name+" is named in the log", func() bool {
			return slices.ContainsFunc(logs.FilterField(zap.String("reason", reasonServerName)).All(), func(e observer.LoggedEntry) bool {
				return strings.Contains(e.ContextMap()["error"].(string), name)
			})
		})
	}
}

// answerAs makes a scripted broker answer with its name.
func answerAs(name string) func(net.Conn, protocol.RequestHeader, []byte) {
	return func(c net.Conn, h protocol.RequestHeader, _ []byte) {
		c.Write(rawResponse(h.CorrelationID, []byte(name)))
	}
}

// lockedBuffer is written and read by several goroutines.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) Sync() error { return nil }

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// TestAccessLog: who came, logged in how, wrote where, and why the connection ended; never a secret.
func TestAccessLog(t *testing.T) {
	out := &lockedBuffer{}
	encoder := zapcore.NewJSONEncoder(zapcore.EncoderConfig{MessageKey: "event", EncodeTime: zapcore.RFC3339NanoTimeEncoder, EncodeDuration: zapcore.SecondsDurationEncoder})
	log := zap.New(zapcore.NewCore(encoder, out, zap.DebugLevel))
	main, mainLogs := observed()
	refuse := false
	b := script(t, func(c net.Conn, h protocol.RequestHeader, frame []byte) {
		switch {
		case h.APIKey == protocol.KeyProduce:
			c.Write(produced(h, frame, nil))
		case h.APIKey == protocol.KeySASLAuthenticate && refuse:
			c.Write(rawResponse(h.CorrelationID, []byte{0, 58, 0, 0, 0, 0, 0, 0})) // SASL_AUTHENTICATION_FAILED
		default:
			c.Write(rawResponse(h.CorrelationID, []byte{0, 0, 0, 0, 0, 0, 0, 0}))
		}
	})
	s := startBefore(t, b, Options{Access: log, Logger: main})
	handshake := func(mechanism string) []byte {
		return rawRequest(17, 1, 1, append([]byte{0xff, 0xff, 0, byte(len(mechanism))}, mechanism...)) // no client ID
	}
	token := func(text string) []byte {
		return rawRequest(36, 1, 2, append([]byte{0xff, 0xff, 0, 0, 0, byte(len(text))}, text...))
	}
	login := func(mechanism string, tokens ...string) *rawClient {
		c := dialRaw(t, s.Addr())
		for _, frame := range append([][]byte{handshake(mechanism)}, func() (frames [][]byte) {
			for _, x := range tokens {
				frames = append(frames, token(x))
			}
			return frames
		}()...) {
			c.send(frame)
			c.receive()
		}
		return c
	}
	plain := login("PLAIN", "\x00alice\x00s3cret")
	plain.send(requestFrame(produceTo(11, -1, records(1)), 9))
	plain.receive()
	plain.send(requestFrame(produceTo(11, -1, records(1)), 10)) // told once
	plain.receive()
	scram := login("SCRAM-SHA-256", "n,,n=bo=2Cb,r=n0nce-secret", "c=biws,r=n0nce-secret,p=pr00f-secret")
	refuse = true
	wrong := login("PLAIN", "\x00mallory\x00wr0ng-secret")
	for _, c := range []*rawClient{plain, scram, wrong} {
		c.Close()
	}
	told := accessEvents(t, out, 3)
	want := []string{"PLAIN alice ok", "produce orders", "SCRAM-SHA-256 bo,b ok", "PLAIN mallory SASL_AUTHENTICATION_FAILED"}
	if !slices.Equal(told, want) {
		t.Errorf("the log tells %q, want %q\n%s", told, want, out.String())
	}
	all := out.String()
	for _, e := range mainLogs.All() {
		b, _ := json.Marshal(e.ContextMap())
		all += e.Message + string(b)
	}
	if strings.Contains(all, "secret") || strings.Contains(all, "s3cret") {
		t.Errorf("a log holds a secret:\n%s", all)
	}
}

// TestAccessLogNeverBlocks: a log that takes nothing costs events, which are counted, and no connection waits.
func TestAccessLogNeverBlocks(t *testing.T) {
	stuck := make(chan struct{})
	core := zapcore.NewCore(zapcore.NewJSONEncoder(zapcore.EncoderConfig{}), zapcore.AddSync(writerFunc(func(p []byte) (int, error) { <-stuck; return len(p), nil })), zap.DebugLevel)
	s := startBefore(t, script(t, nil), Options{Access: zap.New(core), Logger: nopLogger})
	t.Cleanup(func() { close(stuck) })
	for s.accessed.Load() < accessQueue/2+10 {
		c := dialRaw(t, s.Addr())
		c.send(rawRequest(68, 0, 7, nil))
		c.receive()
		c.Close()
	}
	eventually(t, "events are dropped", func() bool { return len(s.access.events) == accessQueue })
}

// TestAStuckAccessLogHoldsNothingUp: the end of Run doesn't wait for a log that takes nothing.
func TestAStuckAccessLogHoldsNothingUp(t *testing.T) {
	stuck := make(chan struct{})
	writing := make(chan struct{}, 10)
	core := zapcore.NewCore(zapcore.NewJSONEncoder(zapcore.EncoderConfig{}), zapcore.AddSync(writerFunc(func(p []byte) (int, error) {
		writing <- struct{}{}
		<-stuck
		return len(p), nil
	})), zap.DebugLevel)
	s, err := New(Options{Listen: "127.0.0.1:0", Seeds: []string{script(t, nil).ln.Addr().String()}, Access: zap.New(core)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	c := dialRaw(t, s.Addr())
	c.send(rawRequest(68, 0, 7, nil))
	c.receive()
	c.Close()
	<-writing
	cancel()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Error("Run waits for the access log")
	}
	close(stuck)
	eventually(t, "the log's goroutine has ended", func() bool { return len(s.access.events) == 0 })
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// TestLimits: each limit ends the connections that are over it, with its reason, and no others.
func TestLimits(t *testing.T) {
	ask := func(c *rawClient) { c.send(rawRequest(68, 0, 7, nil)); c.receive() }
	run := func(name string, limits Limits, reason string, over func(t *testing.T, s *Server)) {
		t.Run(name, func(t *testing.T) {
			log, logs := observed()
			s := startBefore(t, script(t, nil), Options{Limits: limits, Logger: log})
			over(t, s)
			eventually(t, "the reason is logged", func() bool { return logs.FilterField(zap.String("reason", reason)).Len() > 0 })
			eventually(t, "connections are gone", func() bool { return s.Status().Connections == 0 })
		})
	}
	run("first request", Limits{FirstRequest: 100 * time.Millisecond}, reasonFirstRequest, func(t *testing.T, s *Server) {
		asked, silent := dialRaw(t, s.Addr()), dialRaw(t, s.Addr())
		ask(asked)
		silent.wantClosed("a client that never asks")
		ask(asked)
		asked.Close()
	})
	run("idle", Limits{Idle: 300 * time.Millisecond}, reasonIdle, func(t *testing.T, s *Server) {
		c := dialRaw(t, s.Addr())
		ask(c)
		c.wantClosed("an idle client")
	})
	run("age", Limits{Age: 300 * time.Millisecond}, reasonAge, func(t *testing.T, s *Server) {
		c := dialRaw(t, s.Addr())
		for {
			if _, err := c.Write(rawRequest(68, 0, 7, nil)); err != nil {
				return
			}
			if _, err := c.r.ReadByte(); err != nil {
				return // between two requests: each that was taken is answered
			}
			c.r.Discard(c.r.Buffered())
		}
	})
	run("unread", Limits{Unread: 300 * time.Millisecond}, reasonUnread, func(t *testing.T, s *Server) {
		c, other := dialRaw(t, s.Addr()), dialRaw(t, s.Addr())
		c.send(rawRequest(68, 0, 7, make([]byte, 30<<20))) // more than the sockets hold
		eventually(t, "the client that reads nothing is let go", func() bool { return s.connections() == 1 })
		ask(other)
		other.Close()
	})
	run("per address", Limits{PerIP: 2}, reasonLimit, func(t *testing.T, s *Server) {
		a, b := dialRaw(t, s.Addr()), dialRaw(t, s.Addr())
		ask(a)
		ask(b)
		dialRaw(t, s.Addr()).wantClosed("a third connection of an address")
		a.Close()
		eventually(t, "there is room again", func() bool { return s.Status().Connections == 1 })
		c := dialRaw(t, s.Addr())
		ask(c)
		b.Close()
		c.Close()
	})
}

// TestPlacesOfAnAddressAreTakenBeforeTheHandshake: who connects and doesn't begin a TLS handshake can't take more places than an address may have, and a load
// balancer's clients are told apart by their PROXY protocol headers.
func TestPlacesOfAnAddressAreTakenBeforeTheHandshake(t *testing.T) {
	cert, pool := certificate(t)
	s := startBefore(t, script(t, nil), Options{Limits: Limits{PerIP: 2}, ProxyHeader: ProxyHeaderRequired, DownstreamTLS: &tls.Config{Certificates: []tls.Certificate{cert}}, Logger: nopLogger})
	from := func(ip string) *rawClient {
		c := dialRaw(t, s.Addr())
		header, err := proxyproto.HeaderProxyFromAddrs(2, &net.TCPAddr{IP: net.ParseIP(ip), Port: 1}, &net.TCPAddr{IP: net.ParseIP("192.0.2.1"), Port: 2}).Format()
		if err != nil {
			t.Fatal(err)
		}
		c.send(header)
		return c
	}
	var silent []*rawClient
	for range 2 {
		silent = append(silent, from("198.51.100.7"))
	}
	taken := func(n int) func() bool {
		return func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.perIP[netip.MustParseAddr("198.51.100.7")] == n
		}
	}
	eventually(t, "both hold a place", taken(2))
	from("198.51.100.7").wantClosed("a third connection of an address")
	other := from("198.51.100.8")
	other.Conn = tls.Client(other.Conn, &tls.Config{RootCAs: pool, ServerName: "127.0.0.1"})
	other.r.Reset(other.Conn)
	other.send(rawRequest(68, 0, 7, []byte("hello")))
	if got := string(other.receive()[8:]); got != "hello" {
		t.Errorf("a client of another address got %q behind its header and TLS handshake, want its echo", got)
	}
	for _, c := range silent {
		c.Close()
	}
	eventually(t, "their places are free", taken(0))
}

// TestUnreadLimitIsForWhatIsUnread: the kernel is told of it while there is something to take. At other times it would take the place of keep-alive's, which
// finds vanished clients sooner.
func TestUnreadLimitIsForWhatIsUnread(t *testing.T) {
	const limit = 10 * time.Minute
	s := startBefore(t, script(t, nil), Options{Limits: Limits{Unread: limit}})
	c := dialRaw(t, s.Addr())
	inForce := func(want time.Duration) func() bool {
		return func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			milliseconds := -1
			for c := range s.conns {
				onSocket(c.client, func(fd int) { milliseconds, _ = unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT) })
			}
			return milliseconds == int(want.Milliseconds())
		}
	}
	eventually(t, "a client that has asked nothing has none", inForce(0))
	request := rawRequest(68, 0, 7, make([]byte, 30<<20)) // more than the sockets hold
	c.send(request)
	eventually(t, "one that doesn't read has it", inForce(limit))
	if got := len(c.receive()); got != len(request)-4 {
		t.Errorf("got %d bytes, want %d", got, len(request)-4)
	}
	eventually(t, "one that has read all has none", inForce(0))
}

// TestMaximumAgesDiffer: connections that begin together don't end together, nor before nine tenths of the limit.
func TestMaximumAgesDiffer(t *testing.T) {
	const age = 15 * time.Minute
	ages := make(map[time.Duration]bool)
	for range 100 {
		a := jittered(age)
		if a > age || a < age*9/10 {
			t.Fatalf("jittered(%v) = %v, want up to a tenth less", age, a)
		}
		ages[a] = true
	}
	if len(ages) < 50 {
		t.Errorf("100 connections have %d different ages", len(ages))
	}
	if a := jittered(0); a != 0 {
		t.Errorf("jittered(0) = %v, want no limit", a)
	}
}

// TestIdleLimitWaitsForAnswers: a request that is held by the broker isn't idleness.
func TestIdleLimitWaitsForAnswers(t *testing.T) {
	release := make(chan struct{})
	b := script(t, func(c net.Conn, h protocol.RequestHeader, _ []byte) {
		<-release
		c.Write(rawResponse(h.CorrelationID, nil))
	})
	s := startBefore(t, b, Options{Limits: Limits{Idle: 100 * time.Millisecond}})
	c := dialRaw(t, s.Addr())
	c.send(rawRequest(11, 0, 7, nil)) // JoinGroup
	select {
	case <-time.After(3 * sweepEvery): // several sweeps, each of which could end it
	case <-t.Context().Done():
	}
	close(release)
	c.receive()
}

// accessEvents waits until so many connections ended in the log, and returns what it tells of log-ins and topics.
func accessEvents(t *testing.T, out *lockedBuffer, ends int) (told []string) {
	t.Helper()
	eventually(t, "the connections ended in the log", func() bool { return strings.Count(out.String(), `"close"`) == ends })
	for line := range strings.Lines(out.String()) {
		var e struct {
			Event, Mechanism, Principal, Outcome, Topic, Reason, Client string
			Connection, Requests                                        int
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		switch e.Event {
		case "authenticate":
			told = append(told, e.Mechanism+" "+e.Principal+" "+e.Outcome)
		case "produce":
			told = append(told, "produce "+e.Topic)
		case "connect", "close":
			if e.Client == "" || e.Connection == 0 || e.Event == "close" && (e.Requests == 0 || e.Reason != reasonClient) {
				t.Errorf("event %+v lacks something", e)
			}
		}
	}
	return told
}
