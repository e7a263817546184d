package forwarder

import (
	"regexp"
	"slices"
	"strings"
)

// selector says which topics are mirrored. It isn't changed after it was made.
type selector struct {
	include, exclude []*regexp.Regexp
}

// selects reports whether a topic is to be mirrored. Internal topics never are.
func (s *selector) selects(topic string) bool {
	whole := func(re *regexp.Regexp) bool {
		m := re.FindStringIndex(topic)
		return m != nil && m[0] == 0 && m[1] == len(topic)
	}
	return !strings.HasPrefix(topic, "__") && slices.ContainsFunc(s.include, whole) && !slices.ContainsFunc(s.exclude, whole)
}

// Select changes which topics are mirrored, from the next refresh on, which follows at once. A topic that is no longer selected is let go
// as on a shutdown; selected again, it goes on where it was. It is safe for concurrent use, also before Run.
func (f *Forwarder) Select(include, exclude []*regexp.Regexp) {
	f.selected.Store(&selector{include, exclude})
	if l := f.loop.Load(); l != nil {
		f.inbox.call(l.refreshSoon)
	}
}

// renaming is a template for names on the mirror, in which {topic} stands for the source's; "" keeps names.
type renaming string

const topicPlaceholder = "{topic}"

func (r renaming) mirrorName(topic string) string {
	if r == "" {
		return topic
	}
	return strings.Replace(string(r), topicPlaceholder, topic, 1)
}
