package config

import (
	"fmt"
	"regexp"
	"strings"
)

// never are topics that are not mirrored whatever Include says: Kafka's internal ones and kmirror's own (__kmirror.<name>.…).
const never = `/__.*/`

// Patterns compiles the topic lists. Each pattern matches whole names; a topic is mirrored if any of include does and none of exclude.
func (t Topics) Patterns() (include, exclude []*regexp.Regexp, err error) {
	if include, err = compile(t.Include); err != nil {
		return nil, nil, err
	}
	exclude, err = compile(append([]string{never}, t.Exclude...))
	return include, exclude, err
}

func compile(entries []string) ([]*regexp.Regexp, error) {
	patterns := make([]*regexp.Regexp, 0, len(entries))
	for _, entry := range entries {
		p, err := pattern(entry)
		if err != nil {
			return nil, err
		}
		patterns = append(patterns, p)
	}
	return patterns, nil
}

var topicName = regexp.MustCompile(`^[a-zA-Z0-9._-]{1,249}$`)

// pattern compiles one entry of a topic list: a name, or /a regular expression/.
func pattern(entry string) (*regexp.Regexp, error) {
	if expression, ok := strings.CutPrefix(entry, "/"); ok {
		expression, ok = strings.CutSuffix(expression, "/")
		if !ok {
			return nil, fmt.Errorf("%q: a regular expression ends with a slash", entry)
		}
		p, err := regexp.Compile(`^(?:` + expression + `)$`)
		if err != nil {
			return nil, fmt.Errorf("%q: %w", entry, err)
		}
		return p, nil
	}
	if !topicName.MatchString(entry) || entry == "." || entry == ".." {
		return nil, fmt.Errorf("%q is no topic name; a regular expression stands between slashes", entry)
	}
	return regexp.MustCompile(`^` + regexp.QuoteMeta(entry) + `$`), nil
}
