package proxy

import (
	"net"
	"strconv"
)

// Status is the proxy's state, for people and scripts.
type Status struct {
	Listen        string           `json:"listen"`
	Advertise     string           `json:"advertise,omitempty"`
	ClusterID     string           `json:"source_cluster_id,omitempty"`
	Ready         bool             `json:"ready"`
	Connections   int              `json:"connections"`
	InFlight      int              `json:"requests_in_flight"`
	HeldBytes     int64            `json:"held_bytes"`
	Accepted      int64            `json:"connections_accepted"`
	Batches       BatchCounts      `json:"batches"`
	Brokers       []BrokerStatus   `json:"brokers"`
	SeedsDown     []string         `json:"bootstrap_down,omitempty"`
	BindingFailed map[int32]string `json:"binding_failed,omitempty"`
}

// BatchCounts counts acknowledged record batches since the start, by what became of them.
type BatchCounts struct {
	Offered int64 `json:"offered"` // taken by the mirror as they came
	Refused int64 `json:"refused"` // by the mirror, which reads them back later
	Grown   int64 `json:"grown"`   // never offered: acks=1, transactional, old format, append time
	Doubts  int64 `json:"doubts"`  // answers that put a topic or a log in doubt
}

// BrokerStatus is one broker listener.
type BrokerStatus struct {
	ID     int32  `json:"id"`
	Listen string `json:"listen"`
	Source string `json:"source,omitempty"` // host:port in the source cluster; "" if the broker left it
}

// Status returns the state now.
func (s *Server) Status() Status {
	st := Status{
		Listen:      s.ln.Addr().String(),
		Advertise:   s.o.Advertise,
		Ready:       s.Ready(),
		Connections: s.connections(),
		InFlight:    s.inFlight(),
		HeldBytes:   s.held.Load(),
		Accepted:    s.metrics.accepted.Load(),
		Batches:     BatchCounts{s.metrics.offered.Load(), s.metrics.refused.Load(), s.metrics.grown.Load(), s.metrics.doubts.Load()},
		Brokers:     []BrokerStatus{},
		SeedsDown:   s.seeds.down(),
	}
	s.mu.Lock()
	st.ClusterID = s.clusterID
	s.mu.Unlock()
	for _, k := range s.brokers.list() {
		b := BrokerStatus{ID: k.id, Listen: net.JoinHostPort(k.host, strconv.Itoa(int(k.port)))}
		if k.ln != nil {
			b.Listen = k.ln.Addr().String()
		}
		if at := k.at.Load(); at != nil {
			b.Source = at.address()
		}
		st.Brokers = append(st.Brokers, b)
	}
	st.BindingFailed = s.brokers.failures()
	return st
}

// down returns the seeds whose last dial failed.
func (s *seeds) down() (down []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range s.list {
		if d.err != nil {
			down = append(down, d.address)
		}
	}
	return down
}

// failures returns why brokers have no listener.
func (b *brokers) failures() map[int32]string {
	b.mu.RLock()
	defer b.mu.RUnlock()
	if len(b.failed) == 0 {
		return nil
	}
	failed := make(map[int32]string, len(b.failed))
	for id, why := range b.failed {
		failed[id] = why
	}
	return failed
}
