package proxy

import (
	"context"
	"encoding/hex"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"kmirror/protocol"
)

// accessQueue is how many events wait for the access log to be written. What comes while it is full is dropped and counted: no connection
// waits for the log.
const accessQueue = 8192

// accessLog writes what clients do: connect, authenticate, first acknowledged record of a topic, end. It never sees a password, a token, or what is in
// a record. A nil log takes nothing.
type accessLog struct {
	log     *zap.Logger
	events  chan accessEvent
	dropped prometheus.Counter
}

type accessEvent struct {
	name   string
	at     time.Time
	fields []zap.Field
}

func newAccessLog(log *zap.Logger, dropped prometheus.Counter) *accessLog {
	if log == nil {
		return nil
	}
	return &accessLog{log: log, events: make(chan accessEvent, accessQueue), dropped: dropped}
}

// run writes events until ctx ends, then those that are there.
func (a *accessLog) run(ctx context.Context) {
	for {
		select {
		case e := <-a.events:
			a.write(e)
		case <-ctx.Done():
			for {
				select {
				case e := <-a.events:
					a.write(e)
				default:
					_ = a.log.Sync() // a pipe can't
					return
				}
			}
		}
	}
}

func (a *accessLog) write(e accessEvent) {
	a.log.Info(e.name, append(e.fields, zap.Time("time", e.at))...)
}

func (a *accessLog) add(name string, fields ...zap.Field) {
	select {
	case a.events <- accessEvent{name, time.Now(), fields}:
	default:
		a.dropped.Inc()
	}
}

// access is what the access log keeps of one connection; nil where there is no log. The request goroutine owns the first block, the response
// goroutine the second.
type access struct {
	log *accessLog
	id  int64

	mechanism string
	principal string // of PLAIN and SCRAM, which send it in the clear

	steps  int // SaslAuthenticate answers without error since the handshake
	topics map[string]bool
}

// maxAccessTopics is how many topics of one connection are told.
const maxAccessTopics = 1000

func (c *conn) accessFields(more ...zap.Field) []zap.Field {
	fields := []zap.Field{zap.Int64("connection", c.access.id), zap.String("client", c.ends.client.String())}
	if c.broker != nil {
		fields = append(fields, zap.Int32("broker", c.broker.id))
	}
	return append(fields, more...)
}

// accessConnected begins the log of a connection.
func (c *conn) accessConnected() {
	if c.s.access == nil {
		return
	}
	c.access = &access{log: c.s.access, id: c.s.accessed.Add(1)}
	fields := c.accessFields(zap.String("broker_address", c.source.RemoteAddr().String()))
	if name := tlsSubject(c.client); name != "" {
		fields = append(fields, zap.String("tls_subject", name))
	}
	c.access.log.add("connect", fields...)
}

// accessSASL looks into a SASL request of the client's for who logs in how, and reports whether its answer is to be looked at.
func (c *conn) accessSASL(h protocol.RequestHeader, n int) (watch bool, err error) {
	if c.access == nil || n > maxPeek || h.APIKey != protocol.KeySASLHandshake && h.APIKey != protocol.KeySASLAuthenticate {
		return false, nil
	}
	b, err := c.requests.peek(n)
	if err != nil {
		return false, err
	}
	if h.APIKey == protocol.KeySASLHandshake {
		c.access.mechanism, c.access.principal = clip(protocol.SASLMechanism(b[:n])), ""
		return false, nil
	}
	if h.APIVersion > maxSASLAuthenticate {
		return false, nil
	}
	if c.access.principal == "" {
		c.access.principal = clip(principal(c.access.mechanism, protocol.SASLToken(b[:n])))
	}
	return true, nil
}

// maxSASLAuthenticate is the newest version whose answer is read.
const maxSASLAuthenticate = 2

// principal reads the user's name from the first token of a log-in (RFC 4616, RFC 5802), "" where it can't.
func principal(mechanism string, token []byte) string {
	switch mechanism = strings.ToUpper(mechanism); {
	case mechanism == "PLAIN":
		if parts := strings.SplitN(string(token), "\x00", 3); len(parts) == 3 {
			return parts[1]
		}
	case strings.HasPrefix(mechanism, "SCRAM-"):
		for part := range strings.SplitSeq(string(token), ",") {
			if name, ok := strings.CutPrefix(part, "n="); ok {
				return strings.NewReplacer("=2C", ",", "=3D", "=").Replace(name)
			}
		}
	}
	return ""
}

// clip bounds what a client can write into the log.
func clip(s string) string { return strings.ToValidUTF8(s[:min(len(s), 200)], "?") }

// lastStep is the number of SaslAuthenticate answers after which a mechanism is done; of others each answer is told.
var lastStep = map[string]int{"PLAIN": 1, "OAUTHBEARER": 1, "SCRAM-SHA-256": 2, "SCRAM-SHA-512": 2}

// accessAuthenticated tells how a log-in went. The client waits for each answer, so the request goroutine's fields stand still.
func (c *conn) accessAuthenticated(frame []byte, version int16) {
	code, ok := protocol.SASLAuthenticateCode(frame, version)
	if !ok {
		return
	}
	a := c.access
	a.steps++
	if last := lastStep[strings.ToUpper(a.mechanism)]; code == 0 && a.steps < last {
		return
	}
	a.steps = 0
	outcome := "ok"
	if code != 0 {
		outcome = protocol.ErrorName(code)
	}
	a.log.add("authenticate", c.accessFields(zap.String("mechanism", a.mechanism), zap.String("principal", a.principal), zap.String("outcome", outcome))...)
}

// accessProduced tells of a topic's first acknowledged record on this connection.
func (c *conn) accessProduced(topic []byte, id protocol.TopicID) {
	if c.access == nil {
		return
	}
	a := c.access
	if topic == nil {
		topic = id[:]
	}
	if a.topics[string(topic)] || len(a.topics) >= maxAccessTopics {
		return
	}
	if a.topics == nil {
		a.topics = make(map[string]bool)
	}
	a.topics[string(topic)] = true
	field := zap.String("topic", string(topic))
	if id != (protocol.TopicID{}) {
		field = zap.String("topic_id", hex.EncodeToString(id[:]))
	}
	a.log.add("produce", c.accessFields(field)...)
}

// accessEnded tells of a connection's end.
func (c *conn) accessEnded(reason string, err error) {
	if c.access == nil {
		return
	}
	asked, _ := c.flight.totals()
	fields := c.accessFields(zap.String("reason", reason), zap.Duration("duration", time.Since(c.began)), zap.Uint64("requests", asked+uint64(c.zeroAcks.Load())),
		zap.Int64("request_bytes", c.requestBytes.Load()), zap.Int64("response_bytes", c.responseBytes.Load()), zap.Int("topics", len(c.access.topics)))
	if err != nil {
		fields = append(fields, zap.Error(err))
	}
	c.access.log.add("close", slices.Clip(fields)...)
}
