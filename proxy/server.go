package proxy

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
)

// Options configure a Server. Zero durations and bounds mean the defaults named.
type Options struct {
	Listen         string   // host:port of the bootstrap listener
	Advertise      string   // host that clients are told to reach brokers at; "": the listener's, or, if that is unspecified, the address that the client itself came to
	BrokerPortBase int      // broker n listens on base + n; 0: any free port
	Seeds          []string // host:port of bootstrap brokers of the source cluster

	Dial          func(ctx context.Context, network, address string) (net.Conn, error) // nil: TCP
	UpstreamTLS   *tls.Config                                                          // nil: plaintext to brokers
	DownstreamTLS *tls.Config                                                          // nil: plaintext from clients

	Brokers      BrokerLister  // nil: brokers are learned from responses alone
	RefreshEvery time.Duration // of Brokers; 5 s
	StartTimeout time.Duration // Run fails if no seed was reached so long; 25 s

	Sink      Sink  // nil: nothing is mirrored
	HeldBytes int64 // bound of Produce requests held until they are answered, over all connections; beyond it they aren't offered; 64 MiB

	MaxRequestBytes int           // 100 MiB, as Kafka's socket.request.max.bytes
	MaxConnections  int           // 10,000
	FrameTimeout    time.Duration // a request that stops midway is given up after so long; 30 s
	Grace           time.Duration // for requests in flight at shutdown; 30 s

	Logger   *zap.Logger           // nil: none
	Registry prometheus.Registerer // nil: none
}

func (o Options) withDefaults() Options {
	o.RefreshEvery = cmp.Or(o.RefreshEvery, 5*time.Second)
	o.StartTimeout = cmp.Or(o.StartTimeout, 25*time.Second)
	o.HeldBytes = cmp.Or(o.HeldBytes, 64<<20)
	o.MaxRequestBytes = cmp.Or(o.MaxRequestBytes, 100<<20)
	o.MaxConnections = cmp.Or(o.MaxConnections, 10_000)
	o.FrameTimeout = cmp.Or(o.FrameTimeout, 30*time.Second)
	o.Grace = cmp.Or(o.Grace, 30*time.Second)
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	if o.Dial == nil {
		o.Dial = (&net.Dialer{KeepAlive: 15 * time.Second}).DialContext
	}
	return o
}

// Server is the proxy: the bootstrap listener, a listener per broker, and their connections.
type Server struct {
	o        Options
	log      *zap.Logger
	ln       net.Listener // bootstrap
	bindHost string       // of all listeners
	metrics  metrics
	brokers  brokers
	seeds    *seeds
	topics   topicNames
	warnings warnings
	held     atomic.Int64 // bytes of kept Produce requests
	ready    atomic.Bool
	started  atomic.Bool

	wg   sync.WaitGroup // every goroutine of Run
	base context.Context
	stop context.CancelCauseFunc // ends Run with an error

	mu        sync.Mutex
	conns     map[*conn]struct{}
	slots     int // open and connecting client connections
	draining  bool
	clusterID string
}

// New binds the bootstrap listener. It starts no goroutine; clients are served once Run runs.
func New(o Options) (*Server, error) {
	o = o.withDefaults()
	ln, err := net.Listen("tcp", o.Listen)
	if err != nil {
		return nil, fmt.Errorf("proxy: %w", err)
	}
	s := &Server{o: o, log: o.Logger, ln: ln, conns: make(map[*conn]struct{})}
	if s.bindHost, _, err = net.SplitHostPort(o.Listen); err != nil {
		ln.Close()
		return nil, fmt.Errorf("proxy: %w", err)
	}
	s.warnings.log = o.Logger
	s.brokers = brokers{bind: s.bindBroker, log: o.Logger, byID: make(map[int32]*broker), failed: make(map[int32]string)}
	s.seeds = newSeeds(o.Seeds, s.dial, o.Logger)
	if err := s.metrics.register(o.Registry, s); err != nil {
		ln.Close()
		return nil, fmt.Errorf("proxy: %w", err)
	}
	return s, nil
}

// Addr is the address of the bootstrap listener.
func (s *Server) Addr() net.Addr { return s.ln.Addr() }

// Close releases the bootstrap listener of a Server that is never run. Run closes it itself.
func (s *Server) Close() error { return s.ln.Close() }

// Ready reports whether the listeners of all known brokers are bound, so that a client that knows only those can come back.
func (s *Server) Ready() bool { return s.ready.Load() }

// Run serves until ctx ends, then lets the requests in flight finish, for at most the grace time. It returns after the last
// goroutine it started: nil after ctx ended, else why it can't serve. It may be called once.
func (s *Server) Run(ctx context.Context) error {
	if s.started.Swap(true) {
		return errors.New("proxy: Run was called before")
	}
	ctx, s.stop = context.WithCancelCause(ctx)
	defer s.stop(nil)
	base, abort := context.WithCancel(context.Background())
	defer abort()
	s.base = base

	s.log.Info("proxy listens", zap.Stringer("address", s.ln.Addr()))
	s.wg.Go(s.acceptBootstrap)
	s.wg.Go(func() { s.watchSeeds(ctx) })
	s.wg.Go(func() { s.watchBrokers(ctx) })

	<-ctx.Done()
	s.ready.Store(false)
	s.ln.Close()
	s.brokers.close()
	s.drain()
	grace := time.AfterFunc(s.o.Grace, func() {
		abort()
		s.abortAll()
	})
	s.wg.Wait()
	grace.Stop()
	s.warnings.flush()
	s.log.Info("proxy stopped")
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("proxy: %w", err)
	}
	return nil
}

// drain lets every connection end after its requests in flight.
func (s *Server) drain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.draining = true
	for c := range s.conns {
		c.drain()
	}
}

func (s *Server) abortAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		c.abort()
	}
}

func (s *Server) acceptBootstrap() {
	if err := s.accept(s.ln, nil); err != nil {
		s.stop(fmt.Errorf("bootstrap listener: %w", err))
	}
}

func (s *Server) acceptBroker(b *broker) {
	if err := s.accept(b.ln, b); err != nil {
		s.stop(fmt.Errorf("listener of broker %d: %w", b.id, err))
	}
}

// accept takes connections until the listener is closed.
func (s *Server) accept(ln net.Listener, b *broker) error {
	for {
		client, err := ln.Accept()
		switch {
		case err == nil:
		case errors.Is(err, net.ErrClosed):
			return nil
		case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE), errors.Is(err, syscall.ECONNABORTED), errors.Is(err, syscall.ENOBUFS):
			s.warnings.warn("accept", "can't accept connections", zap.Error(err))
			pause(s.base, 50*time.Millisecond)
			continue
		default:
			return err
		}
		s.metrics.accepted.Inc()
		if !s.takeSlot() {
			client.Close()
			s.metrics.closedBy[reasonLimit].Inc()
			s.warnings.warn(reasonLimit, "connection refused: too many are open", zap.Stringer("client", client.RemoteAddr()))
			continue
		}
		s.wg.Go(func() { s.serveClient(client, b) })
	}
}

func (s *Server) takeSlot() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.slots >= s.o.MaxConnections || s.draining {
		return false
	}
	s.slots++
	return true
}

// serveClient serves one client connection of the bootstrap listener (b nil) or a broker's.
func (s *Server) serveClient(client net.Conn, b *broker) {
	defer func() {
		s.mu.Lock()
		s.slots--
		s.mu.Unlock()
	}()
	defer client.Close()
	keepAlive(client)
	c := &conn{s: s, broker: b, client: client, host: s.advertised(client)}
	if s.o.DownstreamTLS != nil {
		t, err := handshakeTLS(s.base, client, s.o.DownstreamTLS, s.o.FrameTimeout)
		if err != nil {
			s.closed(c, &closeError{reasonTLS, err}, nil)
			return
		}
		c.client = t
	}
	source, err := s.dialBroker(b)
	if err != nil {
		reset(client)
		s.closed(c, &closeError{reasonDial, err}, nil)
		return
	}
	c.source = source
	if !s.enter(c) {
		reset(client)
		source.Close()
		return
	}
	c.serve()
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
}

// reset makes the coming close a reset. Direct, a client would be refused by a broker that is down, and would try again; a plain end of a
// connection before its first answer is what brokers do to a wrong login or protocol, and franz-go, for one, gives up on that.
func reset(client net.Conn) {
	if tcp, ok := client.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // of a connection that is lost anyway
	}
}

// enter lists c, so that drain and abort reach it; false if it's too late.
func (s *Server) enter(c *conn) bool {
	c.begin()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		return false
	}
	s.conns[c] = struct{}{}
	return true
}

// advertised is the host that this client is told.
func (s *Server) advertised(client net.Conn) string {
	if s.o.Advertise != "" {
		return s.o.Advertise
	}
	if ip := net.ParseIP(s.bindHost); s.bindHost != "" && (ip == nil || !ip.IsUnspecified()) {
		return s.bindHost
	}
	return client.LocalAddr().(*net.TCPAddr).IP.String()
}

// dialBroker connects to a broker, or for the bootstrap listener to any seed, else to any broker known.
func (s *Server) dialBroker(b *broker) (net.Conn, error) {
	if b != nil {
		at := b.at.Load()
		if at == nil {
			return nil, fmt.Errorf("broker %d left the cluster", b.id)
		}
		c, err := s.dial(s.base, at.address())
		if err != nil {
			return nil, fmt.Errorf("broker %d at %s: %w", b.id, at.address(), err)
		}
		return c, nil
	}
	c, err := s.seeds.connect(s.base)
	if err == nil {
		return c, nil
	}
	for _, k := range s.brokers.list() {
		if at := k.at.Load(); at != nil {
			if c, err := s.dial(s.base, at.address()); err == nil {
				return c, nil
			}
		}
	}
	return nil, err
}

// dial connects to an address of the source cluster, with TLS if so configured.
func (s *Server) dial(ctx context.Context, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	c, err := s.o.Dial(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	keepAlive(c)
	if s.o.UpstreamTLS == nil {
		return c, nil
	}
	config := s.o.UpstreamTLS.Clone()
	if config.ServerName == "" {
		config.ServerName, _, _ = net.SplitHostPort(address)
	}
	t := tls.Client(c, config)
	if err := t.HandshakeContext(ctx); err != nil {
		c.Close()
		return nil, fmt.Errorf("TLS: %w", err)
	}
	return t, nil
}

// keepAlive finds peers that vanished without a word within about a minute.
func keepAlive(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		t.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 10 * time.Second, Count: 4})
	}
}

// hold reserves n bytes for a kept Produce request; false if there is no room.
func (s *Server) hold(n int) bool {
	if s.held.Add(int64(n)) > s.o.HeldBytes {
		s.held.Add(-int64(n))
		return false
	}
	return true
}

func (s *Server) unhold(n int) { s.held.Add(-int64(n)) }

// watchSeeds tells of dead seeds at start, and ends Run if all of them stay dead.
func (s *Server) watchSeeds(ctx context.Context) {
	if err := s.seeds.probe(ctx, s.o.StartTimeout); err != nil {
		s.stop(err)
	}
}

// watchBrokers keeps the listeners in step with the cluster.
func (s *Server) watchBrokers(ctx context.Context) {
	if s.o.Brokers == nil {
		s.ready.Store(true)
		return
	}
	const firstWait = 200 * time.Millisecond
	wait, failing := firstWait, ""
	for ctx.Err() == nil {
		err := s.refreshBrokers(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			if failing != "" {
				s.log.Info("brokers of the source cluster are listed again")
			}
			wait, failing = s.o.RefreshEvery, ""
		default:
			if failing != err.Error() {
				s.log.Warn("brokers of the source cluster can't be listed", zap.Error(err))
			}
			failing = err.Error()
			wait = min(2*wait, s.o.RefreshEvery)
		}
		pause(ctx, wait)
	}
}

// refreshBrokers asks for the brokers once, and binds and re-points listeners.
func (s *Server) refreshBrokers(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	clusterID, list, err := s.o.Brokers.Brokers(ctx)
	if err != nil {
		return err
	}
	s.mu.Lock()
	was := s.clusterID
	s.clusterID = clusterID
	s.mu.Unlock()
	if was != "" && was != clusterID {
		s.log.Error("the source cluster's ID changed: do the bootstrap addresses belong to one cluster?", zap.String("was", was), zap.String("is", clusterID))
	}
	bound := true
	for _, b := range list {
		_, ok := s.brokers.learn(b.ID, []byte(b.Host), b.Port)
		bound = bound && ok
	}
	if ready := bound && len(list) > 0 && ctx.Err() == nil; ready != s.ready.Swap(ready) && ready {
		s.log.Info("proxy is ready", zap.String("cluster_id", clusterID), zap.Int("brokers", len(list)))
	}
	return nil
}

func (s *Server) connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.slots
}

func (s *Server) inFlight() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for c := range s.conns {
		n += c.flight.waits()
	}
	return n
}

// closed counts the end of a connection, and logs it if someone should know.
func (s *Server) closed(c *conn, requestErr, responseErr error) {
	reason, err := reasonClient, requestErr
	if quiet(requestErr) && !quiet(responseErr) {
		err = responseErr
	}
	fields := []zap.Field{zap.Stringer("client", c.client.RemoteAddr())}
	if c.broker != nil {
		fields = append(fields, zap.Int32("broker", c.broker.id))
	}
	if ce, ok := errors.AsType[*closeError](err); ok {
		s.metrics.closedBy[ce.reason].Inc()
		s.warnings.warn(ce.reason, "connection closed", append(fields, zap.String("reason", ce.reason), zap.Error(ce.err))...)
		return
	}
	s.mu.Lock()
	draining := s.draining
	s.mu.Unlock()
	switch {
	case draining:
		reason = reasonShutdown
	case c.endedBy.Load() == endedByBroker:
		reason = reasonBroker
		if asked, answered := c.flight.totals(); asked > 0 && answered == 0 {
			s.warnings.warn(reason, "broker closed the connection without an answer: does it expect TLS or SASL?",
				append(fields, zap.Stringer("broker_address", c.source.RemoteAddr()))...)
		}
	case errors.Is(requestErr, os.ErrDeadlineExceeded):
		reason = reasonTimeout
		s.warnings.warn(reason, "connection closed: a request stopped midway", fields...)
	}
	s.metrics.closedBy[reason].Inc()
	s.log.Debug("connection ended", append(fields, zap.String("reason", reason), zap.NamedError("request_error", requestErr), zap.NamedError("response_error", responseErr))...)
}

func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}
