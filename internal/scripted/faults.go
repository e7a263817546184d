package scripted

import (
	"net"
	"slices"

	"kmirror/protocol"
)

// Freeze stops a broker as SIGSTOP does: it accepts connections and bytes but works on nothing, and doesn't notice leader changes.
func (c *Cluster) Freeze(id int32) {
	c.locked(func() {
		if b := c.broker(id); b.thawed == nil {
			b.thawed = make(chan struct{})
		}
	})
}

// Thaw wakes a frozen broker. Where leaders moved meanwhile it still acts on what it knew before, as a woken old leader does
// for a moment, until CatchUp is called: an acks=all Produce to it waits, DescribeProducers and reads give old figures.
func (c *Cluster) Thaw(id int32) {
	c.locked(func() {
		if b := c.broker(id); b.thawed != nil {
			close(b.thawed)
			b.thawed = nil
		}
	})
}

// CatchUp makes a woken broker learn what happened while it was frozen: what it appended meanwhile is gone and the requests
// that wait for it are answered NOT_LEADER_OR_FOLLOWER.
func (c *Cluster) CatchUp(id int32) {
	c.locked(func() {
		for _, t := range c.topics {
			for _, p := range t.partitions {
				if old := p.clones[id]; old != nil {
					old.deleted = true
					delete(p.clones, id)
				}
			}
		}
	})
}

// Kill ends a broker as kill -9 does: its port is closed, its connections break, nothing that waits is answered. Leaders stay
// where they are; see MoveLeader.
func (c *Cluster) Kill(id int32) {
	c.locked(func() { c.broker(id).stop() })
}

// Restart starts a killed broker on its old port; the partitions that it leads reload their producer state.
func (c *Cluster) Restart(id int32) {
	c.locked(func() {
		b := c.broker(id)
		if b.ln != nil {
			panic("scripted: Restart of a broker that runs")
		}
		ln, err := net.Listen("tcp", b.addr)
		if err != nil {
			panic("scripted: " + err.Error())
		}
		b.start(ln)
		c.everyPartition(func(p *partition) {
			if p.leader == id {
				p.producers.reload(c.opts.Now().UnixMilli(), p.expiration.Milliseconds())
			}
		})
	})
}

// BreakConnections closes all connections of a broker; requests that are being worked on are applied but not answered.
func (c *Cluster) BreakConnections(id int32) {
	c.locked(func() {
		for cn := range c.broker(id).conns {
			cn.net.Close()
		}
	})
}

func (c *Cluster) everyPartition(f func(*partition)) {
	for _, t := range c.topics {
		for _, p := range t.partitions {
			f(p)
		}
	}
}

// remember leaves a frozen leader its own view of the partition, before others go on without it.
func (c *Cluster) remember(p *partition) {
	if p.leader > 0 && c.broker(p.leader).thawed != nil && p.clones[p.leader] == nil {
		p.clones[p.leader] = p.clone()
	}
}

// MoveLeader makes another replica lead, without loss, under a new leader epoch. The same broker may be named again.
func (c *Cluster) MoveLeader(topicName string, index, leader int32) {
	c.locked(func() {
		p := c.at(topicName, index)
		c.remember(p)
		p.become(leader)
	})
}

// UncleanElection makes a replica lead whose log ends at end: what is above is lost. Its producer state is what its own log
// tells, or none at all where keepProducerState is false. end must be a batch boundary.
func (c *Cluster) UncleanElection(topicName string, index, leader int32, end int64, keepProducerState bool) {
	c.locked(func() {
		p := c.at(topicName, index)
		c.remember(p)
		keep := slices.DeleteFunc(slices.Clone(p.batches), func(b protocol.Batch) bool { return b.EndOffset() > end })
		p.replay(keep, end, keepProducerState)
		p.become(leader)
	})
}

// ReplaceReplica makes a replica lead that was built anew from the leader's log, so it knows no producer whose batches were
// deleted from the log before.
func (c *Cluster) ReplaceReplica(topicName string, index, leader int32) {
	c.locked(func() {
		p := c.at(topicName, index)
		p.replay(slices.Clone(p.batches), p.logEnd, true)
		p.become(leader)
	})
}

// DeleteRecords moves the log start offset.
func (c *Cluster) DeleteRecords(topicName string, index int32, before int64) {
	c.locked(func() { c.at(topicName, index).deleteRecords(before) })
}

// Expire runs the check of producer.id.expiration.check.interval.ms on all partitions, by the cluster's clock.
func (c *Cluster) Expire() {
	c.locked(func() {
		c.everyPartition(func(p *partition) { p.producers.expire(c.opts.Now().UnixMilli(), p.expiration.Milliseconds()) })
	})
}

// ForgetProducers makes one partition forget every producer, whatever their age.
func (c *Cluster) ForgetProducers(topicName string, index int32) {
	c.locked(func() { clear(c.at(topicName, index).producers) })
}

// Reload is what a restart of its brokers does to the producer state of all partitions: one batch each, expired ones forgotten.
func (c *Cluster) Reload() {
	c.locked(func() {
		c.everyPartition(func(p *partition) { p.producers.reload(c.opts.Now().UnixMilli(), p.expiration.Milliseconds()) })
	})
}

// HoldHighWatermark keeps the high watermark where it is, as followers that don't fetch do: acks=all appends wait and time out.
func (c *Cluster) HoldHighWatermark(topicName string, index int32) {
	c.locked(func() { c.at(topicName, index).held = true })
}

// ReleaseHighWatermark lets the high watermark follow the log end again.
func (c *Cluster) ReleaseHighWatermark(topicName string, index int32) {
	c.locked(func() {
		p := c.at(topicName, index)
		p.held, p.highWatermark = false, p.logEnd
	})
}

// Append writes a batch at its own base offset, without a client's checks, and returns its end offset: how a test fills a source
// log, with holes, old timestamps, transactions and all. Below the log's end it is moved there.
func (c *Cluster) Append(topicName string, index int32, spec Batch) (end int64) {
	c.locked(func() {
		p := c.at(topicName, index)
		spec.BaseOffset = max(spec.BaseOffset, p.logEnd)
		b := spec.Bytes()
		b.SetLeaderEpoch(p.leaderEpoch)
		p.store(b)
		end = p.logEnd
	})
	return end
}

// AppendForeign writes values as another client's batch without producer ID.
func (c *Cluster) AppendForeign(topicName string, index int32, values ...string) (end int64) {
	return c.Append(topicName, index, Batch{Values: values, Timestamp: c.opts.Now()})
}

// AppendMarker ends a transaction with a control batch.
func (c *Cluster) AppendMarker(topicName string, index int32, producerID int64, epoch int16, commit bool) {
	c.locked(func() { c.at(topicName, index).appendMarker(producerID, epoch, commit, c.opts.Now().UnixMilli()) })
}

// AppendHole moves the log's end to end without a record, as if compaction had removed what was there.
func (c *Cluster) AppendHole(topicName string, index int32, end int64) {
	c.locked(func() {
		p := c.at(topicName, index)
		if p.logEnd = max(p.logEnd, end); !p.held {
			p.highWatermark = p.logEnd
		}
	})
}
