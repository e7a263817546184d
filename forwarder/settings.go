package forwarder

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/zap"
)

const (
	maxMessageBytes = "max.message.bytes"
	compressionType = "compression.type"
	timestampType   = "message.timestamp.type"
	timestampBefore = "message.timestamp.before.max.ms"
	timestampAfter  = "message.timestamp.after.max.ms"
	retentionTime   = "retention.ms"
	cleanupPolicy   = "cleanup.policy"
	minInSync       = "min.insync.replicas"
)

// checkedSettings are those that can alter or refuse what kmirror appends.
var checkedSettings = []string{
	maxMessageBytes, compressionType, timestampType, timestampBefore, timestampAfter, retentionTime, cleanupPolicy, minInSync,
}

// topicSetting is one setting of a topic as it is in force.
type topicSetting struct {
	value string
	own   bool // set on the topic, else a broker's or Kafka's default
}

type topicSettings map[string]topicSetting

// own returns what is set on the topic itself, nil if nothing is.
func (s topicSettings) own(name string) *string {
	if x, ok := s[name]; ok && x.own {
		return &x.value
	}
	return nil
}

// number returns a setting that counts something; false where it isn't known.
func (s topicSettings) number(name string) (int64, bool) {
	n, err := strconv.ParseInt(s[name].value, 10, 64)
	return n, err == nil
}

// describeTopics reads settings of topics. A topic that is gone is left out; so is one whose settings may not be read, and the first such
// refusal is returned beside what could be read.
func describeTopics(ctx context.Context, client *kgo.Client, topics, names []string) (found map[string]topicSettings, refused error, err error) {
	req := kmsg.NewPtrDescribeConfigsRequest()
	for _, topic := range topics {
		res := kmsg.NewDescribeConfigsRequestResource()
		res.ResourceType, res.ResourceName, res.ConfigNames = kmsg.ConfigResourceTypeTopic, topic, names
		req.Resources = append(req.Resources, res)
	}
	found = make(map[string]topicSettings, len(topics))
	for _, shard := range client.RequestSharded(ctx, req) {
		if shard.Err != nil {
			if !knowsAPI(ctx, client, kmsg.DescribeConfigs) {
				return found, errNoSettings, nil
			}
			return nil, nil, fmt.Errorf("topic settings: %w", shard.Err)
		}
		for _, res := range shard.Resp.(*kmsg.DescribeConfigsResponse).Resources {
			if err := kerr.ErrorForCode(res.ErrorCode); err != nil {
				if !errors.Is(err, kerr.UnknownTopicOrPartition) && refused == nil {
					refused = fmt.Errorf("settings of topic %s: %w", res.ResourceName, err)
				}
				continue
			}
			settings := make(topicSettings, len(res.Configs))
			for _, c := range res.Configs {
				if c.Value != nil {
					settings[c.Name] = topicSetting{*c.Value, c.Source == kmsg.ConfigSourceDynamicTopicConfig}
				}
			}
			found[res.ResourceName] = settings
		}
	}
	return found, refused, nil
}

// errNoSettings says that a cluster is older than topic settings that clients can read.
var errNoSettings = errors.New("topic settings: brokers before Kafka 0.11 don't tell them")

// knowsAPI reports whether a cluster's brokers have an API, true where that can't be found out now.
func knowsAPI(ctx context.Context, client *kgo.Client, key kmsg.Key) bool {
	resp, err := kmsg.NewPtrApiVersionsRequest().RequestWith(ctx, client)
	return err != nil || slices.ContainsFunc(resp.ApiKeys, func(k kmsg.ApiVersionsResponseApiKey) bool { return k.ApiKey == int16(key) })
}

// settingsFor is what a topic made on the mirror is given: what the source's topic sets itself of the synced settings; and against what would
// alter or refuse data: no recompression, create time, room for the source's largest batches.
func settingsFor(source topicSettings, synced []string) map[string]*string {
	set := map[string]*string{compressionType: kmsg.StringPtr("producer"), timestampType: kmsg.StringPtr("CreateTime")}
	for _, name := range synced {
		if value := source.own(name); value != nil {
			set[name] = value
		}
	}
	if x, ok := source[maxMessageBytes]; ok {
		set[maxMessageBytes] = &x.value
	}
	return set
}

// syncPlan says how to bring a mirror topic's settings in step with the source's. base is what kmirror set last, nil where it set nothing: only what
// still is as kmirror left it may change; all else is the owner's of the mirror. It returns the changes (nil: back to the default), the base
// that holds after them, and the settings that stay different because the owner changed them.
func syncPlan(source, mirror topicSettings, base map[string]*string, synced []string) (changes, next map[string]*string, left []string) {
	changes, next = map[string]*string{}, maps.Clone(base)
	if next == nil {
		next = map[string]*string{}
	}
	for _, name := range append([]string{maxMessageBytes}, synced...) {
		want, have := source.own(name), mirror.own(name)
		if name == maxMessageBytes { // what is in force counts, wherever it is set
			x, ok := source[name]
			if !ok {
				continue
			}
			want = &x.value
		}
		was, ours := base[name]
		switch {
		case same(want, have):
			if ours {
				next[name] = want
			}
		case ours && same(was, have):
			changes[name], next[name] = want, want
		case ours:
			left = append(left, name)
		}
	}
	return changes, next, left
}

func same(a, b *string) bool {
	if a == nil || b == nil {
		return a == b
	}
	return *a == *b
}

// hazard is a setting of a mirror topic that alters or refuses what kmirror appends.
type hazard struct {
	name string
	text string
	fix  *string // value that mends it; nil: a person's matter
}

// hazards looks for them. replicas is the mirror topic's replication factor, 0 if it isn't known.
func hazards(source, mirror topicSettings, replicas int) (found []hazard) {
	add := func(name string, fix *string, format string, args ...any) {
		found = append(found, hazard{name, name + "=" + mirror[name].value + ": " + fmt.Sprintf(format, args...), fix})
	}
	if c, ok := mirror[compressionType]; ok && c.value != "producer" {
		add(compressionType, kmsg.StringPtr("producer"), "the mirror's broker compresses batches anew")
	}
	if c, ok := mirror[timestampType]; ok && c.value != "CreateTime" {
		add(timestampType, kmsg.StringPtr("CreateTime"), "records get the time of their arrival on the mirror")
	}
	smaller := func(name string) (is bool, want string) {
		a, okA := mirror.number(name)
		b, okB := source.number(name)
		return okA && okB && a < b, source[name].value
	}
	if is, want := smaller(maxMessageBytes); is {
		add(maxMessageBytes, &want, "the source takes batches of up to %s bytes", want)
	}
	for _, name := range []string{timestampBefore, timestampAfter} {
		if is, want := smaller(name); is {
			add(name, &want, "records with timestamps that the source takes (%s) are refused", want)
		}
	}
	if mine, ok := mirror.number(retentionTime); ok && mine >= 0 {
		theirs, known := source.number(retentionTime)
		if known && (theirs < 0 || mine < theirs) && strings.Contains(mirror[cleanupPolicy].value, "delete") {
			add(retentionTime, nil, "the source keeps records longer (%d): older ones vanish as they arrive", theirs)
		}
	}
	if strings.Contains(mirror[cleanupPolicy].value, "compact") && len(source) > 0 && !strings.Contains(source[cleanupPolicy].value, "compact") {
		add(cleanupPolicy, nil, "records without a key are refused, and older records of a key removed, which the source keeps")
	}
	if n, ok := mirror.number(minInSync); ok && replicas > 0 && n > int64(replicas) {
		add(minInSync, nil, "the topic has %d replicas: every append is refused", replicas)
	}
	return found
}

// settingsKeeper keeps mirror topics' settings in step and names what is wrong with them. It belongs to the refresher.
type settingsKeeper struct {
	source, mirror *kgo.Client
	synced         []string // none: nothing is synced
	fix            bool     // hazards are mended where that is a matter of one value
	every          time.Duration
	log            *zap.Logger

	lookedAt time.Time
	checked  map[string]topicCheck // by source topic
	told     map[told]string       // problem, once logged
}

// told is what a problem was said of.
type told struct{ topic, message string }

// topicCheck is what the last look at a topic's settings found.
type topicCheck struct {
	view    *topicView // of the mirror topic
	hazards []string
}

// due reports whether it's time for a look: the interval is over, or a mirror topic was never looked at.
func (k *settingsKeeper) due(now time.Time, names []string, mirror func(string) *topicView) bool {
	if now.Sub(k.lookedAt) >= k.every {
		return true
	}
	return slices.ContainsFunc(names, func(name string) bool {
		have := mirror(name)
		return have != nil && have.err == nil && (k.checked[name].view == nil || k.checked[name].view.id != have.id)
	})
}

// look reads both sides' settings, changes the mirror's where it may, and remembers what is wrong.
func (k *settingsKeeper) look(ctx context.Context, registry *registry, source map[string]*topicView, mirror func(string) *topicView) error {
	k.lookedAt = time.Now()
	names := slices.Sorted(maps.Keys(source))
	var mirrorNames []string
	for _, name := range names {
		if have := mirror(name); have != nil && have.err == nil {
			mirrorNames = append(mirrorNames, have.name)
		}
	}
	wanted := slices.Concat(checkedSettings, k.synced)
	slices.Sort(wanted)
	wanted = slices.Compact(wanted)
	theirs, refusedThere, err := describeTopics(ctx, k.source, names, wanted)
	if err != nil {
		return fmt.Errorf("source: %w", err)
	}
	ours, refusedHere, err := describeTopics(ctx, k.mirror, mirrorNames, wanted)
	if err != nil {
		return fmt.Errorf("mirror: %w", err)
	}
	k.tell("", errors.Join(refusedThere, refusedHere), "topic settings can't be read; they are neither checked nor kept in step")
	checked := make(map[string]topicCheck, len(names))
	alter := kmsg.NewPtrIncrementalAlterConfigsRequest()
	var bases []settingsRecord
	for _, name := range names {
		have := mirror(name)
		if have == nil || have.err != nil {
			continue
		}
		check := topicCheck{view: have}
		from, okFrom := theirs[name]
		to, okTo := ours[have.name]
		if okFrom && okTo {
			changes := map[string]*string{}
			if base, ok := registry.settings(source[name].id, have.id); ok && len(k.synced) > 0 {
				var next map[string]*string
				var left []string
				changes, next, left = syncPlan(from, to, base, k.synced)
				k.tellLeft(name, left)
				if !maps.EqualFunc(base, next, same) {
					bases = append(bases, newSettingsRecord(source[name], have, next))
				}
			}
			for _, h := range hazards(from, to, have.replicas) {
				if k.fix && h.fix != nil {
					changes[h.name] = h.fix
				} else if _, mended := changes[h.name]; !mended {
					check.hazards = append(check.hazards, h.text)
				}
			}
			addChanges(alter, have.name, changes)
			k.tell(name, hazardsError(check.hazards), "the mirror topic's settings alter or refuse what is mirrored")
		}
		checked[name] = check
	}
	k.checked = checked
	return k.apply(ctx, registry, alter, bases)
}

func hazardsError(texts []string) error {
	if len(texts) == 0 {
		return nil
	}
	return errors.New(strings.Join(texts, "; "))
}

func addChanges(req *kmsg.IncrementalAlterConfigsRequest, topic string, changes map[string]*string) {
	if len(changes) == 0 {
		return
	}
	res := kmsg.NewIncrementalAlterConfigsRequestResource()
	res.ResourceType, res.ResourceName = kmsg.ConfigResourceTypeTopic, topic
	for _, name := range slices.Sorted(maps.Keys(changes)) {
		c := kmsg.NewIncrementalAlterConfigsRequestResourceConfig()
		c.Name, c.Value = name, changes[name]
		if c.Op = kmsg.IncrementalAlterConfigOpSet; c.Value == nil {
			c.Op = kmsg.IncrementalAlterConfigOpDelete
		}
		res.Configs = append(res.Configs, c)
	}
	req.Resources = append(req.Resources, res)
}

// apply changes settings, then records what kmirror set. After a crash in between the mirror's value is the source's, which counts as in step.
func (k *settingsKeeper) apply(ctx context.Context, registry *registry, alter *kmsg.IncrementalAlterConfigsRequest, bases []settingsRecord) error {
	if len(alter.Resources) > 0 {
		resp, err := alter.RequestWith(ctx, k.mirror)
		if err != nil {
			return fmt.Errorf("mirror: topic settings: %w", err)
		}
		failed := map[string]bool{}
		for _, res := range resp.Resources {
			err := kerr.ErrorForCode(res.ErrorCode)
			failed[res.ResourceName] = err != nil
			if err != nil {
				k.tell(res.ResourceName, described(err, res.ErrorMessage), "the mirror topic's settings can't be changed")
			}
		}
		for _, res := range alter.Resources {
			if !failed[res.ResourceName] {
				k.log.Info("mirror topic's settings changed", zap.String("topic", res.ResourceName), zap.Strings("settings", changeTexts(res.Configs)))
			}
		}
		bases = slices.DeleteFunc(bases, func(b settingsRecord) bool { return failed[b.mirrorName] })
	}
	if len(bases) == 0 {
		return nil
	}
	return registry.keepSettings(ctx, bases)
}

func changeTexts(configs []kmsg.IncrementalAlterConfigsRequestResourceConfig) (texts []string) {
	for _, c := range configs {
		if c.Value == nil {
			texts = append(texts, c.Name+" back to its default")
		} else {
			texts = append(texts, c.Name+"="+*c.Value)
		}
	}
	return texts
}

// tell logs a topic's problem of one kind, which message names, when it is new or another one.
func (k *settingsKeeper) tell(topic string, problem error, message string) {
	of := told{topic, message}
	if problem == nil {
		delete(k.told, of)
		return
	}
	if k.told[of] == problem.Error() {
		return
	}
	k.told[of] = problem.Error()
	k.log.Warn(message, zap.String("topic", topic), zap.Error(problem))
}

func (k *settingsKeeper) tellLeft(topic string, left []string) {
	var problem error
	if len(left) > 0 {
		problem = errors.New(strings.Join(left, ", "))
	}
	k.tell(topic, problem, "settings that were changed on the mirror aren't kept in step any more")
}
