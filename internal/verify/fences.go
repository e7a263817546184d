package verify

import (
	"context"
	"encoding/json"

	"github.com/twmb/franz-go/pkg/kadm"
)

// readFences learns the producer IDs that brokers gave to kmirror's fenced sessions (compacted or repartitioned topics), and which source partition each
// copies. Nothing else in the topic is believed.
func (c *cluster) readFences(ctx context.Context, segments string) error {
	if segments == "" {
		return nil
	}
	details, err := kadm.NewClient(c.client).ListTopicsWithInternal(ctx, segments)
	if err != nil || !details.Has(segments) {
		return err // nothing was mirrored yet
	}
	at, err := openCluster(ctx, c.client, func(name string) bool { return name == segments })
	if err != nil {
		return err
	}
	fenced := map[int64]partitionKey{}
	for key, log := range at.logs {
		if log.err != nil {
			return log.err
		}
		allowed := &allowance{lock: &at.unpacking}
		err := drain(ctx, newReader(at, key, log.Range, nil, allowed), func(it *item) {
			var record struct {
				Topic     string `json:"topic"`
				Partition int32  `json:"partition"`
				Fence     *struct {
					ProducerID int64 `json:"producer_id"`
				} `json:"fence"`
			}
			if json.Unmarshal(it.record.Value, &record) == nil && record.Fence != nil {
				fenced[record.Fence.ProducerID] = partitionKey{record.Topic, record.Partition}
			}
		})
		allowed.release()
		if err != nil {
			return err
		}
	}
	c.fenced = fenced
	c.ours = func(producerID int64) bool { _, ok := fenced[producerID]; return ok || isOurs(producerID) }
	return nil
}
