package forwarder

import (
	"context"
	"net"
	"regexp"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/twmb/franz-go/pkg/sasl"
	"go.uber.org/zap"
)

// ClusterOptions says how kmirror's own clients reach a cluster.
type ClusterOptions struct {
	Seeds []string // host:port
	// Dial opens a connection to a broker, with TLS where it's spoken; nil: plain TCP.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	SASL []sasl.Mechanism
}

// Start says where a stream begins that never was.
type Start int8

// The start policies.
const (
	StartEarliest Start = iota
	StartLatest
	StartTimestamp
)

// Options configure a Forwarder; New checks none of them, config.Validate does.
type Options struct {
	Name   string // the instance's name: consumer group kmirror.<Name> on the source
	Source ClusterOptions
	Mirror ClusterOptions
	// Instance tells this process from others of the same name on the same host, across restarts: its listener, say. "" joins the group
	// as a dynamic member, whose partitions wait for the session timeout after a crash.
	Instance string

	// NoOffers says that no proxy is in this process: streams follow the source log from the start.
	NoOffers bool

	Include []*regexp.Regexp // whole topic names; a topic is mirrored if any matches and no Exclude does; Select changes both
	Exclude []*regexp.Regexp
	Rename  string // name on the mirror, {topic} stands for the source's; "": the same

	OnRecreate RecreatePolicy
	Expand     bool // mirror topics get the partitions that the source's have more
	// Repartition spreads each source partition over all partitions of the mirror topic, by key (murmur2, as Kafka's Java client), without one by offset.
	Repartition bool

	Offsets  OffsetPolicy
	FillTime time.Duration // that a stream may spend on fillers before it reaches the source log's end
	// FillPatience is how long a filler is tried without success; 0: 15 s.
	FillPatience time.Duration

	SyncedSettings []string      // topic settings to be kept in step on the mirror; none: nothing is changed there
	FixSettings    bool          // of mirror topics, where they alter or refuse data and one value mends it; else they are only named
	SettingsEvery  time.Duration // look at topic settings

	Start          Start
	StartTimestamp time.Time // with StartTimestamp

	StopOnDataLoss   bool // source deleted records before they were mirrored: stop the stream (true) or go on behind the loss
	StopOnDivergence bool // source truncated its log below what was mirrored: stop (true) or go on

	ReplicationFactor int16 // of topics that kmirror creates on the mirror; -1: the mirror's default

	MergeBytes      int64         // bound of the batches that waiting small ones are merged to; 0: never merge
	MemoryBytes     int64         // bound of record batches held in memory
	RefreshEvery    time.Duration // topics, partitions, leaders
	LookEvery       time.Duration // ListOffsets on live streams
	CheckpointEvery time.Duration
	SessionTimeout  time.Duration // of the consumer group
	TakeoverWait    time.Duration // EXACTLY-ONCE.md W3
	DrainTimeout    time.Duration // at shutdown, for what is in flight and the last checkpoint; 0: 8 s

	Logger   *zap.Logger
	Registry prometheus.Registerer
}

// RecreatePolicy says what becomes of a source topic that was deleted and made again.
type RecreatePolicy int8

// The policies.
const (
	RecreateAppend RecreatePolicy = iota // its records follow the old ones on the mirror
	RecreateStop                         // the topic stops until a person decides
	RecreateAnew                         // the mirror topic is deleted and made again
)

// State is where a stream stands in its life.
type State int8

// The states of a stream; DESIGN.md section 5.
const (
	StateRecover State = iota // resolving the position from the mirror
	StateCatchUp              // reading the source log
	StateLive                 // forwarding what the proxy offers
	StateTail                 // reading the source log's end as it grows: writers bypass the proxy
	StatePaused               // the mirror or the source can't be reached
	StateFailed               // a person must decide; see StreamStatus.Reason
)

var stateNames = [...]string{"recover", "catch-up", "live", "tail", "paused", "failed"}

func (s State) String() string { return stateNames[s] }

// StreamStatus describes one stream at one moment.
type StreamStatus struct {
	Topic        string `json:"topic"`
	Partition    int32  `json:"partition"`
	State        string `json:"state"`
	Reason       string `json:"reason,omitempty"`   // why paused or failed, or until when a takeover waits
	SourceEnd    int64  `json:"source_end_offset"`  // last known committed end on the source, -1: not known yet
	Next         int64  `json:"next_source_offset"` // all below is acknowledged by the mirror, -1: not known yet
	MirrorOffset int64  `json:"mirror_offset"`      // log end on the mirror behind the last acknowledged batch, -1: not known yet
	LagRecords   int64  `json:"lag_records"`        // SourceEnd - Next, never negative; -1: not known yet
	LostRecords  int64  `json:"lost_records"`       // deleted on the source before they were mirrored
	// LostRanges are the last of their source offsets, [from, to).
	LostRanges [][2]int64 `json:"lost_ranges,omitempty"`
	// MirrorPartition is where these records go, of a partition that is spread over several: then each has its own StreamStatus.
	MirrorPartition *int32 `json:"mirror_partition,omitempty"`
	// MirrorTopic is the topic's name on the mirror where it has another one there.
	MirrorTopic string `json:"mirror_topic,omitempty"`
}

func (s *StreamStatus) mirrorPartition() int32 {
	if s.MirrorPartition == nil {
		return s.Partition
	}
	return *s.MirrorPartition
}

// TopicStatus names what is wrong with a topic on the mirror.
type TopicStatus struct {
	Topic   string   `json:"topic"`
	Hazards []string `json:"hazards"` // settings of the mirror topic that alter or refuse what is mirrored
}

// Status describes the forwarder at one moment, as /api/status and kmirror status show it.
type Status struct {
	Name     string         `json:"name"`
	Group    string         `json:"group"`
	Member   bool           `json:"member"` // the group membership is confirmed
	SourceID string         `json:"source_cluster_id"`
	MirrorID string         `json:"mirror_cluster_id"`
	CaughtUp bool           `json:"caught_up"`        // every topic known, every own stream, its place on the mirror read, at lag 0 as of a look at the source after the question
	Topics   []TopicStatus  `json:"topics,omitempty"` // with something wrong
	Streams  []StreamStatus `json:"streams"`          // the partitions that this instance owns, by topic and partition
}
