package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestMirrorMakerFilesAndFlags(t *testing.T) {
	consumer := write(t, "consumer.properties", `
# the source
bootstrap.servers=a:9092, b:9092
group.id: mm-orders
zookeeper.connect=z:2181
security.protocol = SASL_SSL
sasl.mechanism=PLAIN
sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \
  username="u" password="p=:;x";
session.timeout.ms=30000
some.thing=else
`)
	producer := write(t, "producer.properties", "bootstrap.servers=c:9092\nacks=all\ncompression.type=gzip\n")
	c, warnings, err := load(t, "", nil, "--consumer.config", consumer, "--producer.config", producer, "--whitelist", "orders,audit.*",
		"--num.streams", "4", "--new.consumer", "--offset.commit.interval.ms=5000")
	if err != nil {
		t.Fatal(err)
	}
	if c.Name != "mm-orders" || c.HasRole(RoleProxy) || !c.HasRole(RoleMirror) || c.Topics.Start != "latest" || len(c.Source.Bootstrap) != 2 {
		t.Errorf("settings = %+v", c)
	}
	if c.Source.SASL.Username != "u" || c.Source.SASL.Password != "p=:;x" || !c.Source.TLS.Enabled || c.Mirror.TLS.Enabled {
		t.Errorf("source = %+v, password %q", c.Source, string(c.Source.SASL.Password))
	}
	if c.Timing.SessionTimeout != 30*time.Second || c.Timing.Checkpoint != 5*time.Second || c.Topics.Include[0] != "/orders|audit.*/" {
		t.Errorf("settings = %+v", c)
	}
	all := strings.Join(warnings, "\n")
	for _, name := range []string{"group.id", "zookeeper.connect", "some.thing", "acks", "compression.type", "--num.streams", "--new.consumer", "--listen"} {
		if !strings.Contains(all, name) {
			t.Errorf("no warning names %s:\n%s", name, all)
		}
	}
	if strings.Contains(all, "p=:;x") {
		t.Error("a warning shows the password")
	}
}

func TestMirrorMakerWithAListenerKeepsTheProxy(t *testing.T) {
	consumer := write(t, "consumer.properties", "bootstrap.servers=a:9092\nauto.offset.reset=smallest\n")
	producer := write(t, "producer.properties", "bootstrap.servers=c:9092\n")
	c, warnings, err := load(t, "", nil, "--consumer.config", consumer, "--producer.config", producer, "--listen=127.0.0.1:9092")
	if err != nil || len(warnings) != 0 {
		t.Fatal(err, warnings)
	}
	if !c.HasRole(RoleProxy) || c.Topics.Start != "earliest" {
		t.Errorf("settings = %+v", c)
	}
}

func TestJavaKeyStoresAreRefused(t *testing.T) {
	consumer := write(t, "consumer.properties", "bootstrap.servers=a:9092\nsecurity.protocol=SSL\nssl.truststore.location=/x/trust.jks\n")
	producer := write(t, "producer.properties", "bootstrap.servers=c:9092\n")
	_, _, err := load(t, "", nil, "--consumer.config", consumer, "--producer.config", producer)
	if err == nil || !strings.Contains(err.Error(), "ssl.truststore.location: want a PEM file") {
		t.Errorf("Load = %v, want the trust store to be named", err)
	}
}
