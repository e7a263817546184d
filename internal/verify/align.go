package verify

import (
	"context"
	"errors"
)

// The two sides may begin at different records, each for good reasons: the copy began at the source's end then (topics.start), the
// mirror or the source deleted its oldest records since. So before anything is compared the first common record is sought:
//
//  1. by position. A record batch of kmirror carries its position in its producer epoch and sequence, which is the source offset
//     as long as the source's log has no holes. Whatever the mirror holds from before the source's log start is counted
//     (OnlyMirror) and skipped; else what the source holds from before the mirror's first position is (NotMirrored).
//  2. by content, where the records at those positions are not equal, since positions may be shifted (by transaction markers, or on
//     brokers that want sequences to begin at 0): the mirror's first records are sought on the source, then the other way round.
//  3. Where neither finds it, the first record that was sought by position is the first difference.
//
// A position is only a hint where to look. It can't make different records equal: everything behind the first common record is
// compared one by one.

// windowSize is how many records in a row must be equal to be taken for the first common ones, if a side has that many.
const windowSize = 32

var errMirrorDeleted = errors.New("the mirror deleted all that kmirror wrote")

// align moves both readers to the first common record. It returns true where there is nothing to compare; the result is set then.
func (c *comparison) align(ctx context.Context) (ended bool, err error) {
	fromSource, err := c.source.peek(ctx)
	if err != nil || fromSource == nil {
		return false, err // step tells what the mirror has
	}
	fromMirror, err := c.mirror.peek(ctx)
	if err != nil {
		return false, err
	}
	if fromMirror == nil {
		if grown, err := c.awaitMirror(ctx); err != nil || !grown {
			return true, err
		}
		return c.align(ctx)
	}
	return false, c.alignAt(ctx, fromSource.record.Offset, fromMirror.position)
}

// alignAt seeks by position, then by content. The readers stand at the source offset and at the position given.
func (c *comparison) alignAt(ctx context.Context, sourceAt, position int64) error {
	skipped := int64(0)
	if position > sourceAt {
		sourceAt = position
	} else if position >= 0 {
		var err error
		if skipped, err = c.skipOldPositions(ctx, sourceAt); err != nil {
			return err
		}
	}
	found, err := c.tryAt(ctx, sourceAt)
	if err == nil && !found {
		if found, err = c.alignByContent(ctx); found {
			return err
		}
		c.moveSource(sourceAt)
	}
	c.p.OnlyMirror = skipped
	return err
}

// skipOldPositions takes the mirror's records from before source offset first and returns how many there were.
func (c *comparison) skipOldPositions(ctx context.Context, first int64) (skipped int64, err error) {
	for {
		it, err := c.mirror.peek(ctx)
		if err != nil || it == nil || it.position < 0 || it.position >= first {
			return skipped, err
		}
		c.mirror.take()
		skipped++
	}
}

// tryAt tells whether the source's records from offset on equal those that the mirror's reader stands at, and moves the source there.
func (c *comparison) tryAt(ctx context.Context, offset int64) (bool, error) {
	candidate := c.source
	if first := c.source.items; len(first) == 0 || first[0].record.Offset != offset {
		candidate = c.source.clone(offset)
	}
	a, err := candidate.window(ctx, windowSize)
	if err != nil {
		return false, err
	}
	b, err := c.mirror.window(ctx, windowSize)
	if err != nil {
		return false, err
	}
	if !prefixEqual(a, b) {
		return false, nil
	}
	c.p.NotMirrored = offset - c.source.items[0].record.Offset
	c.source = candidate
	return true, nil
}

// moveSource lets the comparison begin at a source offset whatever is there.
func (c *comparison) moveSource(offset int64) {
	if c.p.NotMirrored = offset - c.source.items[0].record.Offset; c.p.NotMirrored > 0 {
		c.source = c.source.clone(offset)
	}
}

// alignByContent seeks the first records of either side on the other one.
func (c *comparison) alignByContent(ctx context.Context) (bool, error) {
	mirror := c.mirror.clone(c.mirror.first)
	pattern, err := mirror.window(ctx, windowSize)
	if err != nil {
		return false, err
	}
	source := c.source.clone(c.source.first)
	before, found, err := seek(ctx, source, pattern)
	if err != nil {
		return false, err
	}
	if found {
		c.p.NotMirrored, c.source, c.mirror = before, source, mirror
		return true, nil
	}
	source = c.source.clone(c.source.first)
	if pattern, err = source.window(ctx, windowSize); err != nil {
		return false, err
	}
	mirror = c.mirror.clone(c.mirror.first)
	if before, found, err = seek(ctx, mirror, pattern); err != nil || !found {
		return false, err
	}
	c.p.OnlyMirror, c.source, c.mirror = before, source, mirror
	return true, nil
}

// seek takes records until r stands at pattern, and returns how many it took.
func seek(ctx context.Context, r *reader, pattern []item) (taken int64, found bool, err error) {
	for {
		window, err := r.window(ctx, len(pattern))
		if err != nil || len(window) == 0 {
			return taken, false, err
		}
		if prefixEqual(window, pattern) {
			return taken, true, nil
		}
		r.take()
		taken++
	}
}

// prefixEqual compares as far as both sides go, and at least one record.
func prefixEqual(a, b []item) bool {
	n := min(len(a), len(b))
	for i := range n {
		if differ(a[i].record, b[i].record) != "" {
			return false
		}
	}
	return n > 0
}
