package proxy

import (
	"sync/atomic"

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

	reasonProxyHeader  = "proxy-header"  // the PROXY protocol header is missing or wrong
	reasonServerName   = "server-name"   // the TLS server name stands for no broker
	reasonFirstRequest = "first-request" // none came in time
	reasonUnread       = "unread"        // the client took nothing of its answers for too long, or vanished without a word
	reasonIdle         = "idle"          // longer than the limit
	reasonAge          = "age"           // the limit
)

var reasons = []string{reasonClient, reasonBroker, reasonDial, reasonTLS, reasonLimit, reasonTimeout, reasonBadFrame, reasonVersion,
	reasonResponse, reasonForeign, reasonShutdown, reasonProxyHeader, reasonServerName, reasonFirstRequest, reasonUnread, reasonIdle, reasonAge}

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
	{"kmirror_proxy_held_bytes", "Bytes of Produce requests held until they are answered, and longer where several batches of one are on their way to the mirror."},
	{"kmirror_proxy_answer_bytes", "Bytes of large answers that are held until their clients have taken them: rewritten ones and those to Produce."},
	{"kmirror_proxy_broker_listeners", "Open broker listeners."},
	{"kmirror_proxy_bind_errors_total", "Attempts to open a broker's listener that failed; they are repeated."},
	{"kmirror_proxy_access_events_dropped_total", "Events that the access log couldn't take in time."},
	{"kmirror_proxy_ready", "1 once the listeners of all known brokers are open."},
}

// tally is a counter that the status shows too.
type tally struct{ atomic.Int64 }

// Inc counts one.
func (t *tally) Inc() { t.Add(1) }

type metrics struct {
	accepted            tally
	closedBy            map[string]prometheus.Counter
	requestsBy          [kmsg.MaxKey + 2]prometheus.Counter // the last one is for unknown APIs
	requested, answered prometheus.Counter
	accessDropped       prometheus.Counter
	offered, refused    tally
	grown, doubts       tally
	bindErrors          tally
}

// register makes the metrics and registers them, if there is a registry. The gauges are read from s when scraped.
func (m *metrics) register(registry prometheus.Registerer, s *Server) error {
	r := registrar{registry: registry, help: make(map[string]string)}
	for _, m := range Metrics {
		r.help[m.Name] = m.Help
	}
	m.requested = r.counter("kmirror_proxy_request_bytes_total")
	m.answered = r.counter("kmirror_proxy_response_bytes_total")
	m.accessDropped = r.counter("kmirror_proxy_access_events_dropped_total")
	m.closedBy = make(map[string]prometheus.Counter)
	closed := r.vector("kmirror_proxy_connections_closed_total", "reason")
	for _, reason := range reasons {
		m.closedBy[reason] = closed.WithLabelValues(reason)
	}
	requests := r.vector("kmirror_proxy_requests_total", "api")
	for key := range m.requestsBy {
		name := "unknown"
		if key <= kmsg.MaxKey && kmsg.RequestForKey(int16(key)) != nil {
			name = kmsg.NameForKey(int16(key))
		}
		m.requestsBy[key] = requests.WithLabelValues(name)
	}
	r.tally("kmirror_proxy_connections_total", nil, &m.accepted)
	r.tally("kmirror_proxy_batches_total", prometheus.Labels{"outcome": "offered"}, &m.offered)
	r.tally("kmirror_proxy_batches_total", prometheus.Labels{"outcome": "refused"}, &m.refused)
	r.tally("kmirror_proxy_batches_total", prometheus.Labels{"outcome": "grown"}, &m.grown)
	r.tally("kmirror_proxy_doubts_total", nil, &m.doubts)
	r.tally("kmirror_proxy_bind_errors_total", nil, &m.bindErrors)
	r.gauge("kmirror_proxy_connections", s.connections)
	r.gauge("kmirror_proxy_requests_in_flight", s.inFlight)
	r.gauge("kmirror_proxy_held_bytes", func() int { return int(s.held.Load()) })
	r.gauge("kmirror_proxy_answer_bytes", func() int { return int(s.answers.held.Load()) })
	r.gauge("kmirror_proxy_broker_listeners", s.brokers.len)
	r.gauge("kmirror_proxy_ready", func() int {
		if s.Ready() {
			return 1
		}
		return 0
	})
	return r.err
}

// registrar makes collectors with the help texts of Metrics. Its first error stays.
type registrar struct {
	registry prometheus.Registerer
	help     map[string]string
	err      error
}

func (r *registrar) add(c prometheus.Collector) {
	if r.registry != nil && r.err == nil {
		r.err = r.registry.Register(c)
	}
}

func (r *registrar) counter(name string) prometheus.Counter {
	c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: r.help[name]})
	r.add(c)
	return c
}

func (r *registrar) vector(name, label string) *prometheus.CounterVec {
	v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: r.help[name]}, []string{label})
	r.add(v)
	return v
}

func (r *registrar) tally(name string, labels prometheus.Labels, t *tally) {
	r.add(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: r.help[name], ConstLabels: labels}, func() float64 { return float64(t.Load()) }))
}

func (r *registrar) gauge(name string, f func() int) {
	r.add(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: r.help[name]}, func() float64 { return float64(f()) }))
}

// request counts a request of this API.
func (m *metrics) request(key int16) {
	m.requestsBy[min(int(key), len(m.requestsBy)-1)].Inc()
}

func (m *metrics) requestBytes(n int)  { m.requested.Add(float64(n)) }
func (m *metrics) responseBytes(n int) { m.answered.Add(float64(n)) }
