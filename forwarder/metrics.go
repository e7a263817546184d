package forwarder

import "github.com/prometheus/client_golang/prometheus"

// Metrics is the table of the package's metrics: name and help text. docs/operations.md lists them all.
var Metrics = map[string]string{
	"kmirror_forwarder_mirrored_records_total":  "Records that the mirror acknowledged.",
	"kmirror_forwarder_mirrored_batches_total":  "Record batches that the mirror acknowledged.",
	"kmirror_forwarder_mirrored_bytes_total":    "Bytes of record batches that the mirror acknowledged.",
	"kmirror_forwarder_produce_requests_total":  "Produce requests sent to the mirror.",
	"kmirror_forwarder_produced_bytes_total":    "Bytes of record batches sent to the mirror, acknowledged or not.",
	"kmirror_forwarder_fetches_total":           "Fetch requests sent to the source.",
	"kmirror_forwarder_fetched_bytes_total":     "Bytes of Fetch answers from the source.",
	"kmirror_forwarder_gaps_total":              "Holes in what the proxy offered that were read from the source.",
	"kmirror_forwarder_offers_refused_total":    "Offered batches not kept, for want of memory; they are read from the source.",
	"kmirror_forwarder_doubts_total":            "Times that offers were held until the source was asked again (rule T1).",
	"kmirror_forwarder_recoded_batches_total":   "Batches that had to be re-encoded.",
	"kmirror_forwarder_merged_batches_total":    "Source batches that went to the mirror merged with their neighbours.",
	"kmirror_forwarder_fillers_total":           "Empty transactions written to the mirror so that offsets stay equal behind the source's transaction markers.",
	"kmirror_forwarder_refusals_total":          "Batches that the mirror answered with an error.",
	"kmirror_forwarder_session_ends_total":      "Sessions that ended: a connection, a leader or an answer.",
	"kmirror_forwarder_dial_errors_total":       "Connections to mirror brokers that failed.",
	"kmirror_forwarder_lost_records_total":      "Records that the source deleted before they were mirrored.",
	"kmirror_forwarder_foreign_records_total":   "Offsets on the mirror that others took between ours.",
	"kmirror_forwarder_checkpoint_errors_total": "Checkpoint commits that failed; they are tried again.",
	"kmirror_forwarder_lag_records":             "Committed records on the source that the mirror hasn't acknowledged.",
	"kmirror_forwarder_source_end_offset":       "Committed end of the source partition as last seen.",
	"kmirror_forwarder_next_source_offset":      "Source offset below which all is on the mirror.",
	"kmirror_forwarder_partitions":              "Streams of this instance by state.",
	"kmirror_forwarder_topic_hazards":           "Settings of mirror topics that alter or refuse what is mirrored; status names them.",
	"kmirror_forwarder_memory_bytes":            "Bytes of record batches held in memory.",
	"kmirror_forwarder_memory_limit_bytes":      "Bound of the record batches held in memory.",
	"kmirror_forwarder_group_member":            "1 while the membership of the consumer group is confirmed.",
}

// metrics are the counters; what has a value at any time is collected from a snapshot.
type metrics struct {
	mirroredRecords, mirroredBatches, mirroredBytes prometheus.Counter
	produceRequests, producedBytes                  prometheus.Counter
	fetches, fetchedBytes                           prometheus.Counter
	gaps, offersRefused, doubts, recoded, merged    prometheus.Counter
	fillers, refusals, sessionEnds, dialErrors      prometheus.Counter
	lostRecords, foreignRecords, checkpointErrors   prometheus.Counter
}

func newMetrics(registry prometheus.Registerer) *metrics {
	counter := func(name string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help(name)})
		if registry != nil {
			registry.MustRegister(c)
		}
		return c
	}
	return &metrics{
		mirroredRecords: counter("kmirror_forwarder_mirrored_records_total"),
		mirroredBatches: counter("kmirror_forwarder_mirrored_batches_total"),
		mirroredBytes:   counter("kmirror_forwarder_mirrored_bytes_total"),
		produceRequests: counter("kmirror_forwarder_produce_requests_total"),
		producedBytes:   counter("kmirror_forwarder_produced_bytes_total"),
		fetches:         counter("kmirror_forwarder_fetches_total"),
		fetchedBytes:    counter("kmirror_forwarder_fetched_bytes_total"),
		gaps:            counter("kmirror_forwarder_gaps_total"),
		offersRefused:   counter("kmirror_forwarder_offers_refused_total"),
		doubts:          counter("kmirror_forwarder_doubts_total"),
		recoded:         counter("kmirror_forwarder_recoded_batches_total"),
		merged:          counter("kmirror_forwarder_merged_batches_total"),
		fillers:         counter("kmirror_forwarder_fillers_total"),
		refusals:        counter("kmirror_forwarder_refusals_total"),
		sessionEnds:     counter("kmirror_forwarder_session_ends_total"),
		dialErrors:      counter("kmirror_forwarder_dial_errors_total"),
		lostRecords:     counter("kmirror_forwarder_lost_records_total"),
		foreignRecords:  counter("kmirror_forwarder_foreign_records_total"),

		checkpointErrors: counter("kmirror_forwarder_checkpoint_errors_total"),
	}
}

func help(name string) string {
	text, ok := Metrics[name]
	if !ok {
		panic("forwarder: metric " + name + " isn't in the table")
	}
	return text
}

// collector shows the streams as they are when asked; series of a stream that is gone vanish.
type collector struct {
	f    *Forwarder
	desc map[string]*prometheus.Desc
}

func newCollector(f *Forwarder) *collector {
	c := &collector{f: f, desc: map[string]*prometheus.Desc{}}
	for name, labels := range map[string][]string{
		"kmirror_forwarder_lag_records":        {"topic", "partition"},
		"kmirror_forwarder_source_end_offset":  {"topic", "partition"},
		"kmirror_forwarder_next_source_offset": {"topic", "partition"},
		"kmirror_forwarder_partitions":         {"state"},
		"kmirror_forwarder_topic_hazards":      {"topic"},
		"kmirror_forwarder_memory_bytes":       nil,
		"kmirror_forwarder_memory_limit_bytes": nil,
		"kmirror_forwarder_group_member":       nil,
	} {
		c.desc[name] = prometheus.NewDesc(name, help(name), labels, nil)
	}
	return c
}

func (c *collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range c.desc {
		out <- d
	}
}

func (c *collector) Collect(out chan<- prometheus.Metric) {
	gauge := func(name string, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(c.desc[name], prometheus.GaugeValue, value, labels...)
	}
	status := c.f.Status()
	states := make(map[string]int, len(stateNames))
	partitions := map[topicPartition]*StreamStatus{}
	for i := range status.Streams {
		s := &status.Streams[i]
		states[s.State]++
		tp := topicPartition{s.Topic, s.Partition}
		if before := partitions[tp]; before == nil || s.Next < before.Next { // of several shares the one that is behind
			partitions[tp] = s
		}
	}
	for tp, s := range partitions {
		partition := partitionLabel(tp.partition)
		for name, value := range map[string]int64{
			"kmirror_forwarder_lag_records": s.LagRecords, "kmirror_forwarder_source_end_offset": s.SourceEnd,
			"kmirror_forwarder_next_source_offset": s.Next,
		} {
			if value >= 0 {
				gauge(name, float64(value), s.Topic, partition)
			}
		}
	}
	for _, topic := range status.Topics {
		gauge("kmirror_forwarder_topic_hazards", float64(len(topic.Hazards)), topic.Topic)
	}
	for _, state := range stateNames {
		gauge("kmirror_forwarder_partitions", float64(states[state]), state)
	}
	gauge("kmirror_forwarder_memory_bytes", float64(c.f.memory.used.Load()))
	gauge("kmirror_forwarder_memory_limit_bytes", float64(c.f.memory.limit))
	member := 0.0
	if status.Member {
		member = 1
	}
	gauge("kmirror_forwarder_group_member", member)
}
