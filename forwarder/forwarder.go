package forwarder

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/zap"

	"kmirror/internal/bufpool"
	"kmirror/protocol"
)

// Forwarder copies the source's topics to the mirror. Offer, Grown, Doubt, Status and Look are safe for concurrent use, also before
// and after Run.
type Forwarder struct {
	opts      Options
	log       *zap.Logger
	metrics   *metrics
	memory    budget
	codec     recordCodec
	inbox     inbox
	directory atomic.Pointer[directory]
	selected  atomic.Pointer[selector]
	running   atomic.Bool
	loop      atomic.Pointer[loop]
	ended     chan struct{} // closed when Run returns
}

// directory finds the stream of an offer. It isn't changed after it was published.
type directory struct {
	byName map[string][]*stream // by partition; nil where it isn't ours
	byID   map[protocol.TopicID][]*stream
}

func (d *directory) find(topic string, id protocol.TopicID, partition int32) *stream {
	var streams []*stream
	if id != (protocol.TopicID{}) {
		streams = d.byID[id]
	} else {
		streams = d.byName[topic]
	}
	if partition < 0 || int(partition) >= len(streams) {
		return nil
	}
	return streams[partition]
}

// New makes a Forwarder and registers its metrics; nothing runs yet.
func New(opts Options) (*Forwarder, error) {
	f := &Forwarder{
		opts: opts, log: opts.Logger, metrics: newMetrics(opts.Registry),
		inbox: inbox{wake: make(chan struct{}, 1)}, ended: make(chan struct{}),
	}
	f.memory.limit, f.codec.limit = opts.MemoryBytes, max(opts.MemoryBytes, minUnpackedBytes)
	f.directory.Store(&directory{})
	f.selected.Store(&selector{opts.Include, opts.Exclude})
	if opts.Registry != nil {
		if err := opts.Registry.Register(newCollector(f)); err != nil {
			return nil, fmt.Errorf("metrics: %w", err)
		}
	}
	return f, nil
}

// Offer takes a record batch that the source acknowledged; see proxy.Sink. It takes one only for a stream of this instance that is
// live or about to be, and only within the memory bound.
func (f *Forwarder) Offer(b protocol.AckedBatch) bool {
	s := f.directory.Load().find(b.Topic, b.TopicID, b.Partition)
	if s == nil {
		return false
	}
	s.offered.Add(int64(b.Batch.RecordCount()))
	if !s.accepting.Load() || !b.Batch.Dense() {
		return false
	}
	if !f.memory.offer(int64(bufpool.Footprint(len(b.Batch)))) {
		f.metrics.offersRefused.Inc()
		f.grown(s, b.BaseOffset+int64(b.Batch.LastOffsetDelta())+1)
		return false
	}
	f.inbox.offer(offering{s, b})
	return true
}

// Grown says that a source log reaches at least end; see proxy.Sink.
func (f *Forwarder) Grown(topic string, id protocol.TopicID, partition int32, end int64) {
	if s := f.directory.Load().find(topic, id, partition); s != nil && s.accepting.Load() {
		f.grown(s, end)
	}
}

func (f *Forwarder) grown(s *stream, end int64) {
	for {
		old := s.grownTo.Load()
		if end <= old || s.grownTo.CompareAndSwap(old, end) {
			break
		}
	}
	if s.grownSent.CompareAndSwap(false, true) {
		f.inbox.call(func() { s.loop.grew(s) })
	}
}

// Doubt says that a topic may have been recreated or truncated; see proxy.Sink.
func (f *Forwarder) Doubt(topic string, id protocol.TopicID, partition int32) {
	if s := f.directory.Load().find(topic, id, partition); s != nil && s.accepting.CompareAndSwap(true, false) {
		f.inbox.call(func() { s.loop.doubted(s) })
	}
}

// Run mirrors until ctx ends. Then it drains what is in flight, commits the checkpoint, leaves the group, and returns after the last goroutine
// it started. It returns an error only for what trying again can't mend.
func (f *Forwarder) Run(ctx context.Context) error {
	if !f.running.CompareAndSwap(false, true) {
		return errors.New("forwarder: Run was called before")
	}
	defer close(f.ended)
	clientID := "kmirror-" + f.opts.Name
	source, err := kgo.NewClient(append(clientOptions(f.opts.Source, clientID), kgo.RequestRetries(3))...)
	if err != nil {
		return fmt.Errorf("forwarder: source: %w", err)
	}
	defer source.Close()
	mirror, err := kgo.NewClient(append(clientOptions(f.opts.Mirror, clientID), kgo.RequestRetries(3),
		kgo.RecordDeliveryTimeout(20*time.Second), kgo.ProducerLinger(0))...)
	if err != nil {
		return fmt.Errorf("forwarder: mirror: %w", err)
	}
	defer mirror.Close()
	tasks, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	var wg sync.WaitGroup
	l := f.newLoop(source, mirror, clientID, func(task func(context.Context)) { wg.Go(func() { task(tasks) }) })
	f.loop.Store(l)
	l.run(ctx)
	stop()
	l.closeConns()
	wg.Wait()
	l.letGo()
	return nil
}

// Look returns after a look at both clusters' topics and the source's ends that began after the call.
func (f *Forwarder) Look(ctx context.Context) error {
	l := f.loop.Load()
	if l == nil {
		return errors.New("forwarder isn't running yet")
	}
	looked := make(chan struct{})
	f.inbox.call(func() { l.lookFor(looked) })
	select {
	case <-looked:
		return nil
	case <-f.ended:
		return errors.New("forwarder ended")
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// instanceID names this process's place in the group across restarts: the host and, where several share it, the given listener.
func instanceID(opts Options) string {
	host, err := os.Hostname()
	if err != nil || opts.Instance == "" {
		return opts.Instance
	}
	return host + "-" + opts.Instance
}

func partitionLabel(p int32) string { return strconv.Itoa(int(p)) }
