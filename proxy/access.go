package proxy

import (
	"context"
	"encoding/base64"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"kmirror/protocol"
)

// accessQueue is how many events wait for the access log to be written. What comes while it is full is dropped and counted: no connection
// waits for the log.
const accessQueue = 8192

// accessLog writes what clients do: connect, authenticate, first record for a topic, end. It never sees a password, a token, or what is in a record. A nil
// log takes nothing.
type accessLog struct {
	log     *zap.Logger
	events  chan accessEvent
	dropped prometheus.Counter

	mu    sync.RWMutex
	names map[protocol.TopicID]string // of topics in Metadata answers, at most maxTopicNames
}

// learnTopics takes the names of topic IDs from a Metadata response: producers name topics by ID alone (Produce v13) and must have asked for them.
func (a *accessLog) learnTopics(frame []byte, version int16) {
	if a == nil {
		return
	}
	protocol.MetadataTopics(frame, version, func(name []byte, id protocol.TopicID) {
		if a.topicName(id) == string(name) {
			return
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.names == nil {
			a.names = make(map[protocol.TopicID]string)
		}
		if len(a.names) < maxTopicNames {
			a.names[id] = string(name)
		}
	})
}

// topicName is "" for an ID that no answer named.
func (a *accessLog) topicName(id protocol.TopicID) string {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.names[id]
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

// access is what the access log keeps of one connection; nil where there is no log.
type access struct {
	log *accessLog
	id  int64

	steps int // answers to a log-in without error since the handshake; of the response goroutine

	mu     sync.Mutex
	topics map[string]bool // by name, or ID
}

// maxAccessTopics is how many topics of one connection are told.
const maxAccessTopics = 1000

// beginAccess begins the log of a connection.
func (c *conn) beginAccess() {
	if c.s.access != nil {
		c.access = &access{log: c.s.access, id: c.s.accessed.Add(1)}
	}
}

func (c *conn) accessFields(more ...zap.Field) []zap.Field {
	fields := []zap.Field{zap.Int64("connection", c.access.id), zap.String("client", c.ends.client.String())}
	if c.broker != nil {
		fields = append(fields, zap.Int32("broker", c.broker.id))
	}
	return append(fields, more...)
}

// accessConnected tells of a connection that has its broker.
func (c *conn) accessConnected() {
	if c.access == nil {
		return
	}
	fields := c.accessFields(zap.String("broker_address", c.source.RemoteAddr().String()))
	if name := tlsSubject(c.client); name != "" {
		fields = append(fields, zap.String("tls_subject", name))
	}
	c.access.log.add("connect", fields...)
}

// accessProduced tells of a topic's first record on this connection that was acknowledged, or wants no acknowledgement.
func (c *conn) accessProduced(topic []byte, id protocol.TopicID) {
	if c.access == nil {
		return
	}
	a := c.access
	key := topic
	if topic == nil {
		key = id[:]
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.topics[string(key)] || len(a.topics) >= maxAccessTopics {
		return
	}
	if a.topics == nil {
		a.topics = make(map[string]bool)
	}
	a.topics[string(key)] = true
	name := string(topic)
	if topic == nil {
		name = a.log.topicName(id)
	}
	var fields []zap.Field
	if name != "" {
		fields = append(fields, zap.String("topic", name))
	}
	if id != (protocol.TopicID{}) {
		fields = append(fields, zap.String("topic_id", base64.RawURLEncoding.EncodeToString(id[:]))) // as Kafka's tools print it
	}
	a.log.add("produce", c.accessFields(fields...)...)
}

// accessUnacked tells of the topics in a Produce request of n bytes that wants no answer, as far as its first maxPeek bytes show them.
func (c *conn) accessUnacked(n int) error {
	if c.access == nil {
		return nil
	}
	b, err := c.requests.peek(min(n, maxPeek))
	if err != nil {
		return err
	}
	walk := protocol.NewProduceRequest(b[:min(n, len(b))])
	for walk.Next() {
		c.accessProduced(walk.Topic, walk.TopicID)
	}
	if walk.Err() != nil && (walk.Topic != nil || walk.TopicID != (protocol.TopicID{})) { // cut off in this one's records
		c.accessProduced(walk.Topic, walk.TopicID)
	}
	return nil
}

// accessEnded tells of a connection's end, also of one that was refused before it had a broker.
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

// accessRefused tells of a connection that was refused for want of a place.
func (s *Server) accessRefused(client net.Conn, b *broker) {
	c := &conn{s: s, broker: b, ends: endsOf(client), began: time.Now()}
	c.beginAccess()
	c.accessEnded(reasonLimit, nil)
}
