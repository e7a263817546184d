package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"
)

// maxBrokers bounds the listeners that responses can make the proxy open.
const maxBrokers = 2000

// Broker is a broker of the source cluster, at the address that the cluster itself advertises.
type Broker struct {
	ID   int32
	Host string
	Port int32
}

func (b Broker) address() string { return net.JoinHostPort(b.Host, strconv.Itoa(int(b.Port))) }

// BrokerLister asks the source cluster for its live brokers.
type BrokerLister interface {
	Brokers(ctx context.Context) (clusterID string, brokers []Broker, err error)
}

// broker is a listener that stands for one broker. It lives as long as the server: clients may hold its address after the
// broker left the cluster, and find it again there when the broker comes back.
type broker struct {
	id   int32
	port int32                  // that clients are told
	host string                 // that they are told, "": the connection's
	ln   net.Listener           // nil where a server name stands for the broker
	at   atomic.Pointer[Broker] // where the broker is now; nil if another broker took that address, or it was never named
	// named says that the source has named this broker.
	named atomic.Bool
}

// brokers are the listeners by node ID.
//
// Invariant: the address of a broker's listener leaves the proxy only after the listener is bound.
type brokers struct {
	bind       func(id int32) (*broker, error) // binds and starts to accept
	appeared   func(*broker)                   // is told when a broker with a listener is named for the first time
	bindErrors *tally                          // counts those of bind
	log        *zap.Logger

	mu     sync.RWMutex
	byID   map[int32]*broker
	failed map[int32]string // the last error of binding, logged once
	closed bool
}

var (
	errTooManyBrokers = errors.New("too many brokers")
	errStopping       = errors.New("stopping")
)

// learn returns the listener of a broker that the source cluster says is at host:port, bound now if it's new. It returns
// false if there can't be one; the broker's own address must not be handed out instead.
func (b *brokers) learn(id int32, host []byte, port int32) (*broker, bool) {
	b.mu.RLock()
	k := b.byID[id]
	b.mu.RUnlock()
	if k != nil {
		if at := k.at.Load(); at != nil && at.Port == port && at.Host == string(host) {
			return k, true
		}
	}
	return b.change(Broker{ID: id, Host: string(host), Port: port})
}

// change makes a listener lead to where the broker is now.
func (b *brokers) change(to Broker) (*broker, bool) {
	if to.ID < 0 || to.Host == "" || to.Port <= 0 || to.Port > 65535 {
		return nil, false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	k, err := b.listener(to.ID)
	if err != nil {
		if b.failed[to.ID] != err.Error() {
			b.failed[to.ID] = err.Error()
			b.log.Error("no listener for broker, its address is withheld from clients", zap.Int32("broker", to.ID), zap.Error(err))
		}
		return nil, false
	}
	if b.failed[to.ID] != "" {
		delete(b.failed, to.ID)
		b.log.Info("broker has its listener now", zap.Int32("broker", to.ID), zap.Int32("port", k.port))
	}
	for _, other := range b.byID {
		if at := other.at.Load(); at != nil && other != k && at.Host == to.Host && at.Port == to.Port {
			other.at.Store(nil) // a client of that broker must not reach this one
		}
	}
	if was := k.at.Swap(&to); was == nil || *was != to {
		b.log.Info("broker listener leads to", zap.Int32("broker", to.ID), zap.Int32("port", k.port), zap.String("broker_address", to.address()))
	}
	if !k.named.Swap(true) {
		b.appeared(k)
	}
	return k, true
}

// listener returns the listener of a broker, bound now if it's new. b.mu is held.
func (b *brokers) listener(id int32) (*broker, error) {
	if k := b.byID[id]; k != nil {
		return k, nil
	}
	if b.closed {
		return nil, errStopping
	}
	if len(b.byID) >= maxBrokers {
		return nil, errTooManyBrokers
	}
	k, err := b.bind(id)
	if err != nil {
		b.bindErrors.Inc()
		return nil, err
	}
	b.byID[id] = k
	return k, nil
}

// close closes all listeners; no new ones are opened.
func (b *brokers) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	for _, k := range b.byID {
		if k.ln != nil {
			k.ln.Close()
		}
	}
}

// get returns the listener of a broker, nil if there is none.
func (b *brokers) get(id int32) *broker {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.byID[id]
}

func (b *brokers) len() int {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return len(b.byID)
}

// list returns the listeners by broker ID.
func (b *brokers) list() []*broker {
	b.mu.RLock()
	defer b.mu.RUnlock()
	list := make([]*broker, 0, len(b.byID))
	for _, k := range b.byID {
		list = append(list, k)
	}
	slices.SortFunc(list, func(x, y *broker) int { return int(x.id) - int(y.id) })
	return list
}

// bindBroker opens the listener of a broker and starts to accept on it.
func (s *Server) bindBroker(id int32) (*broker, error) {
	k, err := s.listenFor(id)
	if err == nil {
		s.wg.Go(func() { s.acceptBroker(k) })
	}
	return k, err
}

// listenFor opens the listener of a broker.
func (s *Server) listenFor(id int32) (*broker, error) {
	port := 0
	if s.o.BrokerPortBase > 0 {
		port = s.o.BrokerPortBase + int(id)
		if port > 65535 {
			return nil, fmt.Errorf("port base %d + broker ID %d is above 65535", s.o.BrokerPortBase, id)
		}
	}
	ln, err := net.Listen("tcp", net.JoinHostPort(s.bindHost, strconv.Itoa(port)))
	if err != nil {
		if port != 0 && port == portOf(s.ln.Addr()) {
			err = fmt.Errorf("%w: it is the bootstrap listener's own", err)
		}
		return nil, err
	}
	return &broker{id: id, ln: ln, port: int32(ln.Addr().(*net.TCPAddr).Port)}, nil
}
