package config

import (
	"net"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Validate returns a Problems with everything that is wrong with c, or nil.
func (c Config) Validate() error {
	var p Problems
	c.checkInstance(&p)
	c.checkClusters(&p)
	if c.HasRole(RoleProxy) {
		c.Proxy.check(&p)
		c.checkPorts(&p)
	}
	c.Topics.check(&p)
	c.Timing.check(&p)
	if len(p) == 0 {
		return nil
	}
	return p
}

// instanceName is what may stand in the names of a topic (__kmirror.<name>.segments) and a group.
var instanceName = regexp.MustCompile(`^[a-zA-Z0-9._-]{1,200}$`)

const minMirrorMemory = 16 << 20

func (c Config) checkInstance(p *Problems) {
	if !instanceName.MatchString(c.Name) {
		p.add("name", "want 1 to 200 letters, digits, dots, underscores or hyphens, got %q", c.Name)
	}
	if len(c.Roles) == 0 {
		p.add("roles", "want proxy, mirror or both, got none")
	}
	for i, role := range c.Roles {
		if role != RoleProxy && role != RoleMirror {
			p.add("roles", "[%d]: want proxy or mirror, got %q", i, role)
		}
	}
	if c.MirrorMemory < minMirrorMemory {
		p.add("mirror_memory", "want at least %v, got %v", Size(minMirrorMemory), c.MirrorMemory)
	}
	if c.Grace <= 0 {
		p.add("grace", "want a positive duration, got %v", c.Grace)
	}
	if c.Admin.Listen != "" {
		checkAddress(p, "admin.listen", c.Admin.Listen)
	}
	oneOf(p, "log.level", c.Log.Level, "debug", "info", "warn", "error")
	oneOf(p, "log.format", c.Log.Format, "text", "json")
}

func (c Config) checkClusters(p *Problems) {
	c.Source.check(p, "source")
	if !c.HasRole(RoleMirror) {
		return
	}
	c.Mirror.check(p, "mirror")
	for i, server := range c.Mirror.Bootstrap {
		if slices.Contains(c.Source.Bootstrap, server) {
			p.add("mirror.bootstrap", "[%d]: %s is a server of the source too", i, server)
		}
	}
}

func (c Cluster) check(p *Problems, path string) {
	if len(c.Bootstrap) == 0 {
		p.add(path+".bootstrap", "missing: name at least one server, host:port")
	}
	for i, server := range c.Bootstrap {
		checkAddress(p, path+".bootstrap["+strconv.Itoa(i)+"]", server)
	}
	if c.ProxyURL != "" {
		u, err := url.Parse(string(c.ProxyURL))
		switch { // the URL itself may hold a password
		case err != nil:
			p.add(path+".proxy_url", "want a URL as in socks5://host:1080 or http://host:3128")
		case u.Scheme != "socks5" && u.Scheme != "http":
			p.add(path+".proxy_url", "want socks5:// or http://, got %q", u.Scheme+"://")
		case u.Port() == "":
			p.add(path+".proxy_url", "missing port")
		}
	}
	c.TLS.check(p, path+".tls")
	c.SASL.check(p, path+".sasl")
}

func (t ClientTLS) check(p *Problems, path string) {
	if !t.Enabled && t != (ClientTLS{}) {
		p.add(path+".enabled", "false, but other keys of %s are set", path)
	}
	checkFile(p, path+".ca_file", t.CAFile)
	checkPair(p, path, t.CertFile, t.KeyFile)
}

func (s SASL) check(p *Problems, path string) {
	switch s.Mechanism {
	case "":
		if s != (SASL{}) {
			p.add(path+".mechanism", "missing, but other keys of %s are set", path)
		}
	case "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512":
		if s.Username == "" {
			p.add(path+".username", "missing")
		}
		checkSecret(p, path+".password", s.Password, s.PasswordFile)
	case "OAUTHBEARER":
		checkSecret(p, path+".token", s.Token, s.TokenFile)
	default:
		oneOf(p, path+".mechanism", s.Mechanism, "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
	}
}

func checkSecret(p *Problems, path string, secret Secret, file string) {
	switch {
	case secret == "" && file == "":
		p.add(path, "missing, as is %s_file", path)
	case secret != "" && file != "":
		p.add(path, "set, and %s_file too: name one of them", path)
	}
	checkFile(p, path+"_file", file)
}

func (x Proxy) check(p *Problems) {
	if x.Listen == "" {
		p.add("proxy.listen", "missing: say where clients connect, host:port")
	} else {
		checkAddress(p, "proxy.listen", x.Listen)
	}
	if host := strings.Trim(x.Advertise, "[]"); strings.Contains(host, ":") && net.ParseIP(host) == nil {
		p.add("proxy.advertise", "want a host without a port, got %q", x.Advertise)
	}
	if x.BrokerPorts.Base < 0 || x.BrokerPorts.Base > 65535 {
		p.add("proxy.broker_ports.base", "want 0 to 65535, got %d", x.BrokerPorts.Base)
	}
	checkPair(p, "proxy.tls", x.TLS.CertFile, x.TLS.KeyFile)
	if x.TLS.ClientCAFile != "" && x.TLS.CertFile == "" {
		p.add("proxy.tls.cert_file", "missing, but proxy.tls.client_ca_file is set")
	}
	checkFile(p, "proxy.tls.client_ca_file", x.TLS.ClientCAFile)
	x.checkSNI(p)
	oneOf(p, "proxy.proxy_protocol", x.ProxyProtocol, "off", "allowed", "required")
	oneOf(p, "proxy.send_proxy_protocol", x.SendProxyProtocol, "off", "v1", "v2")
	if x.Limits.Connections < 1 {
		p.add("proxy.limits.connections", "want at least 1, got %d", x.Limits.Connections)
	}
	if x.Limits.RequestBytes < 1<<10 || x.Limits.RequestBytes > 1<<31-1 {
		p.add("proxy.limits.request_bytes", "want 1KiB to 2GiB less one byte, got %v", x.Limits.RequestBytes)
	}
	if x.Limits.ConnectionsPerIP < 0 {
		p.add("proxy.limits.connections_per_ip", "want 0 or more, got %d", x.Limits.ConnectionsPerIP)
	}
	if x.Limits.FrameTime < time.Second {
		p.add("proxy.limits.frame_time", "want at least 1s, got %v", x.Limits.FrameTime)
	}
	for path, limit := range map[string]time.Duration{"first_request": x.Limits.FirstRequest, "idle": x.Limits.Idle, "age": x.Limits.Age, "unread": x.Limits.Unread} {
		if limit != 0 && limit < time.Second {
			p.add("proxy.limits."+path, "want 0 for no bound, or at least 1s, got %v", limit)
		}
	}
}

func (x Proxy) checkSNI(p *Problems) {
	if x.SNI.Port < 0 || x.SNI.Port > 65535 {
		p.add("proxy.sni.port", "want 0 to 65535, got %d", x.SNI.Port)
	}
	if x.SNI.Pattern == "" {
		if x.SNI.Port != 0 {
			p.add("proxy.sni.pattern", "missing, but proxy.sni.port is set")
		}
		return
	}
	before, after, found := strings.Cut(x.SNI.Pattern, "{id}")
	if !found || strings.ContainsAny(before+after, "{}: /") {
		p.add("proxy.sni.pattern", "want a host name with {id} in it, as in broker-{id}.kafka.example.com, got %q", x.SNI.Pattern)
	}
	if x.TLS.CertFile == "" {
		p.add("proxy.tls.cert_file", "missing, but proxy.sni.pattern is set: only TLS clients name a server")
	}
	if x.Advertise == "" {
		p.add("proxy.advertise", "missing, but proxy.sni.pattern is set: say under which name clients bootstrap")
	}
	if x.BrokerPorts.Base != 0 {
		p.add("proxy.broker_ports.base", "set, and proxy.sni.pattern too: name one of them")
	}
}

func (t Topics) check(p *Problems) {
	if len(t.Include) == 0 {
		p.add("topics.include", "empty: nothing would be mirrored")
	}
	for i, entry := range t.Include {
		if _, err := pattern(entry); err != nil {
			p.add("topics.include", "[%d]: %v", i, err)
		} else if strings.HasPrefix(entry, "__") {
			p.add("topics.include", "[%d]: %s is internal; topics that start with __ are never mirrored", i, entry)
		}
	}
	for i, entry := range t.Exclude {
		if _, err := pattern(entry); err != nil {
			p.add("topics.exclude", "[%d]: %v", i, err)
		}
	}
	if t.Start != "earliest" && t.Start != "latest" {
		if _, err := time.Parse(time.RFC3339, t.Start); err != nil {
			p.add("topics.start", "want earliest, latest or a time such as 2026-01-31T12:00:00Z, got %q", t.Start)
		}
	}
	t.checkRename(p)
	oneOf(p, "topics.partitions", t.Partitions, "expand", "preserve", "repartition")
	oneOf(p, "topics.offsets", t.Offsets, "auto", "identical", "mapped")
	oneOf(p, "topics.on_recreate", t.OnRecreate, "append", "stop", "recreate")
	for i, name := range t.Settings {
		if slices.Contains(ownSettings, name) {
			p.add("topics.settings", "[%d]: %s is set by kmirror itself on topics that it makes", i, name)
		}
	}
	oneOf(p, "topics.on_data_loss", t.OnDataLoss, "continue", "stop")
	oneOf(p, "topics.on_divergence", t.OnDivergence, "stop", "continue")
	if t.ReplicationFactor != -1 && (t.ReplicationFactor < 1 || t.ReplicationFactor > 1<<15-1) {
		p.add("topics.replication_factor", "want -1 or at least 1, got %d", t.ReplicationFactor)
	}
}

// ownSettings are those that kmirror sets so that batches arrive as they were sent.
var ownSettings = []string{"compression.type", "message.timestamp.type", "max.message.bytes"}

func (t Topics) checkRename(p *Problems) {
	if t.Rename == "" {
		return
	}
	rest := strings.Replace(t.Rename, "{topic}", "", 1)
	switch {
	case rest == t.Rename:
		p.add("topics.rename", "want {topic} in it, once, got %q: all topics would have the same name", t.Rename)
	case rest != "" && !topicName.MatchString(rest):
		p.add("topics.rename", "want letters, digits, dots, underscores and hyphens around {topic}, got %q", t.Rename)
	case strings.HasPrefix(t.Rename, "__"):
		p.add("topics.rename", "topics that start with __ are internal, got %q", t.Rename)
	}
}

func (t Timing) check(p *Problems) {
	atLeast := func(path string, value, least time.Duration) {
		if value < least {
			p.add(path, "want at least %v, got %v", least, value)
		}
	}
	atLeast("timing.refresh", t.Refresh, 100*time.Millisecond)
	atLeast("timing.settings", t.Settings, 100*time.Millisecond)
	atLeast("timing.look", t.Look, 10*time.Millisecond)
	atLeast("timing.checkpoint", t.Checkpoint, 10*time.Millisecond)
	atLeast("timing.session_timeout", t.SessionTimeout, time.Second)
	atLeast("timing.takeover_wait", t.TakeoverWait, 0)
	atLeast("timing.fill", t.Fill, 0)
}

// checkAddress reports what keeps address from being a host:port.
func checkAddress(p *Problems, path, address string) {
	if scheme, _, found := strings.Cut(address, "://"); found {
		p.add(path, "want host:port without %s://, got %q", scheme, address)
		return
	}
	host, port, err := net.SplitHostPort(address)
	switch {
	case err != nil && net.ParseIP(strings.Trim(address, "[]")) != nil:
		p.add(path, "missing port, got %q", address)
	case err != nil && strings.Count(address, ":") > 1:
		p.add(path, "want an IPv6 address in brackets, [::1]:9092, got %q", address)
	case err != nil:
		p.add(path, "missing port, got %q", address)
	case strings.ContainsAny(host, " \t/"):
		p.add(path, "want a host name, got %q", host)
	default:
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 && strings.HasSuffix(path, "]") {
			p.add(path, "want a port from 1 to 65535, got %q", port)
		}
	}
}

func checkPair(p *Problems, path, certFile, keyFile string) {
	if certFile != "" && keyFile == "" {
		p.add(path+".key_file", "missing, but %s.cert_file is set", path)
	}
	if keyFile != "" && certFile == "" {
		p.add(path+".cert_file", "missing, but %s.key_file is set", path)
	}
	checkFile(p, path+".cert_file", certFile)
	checkFile(p, path+".key_file", keyFile)
}

func checkFile(p *Problems, path, file string) {
	if file == "" {
		return
	}
	f, err := os.Open(file)
	if err != nil {
		p.add(path, "%v", err)
		return
	}
	_ = f.Close() // nothing was written
}

func oneOf(p *Problems, path, value string, allowed ...string) {
	if !slices.Contains(allowed, value) {
		p.add(path, "want %s, got %q", strings.Join(allowed, ", "), value)
	}
}
