package forwarder

import (
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"kmirror/protocol"
)

// checkpoint is what kmirror.<name> commits on the source for a partition (rule R6). The committed offset is next; the rest is the metadata
// string. It is a lower bound and makes resolving cheap; it is never believed against the mirror's log.
type checkpoint struct {
	next          int64 // source offset; all below is on the mirror, below its high watermark
	sourceTopicID protocol.TopicID
	mirrorTopicID protocol.TopicID
	generation    int32
	position      int64 // of next
	mirrorOffset  int64 // base offset on the mirror of our last batch, -1: nothing was appended yet
	mirrorEnd     int64 // mirror offset behind our last batch, -1: nothing was appended yet
	mirrorEpoch   int32 // the mirror partition's leader epoch at that time, -1: not known
	lineage             // of the source's log
	owner         process
	released      bool // the owner drained and let go (rule W1)
}

const checkpointMagic = "kmirror2"

// metadata is a single line that people can read too.
func (c *checkpoint) metadata() string {
	return fmt.Sprintf("%s source=%s mirror=%s gen=%d pos=%d at=%d end=%d in=%d epoch=%d below=%d owner=%s released=%t", checkpointMagic,
		hex.EncodeToString(c.sourceTopicID[:]), hex.EncodeToString(c.mirrorTopicID[:]), c.generation, c.position, c.mirrorOffset, c.mirrorEnd, c.mirrorEpoch, c.lineage.epoch, c.lineage.end, c.owner, c.released)
}

// parseCheckpoint reads a committed offset; false for one that isn't kmirror's (somebody reset the group's offsets, say).
func parseCheckpoint(next int64, metadata string) (c checkpoint, ok bool) {
	c.next = next
	rest, ok := strings.CutPrefix(metadata, checkpointMagic+" ")
	if !ok {
		return c, false
	}
	var source, mirror, owner string
	n, err := fmt.Sscanf(rest, "source=%32s mirror=%32s gen=%d pos=%d at=%d end=%d in=%d epoch=%d below=%d owner=%s released=%t",
		&source, &mirror, &c.generation, &c.position, &c.mirrorOffset, &c.mirrorEnd, &c.mirrorEpoch, &c.lineage.epoch, &c.lineage.end, &owner, &c.released)
	if n != 11 || err != nil {
		return c, false
	}
	if c.sourceTopicID, err = parseTopicID(source); err != nil {
		return c, false
	}
	if c.mirrorTopicID, err = parseTopicID(mirror); err != nil {
		return c, false
	}
	c.owner, err = parseProcess(owner)
	return c, err == nil
}

// parseTopicID reads a topic ID as kmirror writes it: 32 hexadecimal digits.
func parseTopicID(s string) (id protocol.TopicID, err error) {
	b, err := hex.DecodeString(s)
	if err == nil && len(b) != len(id) {
		err = fmt.Errorf("topic ID %q is not 32 hexadecimal digits", s)
	}
	copy(id[:], b)
	return id, err
}

// checkpoint is what is to be committed for a stream.
func (s *stream) checkpoint(self process) checkpoint {
	c := s.stored
	if s.acked >= 0 {
		c.next, c.position, c.mirrorOffset, c.mirrorEnd = s.acked, s.ackedPosition(), s.lastBatchAt, s.mirrorEnd
		c.mirrorEpoch, c.lineage = s.mirrorEpoch, s.lineage
	}
	c.sourceTopicID, c.mirrorTopicID, c.owner, c.released = s.topicID, s.mirrorTopicID, self, false
	return c
}

// commit stores the checkpoints that moved, and those of streams that were handed over.
func (l *loop) commit() {
	if l.committing || l.left {
		return
	}
	releases := l.releases
	l.releases = nil
	var commits []commit
	var streams []*stream
	add := func(s *stream, c checkpoint) {
		commits, streams = append(commits, commit{s.topicPartition, s.topicID, c}), append(streams, s)
		s.uncommitted = false
	}
	for _, s := range l.streams {
		if s.uncommitted && s.conn != nil && s.spread == nil {
			add(s, s.checkpoint(l.self))
		}
	}
	l.commitShares(add)
	if len(commits)+len(releases) == 0 {
		return
	}
	l.committing = true
	l.spawn(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, mirrorTimeout)
		defer cancel()
		err := l.release(ctx, releases)
		if err == nil {
			err = l.group.commit(ctx, commits)
		}
		l.inbox.call(func() {
			l.committing = false
			l.committed(streams, commits, err)
		})
	})
}

func (l *loop) committed(streams []*stream, commits []commit, err error) {
	for i, s := range streams {
		if err != nil {
			s.uncommitted = true
		} else {
			s.stored = commits[i].checkpoint
		}
	}
	if err != nil {
		l.metrics.checkpointErrors.Inc()
		if !isRebalance(err) {
			l.sourceLost(err)
		}
	}
	if len(l.releases) > 0 || l.stopping && err == nil {
		l.commit()
	}
}

// release commits that streams were handed over, where the next owner hasn't committed yet: its word must not be covered. It runs beside the
// loop.
func (l *loop) release(ctx context.Context, releases []commit) error {
	if len(releases) == 0 {
		return nil
	}
	stored, err := l.group.fetchCheckpoints(ctx)
	if err != nil {
		return err
	}
	releases = slices.DeleteFunc(releases, func(c commit) bool {
		last, ok := stored[c.topicPartition]
		return ok && last.owner != l.self
	})
	return l.group.commit(ctx, releases)
}
