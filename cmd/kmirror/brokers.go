package main

import (
	"context"
	"fmt"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/forwarder"
	"kmirror/proxy"
)

// brokerLister asks the source for its brokers, with kmirror's own credentials.
type brokerLister struct{ client *kgo.Client }

func newBrokerLister(source forwarder.ClusterOptions) (*brokerLister, error) {
	client, err := kgo.NewClient(clientOptions("kmirror-proxy", source)...)
	return &brokerLister{client}, err
}

// Close ends the client; no call may be running or follow.
func (l *brokerLister) Close() { l.client.Close() }

// Brokers implements proxy.BrokerLister. A Metadata request about no topic creates none.
func (l *brokerLister) Brokers(ctx context.Context) (clusterID string, brokers []proxy.Broker, err error) {
	req := kmsg.NewPtrMetadataRequest()
	req.Topics = []kmsg.MetadataRequestTopic{}
	req.AllowAutoTopicCreation = false
	resp, err := req.RequestWith(ctx, l.client)
	if err != nil {
		return "", nil, fmt.Errorf("brokers of the source: %w", err)
	}
	if err := kerr.ErrorForCode(resp.ErrorCode); err != nil {
		return "", nil, fmt.Errorf("brokers of the source: %w", err)
	}
	if resp.ClusterID != nil {
		clusterID = *resp.ClusterID
	}
	for _, b := range resp.Brokers {
		brokers = append(brokers, proxy.Broker{ID: b.NodeID, Host: b.Host, Port: b.Port})
	}
	return clusterID, brokers, nil
}
