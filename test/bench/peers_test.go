package bench

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"kmirror/internal/kafkatest"
)

const (
	nameKmirror = "kmirror"
	brokerIDs   = 2 // broker IDs that a kmirror can have ports for: 0 and 1
)

// copier starts one way of mirroring topics from source to mirror; both are seed addresses. The process runs until it is stopped.
type copier struct {
	name  string
	start func(t testing.TB, w *world, topic string) *process
}

func copiers(t *testing.T) []copier {
	t.Helper()
	return wanted(t, []copier{
		{"naive, 1 connection", naiveCopier(1)},
		{"naive, 2 connections", naiveCopier(2)},
		{nameKmirror, func(t testing.TB, w *world, topic string) *process { return startKmirror(t, w, topic).process }},
		{"MirrorMaker 2", startMirrorMaker},
	}, func(c copier) string { return c.name })
}

func naiveCopier(connections int) func(testing.TB, *world, string) *process {
	return func(t testing.TB, w *world, topic string) *process {
		t.Helper()
		kafkatest.CreateTopic(t, w.mirror, topic, partitions, 1)
		return start(t, "naive", w.naive, "-source", w.source.Seeds()[0], "-mirror", w.mirror.Seeds()[0], "-topics", topic,
			"-connections", fmt.Sprint(connections))
	}
}

// kmirror is a running kmirror.
type kmirror struct {
	*process
	mirrorOf string // its settings' name
	proxy    string // bootstrap address
	admin    string // host:port
}

// startKmirror runs the built binary with a name of its own, so that it remembers nothing of an earlier run. extra flags come last.
func startKmirror(t testing.TB, w *world, topics string, extra ...string) *kmirror {
	t.Helper()
	w.runs++
	port := kafkatest.PortBlock(t, 2+brokerIDs)
	k := &kmirror{mirrorOf: fmt.Sprintf("bench-%d-%d", os.Getpid(), w.runs), proxy: loopback(port), admin: loopback(port + 1)}
	args := []string{"proxy", "--name", k.mirrorOf, "--source", w.source.Seeds()[0],
		"--mirror", w.mirror.Seeds()[0],
		"--listen", k.proxy, "--broker-port-base", fmt.Sprint(port + 2), "--topics", topics, "--admin", k.admin}
	k.process = start(t, "kmirror", w.kmirror, append(args, extra...)...)
	return k
}

// awaitReady returns once clients may connect.
func (k *kmirror) awaitReady(t testing.TB) {
	t.Helper()
	kafkatest.Eventually(t, readyTimeout, func() error {
		k.running(t)
		resp, err := http.Get("http://" + k.admin + "/readyz")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("kmirror isn't ready: %s", resp.Status)
		}
		return nil
	})
}

// awaitStreams returns once kmirror has caught up with at least n streams.
func (k *kmirror) awaitStreams(t testing.TB, n int) {
	t.Helper()
	kafkatest.Eventually(t, copyTimeout, func() error {
		k.running(t)
		s, err := k.status()
		if err == nil && (!s.CaughtUp || len(s.Streams) < n) {
			err = fmt.Errorf("caught up: %t, %d of %d streams: %w", s.CaughtUp, len(s.Streams), n, errNotYet)
		}
		return err
	})
}

// mirrorStatus is what the benchmark needs of /api/status.
type mirrorStatus struct {
	CaughtUp bool       `json:"caught_up"`
	Streams  []struct{} `json:"streams"`
}

// status asks kmirror how its mirror stands now.
func (k *kmirror) status() (mirrorStatus, error) {
	var s struct {
		Mirror mirrorStatus `json:"mirror"`
	}
	resp, err := http.Get("http://" + k.admin + "/api/status?fresh=1")
	if err != nil {
		return s.Mirror, err
	}
	defer resp.Body.Close()
	err = json.NewDecoder(resp.Body).Decode(&s)
	return s.Mirror, err
}

// mirrorMakerProperties are those that made MirrorMaker 2 fastest on one machine with a broker a cluster; %s: source, mirror, topic.
const mirrorMakerProperties = `
clusters = s, d
s.bootstrap.servers = %s
d.bootstrap.servers = %s
s->d.enabled = true
s->d.topics = %s
d->s.enabled = false
replication.policy.class = org.apache.kafka.connect.mirror.IdentityReplicationPolicy
tasks.max = 4
emit.heartbeats.enabled = false
s->d.emit.heartbeats.enabled = false
d->s.emit.heartbeats.enabled = false
emit.checkpoints.enabled = false
sync.topic.acls.enabled = false
refresh.topics.interval.seconds = 5
replication.factor = 1
offset-syncs.topic.replication.factor = 1
heartbeats.topic.replication.factor = 1
checkpoints.topic.replication.factor = 1
config.storage.replication.factor = 1
offset.storage.replication.factor = 1
status.storage.replication.factor = 1
s.consumer.fetch.max.wait.ms = 50
s.consumer.max.poll.records = 2000
d.producer.batch.size = 131072
d.producer.linger.ms = 0
d.offset.flush.interval.ms = 1000
`

func startMirrorMaker(t testing.TB, w *world, topic string) *process {
	t.Helper()
	file := filepath.Join(t.TempDir(), "mm2.properties")
	if err := os.WriteFile(file, fmt.Appendf(nil, mirrorMakerProperties, w.source.Seeds()[0], w.mirror.Seeds()[0], topic), 0o644); err != nil {
		t.Fatal(err)
	}
	return start(t, "mirrormaker", "java", "-Xmx1g", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
		"-cp", filepath.Join(w.jars, "*"), "org.apache.kafka.connect.mirror.MirrorMaker", file)
}

// fetchJars lets Maven copy the Java peers below the git-ignored cache folder and returns where they are.
func fetchJars(t testing.TB) string {
	t.Helper()
	for _, tool := range []string{"java", "mvn"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Fatalf("the benchmark needs %s for MirrorMaker 2 and ProducerPerformance: %v", tool, err)
		}
	}
	jars, err := filepath.Abs("../../.cache/bench-jars")
	if err != nil {
		t.Fatal(err)
	}
	if found, err := filepath.Glob(filepath.Join(jars, "connect-mirror-*.jar")); err == nil && len(found) > 0 {
		return jars
	}
	out, err := exec.Command("mvn", "-q", "-B", "-f", "mirrormaker/pom.xml", "dependency:copy-dependencies",
		"-DincludeScope=runtime", "-DoutputDirectory="+jars).CombinedOutput()
	if err != nil {
		t.Fatalf("fetch the jars of MirrorMaker 2: %v\n%s", err, strings.TrimSpace(string(out)))
	}
	return jars
}
