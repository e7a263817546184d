package matrix

import (
	"path/filepath"
	"testing"

	"kmirror/internal/kafkatest"
	"kmirror/test/clients"
)

// TestMatrix (guarantee G2): no client can tell kmirror from its cluster. Each subtest is a client.
func TestMatrix(t *testing.T) {
	c := startCluster(t)
	program := kafkatest.CompileJava(t, filepath.Join(kafkatest.Root(t), "test", "matrix", "java"))
	t.Run("java", parallel(func(t *testing.T) { c.java(t, program) }))
	t.Run("tools", parallel(func(t *testing.T) { c.tools(t, program) }))
	t.Run("kcat", parallel(c.kcat))
	t.Run("franz-go", parallel(c.franz))
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
