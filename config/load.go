package config

import (
	"fmt"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/env/v2"
	"github.com/knadh/koanf/providers/file"
	"github.com/knadh/koanf/providers/posflag"
	"github.com/knadh/koanf/v2"
	"github.com/spf13/pflag"
)

// Problems lists everything that is wrong with the settings, one line each: path, colon, what is wrong.
type Problems []string

func (p Problems) Error() string { return strings.Join(p, "\n") }

// add notes a problem of the setting at path.
func (p *Problems) add(path, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if !strings.HasPrefix(text, "[") { // "[1]: …" follows its list without a colon
		path += ": "
	}
	*p = append(*p, path+text)
}

// Load reads the settings from the file at path (none if ""), the environment and the flags that AddFlags added (none if nil),
// and validates them. The warnings name properties of MirrorMaker files that have no effect here. An error is a Problems.
func Load(path string, environ []string, flags *pflag.FlagSet) (Config, []string, error) {
	c := Default()
	var problems Problems
	warnings := mergeMirrorMaker(&c, flags, &problems)
	if path != "" {
		mergeFile(&c, path, &problems)
	}
	mergeEnviron(&c, environ, &problems)
	if flags != nil {
		mergeFlags(&c, flags, &problems)
	}
	warnings = append(warnings, mirrorMakerRole(&c, flags)...)
	if len(problems) > 0 { // what Validate would say of half-read settings misleads
		return c, warnings, problems
	}
	return c, warnings, c.Validate()
}

func mergeFile(c *Config, path string, problems *Problems) {
	if _, err := os.Stat(path); err != nil {
		problems.add(path, "%v", err)
		return
	}
	k := koanf.New(".")
	if err := k.Load(file.Provider(path), yaml.Parser()); err != nil {
		problems.add(path, "%v", err)
		return
	}
	mergeSection(c, "", k.Raw(), problems)
}

// mergeSection copies the entries of a section of a file into c.
func mergeSection(c *Config, prefix string, section map[string]any, problems *Problems) {
	for _, name := range slices.Sorted(maps.Keys(section)) {
		path, raw := prefix+name, section[name]
		field := lookup(c, path)
		nested, isSection := raw.(map[string]any)
		switch {
		case !field.IsValid():
			problems.add(path, "unknown key, did you mean %s?", nearestKey(path))
		case raw == nil: // "topics:" with nothing behind it
		case field.Kind() == reflect.Struct && isSection:
			mergeSection(c, path+".", nested, problems)
		case field.Kind() == reflect.Struct:
			problems.add(path, "want a section (%s.…), got %s", path, describe(raw))
		default:
			set(path, field, raw, problems)
		}
	}
}

// set stores raw, and keeps what a secret was out of the error text.
func set(path string, field reflect.Value, raw any, problems *Problems) {
	err := setValue(field, raw)
	if err == nil {
		return
	}
	if field.Type() == reflect.TypeFor[Secret]() {
		err = fmt.Errorf("want text (in quotes)")
	}
	problems.add(path, "%v", err)
}

// FileVariable names the settings file where no flag does.
const FileVariable = envPrefix + "CONFIG"

// serviceLink matches the variables that Kubernetes adds for a service whose name starts with kmirror. The last few
// are for the project's own tests.
var serviceLink = regexp.MustCompile(`^KMIRROR(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP)(_[A-Z]+)?)?)$|^KMIRROR_(TEST_.*|KAFKA_LOG|KEEP)$`)

func mergeEnviron(c *Config, environ []string, problems *Problems) {
	byName := map[string]Key{}
	for _, key := range Keys() {
		byName[key.Env()] = key
	}
	k := koanf.New("") // no delimiter: the names stay whole
	err := k.Load(env.Provider("", env.Opt{Prefix: envPrefix, EnvironFunc: func() []string { return environ }}), nil)
	if err != nil {
		problems.add("environment", "%v", err)
	}
	values := k.Raw()
	for _, name := range slices.Sorted(maps.Keys(values)) {
		key, known := byName[name]
		switch {
		case known:
			set(name, lookup(c, key.Path), values[name], problems)
		case name != FileVariable && !serviceLink.MatchString(name):
			guess := strings.ToLower(strings.TrimPrefix(name, envPrefix))
			problems.add(name, "unknown setting, did you mean %s?", Key{Path: nearestKey(guess)}.Env())
		}
	}
}

func mergeFlags(c *Config, flags *pflag.FlagSet, problems *Problems) {
	k := koanf.New("")
	provider := posflag.ProviderWithFlag(flags, "", nil, func(f *pflag.Flag) (string, any) {
		if !f.Changed {
			return "", nil
		}
		return f.Name, f.Value.String()
	})
	if err := k.Load(provider, nil); err != nil {
		problems.add("flags", "%v", err)
	}
	values := k.Raw()
	for _, key := range Keys() {
		for _, name := range []string{key.Path, key.Flag} { // the short one, given last, wins over the full name
			if text, given := values[name]; given {
				set("--"+name, lookup(c, key.Path), text, problems)
			}
		}
	}
}
