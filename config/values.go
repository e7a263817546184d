package config

import (
	"fmt"
	"io"
	"strconv"
	"strings"
)

// redacted stands for a secret wherever it would be printed.
const redacted = "[redacted]"

// Secret is a text that no formatting verb, encoder or logger prints; string(s) is the only way to it.
type Secret string

// Format writes [redacted] for every verb, or nothing where the secret is empty.
func (s Secret) Format(w fmt.State, _ rune) { _, _ = io.WriteString(w, s.String()) }

// String returns [redacted], or "" where the secret is empty.
func (s Secret) String() string {
	if s == "" {
		return ""
	}
	return redacted
}

// MarshalText makes encoders (JSON, YAML) write [redacted] too.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// Size is a number of bytes, written as 4096, 64KiB, 256MiB or 1GiB.
type Size int64

var sizeUnits = []struct {
	suffix string
	bytes  int64
}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"B", 1}}

// ParseSize reads a size; a bare number counts bytes.
func ParseSize(text string) (Size, error) {
	number, unit := strings.TrimSpace(text), int64(1)
	for _, u := range sizeUnits {
		if rest, ok := strings.CutSuffix(number, u.suffix); ok {
			number, unit = strings.TrimSpace(rest), u.bytes
			break
		}
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n < 0 || n > (1<<62)/unit {
		return 0, fmt.Errorf("want a size such as 256MiB, got %q", text)
	}
	return Size(n * unit), nil
}

func (s Size) String() string {
	for _, u := range []int{2, 1, 0} { // GiB, MiB, KiB: the largest that divides it
		if unit := sizeUnits[u]; s > 0 && int64(s)%unit.bytes == 0 {
			return strconv.FormatInt(int64(s)/unit.bytes, 10) + unit.suffix
		}
	}
	return strconv.FormatInt(int64(s), 10)
}

// Servers is a list of host:port. Blanks around a comma and a comma at the end are forgiven wherever it is read from.
type Servers []string

// splitList splits at commas, drops blanks around the items and empty items. A comma inside /…/ belongs to a regular
// expression: an item that starts with a slash ends at the next slash before a comma or the end.
func splitList(text string) []string {
	var items []string
	for text != "" {
		text = strings.TrimLeft(text, " \t\r\n,")
		end := strings.IndexByte(text, ',')
		if strings.HasPrefix(text, "/") {
			end = regexpEnd(text)
		}
		if end < 0 {
			end = len(text)
		}
		if item := strings.TrimSpace(text[:end]); item != "" {
			items = append(items, item)
		}
		text = text[end:]
	}
	return items
}

// regexpEnd returns where the /…/ item that text starts with ends, -1 if that's the end of text.
func regexpEnd(text string) int {
	for i := 1; i < len(text); i++ {
		if text[i] != '/' {
			continue
		}
		rest := strings.TrimLeft(text[i+1:], " \t")
		if strings.HasPrefix(rest, ",") {
			return len(text) - len(rest)
		}
	}
	return -1
}
