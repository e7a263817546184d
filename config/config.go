package config

import (
	"slices"
	"time"
)

// The roles of an instance.
const (
	RoleProxy  = "proxy"  // clients connect to it
	RoleMirror = "mirror" // it copies to the mirror cluster
)

// Config is every setting. The koanf tag is the key in the file, help its line in the list of flags.
type Config struct {
	Name         string        `koanf:"name" help:"name of this mirror; its consumer group on the source is kmirror.<name>"`
	Roles        []string      `koanf:"roles" help:"what this instance does: proxy, mirror or both"`
	Source       Cluster       `koanf:"source"`
	Mirror       Cluster       `koanf:"mirror"`
	Proxy        Proxy         `koanf:"proxy"`
	Topics       Topics        `koanf:"topics"`
	MirrorMemory Size          `koanf:"mirror_memory" help:"bound of the record batches held in memory"`
	Timing       Timing        `koanf:"timing"`
	Grace        time.Duration `koanf:"grace" help:"time that requests in flight and the mirror get after SIGTERM"`
	Admin        Admin         `koanf:"admin"`
	Log          Log           `koanf:"log"`
}

// Cluster says how kmirror's own clients reach a Kafka cluster. Clients of the proxy bring their own SASL.
type Cluster struct {
	Bootstrap Servers   `koanf:"bootstrap" help:"bootstrap servers, host:port"`
	ProxyURL  Secret    `koanf:"proxy_url" help:"reach the brokers through socks5://[user:password@]host:port or http://[user:password@]host:port (CONNECT)"`
	TLS       ClientTLS `koanf:"tls"`
	SASL      SASL      `koanf:"sasl"`
}

// ClientTLS is TLS towards a cluster. Certificates are read again when the files change.
type ClientTLS struct {
	Enabled            bool   `koanf:"enabled" help:"speak TLS"`
	CAFile             string `koanf:"ca_file" help:"PEM file of the authorities to trust; default: the system's"`
	CertFile           string `koanf:"cert_file" help:"PEM file of the client certificate"`
	KeyFile            string `koanf:"key_file" help:"PEM file of the client certificate's key"`
	ServerName         string `koanf:"server_name" help:"name that the certificate must carry; default: the host dialled"`
	InsecureSkipVerify bool   `koanf:"insecure_skip_verify" help:"accept any certificate (for tests only)"`
}

// SASL is how kmirror itself logs in to a cluster. Files are read again at each login.
type SASL struct {
	Mechanism    string `koanf:"mechanism" help:"PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER; default: none"`
	Username     string `koanf:"username" help:"user of PLAIN and SCRAM"`
	Password     Secret `koanf:"password" help:"password of PLAIN and SCRAM"`
	PasswordFile string `koanf:"password_file" help:"file that holds the password"`
	Token        Secret `koanf:"token" help:"token of OAUTHBEARER"`
	TokenFile    string `koanf:"token_file" help:"file that holds the token"`
}

// Proxy is what producers and consumers connect to.
type Proxy struct {
	Listen      string      `koanf:"listen" help:"address of the bootstrap listener, host:port"`
	Advertise   string      `koanf:"advertise" help:"host that clients are told; default: the listener's, or on all addresses the one that the client came to"`
	BrokerPorts BrokerPorts `koanf:"broker_ports"`
	SNI         SNI         `koanf:"sni"`
	TLS         ServerTLS   `koanf:"tls"`
	// The PROXY protocol of load balancers, versions 1 and 2.
	ProxyProtocol     string `koanf:"proxy_protocol" help:"PROXY protocol header at the begin of client connections: off, allowed or required"`
	SendProxyProtocol string `koanf:"send_proxy_protocol" help:"begin connections to the source with a PROXY protocol header that names the client: off, v1 or v2"`
	Limits            Limits `koanf:"limits"`
}

// SNI lets all brokers share one port: the TLS server name chooses the broker.
type SNI struct {
	Pattern string `koanf:"pattern" help:"host name of broker n, as in broker-{id}.kafka.example.com; then no broker has a port of its own"`
	Port    int    `koanf:"port" help:"port that clients are told; 0: the bootstrap listener's"`
}

// BrokerPorts gives every source broker a port of its own on the proxy.
type BrokerPorts struct {
	Base int    `koanf:"base" help:"broker n listens on base + n; 0: the bootstrap listener's port + 1"`
	IDs  string `koanf:"ids" help:"brokers whose ports are opened at start, before the source named them, as in 0-5,1001; default: none"`
}

// ServerTLS is TLS towards the clients of the proxy. Certificates are read again when the files change.
type ServerTLS struct {
	CertFile     string `koanf:"cert_file" help:"PEM file of the proxy's certificate; turns TLS on"`
	KeyFile      string `koanf:"key_file" help:"PEM file of its key"`
	ClientCAFile string `koanf:"client_ca_file" help:"PEM file of the authorities that client certificates must come from"`
}

// Limits bound what clients can make the proxy hold.
type Limits struct {
	Connections  int  `koanf:"connections" help:"client connections at a time"`
	RequestBytes Size `koanf:"request_bytes" help:"largest request; as socket.request.max.bytes of the brokers"`

	ConnectionsPerIP int           `koanf:"connections_per_ip" help:"client connections of one address at a time; 0: no bound of its own"`
	FrameTime        time.Duration `koanf:"frame_time" help:"wait for the next byte of a request that has begun, or of a TLS handshake"`
	FirstRequest     time.Duration `koanf:"first_request" help:"time from the connection to its first request; 0: no bound"`
	Idle             time.Duration `koanf:"idle" help:"time without a request, with none unanswered, after which a connection is ended; 0: no bound, the broker's holds"`
	Age              time.Duration `koanf:"age" help:"time after which a connection is ended between two requests, up to a tenth earlier, so that clients spread anew; 0: no bound"`
	Unread           time.Duration `koanf:"unread" help:"time that a client may take nothing of its answers; 0: no bound"`
}

// Topics says what is mirrored and how.
type Topics struct {
	Include           []string `koanf:"include" help:"topics to mirror: names, or /regular expressions/ of whole names"`
	Exclude           []string `koanf:"exclude" help:"topics left out, named in the same way"`
	Start             string   `koanf:"start" help:"where a new topic's copy begins: earliest, latest or a time (RFC 3339)"`
	Rename            string   `koanf:"rename" help:"name on the mirror, as in dr.{topic}; default: the source's"`
	Partitions        string   `koanf:"partitions" help:"partition p goes to partition p; expand: the mirror topic is given partitions that it lacks; preserve: it isn't; repartition: each source partition is spread over all of the mirror's, by key, without one by offset"`
	Offsets           string   `koanf:"offsets" help:"where transactions leave holes in the source's offsets; auto: markers become empty transactions on the mirror, so that offsets stay equal; identical: aborted records too; mapped: offsets shift"`
	OnRecreate        string   `koanf:"on_recreate" help:"a source topic was deleted and made again: append its records to the old ones, stop, or recreate the mirror's"`
	OnDataLoss        string   `koanf:"on_data_loss" help:"the source deleted records before they were mirrored: continue or stop"`
	OnDivergence      string   `koanf:"on_divergence" help:"the source lost records that are on the mirror: stop or continue"`
	ReplicationFactor int      `koanf:"replication_factor" help:"of topics that kmirror creates; -1: the mirror's default"`
	Settings          []string `koanf:"settings" help:"topic settings that mirror topics take from the source's and that are kept in step, unless they are changed on the mirror; empty: none"`
	FixSettings       bool     `koanf:"fix_settings" help:"set back what alters or refuses data on mirror topics that others made (compression, timestamps, batch size); else it is only said"`
}

// Timing holds the intervals.
type Timing struct {
	Refresh        time.Duration `koanf:"refresh" help:"how often topics, partitions and leaders are asked for"`
	Settings       time.Duration `koanf:"settings" help:"how often topic settings are compared"`
	Look           time.Duration `koanf:"look" help:"how often the source is asked for log ends that no producer's answer told"`
	Checkpoint     time.Duration `koanf:"checkpoint" help:"how often positions are committed on the source"`
	SessionTimeout time.Duration `koanf:"session_timeout" help:"after it a silent instance's partitions go to another one"`
	Fill           time.Duration `koanf:"fill" help:"how long a partition may be held up by empty transactions, one takes about 8 ms, before it reaches the source's end; past it, its offsets shift"`
	TakeoverWait   time.Duration `koanf:"takeover_wait" help:"wait before old data of a lost instance goes on: the mirror's connections.max.idle.ms + 1 minute"`
}

// Admin is the operator's HTTP listener.
type Admin struct {
	Listen string `koanf:"listen" help:"address of /metrics, /healthz, /readyz, /api/status and the status page; empty: none"`
}

// Log says how kmirror logs.
type Log struct {
	Level  string `koanf:"level" help:"debug, info, warn or error"`
	Format string `koanf:"format" help:"text or json"`
	Access string `koanf:"access" help:"JSON lines of what clients do (connect, log in, topics produced to, close with the reason, also of those refused): a file, which is opened anew on SIGHUP, or stdout; empty: none"`
}

// Default returns the settings that hold where nothing else is said.
func Default() Config {
	return Config{
		Name:  "default",
		Roles: []string{RoleProxy, RoleMirror},
		Proxy: Proxy{
			ProxyProtocol: "off", SendProxyProtocol: "off",
			Limits: Limits{
				Connections: 10_000, RequestBytes: 100 << 20, FrameTime: 30 * time.Second, FirstRequest: time.Minute, Unread: 10 * time.Minute,
			},
		},
		Topics: Topics{
			Include: []string{"/.*/"}, Start: "earliest", Partitions: "expand", Offsets: "auto",
			Settings: []string{
				"cleanup.policy", "retention.ms", "retention.bytes", "delete.retention.ms", "min.compaction.lag.ms", "max.compaction.lag.ms",
				"message.timestamp.before.max.ms", "message.timestamp.after.max.ms",
			},
			OnRecreate: "append", OnDataLoss: "continue", OnDivergence: "stop", ReplicationFactor: -1,
		},
		MirrorMemory: 256 << 20,
		Timing: Timing{
			Refresh: 5 * time.Second, Settings: 30 * time.Second, Look: time.Second, Checkpoint: time.Second,
			SessionTimeout: 10 * time.Second, TakeoverWait: 11 * time.Minute, Fill: time.Minute,
		},
		Grace: 30 * time.Second,
		Admin: Admin{Listen: "127.0.0.1:9180"},
		Log:   Log{Level: "info", Format: "text"},
	}
}

// HasRole tells whether the instance plays role.
func (c Config) HasRole(role string) bool { return slices.Contains(c.Roles, role) }
