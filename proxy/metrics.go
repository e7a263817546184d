package proxy

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Reasons for ending a connection: the label of kmirror_proxy_connections_closed_total, and what the log is limited by.
const (
	reasonClient   = "client"   // the client ended it
	reasonBroker   = "broker"   // the broker ended it
	reasonDial     = "dial"     // the broker couldn't be reached
	reasonTLS      = "tls"      // the client's TLS handshake failed
	reasonLimit    = "limit"    // too many connections
	reasonTimeout  = "timeout"  // a request stopped midway
	reasonBadFrame = "frame"    // a request that isn't Kafka's, or is too large
	reasonVersion  = "version"  // a version that kmirror doesn't offer and can't pass on
	reasonResponse = "response" // a response that can't be matched or read
	reasonForeign  = "foreign"  // the broker speaks something else
	reasonShutdown = "shutdown" // kmirror is stopping
)

var reasons = []string{reasonClient, reasonBroker, reasonDial, reasonTLS, reasonLimit, reasonTimeout, reasonBadFrame, reasonVersion,
	reasonResponse, reasonForeign, reasonShutdown}

// Metrics lists every metric of this package with its help text.
var Metrics = []struct{ Name, Help string }{
	{"kmirror_proxy_connections", "Open client connections."},
	{"kmirror_proxy_connections_total", "Client connections accepted."},
	{"kmirror_proxy_connections_closed_total", "Client connections ended, by reason."},
	{"kmirror_proxy_requests_total", "Requests read from clients, by API."},
	{"kmirror_proxy_requests_in_flight", "Requests sent to brokers and not yet answered to clients."},
	{"kmirror_proxy_request_bytes_total", "Bytes written to brokers."},
	{"kmirror_proxy_response_bytes_total", "Bytes written to clients."},
	{"kmirror_proxy_batches_total", "Acknowledged record batches, by what became of them: offered to the mirror, refused by it (read back later), or grown (never offered: acks=1, transactional, old format)."},
	{"kmirror_proxy_doubts_total", "Produce answers that put a topic's identity or a partition's log in doubt."},
	{"kmirror_proxy_held_bytes", "Bytes of Produce requests held until they are answered."},
	{"kmirror_proxy_broker_listeners", "Open broker listeners."},
	{"kmirror_proxy_ready", "1 once the listeners of all known brokers are open."},
}

type metrics struct {
	accepted            prometheus.Counter
	closedBy            map[string]prometheus.Counter
	requestsBy          [kmsg.MaxKey + 2]prometheus.Counter // the last one is for unknown APIs
	requested, answered prometheus.Counter
	offered, refused    prometheus.Counter
	grown, doubts       prometheus.Counter
}

// newMetrics makes the metrics and registers them, if there is a registry. The gauges are read from s when scraped.
func newMetrics(registry prometheus.Registerer, s *Server) (metrics, error) {
	help := make(map[string]string)
	for _, m := range Metrics {
		help[m.Name] = m.Help
	}
	var all []prometheus.Collector
	counter := func(name string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help[name]})
		all = append(all, c)
		return c
	}
	vector := func(name, label string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help[name]}, []string{label})
		all = append(all, v)
		return v
	}
	gauge := func(name string, f func() int) {
		all = append(all, prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help[name]}, func() float64 { return float64(f()) }))
	}
	m := metrics{
		accepted:  counter("kmirror_proxy_connections_total"),
		requested: counter("kmirror_proxy_request_bytes_total"),
		answered:  counter("kmirror_proxy_response_bytes_total"),
		doubts:    counter("kmirror_proxy_doubts_total"),
		closedBy:  make(map[string]prometheus.Counter),
	}
	closed := vector("kmirror_proxy_connections_closed_total", "reason")
	for _, r := range reasons {
		m.closedBy[r] = closed.WithLabelValues(r)
	}
	requests := vector("kmirror_proxy_requests_total", "api")
	for key := range m.requestsBy {
		name := "unknown"
		if key <= kmsg.MaxKey && kmsg.RequestForKey(int16(key)) != nil {
			name = kmsg.NameForKey(int16(key))
		}
		m.requestsBy[key] = requests.WithLabelValues(name)
	}
	batches := vector("kmirror_proxy_batches_total", "outcome")
	m.offered, m.refused, m.grown = batches.WithLabelValues("offered"), batches.WithLabelValues("refused"), batches.WithLabelValues("grown")
	gauge("kmirror_proxy_connections", s.connections)
	gauge("kmirror_proxy_requests_in_flight", s.inFlight)
	gauge("kmirror_proxy_held_bytes", func() int { return int(s.held.Load()) })
	gauge("kmirror_proxy_broker_listeners", func() int { return s.brokers.len() })
	gauge("kmirror_proxy_ready", func() int {
		if s.Ready() {
			return 1
		}
		return 0
	})
	if registry == nil {
		return m, nil
	}
	for _, c := range all {
		if err := registry.Register(c); err != nil {
			return m, err
		}
	}
	return m, nil
}

// request counts a request of this API.
func (m *metrics) request(key int16) {
	m.requestsBy[min(int(key), len(m.requestsBy)-1)].Inc()
}

func (m *metrics) requestBytes(n int)  { m.requested.Add(float64(n)) }
func (m *metrics) responseBytes(n int) { m.answered.Add(float64(n)) }
