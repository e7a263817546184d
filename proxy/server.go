package proxy

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
)

// Options configure a Server. Zero durations and bounds mean the defaults named.
type Options struct {
	Listen         string   // host:port of the bootstrap listener
	Advertise      string   // host that clients are told to reach brokers at, IPv6 also in brackets; "": the listener's, or, if that is unspecified, the address that the client itself came to
	BrokerPortBase int      // broker n listens on base + n; 0: any free port
	BrokerIDs      []int32  // brokers whose listeners New binds, before the source named them
	Seeds          []string // host:port of bootstrap brokers of the source cluster

	Dial          func(ctx context.Context, network, address string) (net.Conn, error) // nil: TCP
	UpstreamTLS   func() *tls.Config                                                   // of a new connection to a broker, its own; where it names no server, that is the host dialled; nil: plaintext
	DownstreamTLS *tls.Config                                                          // nil: plaintext from clients

	SNI         SNI         // one port for all brokers; needs DownstreamTLS
	ProxyHeader ProxyHeader // at the begin of client connections
	// SendProxyHeader is the version, 1 or 2, of the PROXY protocol header that connections to the source begin with, so that it knows the client's
	// address; 0: none.
	SendProxyHeader int
	Limits          Limits
	Access          *zap.Logger // gets an entry for each event of the access log; nil: none

	Brokers      BrokerLister  // nil: brokers are learned from responses alone
	RefreshEvery time.Duration // of Brokers; 5 s
	StartTimeout time.Duration // Run fails if no seed was reached so long; 25 s

	Sink      Sink  // nil: nothing is mirrored
	HeldBytes int64 // bound of Produce requests held until they are answered, over all connections; beyond it they aren't offered; 64 MiB

	// AnswerBytes bounds the answers of more than 32 KiB that are read whole, until they are written, over all connections and as the source sent them; beyond it
	// they wait; 64 MiB. While one waits, each that hasn't moved for AnswerPatience is given up with its connection; 10 s.
	AnswerBytes    int64
	AnswerPatience time.Duration

	MaxRequestBytes int           // 100 MiB, as Kafka's socket.request.max.bytes
	MaxConnections  int           // 10,000
	FrameTimeout    time.Duration // a request that stops midway is given up after so long; 30 s
	Grace           time.Duration // for requests in flight at shutdown; 30 s

	Logger   *zap.Logger           // nil: none
	Registry prometheus.Registerer // nil: none
}

func (o Options) withDefaults() Options {
	o.Advertise = strings.Trim(o.Advertise, "[]") // the protocol's hosts are literals without brackets
	o.RefreshEvery = cmp.Or(o.RefreshEvery, 5*time.Second)
	o.StartTimeout = cmp.Or(o.StartTimeout, 25*time.Second)
	o.HeldBytes = cmp.Or(o.HeldBytes, 64<<20)
	o.AnswerBytes = cmp.Or(o.AnswerBytes, 64<<20)
	o.AnswerPatience = cmp.Or(o.AnswerPatience, 10*time.Second)
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
	o         Options
	log       *zap.Logger
	ln        net.Listener // bootstrap
	bindHost  string       // of all listeners
	metrics   metrics
	brokers   brokers
	predicted []*broker // of Options.BrokerIDs
	seeds     *seeds
	topics    topicNames
	warnings  warnings
	held      atomic.Int64 // bytes of kept Produce requests
	answers   *answers
	ready     atomic.Bool
	started   atomic.Bool
	listed    atomic.Bool // Options.Brokers answered

	wg   sync.WaitGroup // every goroutine of Run
	base context.Context
	stop context.CancelCauseFunc // ends Run with an error

	lookMu sync.Mutex
	looked time.Time // when an unknown broker was last asked for

	access   *accessLog   // nil: none
	accessed atomic.Int64 // numbers its connections

	mu         sync.Mutex
	perIP      map[netip.Addr]int
	conns      map[*conn]struct{}
	connecting map[net.Conn]struct{} // clients' connections that are none of conns yet
	slots      int                   // open and connecting client connections
	draining   bool
	clusterID  string
}

// New binds the bootstrap listener. It starts no goroutine; clients are served once Run runs.
func New(o Options) (*Server, error) {
	o = o.withDefaults()
	ln, err := net.Listen("tcp", o.Listen)
	if err != nil {
		return nil, fmt.Errorf("proxy: %w", err)
	}
	s := &Server{o: o, log: o.Logger, ln: ln, conns: make(map[*conn]struct{}), connecting: make(map[net.Conn]struct{})}
	if s.bindHost, _, err = net.SplitHostPort(o.Listen); err != nil {
		ln.Close()
		return nil, fmt.Errorf("proxy: %w", err)
	}
	s.warnings.log = o.Logger
	bind := s.bindBroker
	if o.SNI.Pattern != "" {
		bind = s.bindSNI
	}
	s.brokers = brokers{
		bind: bind, appeared: s.endGuesses, bindErrors: &s.metrics.bindErrors, log: o.Logger,
		byID: make(map[int32]*broker), failed: make(map[int32]string),
	}
	s.answers = newAnswers(o.AnswerBytes, o.AnswerPatience)
	s.seeds = newSeeds(o.Seeds, s.dial, o.Logger)
	if err := s.metrics.register(o.Registry, s); err != nil {
		ln.Close()
		return nil, fmt.Errorf("proxy: %w", err)
	}
	s.access = newAccessLog(o.Access, s.metrics.accessDropped)
	if err := s.bindPredicted(); err != nil {
		s.Close()
		return nil, fmt.Errorf("proxy: %w", err)
	}
	return s, nil
}

// Addr is the address of the bootstrap listener.
func (s *Server) Addr() net.Addr { return s.ln.Addr() }

// Close releases the listeners of a Server that is never run. Run closes them itself.
func (s *Server) Close() error {
	s.brokers.close()
	return s.ln.Close()
}

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
	for _, k := range s.predicted {
		s.wg.Go(func() { s.acceptBroker(k) })
	}
	s.wg.Go(s.acceptBootstrap)
	s.wg.Go(func() { s.watchSeeds(ctx) })
	s.wg.Go(func() { s.watchBrokers(ctx) })
	s.wg.Go(func() { s.sweep(ctx) })
	logged, stopLog := context.WithCancel(context.Background())
	defer stopLog()
	var written sync.WaitGroup
	if s.access != nil {
		written.Go(func() { s.access.run(logged) })
	}

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
	stopLog()
	s.awaitAccessLog(&written)
	s.warnings.flush()
	s.log.Info("proxy stopped")
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("proxy: %w", err)
	}
	return nil
}

// accessLogWait is how long the access log may take to write its last events.
const accessLogWait = time.Second

// awaitAccessLog waits for the access log, but not for a file or pipe that takes nothing: that would hold up the mirror's shutdown.
func (s *Server) awaitAccessLog(written *sync.WaitGroup) {
	done := make(chan struct{})
	go func() {
		written.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(accessLogWait):
		s.log.Warn("the access log takes nothing; its last events are lost")
	}
}

// drain lets every connection end after its requests in flight. Of those that have no broker yet, nothing was forwarded.
func (s *Server) drain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.draining = true
	for client := range s.connecting {
		client.Close()
	}
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

// hold reserves n bytes for a kept Produce request; false if there is no room.
func (s *Server) hold(n int) bool {
	if s.held.Add(int64(n)) > s.o.HeldBytes {
		s.held.Add(-int64(n))
		return false
	}
	return true
}

// mayShare reports whether a held request may stay so for as long as the sink keeps a batch of it.
func (s *Server) mayShare() bool { return s.held.Load() < s.o.HeldBytes/2 }

func (s *Server) unhold(n int) { s.held.Add(-int64(n)) }

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
