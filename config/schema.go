package config

import (
	"fmt"
	"reflect"
	"strings"

	"github.com/spf13/pflag"
)

// Key describes one setting.
type Key struct {
	Path string // as in the file, joined by dots: proxy.limits.connections
	Flag string // the short flag that stands for it too, or ""
	Help string
	kind reflect.Type
}

// Env returns the environment variable that sets k.
func (k Key) Env() string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(k.Path, ".", "_"))
}

const envPrefix = "KMIRROR_"

// shortFlags are the flags for a first try, and the keys that they set.
var shortFlags = map[string]string{
	"source.bootstrap":        "source",
	"mirror.bootstrap":        "mirror",
	"proxy.listen":            "listen",
	"proxy.advertise":         "advertise",
	"proxy.broker_ports.base": "broker-port-base",
	"topics.include":          "topics",
	"admin.listen":            "admin",
}

// Keys lists every setting in the order of the file.
func Keys() []Key { return appendKeys(nil, reflect.TypeFor[Config](), "") }

func appendKeys(keys []Key, section reflect.Type, prefix string) []Key {
	for i := range section.NumField() {
		field := section.Field(i)
		path := prefix + field.Tag.Get("koanf")
		if field.Type.Kind() == reflect.Struct {
			keys = appendKeys(keys, field.Type, path+".")
			continue
		}
		keys = append(keys, Key{Path: path, Flag: shortFlags[path], Help: field.Tag.Get("help"), kind: field.Type})
	}
	return keys
}

// lookup returns the field of c at path: a setting, or a section if it's a struct; the zero Value if there is none.
func lookup(c *Config, path string) reflect.Value {
	value := reflect.ValueOf(c).Elem()
	for name := range strings.SplitSeq(path, ".") {
		if value.Kind() != reflect.Struct {
			return reflect.Value{}
		}
		found := reflect.Value{}
		for i := range value.NumField() {
			if value.Type().Field(i).Tag.Get("koanf") == name {
				found = value.Field(i)
			}
		}
		if !found.IsValid() {
			return reflect.Value{}
		}
		value = found
	}
	return value
}

// Changed lists the settings in which a and b differ, by path.
func Changed(a, b Config) (paths []string) {
	for _, key := range Keys() {
		if !reflect.DeepEqual(lookup(&a, key.Path).Interface(), lookup(&b, key.Path).Interface()) {
			paths = append(paths, key.Path)
		}
	}
	return paths
}

// AddFlags adds a flag for every key under its full name (hidden from the usage text) and the short ones, and those of
// MirrorMaker 1.
func AddFlags(flags *pflag.FlagSet) {
	for _, key := range Keys() {
		flags.String(key.Path, "", key.Help)
		// A flag without a dot is its own short form: --name.
		flags.Lookup(key.Path).Hidden = key.Path != "name"
		if key.Flag != "" {
			flags.String(key.Flag, "", key.Help)
		}
	}
	addMirrorMakerFlags(flags)
}

// nearestKey returns the key or section that most resembles path.
func nearestKey(path string) string {
	best, bestDistance := "", 1<<30
	consider := func(candidate string) {
		distance := editDistance(path, candidate)
		if last := candidate[strings.LastIndexByte(candidate, '.')+1:]; last == path[strings.LastIndexByte(path, '.')+1:] {
			distance = min(distance, 3) // the right word in the wrong section
		}
		if distance < bestDistance {
			best, bestDistance = candidate, distance
		}
	}
	for _, key := range Keys() {
		for i, c := range key.Path {
			if c == '.' {
				consider(key.Path[:i])
			}
		}
		consider(key.Path)
	}
	return best
}

// editDistance counts the single-byte edits (Levenshtein) that turn a into b.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			diagonal, row[j+1] = row[j+1], min(row[j+1]+1, row[j]+1, diagonal+cost)
		}
	}
	return row[len(b)]
}

// Describe lists every setting of c with its value, a line each; secrets are redacted.
func Describe(c Config) string {
	var text strings.Builder
	for _, key := range Keys() {
		fmt.Fprintf(&text, "%s: %v\n", key.Path, lookup(&c, key.Path).Interface())
	}
	return text.String()
}
