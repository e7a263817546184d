package forwarder

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/protocol"
)

// clusterView is what one Metadata answer says. It isn't changed after it was made.
type clusterView struct {
	clusterID string
	brokers   map[int32]string // node ID -> host:port
	topics    map[string]*topicView
}

type topicView struct {
	name       string
	id         protocol.TopicID
	partitions []leadership // by partition
	replicas   int          // of the first partition, 0: not known
	appeared   bool         // on the source after this process first saw its topics
	err        error
}

// leadership says who leads a partition. leader is -1 where nobody does.
type leadership struct {
	leader int32
	epoch  int32
}

// askView asks for all topics (nil) or those named. It never creates a topic.
func askView(ctx context.Context, client *kgo.Client, topics []string) (*clusterView, error) {
	req := kmsg.NewPtrMetadataRequest()
	req.AllowAutoTopicCreation = false
	if topics != nil {
		req.Topics = []kmsg.MetadataRequestTopic{}
	}
	for _, name := range topics {
		t := kmsg.NewMetadataRequestTopic()
		t.Topic = kmsg.StringPtr(name)
		req.Topics = append(req.Topics, t)
	}
	resp, err := req.RequestWith(ctx, client)
	if err != nil {
		return nil, fmt.Errorf("metadata: %w", err)
	}
	if err := kerr.ErrorForCode(resp.ErrorCode); err != nil {
		return nil, fmt.Errorf("metadata: %w", err)
	}
	view := &clusterView{brokers: make(map[int32]string, len(resp.Brokers)), topics: make(map[string]*topicView, len(resp.Topics))}
	if resp.ClusterID != nil {
		view.clusterID = *resp.ClusterID
	}
	for _, b := range resp.Brokers {
		view.brokers[b.NodeID] = net.JoinHostPort(b.Host, strconv.Itoa(int(b.Port)))
	}
	for i := range resp.Topics {
		if t := newTopicView(&resp.Topics[i]); t != nil {
			view.topics[t.name] = t
		}
	}
	return view, nil
}

func newTopicView(t *kmsg.MetadataResponseTopic) *topicView {
	if t.Topic == nil {
		return nil
	}
	view := &topicView{name: *t.Topic, id: t.TopicID, err: kerr.ErrorForCode(t.ErrorCode)}
	view.partitions = make([]leadership, len(t.Partitions))
	for i := range view.partitions {
		view.partitions[i] = leadership{-1, -1}
	}
	for _, p := range t.Partitions {
		if int(p.Partition) < len(view.partitions) && p.Partition >= 0 {
			view.partitions[p.Partition] = leadership{p.Leader, p.LeaderEpoch}
			if p.Partition == 0 {
				view.replicas = len(p.Replicas)
			}
		}
	}
	return view
}

// leadership of a partition, {-1, -1} where it isn't known.
func (v *clusterView) leadership(topic string, partition int32) leadership {
	if t := v.topics[topic]; t != nil && int(partition) < len(t.partitions) {
		return t.partitions[partition]
	}
	return leadership{-1, -1}
}

// clientOptions are the options that each of kmirror's kgo clients has.
func clientOptions(o ClusterOptions, clientID string) []kgo.Opt {
	opts := []kgo.Opt{
		kgo.SeedBrokers(o.Seeds...), kgo.ClientID(clientID), kgo.DialTimeout(dialTimeout),
		kgo.MetadataMinAge(100 * time.Millisecond), // a topic made a moment ago is looked for again soon
	}
	if o.Dial != nil {
		opts = append(opts, kgo.Dialer(o.Dial))
	}
	if len(o.SASL) > 0 {
		opts = append(opts, kgo.SASL(o.SASL...))
	}
	return opts
}
