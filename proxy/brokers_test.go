package proxy

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/big"
	mathrand "math/rand"
	"net"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kmirror/protocol"
)

// fixed lists what a test says.
type fixed struct {
	mu   sync.Mutex
	list []Broker
	err  error
}

func (f *fixed) Brokers(context.Context) (string, []Broker, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return "cluster", f.list, f.err
}

func (f *fixed) set(list ...Broker) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.list, f.err = list, nil
}

// freePorts returns a base of which base+1 to base+n are free.
func freePorts(t *testing.T, n int) int {
	t.Helper()
	for range 100 {
		base := 20_000 + mathrand.Intn(10_000)
		free := true
		for i := range n {
			ln, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(base+1+i)))
			if err != nil {
				free = false
				break
			}
			ln.Close()
		}
		if free {
			return base
		}
	}
	t.Fatal("no free ports")
	return 0
}

// metadataBroker is a broker that names these brokers in Metadata, and echoes all else with its name.
func metadataBroker(t *testing.T, name string, brokers func() []Broker) *scripted {
	return script(t, func(c net.Conn, h protocol.RequestHeader, frame []byte) {
		if h.APIKey == protocol.KeyMetadata {
			c.Write(responseFrame(metadata(h.APIVersion, brokers()...), h.CorrelationID))
			return
		}
		c.Write(rawResponse(h.CorrelationID, []byte(name)))
	})
}

// askMetadata returns the brokers that a client is told.
func askMetadata(t *testing.T, c *rawClient) map[int32]string {
	t.Helper()
	request := kmsg.NewPtrMetadataRequest()
	request.Version = 9
	c.send(requestFrame(request, 5))
	told := make(map[int32]string)
	for _, b := range decode(t, kmsg.NewPtrMetadataResponse(), 9, c.receive()).Brokers {
		told[b.NodeID] = net.JoinHostPort(b.Host, strconv.Itoa(int(b.Port)))
	}
	return told
}

// whoIs returns the name of the broker behind an address.
func whoIs(t *testing.T, address string) string {
	t.Helper()
	a, err := net.ResolveTCPAddr("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	c := dialRaw(t, a)
	c.send(rawRequest(68, 0, 1, nil))
	return string(c.receive()[8:])
}

func TestANewBrokerIsReachableBeforeItIsNamed(t *testing.T) {
	var list []Broker
	one := metadataBroker(t, "one", func() []Broker { return list })
	two := metadataBroker(t, "two", func() []Broker { return list })
	list = []Broker{brokerAt(1, one.ln), brokerAt(2, two.ln)}
	s := startBefore(t, one, Options{})
	told := askMetadata(t, dialRaw(t, s.Addr()))
	for id, name := range map[int32]string{1: "one", 2: "two"} {
		if got := whoIs(t, told[id]); got != name {
			t.Errorf("the address of broker %d leads to %q, want %q", id, got, name)
		}
	}
}

func TestABrokerWithoutAPortIsWithheld(t *testing.T) {
	base := freePorts(t, 3)
	taken, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", base+2))
	if err != nil {
		t.Fatal(err)
	}
	var list []Broker
	b := metadataBroker(t, "one", func() []Broker { return list })
	list = []Broker{brokerAt(1, b.ln), {2, "two.internal", 9092}, {60_000, "beyond.internal", 9092}, {-1, "odd.internal", 9092}, {3, "odd.internal", 0}}
	lister := &fixed{list: list}
	s := startBefore(t, b, Options{BrokerPortBase: base, Brokers: lister, RefreshEvery: 10 * time.Millisecond})
	c := dialRaw(t, s.Addr())
	if told := askMetadata(t, c); len(told) != 1 || told[1] != fmt.Sprintf("127.0.0.1:%d", base+1) {
		t.Errorf("the client was told %v, want broker 1 at port base + 1 alone", told)
	}
	if s.Ready() {
		t.Error("the proxy is ready though broker 2 has no listener")
	}
	if got := s.Status().BindingFailed[2]; got == "" {
		t.Error("the status doesn't say why broker 2 has no listener")
	}
	taken.Close()
	list = list[:2]
	lister.set(list...)
	eventually(t, "the proxy is ready", s.Ready)
	if told := askMetadata(t, c); len(told) != 2 {
		t.Errorf("the client was told %v, want both brokers", told)
	}
}

func TestListenersFollowABrokersAddress(t *testing.T) {
	var list []Broker
	one := metadataBroker(t, "one", func() []Broker { return list })
	two := metadataBroker(t, "two", func() []Broker { return list })
	list = []Broker{brokerAt(1, one.ln), brokerAt(2, two.ln)}
	lister := &fixed{list: list}
	s := startBefore(t, one, Options{Brokers: lister, RefreshEvery: 5 * time.Millisecond})
	eventually(t, "the proxy is ready", s.Ready)
	told := askMetadata(t, dialRaw(t, s.Addr()))
	lister.set(brokerAt(1, two.ln)) // broker 1 is now where 2 was, and 2 is gone
	eventually(t, "broker 1 is re-pointed", func() bool {
		b := s.Status().Brokers
		return b[0].Source == two.ln.Addr().String() && b[1].Source == ""
	})
	if got := whoIs(t, told[1]); got != "two" {
		t.Errorf("the address of broker 1 leads to %q, want two", got)
	}
	gone, _ := net.ResolveTCPAddr("tcp", told[2])
	wantReset(t, gone.String())
	lister.set(brokerAt(1, two.ln), brokerAt(2, one.ln))
	eventually(t, "broker 2 is back", func() bool { return s.Status().Brokers[1].Source == one.ln.Addr().String() })
	if got := whoIs(t, told[2]); got != "one" {
		t.Errorf("the address of broker 2 leads to %q, want one", got)
	}
}

func TestClientsThatKnowOnlyBrokerPortsSurviveARestart(t *testing.T) {
	cluster := fakeCluster(t, kfake.SeedTopics(3, "orders"))
	base := freePorts(t, 3) - 1 // kfake's IDs begin with 0
	adm := lister{newClient(t, cluster.ListenAddrs()[0])}
	run := func() (*Server, func()) {
		s, err := New(Options{Listen: "127.0.0.1:0", BrokerPortBase: base + 1, Seeds: cluster.ListenAddrs(), Brokers: adm, Grace: time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx) }()
		eventually(t, "the proxy is ready", s.Ready)
		return s, func() {
			cancel()
			if err := <-done; err != nil {
				t.Errorf("Run = %v", err)
			}
		}
	}
	s, stop := run()
	ctx := testContext(t)
	client := newClient(t, s.Addr().String(), kgo.DefaultProduceTopic("orders"), kgo.RetryBackoffFn(func(int) time.Duration { return 5 * time.Millisecond }))
	produce := func() {
		t.Helper()
		for range 10 {
			if err := client.ProduceSync(ctx, kgo.StringRecord("x")).FirstErr(); err != nil {
				t.Fatal(err)
			}
		}
	}
	produce()
	stop()
	_, stop = run() // the bootstrap listener has another port now
	produce()
	stop()
}

// capture keeps all bytes that clients read.
type capture struct {
	mu    sync.Mutex
	bytes bytes.Buffer
}

func (c *capture) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
	return capturedConn{conn, c}, err
}

type capturedConn struct {
	net.Conn
	c *capture
}

func (c capturedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.c.mu.Lock()
	c.c.bytes.Write(b[:n])
	c.c.mu.Unlock()
	return n, err
}

// TestNoBrokerAddressReachesAClient puts a proxy that advertises a secret name before a fake cluster, and the proxy under test
// before that one: the secret name must not be in any byte that a client reads.
func TestNoBrokerAddressReachesAClient(t *testing.T) {
	t.Run("with a sink", func(t *testing.T) { noBrokerAddress(t, &recorder{}) })
	t.Run("without", func(t *testing.T) { noBrokerAddress(t, nil) })
}

func noBrokerAddress(t *testing.T, sink Sink) {
	const secret = "secret.internal"
	cluster := fakeCluster(t, kfake.SeedTopics(6, "orders"))
	inner := startOn(t, cluster, Options{Advertise: secret})
	toInner := func(ctx context.Context, network, address string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, strings.Replace(address, secret, "127.0.0.1", 1))
	}
	adm := lister{newClient(t, inner.Addr().String(), kgo.Dialer(toInner))}
	s := start(t, Options{Seeds: []string{inner.Addr().String()}, Dial: toInner, Brokers: adm, Sink: sink})
	eventually(t, "the proxy is ready", s.Ready)

	moved := 0
	cluster.ControlKey(int16(kmsg.Produce), func(request kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		if moved++; moved%5 != 1 || moved > 50 {
			return nil, nil, false
		}
		return notLeader(request.(*kmsg.ProduceRequest), cluster.ListenAddrs()[1]), nil, true
	})
	ctx := testContext(t)
	var seen capture
	producer := newClient(t, s.Addr().String(), kgo.Dialer(seen.dial), kgo.DefaultProduceTopic("orders"), kgo.MetadataMinAge(10*time.Millisecond))
	for i := range 200 {
		if err := producer.ProduceSync(ctx, kgo.StringRecord(fmt.Sprint(i))).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	consumer := newClient(t, s.Addr().String(), kgo.Dialer(seen.dial), kgo.ConsumerGroup("g"), kgo.ConsumeTopics("orders"), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	for n := 0; n < 200; {
		fetches := consumer.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			t.Fatal(err)
		}
		n += fetches.NumRecords()
	}
	request := kmsg.NewPtrDescribeClusterRequest()
	response, err := request.RequestWith(ctx, producer)
	if err != nil || len(response.Brokers) != 3 {
		t.Errorf("DescribeCluster = %v, %v, want 3 brokers", response, err)
	}
	if moved == 0 {
		t.Error("no Produce was answered with NOT_LEADER")
	}
	seen.mu.Lock()
	defer seen.mu.Unlock()
	if i := bytes.Index(seen.bytes.Bytes(), []byte(secret)); i >= 0 {
		t.Errorf("a client read a broker's own address: %q", seen.bytes.Bytes()[max(0, i-40):i+40])
	}
}

// TestEveryAnswerWithAnAddressIsRewritten answers each API of which an answer may name brokers, in each version, with an address that must not reach the
// client; the client is told of the proxy's in its place.
func TestEveryAnswerWithAnAddressIsRewritten(t *testing.T) {
	const host = "broker.internal"
	sent := make(chan []byte, 1)
	b := script(t, func(c net.Conn, h protocol.RequestHeader, request []byte) {
		if !bytes.HasPrefix(request[protocol.RequestPrefix:], []byte("\x00\x06client")) { // the proxy's own
			c.Write(responseFrame(metadata(h.APIVersion), h.CorrelationID))
			return
		}
		response := kmsg.ResponseForKey(h.APIKey)
		response.SetVersion(h.APIVersion)
		if h.APIKey != protocol.KeyProduce || h.APIVersion >= 10 { // kmsg would write them before too
			nameBroker(reflect.ValueOf(response).Elem(), host)
		}
		answer := responseFrame(response, h.CorrelationID)
		sent <- answer
		c.Write(answer)
	})
	s := startBefore(t, b, Options{})
	c := dialRaw(t, s.Addr())
	named := 0
	for _, key := range []kmsg.Key{kmsg.Produce, kmsg.Metadata, kmsg.FindCoordinator, kmsg.DescribeCluster, kmsg.ShareFetch, kmsg.ShareAcknowledge} {
		limit, ok := protocol.MaxVersion(key.Int16())
		if !ok {
			t.Fatalf("%s has no newest version", key.Name())
		}
		for version := range limit + 1 {
			request := kmsg.RequestForKey(key.Int16())
			request.SetVersion(version)
			if p, ok := request.(*kmsg.ProduceRequest); ok {
				p.Acks = -1
			}
			c.send(requestFrame(request, int32(version)))
			got, want := c.receive(), <-sent
			if !bytes.Contains(want, []byte(host)) {
				if !bytes.Equal(got, want) {
					t.Errorf("%s v%d: got %x, want it untouched: %x", key.Name(), version, got, want)
				}
				continue
			}
			named++
			if bytes.Contains(got, []byte(host)) || !bytes.Contains(got, []byte("127.0.0.1")) {
				t.Errorf("%s v%d: the client got %q, with the broker's address or without the proxy's", key.Name(), version, got)
			}
		}
	}
	if named != 4+14+7+3+3+3 {
		t.Errorf("%d answers named a broker", named)
	}
}

// nameBroker puts an address in each place of a response that has room for one.
func nameBroker(v reflect.Value, host string) {
	if f := v.FieldByName("Host"); f.IsValid() {
		f.SetString(host)
		v.FieldByName("Port").SetInt(4711)
		v.FieldByName("NodeID").SetInt(1)
	}
	for i := range v.NumField() {
		f := v.Field(i)
		if f.Kind() != reflect.Slice || f.Type().Elem().Kind() != reflect.Struct {
			continue
		}
		if _, ok := f.Type().Elem().FieldByName("Host"); ok {
			f.Set(reflect.MakeSlice(f.Type(), 1, 1))
			nameBroker(f.Index(0), host)
		}
	}
}

// notLeader answers NOT_LEADER with the new leader's address (KIP-951).
func notLeader(request *kmsg.ProduceRequest, address string) *kmsg.ProduceResponse {
	response := request.ResponseKind().(*kmsg.ProduceResponse)
	for _, topic := range request.Topics {
		rt := kmsg.ProduceResponseTopic{Topic: topic.Topic, TopicID: topic.TopicID}
		for _, p := range topic.Partitions {
			rp := kmsg.NewProduceResponseTopicPartition()
			rp.Partition, rp.ErrorCode, rp.BaseOffset = p.Partition, kerr.NotLeaderForPartition.Code, -1
			rp.CurrentLeader.LeaderID, rp.CurrentLeader.LeaderEpoch = 1, 1
			rt.Partitions = append(rt.Partitions, rp)
		}
		response.Topics = append(response.Topics, rt)
	}
	host, port, _ := net.SplitHostPort(address)
	n, _ := strconv.Atoi(port)
	response.Brokers = []kmsg.ProduceResponseBroker{{NodeID: 1, Host: host, Port: int32(n)}}
	return response
}

func TestBrokersThatJoinLaterAreServed(t *testing.T) {
	cluster := fakeCluster(t, kfake.SeedTopics(6, "orders"))
	s := startOn(t, cluster, Options{RefreshEvery: 10 * time.Millisecond})
	before := len(s.Status().Brokers)
	if _, _, err := cluster.AddNode(-1, 0); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the new broker has a listener", func() bool { return len(s.Status().Brokers) == before+1 && s.Ready() })
}

func TestOneGoodSeedIsEnough(t *testing.T) {
	core, logs := observer.New(zap.WarnLevel)
	closed := listen(t)
	closed.Close()
	good := script(t, nil)
	s := start(t, Options{Logger: zap.New(core), Seeds: []string{"no-such-host.invalid:9092", " " + closed.Addr().String(), "", " " + good.ln.Addr().String() + " ", ""}})
	for range 6 {
		c := dialRaw(t, s.Addr())
		c.send(rawRequest(68, 0, 1, nil))
		c.receive()
		c.Close()
	}
	eventually(t, "the dead seeds are known", func() bool { return len(s.Status().SeedsDown) == 2 })
	if n := logs.FilterMessage("bootstrap broker can't be reached").Len(); n != 2 {
		t.Errorf("%d warnings about dead seeds, want one each", n)
	}
}

func TestRunFailsIfEverySeedIsDead(t *testing.T) {
	closed := listen(t)
	closed.Close()
	seeds := []string{"no-such-host.invalid:9092", closed.Addr().String()}
	s, err := New(Options{Listen: "127.0.0.1:0", Seeds: seeds, StartTimeout: time.Millisecond, Brokers: &fixed{err: errors.New("down")}})
	if err != nil {
		t.Fatal(err)
	}
	err = s.Run(t.Context())
	for _, seed := range seeds {
		if err == nil || !strings.Contains(err.Error(), seed) {
			t.Errorf("Run = %v, want an error that names %s", err, seed)
		}
	}
}

func TestADeadSeedIsPutAside(t *testing.T) {
	dialed := make(map[string]int)
	s := newSeeds([]string{"a:1", "b:1", "c:1"}, func(_ context.Context, address string) (net.Conn, error) {
		dialed[address]++
		if address == "b:1" {
			return nil, errors.New("down")
		}
		client, server := net.Pipe()
		server.Close()
		return client, nil
	}, zap.NewNop())
	for range 30 {
		c, err := s.connect(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	if dialed["b:1"] != 1 || dialed["a:1"] < 10 || dialed["c:1"] < 10 {
		t.Errorf("dialed %v, want b once and the others in turn", dialed)
	}
}

func TestAdvertisedHost(t *testing.T) {
	four, six := net.IPv4(127, 0, 0, 1), net.IPv6loopback
	for _, tc := range []struct {
		listen, advertise string
		from              net.IP // where the client comes to
		want              string
	}{
		{"127.0.0.1:0", "", four, "127.0.0.1"},
		{"localhost:0", "", four, "localhost"},
		{"0.0.0.0:0", "", four, "127.0.0.1"},
		{":0", "", four, "127.0.0.1"},
		{":0", "", six, "::1"}, // a literal goes without brackets
		{"[::]:0", "", four, "127.0.0.1"},
		{"[::]:0", "", six, "::1"},
		{"[::1]:0", "", six, "::1"},
		{"127.0.0.1:0", "kafka.example.com", four, "kafka.example.com"},
		{"[::1]:0", "2001:db8::1", six, "2001:db8::1"},
		{"[::1]:0", "[2001:db8::1]", six, "2001:db8::1"},
	} {
		var list []Broker
		b := metadataBroker(t, "one", func() []Broker { return list })
		list = []Broker{brokerAt(1, b.ln)}
		s := startBefore(t, b, Options{Listen: tc.listen, Advertise: tc.advertise})
		port := s.Addr().(*net.TCPAddr).Port
		told := askMetadata(t, dialRaw(t, &net.TCPAddr{IP: tc.from, Port: port}))
		if host, _, _ := net.SplitHostPort(told[1]); host != tc.want {
			t.Errorf("listen %q, advertise %q: client was told %q, want host %q", tc.listen, tc.advertise, told[1], tc.want)
		}
	}
}

// certificate makes a self-signed certificate for 127.0.0.1 and the pool that trusts it.
func certificate(t *testing.T) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}

func TestTLSOnBothSides(t *testing.T) {
	cert, pool := certificate(t)
	cluster := fakeCluster(t, kfake.SeedTopics(3, "orders"), kfake.TLS(&tls.Config{Certificates: []tls.Certificate{cert}}))
	trust := &tls.Config{RootCAs: pool}
	adm := lister{newClient(t, cluster.ListenAddrs()[0], kgo.DialTLSConfig(trust))}
	sink := &recorder{}
	s := start(t, Options{Seeds: cluster.ListenAddrs(), Brokers: adm, Sink: sink, UpstreamTLS: trust.Clone, DownstreamTLS: &tls.Config{Certificates: []tls.Certificate{cert}}})
	eventually(t, "the proxy is ready", s.Ready)
	client := newClient(t, s.Addr().String(), kgo.DialTLSConfig(trust), kgo.DefaultProduceTopic("orders"), kgo.ConsumeTopics("orders"), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	ctx := testContext(t)
	big := &kgo.Record{Value: make([]byte, 500_000)}
	mathrand.New(mathrand.NewSource(1)).Read(big.Value)
	if err := client.ProduceSync(ctx, kgo.StringRecord("small"), big).FirstErr(); err != nil {
		t.Fatal(err)
	}
	for n := 0; n < 2; {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			t.Fatal(err)
		}
		n += fetches.NumRecords()
	}
	if got := sink.records(); got != 2 {
		t.Errorf("the sink was offered %d records, want 2", got)
	}
	plain := dialRaw(t, s.Addr())
	plain.send(rawRequest(18, 0, 1, nil))
	plain.r.Discard(7) // a TLS alert
	plain.wantClosed("a plaintext client of a TLS listener")
}

func TestClientsAuthenticateWithTheSource(t *testing.T) {
	cluster := fakeCluster(t, kfake.SeedTopics(3, "orders"), kfake.EnableSASL(), kfake.Superuser("PLAIN", "admin", "right"), kfake.Superuser("SCRAM-SHA-256", "scram", "right"))
	source := newClient(t, cluster.ListenAddrs()[0], kgo.SASL(plain.Auth{User: "admin", Pass: "right"}.AsMechanism()))
	sink := &recorder{}
	s := start(t, Options{Seeds: cluster.ListenAddrs(), Brokers: lister{source}, Sink: sink})
	eventually(t, "the proxy is ready", s.Ready)
	ctx := testContext(t)
	for _, tc := range []struct {
		name string
		auth sasl.Mechanism
		ok   bool
	}{
		{"PLAIN", plain.Auth{User: "admin", Pass: "right"}.AsMechanism(), true},
		{"PLAIN, wrong password", plain.Auth{User: "admin", Pass: "wrong"}.AsMechanism(), false},
		{"SCRAM", scram.Auth{User: "scram", Pass: "right"}.AsSha256Mechanism(), true},
		{"SCRAM, wrong password", scram.Auth{User: "scram", Pass: "wrong"}.AsSha256Mechanism(), false},
	} {
		client := newClient(t, s.Addr().String(), kgo.SASL(tc.auth), kgo.DefaultProduceTopic("orders"), kgo.RequestRetries(0))
		err := client.Ping(ctx)
		if !tc.ok {
			// A fake broker closes where a real one answers with an error; either way it's what a direct client gets.
			direct := newClient(t, cluster.ListenAddrs()[0], kgo.SASL(tc.auth), kgo.RequestRetries(0)).Ping(ctx)
			if err == nil || direct == nil || err.Error() != direct.Error() {
				t.Errorf("%s: the proxy's client gets %v, a direct one %v, want the same error", tc.name, err, direct)
			}
			continue
		}
		if err == nil {
			err = client.ProduceSync(ctx, kgo.StringRecord("x")).FirstErr()
		}
		if err != nil {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
	if sink.records() != 2 {
		t.Errorf("the sink was offered %d records, want 2", sink.records())
	}
}

// A client of a broker that is down must be told as the network would: franz-go, for one, gives up on records whose connection ends
// plainly before its first answer, and tries again after a reset.
func TestClientsOfADeadBrokerAreReset(t *testing.T) {
	dead := listen(t)
	dead.Close()
	good := script(t, nil)
	s := start(t, Options{Seeds: []string{good.ln.Addr().String()}, Brokers: &fixed{list: []Broker{brokerAt(7, dead)}}})
	eventually(t, "the broker has a listener", func() bool { return len(s.Status().Brokers) == 1 })
	wantReset(t, s.Status().Brokers[0].Listen)
}

// wantReset fails unless a connection to address is reset, in the dial already or before its first answer.
func wantReset(t *testing.T, address string) {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err == nil {
		defer c.Close()
		c.SetDeadline(time.Now().Add(10 * time.Second))
		_, err = c.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("connection to %s: %v, want a reset", address, err)
	}
}
