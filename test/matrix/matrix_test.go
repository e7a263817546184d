package matrix

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/internal/kafkatest"
	"kmirror/test/clients"
	"kmirror/test/testbed"
)

// TestMatrix (guarantee G2): no client can tell kmirror from its cluster. Each subtest is a client.
func TestMatrix(t *testing.T) {
	c := startCluster(t)
	program := kafkatest.CompileJava(t, filepath.Join(kafkatest.Root(t), "test", "matrix", "java"))
	t.Run("java", parallel(func(t *testing.T) { c.java(t, program) }))
	for version, old := range kafkatest.OldKafkas {
		t.Run("java "+version, parallel(func(t *testing.T) { c.oldJava(t, version, old) }))
	}
	t.Run("tools", parallel(func(t *testing.T) { c.tools(t, program) }))
	for _, client := range clients.Kcats() {
		t.Run(client.Name, parallel(func(t *testing.T) { c.kcat(t, client) }))
	}
	t.Run("franz-go", parallel(c.franz))
	t.Run("new leaders", parallel(c.newLeaders))
	c.leaderChange(t, program)
	for _, client := range clients.Scripted() {
		t.Run(client.Name, parallel(func(t *testing.T) {
			agree(t, c.ways(client.Name), 30, func(w way) string { return run(t, client.Transcript(t, w.seeds[0], w.name)) })
		}))
	}
}

// parallel lets a test run beside others of its kind: their topics and groups have other names.
func parallel(test func(t *testing.T)) func(t *testing.T) {
	return func(t *testing.T) {
		t.Parallel()
		test(t)
	}
}

// java runs Kafka's own clients, logged in: producers, consumers of both protocols, share consumers, and every call that Admin has.
func (c cluster) java(t *testing.T, program kafkatest.JavaProgram) {
	agree(t, ways(loggedIn{c.source}, c.sasl, "java"), 500, func(w way) string {
		return run(t, program.Command(t, "Transcript", w.seeds[0], w.name, "security.protocol=SASL_PLAINTEXT", "sasl.mechanism=PLAIN",
			`sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required username="`+superuser+`" password="`+password+`";`))
	})
}

// oldJava runs old Java clients: what brokers of today refuse them directly, they refuse them through the proxy, with the same error (KIP-896).
func (c cluster) oldJava(t *testing.T, version string, old kafkatest.OldKafka) {
	program := old.CompileJava(t, filepath.Join(kafkatest.Root(t), "test", "matrix", "old"))
	agree(t, c.ways("java "+version), 13, func(w way) string {
		topic := w.name + "topic"
		kafkatest.CreateTopic(t, c.source, topic, 3, 3, "retention.ms", "-1") // the records are of 1970
		for p := range int32(3) {
			r := &kgo.Record{Partition: p, Value: []byte("before"), Timestamp: time.UnixMilli(999)}
			if err := testbed.NewWriter(t, c.source.Seeds(), topic, kgo.RecordPartitioner(kgo.ManualPartitioner())).ProduceSync(t.Context(), r).FirstErr(); err != nil {
				t.Fatal(err)
			}
		}
		transcript := run(t, program.Command(t, "OldClient", w.seeds[0], topic))
		if version != "0.10.2" { // whose Produce is refused
			kafkatest.Eventually(t, time.Minute, func() error { // acks=0
				for p, offsets := range kafkatest.LogOffsets(t, c.source, topic) {
					if offsets.End != 1+5*4 {
						return fmt.Errorf("partition %d ends at %d, want 21", p, offsets.End)
					}
				}
				return nil
			})
		}
		return transcript
	})
}
