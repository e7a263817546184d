package forwarder

import (
	"encoding/hex"
	"fmt"
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
	lineage             // of the source's log
	owner         process
	released      bool // the owner drained and let go (rule W1)
}

const checkpointMagic = "kmirror1"

// metadata is a single line that people can read too.
func (c *checkpoint) metadata() string {
	return fmt.Sprintf("%s source=%s mirror=%s gen=%d pos=%d at=%d end=%d epoch=%d below=%d owner=%s released=%t", checkpointMagic,
		hex.EncodeToString(c.sourceTopicID[:]), hex.EncodeToString(c.mirrorTopicID[:]), c.generation, c.position, c.mirrorOffset, c.mirrorEnd, c.lineage.epoch, c.lineage.end, c.owner, c.released)
}

// parseCheckpoint reads a committed offset; false for one that isn't kmirror's (somebody reset the group's offsets, say).
func parseCheckpoint(next int64, metadata string) (c checkpoint, ok bool) {
	c.next = next
	rest, ok := strings.CutPrefix(metadata, checkpointMagic+" ")
	if !ok {
		return c, false
	}
	var source, mirror, owner string
	n, err := fmt.Sscanf(rest, "source=%32s mirror=%32s gen=%d pos=%d at=%d end=%d epoch=%d below=%d owner=%s released=%t",
		&source, &mirror, &c.generation, &c.position, &c.mirrorOffset, &c.mirrorEnd, &c.lineage.epoch, &c.lineage.end, &owner, &c.released)
	if n != 10 || err != nil {
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
