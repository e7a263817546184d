package scripted

import (
	"encoding/binary"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/protocol"
)

// transaction is what the coordinator knows about a transactional ID.
type transaction struct {
	producerID int64
	epoch      int16
	added      []*partition
}

func (x *exchange) initProducerID(req *kmsg.InitProducerIDRequest) kmsg.Response {
	resp := kmsg.NewPtrInitProducerIDResponse()
	c := x.cluster
	if err := x.refused(); err != nil {
		resp.ErrorCode, resp.ProducerID, resp.ProducerEpoch = err.Code, -1, -1
		return resp
	}
	if req.TransactionalID == nil {
		c.nextProducerID++
		resp.ProducerID, resp.ProducerEpoch = c.nextProducerID, 0
		return resp
	}
	t := c.txns[*req.TransactionalID]
	if t == nil {
		c.nextProducerID++
		t = &transaction{producerID: c.nextProducerID, epoch: -1}
		c.txns[*req.TransactionalID] = t
	}
	t.epoch++
	if len(t.added) > 0 { // what the last owner left open is aborted under the new epoch
		c.writeMarkers(t, false)
		t.epoch++
	}
	resp.ProducerID, resp.ProducerEpoch = t.producerID, t.epoch
	return resp
}

func (t *transaction) owns(producerID int64, epoch int16) *kerr.Error {
	switch {
	case t == nil || t.producerID != producerID:
		return kerr.InvalidProducerIDMapping
	case t.epoch != epoch:
		return kerr.ProducerFenced
	}
	return nil
}

// addPartitionsToTxn serves clients' versions, 0 to 3.
func (x *exchange) addPartitionsToTxn(req *kmsg.AddPartitionsToTxnRequest) kmsg.Response {
	resp := kmsg.NewPtrAddPartitionsToTxnResponse()
	t := x.cluster.txns[req.TransactionalID]
	txnErr := t.owns(req.ProducerID, req.ProducerEpoch)
	for _, rt := range req.Topics {
		st := kmsg.NewAddPartitionsToTxnResponseTopic()
		st.Topic = rt.Topic
		topic, unknown := x.topic(rt.Topic, [16]byte{})
		for _, index := range rt.Partitions {
			p, err := x.replica(topic, unknown, rt.Topic, index)
			if err == nil {
				err = txnErr
			}
			if err == nil {
				t.added = append(t.added, p)
				if _, open := p.openTxns[t.producerID]; !open {
					p.openTxns[t.producerID] = -1
				}
			}
			st.Partitions = append(st.Partitions, kmsg.AddPartitionsToTxnResponseTopicPartition{Partition: index, ErrorCode: code(err)})
		}
		resp.Topics = append(resp.Topics, st)
	}
	return resp
}

// endTxn answers before the markers are written if HoldMarkers says so. From version 5 on the epoch rises with every
// transaction (KIP-890).
func (x *exchange) endTxn(req *kmsg.EndTxnRequest) kmsg.Response {
	resp := kmsg.NewPtrEndTxnResponse()
	t := x.cluster.txns[req.TransactionalID]
	err := x.refused()
	if err == nil {
		err = t.owns(req.ProducerID, req.ProducerEpoch)
	}
	if resp.ErrorCode = code(err); err != nil {
		return resp
	}
	if req.Version >= 5 {
		t.epoch++
	}
	x.cluster.writeMarkers(t, req.Commit)
	resp.ProducerID, resp.ProducerEpoch = t.producerID, t.epoch
	return resp
}

// writeMarkers ends the transaction in its partitions, now or when ReleaseMarkers is called.
func (c *Cluster) writeMarkers(t *transaction, commit bool) {
	added, producerID, epoch := t.added, t.producerID, t.epoch
	t.added = nil
	write := func() {
		for _, p := range added {
			p.appendMarker(producerID, epoch, commit, c.opts.Now().UnixMilli())
		}
	}
	if c.markersHeld {
		c.heldMarkers = append(c.heldMarkers, write)
		return
	}
	write()
}

func (p *partition) appendMarker(producerID int64, epoch int16, commit bool, now int64) {
	if e := p.producers[producerID]; e != nil && epoch < e.epoch {
		return // a marker of a fenced epoch is refused
	}
	r := kmsg.NewRecord()
	r.Key = binary.BigEndian.AppendUint16([]byte{0, 0}, 0) // version 0, type abort
	if commit {
		r.Key[3] = 1
	}
	r.Value = make([]byte, 6) // version 0, coordinator epoch 0
	b := encodeBatch(Batch{
		BaseOffset: p.logEnd, ProducerID: producerID, ProducerEpoch: epoch, BaseSequence: -1,
		Attributes: protocol.AttrControl | protocol.AttrTransactional,
	}, []kmsg.Record{r}, now, now)
	b.SetLeaderEpoch(p.leaderEpoch)
	p.store(b)
}

// markerCommits reads the type out of a control batch: true for COMMIT.
func markerCommits(b protocol.Batch) bool {
	for _, r := range recordsOf(b) {
		return len(r.Key) >= 4 && r.Key[3] == 1
	}
	return false
}

// HoldMarkers makes EndTxn answer without writing markers, until ReleaseMarkers.
func (c *Cluster) HoldMarkers() {
	c.locked(func() { c.markersHeld = true })
}

// ReleaseMarkers writes all held markers and ends holding.
func (c *Cluster) ReleaseMarkers() {
	c.locked(func() {
		for _, write := range c.heldMarkers {
			write()
		}
		c.heldMarkers, c.markersHeld = nil, false
	})
}

// ForgetTransactionalIDs is what transactional.id.expiration.ms does: the next InitProducerId gets a new producer ID.
func (c *Cluster) ForgetTransactionalIDs() {
	c.locked(func() { c.txns = map[string]*transaction{} })
}
