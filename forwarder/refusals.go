package forwarder

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"

	"kmirror/protocol"
)

const (
	// refusalRetry is how often a stream looks whether a person mended at the mirror what refused its record.
	refusalRetry = 10 * time.Second
	// batchLimitAge is how long a limit that the mirror showed is believed: afterwards a batch as it is shows whether it was raised.
	batchLimitAge = 10 * time.Minute

	segmentBytes = "segment.bytes"
)

// askSettings reads settings of a stream's mirror topic beside the loop and goes on with them in the loop, empty where they may not be read.
func (l *loop) askSettings(s *stream, names []string, then func(topicSettings)) {
	topic := s.mirrorTopic
	l.spawn(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, mirrorTimeout)
		defer cancel()
		found, _, err := describeTopics(ctx, l.mirror, []string{topic}, names)
		if err != nil {
			l.log.Debug("mirror topic's settings can't be read", s.logFields(zap.Error(err))...)
		}
		l.inbox.call(func() {
			if !s.removed && !l.stopping {
				then(found[topic])
			}
		})
	})
}

// sizeLimit is the largest batch that a topic takes, and the setting that says so; 0: not known.
func sizeLimit(settings topicSettings) (limit int64, name string) {
	limit, ok := settings.number(maxMessageBytes)
	if !ok {
		return 0, ""
	}
	name = maxMessageBytes
	if segment, ok := settings.number(segmentBytes); ok && segment < limit {
		return segment, segmentBytes
	}
	if !settings[maxMessageBytes].own {
		name += " (message.max.bytes of its brokers)"
	}
	return limit, name
}

// tooLarge goes on after the mirror found a batch too large: with smaller ones, or, where it is one record, with nothing until the limit was raised.
func (l *loop) tooLarge(s *stream, e *entry, err error) {
	base, size, records := e.base, e.sizeBytes(), e.end-e.base
	l.endSession(s, err)
	s.retryAt = l.now.Add(mirrorTimeout) // or when the limit is known
	l.timers.add(s.retryAt, func() { l.recover(s) })
	l.askSettings(s, []string{maxMessageBytes, segmentBytes}, func(settings topicSettings) {
		limit, name := sizeLimit(settings)
		if records == 1 {
			l.stopStream(s, tooLargeError(base, size, limit, name), refusalRetry)
			l.awaitLimit(s, s.reason, size, limit)
			return
		}
		if limit == 0 || limit >= size {
			limit = size / 2 // the records lie behind a limit that can't be read
		}
		s.batchLimit, s.batchLimitUntil = limit, l.now.Add(batchLimitAge)
		s.mergeBytes = min(s.mergeBytes, limit)
		s.retryAt = l.now
		l.recover(s)
	})
}

func tooLargeError(offset, size, limit int64, name string) error {
	if limit == 0 {
		return fmt.Errorf("the record at source offset %d is too large for the mirror: %d bytes as a batch; the mirror's max.message.bytes can't be read; raise it", offset, size)
	}
	return fmt.Errorf("the record at source offset %d is too large for the mirror: %d bytes as a batch, the mirror topic's %s is %d; raise it", offset, size, name, limit)
}

// awaitLimit keeps a stopped stream from sending a record again before there is hope that the mirror takes it: the limit was raised, or can't be read.
func (l *loop) awaitLimit(s *stream, reason string, size, limit int64) {
	if limit == 0 {
		return // the retry that stopStream set sends it
	}
	s.retryAt = l.now.Add(refusalRetry + mirrorTimeout)
	l.timers.add(l.now.Add(refusalRetry), func() {
		if s.removed || s.state != StateFailed || s.reason != reason {
			return
		}
		l.askSettings(s, []string{maxMessageBytes, segmentBytes}, func(settings topicSettings) {
			if s.state != StateFailed || s.reason != reason {
				return
			}
			if limit, _ := sizeLimit(settings); limit > 0 && limit < size {
				l.awaitLimit(s, reason, size, limit)
				return
			}
			s.batchLimit, s.retryAt = 0, l.now
			l.recover(s)
		})
	})
}

// takeParts takes a batch that was made of records of the source's, halved until each part fits the mirror's limit or is one record.
func (l *loop) takeParts(s *stream, e entry) error {
	count := e.records()
	if s.fitsMirror(len(e.batch)) || count == 1 {
		l.takeMade(s, e)
		return nil
	}
	middle := count / 2
	left, right := e, e
	left.end = e.base + middle
	if e.runs != nil {
		left.runs, right.runs = splitRuns(e.runs, middle)
		last := left.runs[len(left.runs)-1]
		left.end = last.Source + last.Count
	}
	right.base = left.end
	var err error
	if left.batch, err = protocol.Recode(e.batch, 0, middle, l.codec); err != nil {
		return err
	}
	if right.batch, err = protocol.Recode(e.batch, middle, count, l.codec); err != nil {
		return err
	}
	if err := l.takeParts(s, left); err != nil {
		return err
	}
	return l.takeParts(s, right)
}

// splitRuns cuts runs behind their first count records, which must be fewer than all.
func splitRuns(runs []protocol.Run, count int64) (left, right []protocol.Run) {
	for i, run := range runs {
		if count < run.Count {
			if count > 0 {
				left = append(left, protocol.Run{Source: run.Source, Count: count})
			}
			right = append(right, protocol.Run{Source: run.Source + count, Count: run.Count - count})
			return left, append(right, runs[i+1:]...)
		}
		left = append(left, run)
		count -= run.Count
	}
	return left, nil
}

// badTimestamp stops a stream whose next batch has a record from outside the mirror's window, and says which.
func (l *loop) badTimestamp(s *stream, e *entry, a produceAnswer) {
	base, end := e.base, e.end
	times, err := protocol.Timestamps(e.batch, l.codec)
	if err != nil {
		times = nil
	}
	bad := a.badRecords
	now := l.now
	l.fail(s, described(fmt.Errorf("mirror refused the timestamp of a record at source offsets [%d, %d)", base, end), nil), refusalRetry)
	l.askSettings(s, []string{timestampBefore, timestampAfter}, func(settings topicSettings) {
		if s.state != StateFailed {
			return
		}
		l.setState(s, StateFailed, timestampReason(base, end, times, bad, settings, now))
	})
}

// timestampReason names the first record that the mirror refused: bad are their places in the batch, where it says so.
func timestampReason(base, end int64, times []int64, bad []int32, settings topicSettings, now time.Time) string {
	at := -1
	if len(bad) > 0 {
		at = int(bad[0])
	}
	before, okBefore := settings.number(timestampBefore)
	after, okAfter := settings.number(timestampAfter)
	for i, t := range times {
		early := okBefore && t < now.UnixMilli()-before
		late := okAfter && t > now.UnixMilli()+after
		if at < 0 && (early || late) {
			at = i
		}
	}
	window := "its topic's message.timestamp.before.max.ms and message.timestamp.after.max.ms can't be read"
	if okBefore && okAfter {
		window = fmt.Sprintf("its topic has message.timestamp.before.max.ms=%d and message.timestamp.after.max.ms=%d", before, after)
	}
	if at < 0 || at >= len(times) {
		return fmt.Sprintf("the mirror refused the timestamp of a record at source offsets [%d, %d): %s; raise them", base, end, window)
	}
	side := "in the past"
	if times[at] > now.UnixMilli() {
		side = "in the future"
	}
	return strings.Join([]string{
		"the mirror refused the timestamp of the record at source offset ", strconv.FormatInt(base+int64(at), 10), ": ", strconv.FormatInt(times[at], 10), " (",
		time.UnixMilli(times[at]).UTC().Format(time.RFC3339), ", too far ", side, "); ", window, "; raise them",
	}, "")
}
