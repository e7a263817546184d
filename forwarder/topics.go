package forwarder

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/zap"

	"kmirror/protocol"
)

// mirrorTimeout bounds one round of questions to the mirror or the source from beside the loop.
const mirrorTimeout = 30 * time.Second

// refresher asks both clusters for their topics and makes on the mirror what it lacks. It runs beside the loop, one at a time of each cluster.
type refresher struct {
	source, mirror *kgo.Client
	selected       *atomic.Pointer[selector]
	rename         renaming
	rf             int16
	expand         bool // mirror topics get the partitions that the source's have more
	repartition    bool // they may have any number
	onRecreate     RecreatePolicy
	settings       settingsKeeper
	log            *zap.Logger

	known map[protocol.TopicID]bool // source topics of the first refresh; nil before it
}

func newRefresher(f *Forwarder, source, mirror *kgo.Client) refresher {
	return refresher{
		source: source, mirror: mirror, selected: &f.selected, rename: renaming(f.opts.Rename), rf: f.opts.ReplicationFactor,
		expand: f.opts.Expand, repartition: f.opts.Repartition, onRecreate: f.opts.OnRecreate, log: f.log,
		settings: settingsKeeper{
			source: source, mirror: mirror, synced: f.opts.SyncedSettings, fix: f.opts.FixSettings, every: f.opts.SettingsEvery, log: f.log,
			checked: map[string]topicCheck{}, told: map[told]string{},
		},
	}
}

// mirrorTopics is what a refresh found on the mirror, and why a topic can't be had there.
type mirrorTopics struct {
	view    *clusterView
	expiry  time.Duration               // the mirror's producer.id.expiration.ms, 0: it doesn't tell
	failed  map[string]error            // by source topic
	hazards map[string][]string         // settings that alter or refuse data, by source topic
	judged  map[string]protocol.TopicID // the source topics for which it was looked
}

// askSource returns the source's view, cut to the topics to be mirrored.
func (r *refresher) askSource(ctx context.Context) (*clusterView, error) {
	ctx, cancel := context.WithTimeout(ctx, mirrorTimeout)
	defer cancel()
	view, err := askView(ctx, r.source, nil)
	if err != nil {
		return nil, fmt.Errorf("source: %w", err)
	}
	first := r.known == nil
	if first {
		r.known = make(map[protocol.TopicID]bool, len(view.topics))
	}
	selector := r.selected.Load()
	maps.DeleteFunc(view.topics, func(name string, t *topicView) bool {
		if first {
			r.known[t.id] = true
		}
		t.appeared = !r.known[t.id]
		return t.err != nil || !selector.selects(name)
	})
	return view, nil
}

// askMirror returns the mirror's view of the source's topics, having made what was missing.
func (r *refresher) askMirror(ctx context.Context, source *clusterView, registry *registry) (*mirrorTopics, error) {
	ctx, cancel := context.WithTimeout(ctx, mirrorTimeout)
	defer cancel()
	names := slices.Sorted(maps.Keys(source.topics))
	mirrorNames := make([]string, len(names))
	for i, name := range names {
		mirrorNames[i] = r.rename.mirrorName(name)
	}
	view, err := askView(ctx, r.mirror, mirrorNames)
	if err != nil {
		return nil, fmt.Errorf("mirror: %w", err)
	}
	found := &mirrorTopics{view: view, failed: map[string]error{}, expiry: r.askExpiry(ctx, view), judged: make(map[string]protocol.TopicID, len(names))}
	for name, t := range source.topics {
		found.judged[name] = t.id
	}
	changed, err := r.mend(ctx, source, found, registry)
	if err == nil && changed {
		found.view, err = askView(ctx, r.mirror, mirrorNames)
	}
	if err == nil {
		err = r.checkSettings(ctx, source, found, registry)
	}
	if err != nil {
		return nil, fmt.Errorf("mirror: %w", err)
	}
	return found, nil
}

// mend makes and grows topics on the mirror, and reports whether it changed anything there.
func (r *refresher) mend(ctx context.Context, source *clusterView, found *mirrorTopics, registry *registry) (changed bool, err error) {
	recreated, err := r.recreated(ctx, source, found, registry)
	if err != nil {
		return false, err
	}
	var create, grow []*topicView
	for _, name := range slices.Sorted(maps.Keys(source.topics)) {
		wanted, have := source.topics[name], found.view.topics[r.rename.mirrorName(name)]
		switch {
		case found.failed[name] != nil:
		case have == nil, errors.Is(have.err, kerr.UnknownTopicOrPartition), slices.Contains(recreated, wanted):
			create = append(create, wanted)
		case have.err != nil && !kerr.IsRetriable(have.err):
			found.failed[name] = have.err
		case have.err == nil && len(have.partitions) < len(wanted.partitions) && !r.repartition:
			if r.expand {
				grow = append(grow, wanted)
			} else {
				found.failed[name] = fmt.Errorf("the mirror topic has %d partitions, the source's %d: give it as many, or set topics.partitions to expand",
					len(have.partitions), len(wanted.partitions))
			}
		}
	}
	if len(create)+len(grow) == 0 {
		return false, nil
	}
	return true, errors.Join(r.create(ctx, create, found.failed, registry), r.grow(ctx, grow, found.failed))
}

// recreated finds the source topics that were deleted and made again since they were mirrored, as the segments topic knows, and does what the
// policy says. It returns those whose mirror topic was deleted, to be made anew.
func (r *refresher) recreated(ctx context.Context, source *clusterView, found *mirrorTopics, registry *registry) (deleted []*topicView, err error) {
	if r.onRecreate == RecreateAppend {
		return nil, nil
	}
	if err := registry.refresh(ctx); err != nil {
		return nil, err
	}
	for name, wanted := range source.topics {
		have := found.view.topics[r.rename.mirrorName(name)]
		if have == nil || have.err != nil {
			continue
		}
		if this, others := registry.lives(wanted.id, have.id); this || !others {
			continue
		}
		if r.onRecreate == RecreateStop {
			found.failed[name] = errors.New("the source topic was deleted and made again (topics.on_recreate: stop): " +
				"delete the mirror topic to begin anew, or set append to let its records follow the old ones")
			continue
		}
		if err := r.delete(ctx, have); err != nil {
			found.failed[name] = fmt.Errorf("the source topic was made again, the mirror's can't be deleted: %w", err)
			continue
		}
		r.log.Warn("source topic was made again: the mirror's was deleted and begins anew", zap.String("topic", name), zap.String("mirror_topic", have.name))
		deleted = append(deleted, wanted)
	}
	return deleted, nil
}

// delete removes a mirror topic by its ID, so that never one that another instance has made anew goes.
func (r *refresher) delete(ctx context.Context, t *topicView) error {
	req := kmsg.NewPtrDeleteTopicsRequest()
	req.TimeoutMillis = 15_000
	x := kmsg.NewDeleteTopicsRequestTopic()
	x.TopicID = t.id
	req.Topics = append(req.Topics, x)
	resp, err := req.RequestWith(ctx, r.mirror)
	if err != nil {
		return err
	}
	if resp.Version < 6 {
		return errors.New("its brokers know no topic IDs")
	}
	for _, x := range resp.Topics {
		if err := kerr.ErrorForCode(x.ErrorCode); err != nil && !errors.Is(err, kerr.UnknownTopicID) {
			return described(err, x.ErrorMessage)
		}
	}
	return nil
}

// checkSettings looks at the topics' settings where it's time to.
func (r *refresher) checkSettings(ctx context.Context, source *clusterView, found *mirrorTopics, registry *registry) error {
	mirror := func(name string) *topicView { return found.view.topics[r.rename.mirrorName(name)] }
	k := &r.settings
	if k.due(time.Now(), slices.Collect(maps.Keys(source.topics)), mirror) {
		if err := registry.refresh(ctx); err != nil {
			return err
		}
		if err := k.look(ctx, registry, source.topics, mirror); err != nil {
			return err
		}
	}
	found.hazards = map[string][]string{}
	for name, check := range k.checked {
		if len(check.hazards) > 0 && source.topics[name] != nil {
			found.hazards[name] = check.hazards
		}
	}
	return nil
}

// expiryTimeout bounds the question to one broker, so that one that says nothing doesn't take a refresh's whole time.
const expiryTimeout = 3 * time.Second

// askExpiry reads how long the mirror's brokers remember a producer (F3), from the first that answers. Who may not ask gets 0.
func (r *refresher) askExpiry(ctx context.Context, view *clusterView) time.Duration {
	for id := range view.brokers {
		ctx, cancel := context.WithTimeout(ctx, expiryTimeout)
		defer cancel()
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
func (r *refresher) create(ctx context.Context, topics []*topicView, failed map[string]error, registry *registry) error {
	if len(topics) == 0 {
		return nil
	}
	names := make([]string, len(topics))
	for i, t := range topics {
		names[i] = t.name
	}
	settings, refused, err := describeTopics(ctx, r.source, names, append([]string{maxMessageBytes}, r.settings.synced...))
	if errors.Is(refused, errNoSettings) {
		refused = nil // the mirror's defaults, then
	}
	if err = errors.Join(err, refused); err != nil {
		return fmt.Errorf("source: %w", err)
	}
	req := kmsg.NewPtrCreateTopicsRequest()
	req.TimeoutMillis = 15_000
	byName := make(map[string]*topicView, len(topics))
	given := make(map[string]map[string]*string, len(topics))
	for _, t := range topics {
		c := kmsg.NewCreateTopicsRequestTopic()
		c.Topic, c.NumPartitions, c.ReplicationFactor = r.rename.mirrorName(t.name), int32(len(t.partitions)), r.rf
		given[c.Topic], byName[c.Topic] = settingsFor(settings[t.name], r.settings.synced), t
		for _, name := range slices.Sorted(maps.Keys(given[c.Topic])) {
			x := kmsg.NewCreateTopicsRequestTopicConfig()
			x.Name, x.Value = name, given[c.Topic][name]
			c.Configs = append(c.Configs, x)
		}
		req.Topics = append(req.Topics, c)
	}
	resp, err := req.RequestWith(ctx, r.mirror)
	if err != nil {
		return fmt.Errorf("create topics: %w", err)
	}
	var bases []settingsRecord
	for _, t := range resp.Topics {
		wanted := byName[t.Topic]
		switch err := kerr.ErrorForCode(t.ErrorCode); {
		case wanted == nil:
		case err == nil:
			r.log.Info("topic made on the mirror", zap.String("topic", t.Topic))
			base := given[t.Topic]
			for _, name := range r.settings.synced {
				if _, ok := base[name]; !ok {
					base[name] = nil // left at the default
				}
			}
			bases = append(bases, newSettingsRecord(wanted, &topicView{name: t.Topic, id: t.TopicID}, base))
		case !errors.Is(err, kerr.TopicAlreadyExists):
			failed[wanted.name] = described(fmt.Errorf("can't be made on the mirror: %w", err), t.ErrorMessage)
		}
	}
	if len(bases) == 0 {
		return nil
	}
	return registry.keepSettings(ctx, bases)
}

func described(err error, message *string) error {
	if message == nil || *message == "" {
		return err
	}
	return fmt.Errorf("%w (%s)", err, *message)
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
		c.Topic, c.Count = r.rename.mirrorName(t.name), int32(len(t.partitions))
		req.Topics = append(req.Topics, c)
	}
	resp, err := req.RequestWith(ctx, r.mirror)
	if err != nil {
		return fmt.Errorf("create partitions: %w", err)
	}
	byName := make(map[string]string, len(topics))
	for _, t := range topics {
		byName[r.rename.mirrorName(t.name)] = t.name
	}
	for _, t := range resp.Topics {
		if err := kerr.ErrorForCode(t.ErrorCode); err != nil {
			failed[byName[t.Topic]] = described(fmt.Errorf("can't be given more partitions on the mirror: %w", err), t.ErrorMessage)
		}
	}
	return nil
}

// refreshing is the state of the topic refresh: of each cluster one at a time, sooner when asked. The mirror's follows the source's, which doesn't wait for it:
// while a mirror broker doesn't answer, streams still learn of their new leaders on the source.
type refreshing struct {
	running bool
	wanted  bool
	waiters []func()

	mirrorRunning bool
	next          *clusterView // the source's, for which the mirror is asked next; nil: none
	nextWaiters   []func()
}

// refreshSoon asks both clusters for their topics again.
func (l *loop) refreshSoon() { l.refreshing.wanted = true }

func (l *loop) startRefresh() {
	r := &l.refreshing
	if !r.wanted || r.running || l.stopping {
		return
	}
	r.wanted, r.running = false, true
	waiters := r.waiters
	r.waiters = nil
	l.spawn(func(ctx context.Context) {
		source, err := l.refresher.askSource(ctx)
		l.inbox.call(func() {
			l.sourceRefreshed(source, err)
			if r.nextWaiters = append(r.nextWaiters, waiters...); err == nil {
				r.next = source
			}
			l.startMirrorRefresh()
		})
		sleep(ctx, 200*time.Millisecond) // however often it is asked for
		l.inbox.call(func() { r.running = false })
	})
}

// startMirrorRefresh is the mirror's half of a refresh.
func (l *loop) startMirrorRefresh() {
	r := &l.refreshing
	if r.mirrorRunning {
		return
	}
	source, waiters, registry := r.next, r.nextWaiters, l.registry
	r.next, r.nextWaiters = nil, nil
	if source == nil || registry == nil || l.stopping {
		for _, done := range waiters {
			done()
		}
		return
	}
	r.mirrorRunning = true
	l.spawn(func(ctx context.Context) {
		mirror, err := l.refresher.askMirror(ctx, source, registry)
		l.inbox.call(func() {
			r.mirrorRunning = false
			l.mirrorRefreshed(mirror, err)
			for _, done := range waiters {
				done()
			}
			l.startMirrorRefresh()
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
	l.mirrorView, l.topicErrors, l.hazards, l.judged = found.view, found.failed, found.hazards, found.judged
	l.reconcile()
}

// lookFor closes looked after topics were refreshed and then the source's ends were looked at.
func (l *loop) lookFor(looked chan struct{}) {
	l.refreshing.waiters = append(l.refreshing.waiters, func() {
		l.lookAll()
		l.looking.waiters = append(l.looking.waiters, looked)
	})
	l.refreshSoon()
}
