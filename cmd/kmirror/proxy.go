package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime/debug"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"kmirror/config"
	"kmirror/forwarder"
	"kmirror/internal/admin"
	"kmirror/proxy"
)

func newProxyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "proxy", Short: "Run the proxy and the mirror, as roles says", Args: cobra.NoArgs,
		Example: "  kmirror proxy --source a:9092 --mirror c:9092 --listen 127.0.0.1:9192\n  kmirror proxy --config kmirror.yaml",
		RunE: func(cmd *cobra.Command, _ []string) error {
			settings, err := loadConfig(cmd)
			if err != nil {
				return err
			}
			log, err := newLogger(settings.Log)
			if err != nil {
				return err
			}
			r := &reloader{file: configFile(cmd), inForce: settings, log: log, load: func() (config.Config, error) { return loadConfig(cmd) }}
			return runInstance(cmd.Context(), settings, log, func(x *instance) []part {
				r.apply, r.reopen = x.selectTopics, x.reopenAccess
				return []part{{"settings", r.run, false}}
			})
		},
	}
	addConfigFlags(cmd)
	return cmd
}

// instance is one running kmirror process: its parts, each nil where its role isn't played.
type instance struct {
	settings config.Config
	log      *zap.Logger
	registry *prometheus.Registry
	proxy    *proxy.Server
	mirror   *forwarder.Forwarder
	admin    *admin.Server
	files    *fileReports
	access   *accessFile // nil: no access log

	mirrorFailure atomic.Pointer[string] // why the mirror ended while the proxy goes on
}

// runInstance runs what settings say until ctx ends. more, if not nil, names further parts, which stop before kmirror's own.
func runInstance(ctx context.Context, settings config.Config, log *zap.Logger, more func(*instance) []part) error {
	x := &instance{settings: settings, log: log, registry: prometheus.NewRegistry()}
	x.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	x.files = newFileReports(log, x.registry)
	lister, err := x.build()
	if err != nil {
		return errors.Join(err, x.discard())
	}
	defer lister.Close()
	limitMemory(settings)
	log.Info("kmirror starts", zap.String("version", versionText()), zap.String("name", settings.Name), zap.Strings("roles", settings.Roles))
	parts := x.parts()
	if more != nil {
		parts = append(more(x), parts...)
	}
	err = runParts(ctx, settings.Grace, parts)
	log.Info("kmirror ends", zap.Error(err))
	return err
}

// memoryHeadroom is what the process needs besides the record batches that mirror_memory bounds.
const memoryHeadroom = 64 << 20

// limitMemory makes the garbage collector run before the heap has twice the size of the batches held. GOMEMLIMIT overrides it.
func limitMemory(c config.Config) {
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(int64(c.MirrorMemory) + memoryHeadroom)
	}
}

// build makes the parts; nothing runs yet.
func (x *instance) build() (*brokerLister, error) {
	source, err := newSource(x.files, x.settings)
	if err != nil {
		return nil, fmt.Errorf("source: %w", err)
	}
	lister, err := newBrokerLister(source.options())
	if err != nil {
		return nil, fmt.Errorf("source: %w", err)
	}
	if x.settings.HasRole(config.RoleMirror) {
		err = x.buildMirror(source)
	}
	if err == nil && x.settings.HasRole(config.RoleProxy) {
		err = x.buildProxy(source, lister)
	}
	if err == nil && x.settings.Admin.Listen != "" {
		err = x.buildAdmin()
	}
	if err != nil {
		lister.Close()
	}
	return lister, err
}

func (x *instance) buildMirror(source cluster) error {
	mirror, err := newCluster(x.files, x.settings.Mirror)
	if err != nil {
		return fmt.Errorf("mirror: %w", err)
	}
	options, err := forwarderOptions(x.settings, source.options(), mirror.options())
	if err != nil {
		return err
	}
	options.Logger, options.Registry = x.log.Named("mirror"), x.registry
	x.mirror, err = forwarder.New(options)
	return err
}

// mergeBytes is the most that small batches are merged to: half of what a broker takes by default.
const mergeBytes = 512 << 10

// forwarderOptions turns the settings into the forwarder's.
func forwarderOptions(c config.Config, source, mirror forwarder.ClusterOptions) (forwarder.Options, error) {
	include, exclude, err := c.Topics.Patterns()
	if err != nil {
		return forwarder.Options{}, fmt.Errorf("topics: %w", err)
	}
	start, at := forwarder.StartEarliest, time.Time{}
	switch c.Topics.Start {
	case "earliest":
	case "latest":
		start = forwarder.StartLatest
	default:
		start = forwarder.StartTimestamp
		if at, err = time.Parse(time.RFC3339, c.Topics.Start); err != nil {
			return forwarder.Options{}, fmt.Errorf("topics.start: %w", err)
		}
	}
	return forwarder.Options{
		Name: c.Name, Source: source, Mirror: mirror, Instance: instanceName(c), NoOffers: !c.HasRole(config.RoleProxy),
		Include: include, Exclude: exclude, Rename: c.Topics.Rename,
		OnRecreate: recreatePolicies[c.Topics.OnRecreate], Expand: c.Topics.Partitions == "expand", Repartition: c.Topics.Partitions == "repartition",
		SyncedSettings: c.Topics.Settings, FixSettings: c.Topics.FixSettings, SettingsEvery: c.Timing.Settings,
		Start: start, StartTimestamp: at,
		StopOnDataLoss:    c.Topics.OnDataLoss == "stop",
		StopOnDivergence:  c.Topics.OnDivergence == "stop",
		ReplicationFactor: int16(c.Topics.ReplicationFactor),
		MergeBytes:        mergeBytes,
		MemoryBytes:       int64(c.MirrorMemory) - heldBytes(c),
		RefreshEvery:      c.Timing.Refresh,
		LookEvery:         c.Timing.Look,
		CheckpointEvery:   c.Timing.Checkpoint,
		SessionTimeout:    c.Timing.SessionTimeout,
		TakeoverWait:      c.Timing.TakeoverWait,
		Offsets:           offsetPolicies[c.Topics.Offsets],
		FillTime:          c.Timing.Fill,
		DrainTimeout:      drainTimeout(c),
	}, nil
}

var offsetPolicies = map[string]forwarder.OffsetPolicy{
	"auto": forwarder.OffsetsAuto, "identical": forwarder.OffsetsIdentical, "mapped": forwarder.OffsetsMapped,
}

var recreatePolicies = map[string]forwarder.RecreatePolicy{
	"append": forwarder.RecreateAppend, "stop": forwarder.RecreateStop, "recreate": forwarder.RecreateAnew,
}

// instanceName tells this instance from others on its host across restarts: by the listener that no other can have. "" where there is
// none: then a restart waits for the group's session timeout.
func instanceName(c config.Config) string {
	listen := c.Admin.Listen
	if c.HasRole(config.RoleProxy) {
		listen = c.Proxy.Listen
	}
	if _, port, err := net.SplitHostPort(listen); err != nil || port == "0" {
		return ""
	}
	return listen
}

// heldBytes is the proxy's share of mirror_memory: requests that wait for their answer. The rest is the forwarder's.
func heldBytes(c config.Config) int64 {
	if !c.HasRole(config.RoleProxy) {
		return 0
	}
	return min(64<<20, int64(c.MirrorMemory)/4)
}

func (x *instance) buildProxy(source cluster, lister proxy.BrokerLister) error {
	c := x.settings
	downstream, err := serverTLS(x.files, c.Proxy.TLS)
	if err != nil {
		return fmt.Errorf("proxy.tls: %w", err)
	}
	base, err := brokerPortBase(c.Proxy)
	if err != nil {
		return err
	}
	ids, err := c.Proxy.BrokerPorts.List()
	if err != nil {
		return fmt.Errorf("proxy.broker_ports.ids: %w", err)
	}
	options := proxy.Options{
		Listen: c.Proxy.Listen, Advertise: c.Proxy.Advertise, BrokerPortBase: base, BrokerIDs: ids, Seeds: c.Source.Bootstrap,
		Dial: source.dial, UpstreamTLS: source.tls, DownstreamTLS: downstream,
		SNI:         proxy.SNI{Pattern: c.Proxy.SNI.Pattern, Port: c.Proxy.SNI.Port},
		ProxyHeader: proxyHeaders[c.Proxy.ProxyProtocol], SendProxyHeader: sentHeaders[c.Proxy.SendProxyProtocol],
		Limits:       proxyLimits(c.Proxy.Limits),
		FrameTimeout: c.Proxy.Limits.FrameTime,
		Brokers:      lister, RefreshEvery: c.Timing.Refresh,
		HeldBytes:       heldBytes(c),
		MaxRequestBytes: int(c.Proxy.Limits.RequestBytes), MaxConnections: c.Proxy.Limits.Connections,
		Grace:  proxyGrace(c.Grace),
		Logger: x.log.Named("proxy"), Registry: x.registry,
	}
	if c.Log.Access != "" {
		if x.access, err = openAccessFile(c.Log.Access); err != nil {
			return fmt.Errorf("log.access: %w", err)
		}
		options.Access = newAccessLogger(x.access)
	}
	if x.mirror != nil { // a nil *Forwarder would not be a nil Sink
		options.Sink = x.mirror
	}
	x.proxy, err = proxy.New(options)
	return err
}

var (
	proxyHeaders = map[string]proxy.ProxyHeader{
		"off": proxy.ProxyHeaderOff, "allowed": proxy.ProxyHeaderAllowed, "required": proxy.ProxyHeaderRequired,
	}
	sentHeaders = map[string]int{"off": 0, "v1": 1, "v2": 2}
)

func proxyLimits(c config.Limits) proxy.Limits {
	return proxy.Limits{PerIP: c.ConnectionsPerIP, FirstRequest: c.FirstRequest, Idle: c.Idle, Age: c.Age, Unread: c.Unread}
}

// mirrorGrace is the forwarder's part of the grace time, and proxyGrace what that leaves the proxy.
func mirrorGrace(grace time.Duration) time.Duration { return min(12*time.Second, grace/2) }

func proxyGrace(grace time.Duration) time.Duration { return grace - mirrorGrace(grace) }

// drainTimeout leaves room in the mirror's part for closing what is open, so that a mirror that hangs doesn't use up the grace time.
func drainTimeout(c config.Config) time.Duration {
	grace := c.Grace
	if c.HasRole(config.RoleProxy) {
		grace = mirrorGrace(grace)
	}
	return min(8*time.Second, grace*2/3)
}

// brokerPortBase is the setting, or the bootstrap listener's port + 1, so that restarts give each broker the same port. A listener
// on any free port lets the brokers have any free port too.
func brokerPortBase(c config.Proxy) (int, error) {
	_, port, err := net.SplitHostPort(c.Listen)
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(port)
	if c.BrokerPorts.Base != 0 || n == 0 {
		return c.BrokerPorts.Base, err
	}
	return n + 1, err
}

func (x *instance) buildAdmin() error {
	options := admin.Options{
		Listen: x.settings.Admin.Listen, Gatherer: x.registry, Ready: x.ready, Status: x.status, Logger: x.log.Named("admin"),
	}
	if x.mirror != nil {
		options.Look = x.mirror.Look
	}
	var err error
	x.admin, err = admin.New(options)
	return err
}

// discard closes the listeners of parts that never ran.
func (x *instance) discard() error {
	var failures []error
	if x.proxy != nil {
		failures = append(failures, x.proxy.Close())
	}
	if x.admin != nil {
		failures = append(failures, x.admin.Close())
	}
	return errors.Join(failures...)
}

// parts lists what runs, in the order in which it stops: the proxy answers what it forwarded, then the forwarder drains and commits
// the checkpoint, and the operator can watch both.
func (x *instance) parts() (parts []part) {
	if x.proxy != nil {
		parts = append(parts, part{"proxy", x.proxy.Run, true})
	}
	if x.mirror != nil {
		// Beside a proxy the mirror isn't vital: whatever happens to it, producers go on.
		parts = append(parts, part{"mirror", x.runMirror, x.proxy == nil})
	}
	if x.admin != nil {
		parts = append(parts, part{"admin", x.admin.Run, false})
	}
	return append(parts, part{"TLS files", x.files.run, false})
}

func (x *instance) runMirror(ctx context.Context) error {
	err := x.mirror.Run(ctx)
	if err != nil {
		why := err.Error()
		x.mirrorFailure.Store(&why)
		x.log.Error("the mirror ended; restart kmirror to go on", zap.Error(err))
	}
	return err
}

// selectTopics takes topic lists that changed.
func (x *instance) selectTopics(t config.Topics) error {
	if x.mirror == nil {
		return nil
	}
	include, exclude, err := t.Patterns()
	if err == nil {
		x.mirror.Select(include, exclude)
	}
	return err
}

// reopenAccess opens the access log anew, after it was moved away.
func (x *instance) reopenAccess() error {
	if x.access == nil {
		return nil
	}
	return x.access.reopen()
}

// ready says what clients would miss if they came now.
func (x *instance) ready() error {
	if x.proxy == nil || x.proxy.Ready() {
		return nil
	}
	for id, why := range x.proxy.Status().BindingFailed {
		return fmt.Errorf("no listener for broker %d: %s", id, why)
	}
	return errors.New("the source's brokers are not known yet")
}

func (x *instance) status() admin.Status {
	s := admin.Status{Name: x.settings.Name, Version: versionText(), Roles: x.settings.Roles}
	if x.proxy != nil {
		s.Proxy = x.proxy.Status()
	}
	if x.mirror != nil {
		s.Mirror = x.mirror.Status()
	}
	if why := x.mirrorFailure.Load(); why != nil {
		s.MirrorError = *why
	}
	return s
}
