package proxy

import (
	"context"
	"encoding/hex"
	"slices"
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

// access is what the access log keeps of one connection; nil where there is no log. The response goroutine owns the second block.
type access struct {
	log *accessLog
	id  int64

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
