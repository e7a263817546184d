package config

import (
	"bufio"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// addMirrorMakerFlags adds the flags of MirrorMaker 1, so that its start scripts go on working.
func addMirrorMakerFlags(flags *pflag.FlagSet) {
	for _, f := range mirrorMakerFlags {
		flags.String(f.name, "", f.help)
		flags.Lookup(f.name).Hidden = f.hidden
		if f.bare {
			flags.Lookup(f.name).NoOptDefVal = "true"
		}
	}
}

// mirrorMakerFlags are the flags; effect says why a hidden one changes nothing here.
var mirrorMakerFlags = []struct {
	name, help, effect string
	hidden, bare       bool
}{
	{name: "consumer.config", help: "MirrorMaker 1's consumer properties: the source cluster"},
	{name: "producer.config", help: "MirrorMaker 1's producer properties: the mirror cluster"},
	{name: "whitelist", help: "MirrorMaker 1's expression of the topics to mirror"},
	{name: "include", help: "the same under its later name", hidden: true},
	{name: "blacklist", help: "MirrorMaker 1's expression of the topics to leave out", hidden: true},
	{name: "offset.commit.interval.ms", help: "timing.checkpoint in milliseconds", hidden: true},
	{name: "num.streams", hidden: true, effect: "partitions are copied in parallel anyway"},
	{name: "new.consumer", hidden: true, bare: true, effect: "there is one kind only"},
	{name: "abort.on.send.failure", hidden: true, effect: "a stream that can't go on stops, the others go on"},
	{name: "consumer.rebalance.listener", hidden: true, effect: "Java classes aren't loaded"},
	{name: "rebalance.listener.args", hidden: true, effect: "Java classes aren't loaded"},
	{name: "message.handler", hidden: true, effect: "refused"},
	{name: "message.handler.args", hidden: true, effect: "Java classes aren't loaded"},
}

// mirrorMakerGiven tells whether kmirror was started like MirrorMaker 1.
func mirrorMakerGiven(flags *pflag.FlagSet) bool {
	return flags != nil && (flags.Changed("consumer.config") || flags.Changed("producer.config"))
}

// mergeMirrorMaker copies what MirrorMaker's files and flags say into c, and names in the warnings what has no effect.
func mergeMirrorMaker(c *Config, flags *pflag.FlagSet, problems *Problems) (warnings []string) {
	if flags == nil {
		return nil
	}
	text := func(name string) string { return flags.Lookup(name).Value.String() }
	if mirrorMakerGiven(flags) {
		c.Topics.Start = "latest" // the default of auto.offset.reset
	}
	m := mirrorMaker{config: c, problems: problems}
	if flags.Changed("consumer.config") {
		m.readFile(text("consumer.config"), &c.Source, m.consumerProperty)
	}
	if flags.Changed("producer.config") {
		m.readFile(text("producer.config"), &c.Mirror, m.producerProperty)
	}
	for _, name := range []string{"whitelist", "include"} {
		if flags.Changed(name) {
			c.Topics.Include = []string{javaTopics(text(name))}
		}
	}
	if flags.Changed("blacklist") {
		c.Topics.Exclude = []string{javaTopics(text("blacklist"))}
	}
	if flags.Changed("offset.commit.interval.ms") {
		m.setMillis("--offset.commit.interval.ms", text("offset.commit.interval.ms"), &c.Timing.Checkpoint)
	}
	if flags.Changed("message.handler") {
		problems.add("--message.handler", "records are copied as they are; Java classes aren't loaded")
	}
	for _, f := range mirrorMakerFlags {
		if f.effect != "" && f.name != "message.handler" && flags.Changed(f.name) {
			m.warn("--"+f.name, "has no effect: "+f.effect)
		}
	}
	return m.warnings
}

// mirrorMakerRole makes an instance that was started like MirrorMaker 1, which knows no proxy, a mirror only.
func mirrorMakerRole(c *Config, flags *pflag.FlagSet) []string {
	if !mirrorMakerGiven(flags) || c.Proxy.Listen != "" || !c.HasRole(RoleMirror) {
		return nil
	}
	c.Roles = []string{RoleMirror}
	return []string{"no --listen: this instance mirrors from the source's log only; with it producers may connect here"}
}

// javaTopics turns MirrorMaker's topic expression, in which a comma stands for "or", into an entry of a topic list.
func javaTopics(expression string) string {
	return "/" + strings.ReplaceAll(strings.Trim(expression, `"' `), ",", "|") + "/"
}

// mirrorMaker reads MirrorMaker's properties files.
type mirrorMaker struct {
	config   *Config
	problems *Problems
	warnings []string
}

func (m *mirrorMaker) warn(what, text string) { m.warnings = append(m.warnings, what+": "+text) }

func (m *mirrorMaker) setMillis(path, text string, target *time.Duration) {
	n, err := strconv.ParseInt(text, 10, 32)
	if err != nil {
		m.problems.add(path, "want milliseconds, got %q", text)
		return
	}
	*target = time.Duration(n) * time.Millisecond
}

// property is one line of a properties file.
type property struct{ file, name, value string }

func (p property) path() string { return p.file + ": " + p.name }

// readFile hands each property to own, then to those that consumers and producers share; what neither knows is named.
func (m *mirrorMaker) readFile(file string, cluster *Cluster, own func(property) bool) {
	properties, err := readProperties(file)
	if err != nil {
		m.problems.add(file, "%v", err)
		return
	}
	for _, p := range properties {
		if !own(p) && !m.sharedProperty(p, cluster) {
			m.warn(p.path(), "isn't known here and has no effect")
		}
	}
}

func (m *mirrorMaker) consumerProperty(p property) bool {
	switch p.name {
	case "group.id":
		m.config.Name = p.value
		m.warn(p.path(), "is the mirror's name now; its consumer group is kmirror."+p.value)
	case "auto.offset.reset":
		start := map[string]string{"smallest": "earliest", "largest": "latest"}[p.value]
		if start == "" {
			start = p.value
		}
		m.config.Topics.Start = start
	case "session.timeout.ms":
		m.setMillis(p.path(), p.value, &m.config.Timing.SessionTimeout)
	case "zookeeper.connect", "zookeeper.connection.timeout.ms", "zookeeper.session.timeout.ms":
		m.warn(p.path(), "has no effect: ZooKeeper isn't used; bootstrap.servers names the source")
	case "auto.commit.enable", "enable.auto.commit", "auto.commit.interval.ms", "exclude.internal.topics",
		"partition.assignment.strategy", "heartbeat.interval.ms", "max.poll.records", "max.poll.interval.ms", "fetch.min.bytes",
		"fetch.max.bytes", "fetch.max.wait.ms", "max.partition.fetch.bytes", "key.deserializer", "value.deserializer",
		"isolation.level", "consumer.timeout.ms", "queued.max.message.chunks", "fetch.message.max.bytes":
		m.warn(p.path(), "has no effect: kmirror reads raw record batches and decides this itself")
	default:
		return false
	}
	return true
}

func (m *mirrorMaker) producerProperty(p property) bool {
	switch p.name {
	case "metadata.broker.list":
		m.config.Mirror.Bootstrap = splitList(p.value)
	case "compression.type", "compression.codec":
		m.warn(p.path(), "has no effect: record batches keep the compression that their producer chose")
	case "acks", "request.required.acks", "retries", "max.in.flight.requests.per.connection", "enable.idempotence",
		"producer.type", "max.block.ms", "block.on.buffer.full", "delivery.timeout.ms", "retry.backoff.ms", "transactional.id":
		m.warn(p.path(), "has no effect: the mirror is always written with acks=all, in order, exactly once")
	case "batch.size", "linger.ms", "buffer.memory", "max.request.size", "batch.num.messages", "partitioner.class",
		"key.serializer", "value.serializer", "queue.buffering.max.ms", "timeout.ms", "request.timeout.ms":
		m.warn(p.path(), "has no effect: batches are copied as they are; mirror_memory bounds the memory")
	default:
		return false
	}
	return true
}

// sharedProperty takes the properties that consumers and producers have in common.
func (m *mirrorMaker) sharedProperty(p property, cluster *Cluster) bool {
	switch p.name {
	case "bootstrap.servers":
		cluster.Bootstrap = splitList(p.value)
	case "security.protocol":
		cluster.TLS.Enabled = strings.HasSuffix(p.value, "SSL")
		if !slices.Contains([]string{"PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"}, p.value) {
			m.problems.add(p.path(), "want PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL, got %q", p.value)
		}
	case "sasl.mechanism":
		cluster.SASL.Mechanism = p.value
	case "sasl.jaas.config":
		cluster.SASL.Username = jaasOption(p.value, "username")
		cluster.SASL.Password = Secret(jaasOption(p.value, "password"))
	case "ssl.truststore.location":
		m.setPEM(p, &cluster.TLS.CAFile)
	case "ssl.keystore.location":
		m.setPEM(p, &cluster.TLS.CertFile)
		cluster.TLS.KeyFile = cluster.TLS.CertFile // a PEM key store holds both
	case "client.id", "metadata.max.age.ms", "receive.buffer.bytes", "send.buffer.bytes", "socket.receive.buffer.bytes",
		"connections.max.idle.ms", "reconnect.backoff.ms", "interceptor.classes", "metric.reporters", "metrics.num.samples",
		"ssl.truststore.type", "ssl.keystore.type", "ssl.truststore.password", "ssl.keystore.password", "ssl.key.password",
		"ssl.endpoint.identification.algorithm", "ssl.protocol", "ssl.enabled.protocols", "sasl.kerberos.service.name":
		m.warn(p.path(), "has no effect")
	default:
		return false
	}
	return true
}

// setPEM takes a store that is a PEM file; Java's own formats have to be converted.
func (m *mirrorMaker) setPEM(p property, target *string) {
	if strings.HasSuffix(p.value, ".pem") || strings.HasSuffix(p.value, ".crt") {
		*target = p.value
		return
	}
	m.problems.add(p.path(), "want a PEM file (.pem, .crt); export it from the Java key store with keytool or openssl")
}

// jaasOption returns the value of name="…" in a JAAS configuration line.
func jaasOption(jaas, name string) string {
	_, rest, found := strings.Cut(jaas, name+"=")
	if !found || strings.TrimSpace(rest) == "" {
		return ""
	}
	if quote := rest[0]; quote == '"' || quote == '\'' {
		value, _, _ := strings.Cut(rest[1:], string(quote))
		return value
	}
	return strings.TrimRight(strings.Fields(rest)[0], ";")
}

// readProperties reads a Java properties file: name=value or name: value, # and ! start comments, \ at the end joins lines.
func readProperties(file string) ([]property, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var properties []property
	lines := bufio.NewScanner(f)
	pending := ""
	for lines.Scan() {
		line := pending + strings.TrimLeft(lines.Text(), " \t")
		if strings.HasSuffix(line, `\`) {
			pending = strings.TrimSuffix(line, `\`)
			continue
		}
		pending = ""
		if line == "" || line[0] == '#' || line[0] == '!' {
			continue
		}
		name, value := line, ""
		if end := strings.IndexAny(line, "=: \t"); end >= 0 {
			name, value = line[:end], strings.TrimSpace(line[end:])
			if value != "" && (value[0] == '=' || value[0] == ':') {
				value = strings.TrimSpace(value[1:])
			}
		}
		properties = append(properties, property{file: file, name: name, value: value})
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return properties, nil
}
