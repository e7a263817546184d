package config

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

// load reads text as a settings file, with env lines and flag arguments.
func load(t *testing.T, text string, environ []string, args ...string) (Config, []string, error) {
	t.Helper()
	path := ""
	if text != "" {
		path = filepath.Join(t.TempDir(), "kmirror.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	AddFlags(flags)
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	return Load(path, environ, flags)
}

const minimal = `
source: {bootstrap: [a:9092]}
mirror: {bootstrap: [c:9092]}
proxy: {listen: "127.0.0.1:9192"}
`

func TestEachLayerOverridesTheOnesBefore(t *testing.T) {
	env := []string{"KMIRROR_NAME=from-env", "KMIRROR_GRACE=5s", "KMIRROR_MIRROR_MEMORY=64MiB"}
	c, _, err := load(t, minimal+"name: from-file\ngrace: 4s\nlog: {level: debug}\n", env, "--name=from-flag")
	if err != nil {
		t.Fatal(err)
	}
	if c.Name != "from-flag" || c.Grace != 5*time.Second || c.Log.Level != "debug" || c.MirrorMemory != 64<<20 || c.Timing.Look != time.Second {
		t.Errorf("settings = %+v, want each from the last layer that names it", c)
	}
}

func TestFullFile(t *testing.T) {
	c, _, err := load(t, `
name: orders-dr
roles: [mirror]
source:
  bootstrap: "a:9092, b:9092 ,"
  tls: {enabled: true, server_name: kafka}
  sasl: {mechanism: SCRAM-SHA-512, username: u, password: p}
mirror:
  bootstrap: ["[::1]:9092", " d:9092"]
topics: {include: [orders, "/audit\\..{1,3}/"], exclude: [], start: 2026-01-31T12:00:00Z}
`, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(c.Source.Bootstrap, c.Mirror.Bootstrap), "[a:9092 b:9092] [[::1]:9092 d:9092]"; got != want {
		t.Errorf("servers = %s, want %s", got, want)
	}
	if c.Source.SASL.Password != "p" || c.Topics.Include[1] != `/audit\..{1,3}/` || c.HasRole(RoleProxy) {
		t.Errorf("settings = %+v", c)
	}
}

func TestFirstTryFlags(t *testing.T) {
	c, _, err := load(t, "", nil, "--source", "a:9092, b:9092,", "--mirror=c:9092", "--listen=:9192", "--advertise=proxy.example.com",
		"--broker-port-base=9200", "--topics=a,b,/x{1,2}/", "--admin=127.0.0.1:0", "--proxy.limits.connections=7")
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(c.Topics.Include, " "); got != "a b /x{1,2}/" {
		t.Errorf("topics = %s", got)
	}
	if len(c.Source.Bootstrap) != 2 || c.Proxy.BrokerPorts.Base != 9200 || c.Proxy.Limits.Connections != 7 {
		t.Errorf("settings = %+v", c)
	}
}

func TestMistakesAreNamed(t *testing.T) {
	for name, tc := range map[string]struct {
		text string
		env  []string
		args []string
		want []string
	}{
		"misspelt key":          {text: minimal + "sourc: {bootstrap: [x:1]}", want: []string{"sourc: unknown key, did you mean source?"}},
		"misspelt nested key":   {text: "source: {bootstap: [a:9092]}", want: []string{"source.bootstap: unknown key, did you mean source.bootstrap?"}},
		"key in wrong section":  {text: minimal + "start: latest", want: []string{"start: unknown key, did you mean topics.start?"}},
		"several at once":       {text: "nam: x\ngrace: soon\n", want: []string{`grace: want a duration such as 10s, got "soon"`, "nam: unknown key, did you mean name?"}},
		"number for a list":     {text: "source: {bootstrap: 9092}", want: []string{"source.bootstrap: want a list, got 9092"}},
		"number in a list":      {text: "source: {bootstrap: [a:1, 9092]}", want: []string{"source.bootstrap[1]: want text, got 9092"}},
		"text for a section":    {text: "source: a:9092", want: []string{`source: want a section (source.…), got "a:9092"`}},
		"text for a number":     {text: "proxy: {limits: {connections: many}}", want: []string{`proxy.limits.connections: want a whole number, got "many"`}},
		"number for a duration": {text: "grace: 10", want: []string{"grace: want a duration such as 10s, got 10"}},
		"bad size":              {text: "mirror_memory: 1 lot", want: []string{`mirror_memory: want a size such as 256MiB, got "1 lot"`}},
		"secret stays hidden":   {text: "source: {sasl: {password: 123456}}", want: []string{"source.sasl.password: want text (in quotes)"}},
		"unknown variable":      {text: minimal, env: []string{"KMIRROR_SOURCE_BOOTSTAP=x"}, want: []string{"KMIRROR_SOURCE_BOOTSTAP: unknown setting, did you mean KMIRROR_SOURCE_BOOTSTRAP?"}},
		"bad flag":              {text: minimal, args: []string{"--broker-port-base=x"}, want: []string{`--broker-port-base: want a whole number, got "x"`}},
		"no clusters": {want: []string{"source.bootstrap: missing: name at least one server, host:port",
			"mirror.bootstrap: missing: name at least one server, host:port", "proxy.listen: missing: say where clients connect, host:port"}},
		"missing port":      {text: minimal, args: []string{"--source=a:1,b"}, want: []string{`source.bootstrap[1]: missing port, got "b"`}},
		"IPv6 bare":         {text: minimal, args: []string{"--source=fe80::1:9092:x"}, want: []string{`source.bootstrap[0]: want an IPv6 address in brackets, [::1]:9092, got "fe80::1:9092:x"`}},
		"scheme":            {text: minimal, args: []string{"--source=PLAINTEXT://a:1"}, want: []string{`source.bootstrap[0]: want host:port without PLAINTEXT://, got "PLAINTEXT://a:1"`}},
		"same cluster":      {text: minimal, args: []string{"--mirror=a:9092"}, want: []string{"mirror.bootstrap[0]: a:9092 is a server of the source too"}},
		"internal topic":    {text: minimal, args: []string{"--topics=__consumer_offsets"}, want: []string{"topics.include[0]: __consumer_offsets is internal; topics that start with __ are never mirrored"}},
		"bad topic":         {text: minimal, args: []string{"--topics=a*"}, want: []string{`topics.include[0]: "a*" is no topic name; a regular expression stands between slashes`}},
		"unknown choice":    {text: minimal + "topics: {on_data_loss: ask}", want: []string{`topics.on_data_loss: want continue, stop, got "ask"`}},
		"sasl without user": {text: minimal + "", args: []string{"--source.sasl.mechanism=PLAIN"}, want: []string{"source.sasl.username: missing", "source.sasl.password: missing, as is source.sasl.password_file"}},
		"tls not enabled":   {text: minimal, args: []string{"--source.tls.server_name=x"}, want: []string{"source.tls.enabled: false, but other keys of source.tls are set"}},
		"message handler":   {text: minimal, args: []string{"--message.handler=X"}, want: []string{"--message.handler: records are copied as they are; Java classes aren't loaded"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := load(t, tc.text, tc.env, tc.args...)
			if err == nil {
				t.Fatalf("Load = no error, want %q", tc.want)
			}
			if got := []string(err.(Problems)); !slices.Equal(got, tc.want) {
				t.Errorf("problems:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(tc.want, "\n"))
			}
		})
	}
}

func TestVariablesOfKubernetesServicesAreNoMistake(t *testing.T) {
	env := []string{"KMIRROR_PORT=tcp://10.0.0.1:9092", "KMIRROR_SERVICE_HOST=10.0.0.1", "KMIRROR_PORT_9092_TCP_ADDR=10.0.0.1",
		"KMIRROR_EU_SERVICE_PORT_KAFKA=9092", "KMIRROR_CONFIG=x.yaml"}
	if _, _, err := load(t, minimal, env); err != nil {
		t.Error(err)
	}
}

func TestEveryKeyHasItsOwnVariableAndHelp(t *testing.T) {
	seen := map[string]string{}
	for _, key := range Keys() {
		if other := seen[key.Env()]; other != "" {
			t.Errorf("%s and %s share %s", key.Path, other, key.Env())
		}
		seen[key.Env()] = key.Path
		if key.Help == "" {
			t.Errorf("%s has no help", key.Path)
		}
		if field := lookup(new(Default()), key.Path); !field.IsValid() {
			t.Errorf("lookup(%s) finds nothing", key.Path)
		}
	}
}

func TestOperationsGuideListsEverySetting(t *testing.T) {
	guide, err := os.ReadFile("../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range Keys() {
		if !strings.Contains(string(guide), "`"+key.Path+"`") {
			t.Errorf("docs/operations.md doesn't list %s", key.Path)
		}
		if key.Flag != "" && !strings.Contains(string(guide), "`--"+key.Flag+"`") {
			t.Errorf("docs/operations.md doesn't list --%s", key.Flag)
		}
	}
}

func TestSecretsAreNeverPrinted(t *testing.T) {
	c := Default()
	c.Source.SASL = SASL{Mechanism: "PLAIN", Username: "u", Password: "hunter2", Token: "hunter2"}
	encoded, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{
		fmt.Sprint(c), fmt.Sprintf("%+v", c), fmt.Sprintf("%#v", c), fmt.Sprintf("%q %x %d", c.Source.SASL.Password, c.Source.SASL.Password, c.Source.SASL.Password),
		string(encoded), c.Source.SASL.Password.String(), Describe(c),
	} {
		if strings.Contains(text, "hunter2") || strings.Contains(text, fmt.Sprintf("%x", "hunter2")) {
			t.Errorf("the password shows in %q", text)
		}
	}
	if !strings.Contains(Describe(c), "source.sasl.password: [redacted]") {
		t.Errorf("Describe = %s", Describe(c))
	}
}

func TestTopicPatternsMatchWholeNames(t *testing.T) {
	c := Default()
	c.Topics.Include = []string{"orders", `/audit\..*|log/`, "/.*internal/"}
	c.Topics.Exclude = []string{"audit.skip"}
	include, exclude, err := c.Topics.Patterns()
	if err != nil {
		t.Fatal(err)
	}
	for topic, want := range map[string]bool{
		"orders": true, "orders2": false, "xorders": false, "audit.x": true, "log": true, "logs": false, "audit.skip": false,
		"__consumer_offsets": false, "__kmirror.default.segments": false, "__internal": false, "my.internal": true,
	} {
		got := false
		for _, p := range include {
			got = got || p.MatchString(topic)
		}
		for _, p := range exclude {
			got = got && !p.MatchString(topic)
		}
		if got != want {
			t.Errorf("%s mirrored = %t, want %t", topic, got, want)
		}
	}
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]Size{"4096": 4096, "64KiB": 64 << 10, "256 MiB": 256 << 20, "1GiB": 1 << 30, "5MB": 5e6} {
		got, err := ParseSize(text)
		if err != nil || got != want {
			t.Errorf("ParseSize(%q) = %d, %v, want %d", text, got, err, want)
		}
		if again, err := ParseSize(got.String()); err != nil || again != got {
			t.Errorf("ParseSize(%q) = %d, %v, want %d", got.String(), again, err, got)
		}
	}
	for _, text := range []string{"", "MiB", "-1", "9999999999GiB", "1.5GiB"} {
		if got, err := ParseSize(text); err == nil {
			t.Errorf("ParseSize(%q) = %d, want an error", text, got)
		}
	}
}
