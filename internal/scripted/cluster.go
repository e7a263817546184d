package scripted

import (
	"crypto/rand"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"kmirror/protocol"
)

// Options shape a Cluster. The zero value is one broker that behaves as Apache Kafka 4.3 does by default.
type Options struct {
	Brokers   int    // node IDs 1..Brokers; 0 means 1
	ClusterID string // "" means a random one

	ProducerIDExpiration time.Duration // producer.id.expiration.ms; 0 means 24 hours
	ConnectionsMaxIdle   time.Duration // connections.max.idle.ms; 0 means never
	// StrictSequence makes a producer ID that the partition doesn't know start at sequence 0, as brokers before 2.5 and kfake do.
	StrictSequence bool
	// AutoCreate makes Metadata requests create topics of one partition, where the client allows it.
	AutoCreate bool
	// MaxVersions lowers the highest version of an API (by API key) that the brokers offer; -1 takes the API away.
	MaxVersions map[int16]int16
	// Now is the brokers' clock: append times, expiry and timestamp checks. nil means time.Now.
	Now func() time.Time
}

// Cluster is a Kafka cluster in memory on real loopback ports. All methods are safe for concurrent use, also in the middle of
// traffic. A method that names a topic or partition that isn't there fails the test.
type Cluster struct {
	tb   testing.TB
	opts Options
	done chan struct{} // closed by Close
	wg   sync.WaitGroup

	mu      sync.Mutex // guards all below, and all state of brokers, topics, partitions and groups
	changed chan struct{}
	closed  bool
	brokers []*broker
	topics  map[string]*topic
	groups  map[string]*group
	txns    map[string]*transaction

	nextProducerID int64
	nextConn       int64
	nextMember     int64
	interceptors   []interceptor
	nextIntercept  int
	requests       []*Request
	markersHeld    bool
	heldMarkers    []func()
}

type topic struct {
	name       string
	id         protocol.TopicID
	configs    map[string]string
	partitions []*partition
}

// New starts a cluster; it is closed when the test ends.
func New(tb testing.TB, opts Options) *Cluster {
	tb.Helper()
	opts.Brokers = max(opts.Brokers, 1)
	if opts.ClusterID == "" {
		opts.ClusterID = "scripted-" + rand.Text()[:12]
	}
	if opts.ProducerIDExpiration == 0 {
		opts.ProducerIDExpiration = 24 * time.Hour
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	c := &Cluster{
		tb: tb, opts: opts, done: make(chan struct{}), changed: make(chan struct{}),
		topics: map[string]*topic{}, groups: map[string]*group{}, txns: map[string]*transaction{}, nextProducerID: 1000,
	}
	for i := range opts.Brokers {
		b := &broker{cluster: c, id: int32(i + 1)}
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			tb.Fatalf("scripted: %v", err)
		}
		c.brokers = append(c.brokers, b)
		b.start(ln)
	}
	tb.Cleanup(c.Close)
	return c
}

// Close ends all connections and waits for every goroutine of the cluster.
func (c *Cluster) Close() {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return
	}
	c.closed = true
	close(c.done)
	for _, b := range c.brokers {
		b.stop()
	}
	c.bump()
	c.mu.Unlock()
	c.wg.Wait()
}

// ID returns the cluster ID.
func (c *Cluster) ID() string { return c.opts.ClusterID }

// Seeds returns the addresses of all brokers, host:port.
func (c *Cluster) Seeds() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var addrs []string
	for _, b := range c.brokers {
		addrs = append(addrs, b.addr)
	}
	return addrs
}

// bump wakes everything that waits for a change of state; the caller holds mu.
func (c *Cluster) bump() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// await releases mu until cond holds, d has passed (d < 0: never) or the broker stops. It reports cond. The caller holds mu.
func (c *Cluster) await(stop <-chan struct{}, d time.Duration, cond func() bool) bool {
	var timeout <-chan time.Time
	if d >= 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		timeout = timer.C
	}
	for !cond() {
		changed := c.changed
		c.mu.Unlock()
		ended := false
		select {
		case <-changed:
		case <-timeout:
			ended = true
		case <-stop:
			ended = true
		}
		c.mu.Lock()
		if ended {
			return cond()
		}
	}
	return true
}

// locked runs f with mu held and wakes all waiters afterwards.
func (c *Cluster) locked(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
	c.bump()
}

// view runs f with mu held.
func (c *Cluster) view(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
}

func (c *Cluster) broker(id int32) *broker {
	if id < 1 || int(id) > len(c.brokers) {
		c.tb.Errorf("scripted: no broker %d", id)
		panic(fmt.Sprintf("scripted: no broker %d", id))
	}
	return c.brokers[id-1]
}

// at returns the live partition of a topic for a hook; the caller holds mu.
func (c *Cluster) at(topicName string, index int32) *partition {
	t := c.topics[topicName]
	if t == nil || index < 0 || int(index) >= len(t.partitions) {
		panic(fmt.Sprintf("scripted: no partition %s-%d", topicName, index))
	}
	return t.partitions[index]
}

// CreateTopic creates a topic whose partitions are replicated on every broker; partition i is led by broker 1 + i mod brokers.
// configs are pairs of name and value.
func (c *Cluster) CreateTopic(name string, partitions int, configs ...string) protocol.TopicID {
	var id protocol.TopicID
	c.locked(func() {
		m := map[string]string{}
		for i := 0; i+1 < len(configs); i += 2 {
			m[configs[i]] = configs[i+1]
		}
		id = c.createTopic(name, partitions, m).id
	})
	return id
}

func (c *Cluster) createTopic(name string, partitions int, configs map[string]string) *topic {
	t := &topic{name: name, configs: configs}
	rand.Read(t.id[:])
	t.id[0] = 'T' // never one of the reserved IDs
	c.topics[name] = t
	c.addPartitions(t, partitions)
	return t
}

func (c *Cluster) addPartitions(t *topic, total int) {
	var replicas []int32
	for _, b := range c.brokers {
		replicas = append(replicas, b.id)
	}
	for i := len(t.partitions); i < total; i++ {
		k := i % len(replicas)
		p := &partition{
			topic: t, index: int32(i), leader: replicas[k], replicas: append(slices.Clone(replicas[k:]), replicas[:k]...),
			producers: producers{}, openTxns: map[int64]int64{}, clones: map[int32]*partition{},
			strict: c.opts.StrictSequence, expiration: c.opts.ProducerIDExpiration,
		}
		p.epochs = []epochStart{{0, 0}}
		t.partitions = append(t.partitions, p)
	}
}

// AddPartitions raises the partition count of a topic to total.
func (c *Cluster) AddPartitions(name string, total int) {
	c.locked(func() { c.addPartitions(c.at(name, 0).topic, total) })
}

// DeleteTopic deletes a topic and its data.
func (c *Cluster) DeleteTopic(name string) {
	c.locked(func() { c.deleteTopic(name) })
}

func (c *Cluster) deleteTopic(name string) {
	if t := c.topics[name]; t != nil {
		for _, p := range t.partitions {
			p.deleted = true
		}
	}
	delete(c.topics, name)
}

// RecreateTopic deletes a topic and creates it again under a new topic ID, with the same partition count and configs.
func (c *Cluster) RecreateTopic(name string) protocol.TopicID {
	var id protocol.TopicID
	c.locked(func() {
		old := c.at(name, 0).topic
		c.deleteTopic(name)
		id = c.createTopic(name, len(old.partitions), old.configs).id
	})
	return id
}

// SetConfig sets a topic's config; an empty value restores the default.
func (c *Cluster) SetConfig(topicName, key, value string) {
	c.locked(func() {
		if t := c.at(topicName, 0).topic; value == "" {
			delete(t.configs, key)
		} else {
			t.configs[key] = value
		}
	})
}

func (c *Cluster) topicByID(id protocol.TopicID) *topic {
	for _, t := range c.topics {
		if t.id == id {
			return t
		}
	}
	return nil
}
