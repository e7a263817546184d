package forwarder

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/zap"
)

// mirrorTimeout bounds one round of questions to the mirror or the source from beside the loop.
const mirrorTimeout = 30 * time.Second

// copiedConfigs are the topic settings that a topic made on the mirror takes from the source where the source's topic sets them.
var copiedConfigs = []string{
	"cleanup.policy", "retention.ms", "retention.bytes", "delete.retention.ms", "min.compaction.lag.ms", "max.compaction.lag.ms",
	"message.timestamp.before.max.ms", "message.timestamp.after.max.ms",
}

// selector says which topics are mirrored.
type selector struct {
	include, exclude []*regexp.Regexp
}

// selects reports whether a topic is to be mirrored. Internal topics never are.
func (s *selector) selects(topic string) bool {
	whole := func(re *regexp.Regexp) bool {
		m := re.FindStringIndex(topic)
		return m != nil && m[0] == 0 && m[1] == len(topic)
	}
	return !strings.HasPrefix(topic, "__") && slices.ContainsFunc(s.include, whole) && !slices.ContainsFunc(s.exclude, whole)
}

// refresher asks both clusters for their topics and makes on the mirror what it lacks. It runs beside the loop, one at a time.
type refresher struct {
	source, mirror *kgo.Client
	selector       selector
	rf             int16
	log            *zap.Logger
}

// mirrorTopics is what a refresh found on the mirror, and why a topic can't be had there.
type mirrorTopics struct {
	view   *clusterView
	expiry time.Duration // the mirror's producer.id.expiration.ms, 0: it doesn't tell
	failed map[string]error
}

// askSource returns the source's view, cut to the topics to be mirrored.
func (r *refresher) askSource(ctx context.Context) (*clusterView, error) {
	ctx, cancel := context.WithTimeout(ctx, mirrorTimeout)
	defer cancel()
	view, err := askView(ctx, r.source, nil)
	if err != nil {
		return nil, fmt.Errorf("source: %w", err)
	}
	maps.DeleteFunc(view.topics, func(name string, t *topicView) bool { return t.err != nil || !r.selector.selects(name) })
	return view, nil
}

// askMirror returns the mirror's view of the source's topics, having made what was missing.
func (r *refresher) askMirror(ctx context.Context, source *clusterView) (*mirrorTopics, error) {
	ctx, cancel := context.WithTimeout(ctx, mirrorTimeout)
	defer cancel()
	names := slices.Sorted(maps.Keys(source.topics))
	view, err := askView(ctx, r.mirror, names)
	if err != nil {
		return nil, fmt.Errorf("mirror: %w", err)
	}
	found := &mirrorTopics{view: view, failed: map[string]error{}, expiry: r.askExpiry(ctx, view)}
	var create, grow []*topicView
	for _, name := range names {
		wanted, have := source.topics[name], view.topics[name]
		switch {
		case have == nil || errors.Is(have.err, kerr.UnknownTopicOrPartition):
			create = append(create, wanted)
		case have.err != nil && !kerr.IsRetriable(have.err):
			found.failed[name] = have.err
		case have.err == nil && len(have.partitions) < len(wanted.partitions):
			grow = append(grow, wanted)
		}
	}
	if len(create)+len(grow) == 0 {
		return found, nil
	}
	if err := errors.Join(r.create(ctx, create, found.failed), r.grow(ctx, grow, found.failed)); err != nil {
		return nil, fmt.Errorf("mirror: %w", err)
	}
	if found.view, err = askView(ctx, r.mirror, names); err != nil {
		return nil, fmt.Errorf("mirror: %w", err)
	}
	return found, nil
}

// askExpiry reads how long the mirror's brokers remember a producer (F3), from the first that answers. Who may not ask gets 0.
func (r *refresher) askExpiry(ctx context.Context, view *clusterView) time.Duration {
	for id := range view.brokers {
		req := kmsg.NewPtrDescribeConfigsRequest()
		res := kmsg.NewDescribeConfigsRequestResource()
		res.ResourceType, res.ResourceName = kmsg.ConfigResourceTypeBroker, strconv.Itoa(int(id))
		res.ConfigNames = []string{"producer.id.expiration.ms"}
		req.Resources = append(req.Resources, res)
		resp, err := r.mirror.Broker(int(id)).RetriableRequest(ctx, req)
		if err != nil {
			continue
		}
		for _, res := range resp.(*kmsg.DescribeConfigsResponse).Resources {
			for _, c := range res.Configs {
				if c.Name != "producer.id.expiration.ms" || c.Value == nil {
					continue
				}
				if ms, err := strconv.ParseInt(*c.Value, 10, 64); err == nil {
					return time.Duration(ms) * time.Millisecond
				}
			}
		}
	}
	return 0
}

// safeAge is the age up to which a batch's producer isn't forgotten: an hour is kept from the broker's limit, or half of a short one.
func safeAge(expiry time.Duration) time.Duration { return max(expiry-time.Hour, expiry/2) }

// create makes topics with the source's partition count and settings, so that the mirror never makes them by itself with its defaults.
func (r *refresher) create(ctx context.Context, topics []*topicView, failed map[string]error) error {
	if len(topics) == 0 {
		return nil
	}
	configs, err := r.configs(ctx, topics)
	if err != nil {
		return err
	}
	req := kmsg.NewPtrCreateTopicsRequest()
	req.TimeoutMillis = 15_000
	for _, t := range topics {
		c := kmsg.NewCreateTopicsRequestTopic()
		c.Topic, c.NumPartitions, c.ReplicationFactor, c.Configs = t.name, int32(len(t.partitions)), r.rf, configs[t.name]
		req.Topics = append(req.Topics, c)
	}
	resp, err := req.RequestWith(ctx, r.mirror)
	if err != nil {
		return fmt.Errorf("create topics: %w", err)
	}
	for _, t := range resp.Topics {
		err := kerr.ErrorForCode(t.ErrorCode)
		if err == nil {
			r.log.Info("topic made on the mirror", zap.String("topic", t.Topic))
			continue
		}
		if !errors.Is(err, kerr.TopicAlreadyExists) {
			failed[t.Topic] = described(fmt.Errorf("can't be made on the mirror: %w", err), t.ErrorMessage)
		}
	}
	return nil
}

func described(err error, message *string) error {
	if message == nil || *message == "" {
		return err
	}
	return fmt.Errorf("%w (%s)", err, *message)
}

// configs reads what the source's topics set themselves. What would alter or refuse data on the mirror is set against it: no
// recompression, create time, and room for the source's largest batches.
func (r *refresher) configs(ctx context.Context, topics []*topicView) (map[string][]kmsg.CreateTopicsRequestTopicConfig, error) {
	req := kmsg.NewPtrDescribeConfigsRequest()
	for _, t := range topics {
		res := kmsg.NewDescribeConfigsRequestResource()
		res.ResourceType, res.ResourceName = kmsg.ConfigResourceTypeTopic, t.name
		res.ConfigNames = append([]string{"max.message.bytes"}, copiedConfigs...)
		req.Resources = append(req.Resources, res)
	}
	configs := make(map[string][]kmsg.CreateTopicsRequestTopicConfig, len(topics))
	set := func(topic, name, value string) {
		c := kmsg.NewCreateTopicsRequestTopicConfig()
		c.Name, c.Value = name, kmsg.StringPtr(value)
		configs[topic] = append(configs[topic], c)
	}
	for _, t := range topics {
		set(t.name, "compression.type", "producer")
		set(t.name, "message.timestamp.type", "CreateTime")
	}
	for _, shard := range r.source.RequestSharded(ctx, req) {
		if shard.Err != nil {
			return nil, fmt.Errorf("source topic settings: %w", shard.Err)
		}
		for _, res := range shard.Resp.(*kmsg.DescribeConfigsResponse).Resources {
			if err := kerr.ErrorForCode(res.ErrorCode); err != nil {
				return nil, fmt.Errorf("settings of source topic %s: %w", res.ResourceName, err)
			}
			for _, c := range res.Configs {
				own := c.Source == kmsg.ConfigSourceDynamicTopicConfig && slices.Contains(copiedConfigs, c.Name)
				if c.Value != nil && (own || c.Name == "max.message.bytes") {
					set(res.ResourceName, c.Name, *c.Value)
				}
			}
		}
	}
	return configs, nil
}

// grow gives mirror topics the partitions that the source's have more.
func (r *refresher) grow(ctx context.Context, topics []*topicView, failed map[string]error) error {
	if len(topics) == 0 {
		return nil
	}
	req := kmsg.NewPtrCreatePartitionsRequest()
	req.TimeoutMillis = 15_000
	for _, t := range topics {
		c := kmsg.NewCreatePartitionsRequestTopic()
		c.Topic, c.Count = t.name, int32(len(t.partitions))
		req.Topics = append(req.Topics, c)
	}
	resp, err := req.RequestWith(ctx, r.mirror)
	if err != nil {
		return fmt.Errorf("create partitions: %w", err)
	}
	for _, t := range resp.Topics {
		if err := kerr.ErrorForCode(t.ErrorCode); err != nil {
			failed[t.Topic] = described(fmt.Errorf("can't be given more partitions on the mirror: %w", err), t.ErrorMessage)
		}
	}
	return nil
}

type refreshing struct {
	running bool
	wanted  bool
	waiters []func()
}

func (l *loop) refreshSoon() { l.refreshing.wanted = true }

func (l *loop) startRefresh() {
	if !l.refreshing.wanted || l.refreshing.running || l.stopping {
		return
	}
	l.refreshing.wanted, l.refreshing.running = false, true
	waiters := l.refreshing.waiters
	l.refreshing.waiters = nil
	l.spawn(func(ctx context.Context) {
		source, err := l.refresher.askSource(ctx)
		l.inbox.call(func() { l.sourceRefreshed(source, err) })
		if err == nil {
			mirror, err := l.refresher.askMirror(ctx, source)
			l.inbox.call(func() { l.mirrorRefreshed(mirror, err) })
		}
		sleep(ctx, 200*time.Millisecond) // however often it is asked for
		l.inbox.call(func() {
			l.refreshing.running = false
			for _, done := range waiters {
				done()
			}
		})
	})
}

func (l *loop) sourceRefreshed(view *clusterView, err error) {
	if l.sourceLost(err) || l.stopping {
		return
	}
	first := l.registry == nil
	if first {
		writer := fmt.Sprintf("%s %s", l.clientID, l.self)
		l.registry = newRegistry(l.mirror, l.opts.Name, view.clusterID, writer, l.opts.ReplicationFactor, l.log)
	}
	for _, s := range l.streams {
		s.ageLineage(view.leadership(s.topic, s.index).epoch, l.now)
	}
	l.sourceView = view
	topics := make(map[string]int32, len(view.topics))
	for name, t := range view.topics {
		topics[name] = int32(len(t.partitions))
	}
	l.groupTopics.Store(&topics)
	if first {
		l.spawn(l.group.run)
	} else {
		select {
		case l.group.changed <- struct{}{}:
		default:
		}
	}
	l.reconcile()
}

func (l *loop) mirrorRefreshed(found *mirrorTopics, err error) {
	if l.mirrorLost(err) || l.stopping {
		return
	}
	for topic, err := range found.failed {
		if l.topicErrors[topic] == nil || l.topicErrors[topic].Error() != err.Error() {
			l.log.Error("mirror topic", zap.String("topic", topic), zap.Error(err))
		}
	}
	if found.expiry > 0 && safeAge(found.expiry) != l.expireAge {
		l.expireAge = safeAge(found.expiry)
		for _, s := range l.streams {
			s.expireAge = l.expireAge
		}
	}
	l.mirrorView, l.topicErrors = found.view, found.failed
	l.reconcile()
}

func (l *loop) lookFor(looked chan struct{}) {
	l.refreshing.waiters = append(l.refreshing.waiters, func() {
		l.lookAll()
		l.looking.waiters = append(l.looking.waiters, looked)
	})
	l.refreshSoon()
}
