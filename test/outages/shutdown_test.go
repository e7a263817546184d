package outages

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

// TestShutdownUnderLoad: SIGTERM in the middle of a load loses nothing, commits the checkpoint and exits 0; a new instance on the same
// ports goes on, and producers see no error at all.
func TestShutdownUnderLoad(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	const partitions = 4
	kafkatest.CreateTopic(t, source, topic, partitions, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	testbed.WaitLive(t, in, topic, partitions)
	l := testbed.StartLoad(t, in.Seeds(), topic, 4, 2000, 200)
	for range 3 {
		l.WaitAcked(2000)
		if code := in.Stop(); code != 0 {
			t.Errorf("exit code after SIGTERM = %d, want 0", code)
		}
		wantCommitted(t, source, mirror, in, topic)
		in.Start()
	}
	l.WaitAcked(2000)
	l.Stop()
	kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
}

// TestRestartsUnderEightProducers: SIGTERM and kill -9 by turns while eight idempotent producers write. Every record is acknowledged, is on the source
// once and on the mirror once, and each producer's records keep their order.
func TestRestartsUnderEightProducers(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	const partitions = 6
	kafkatest.CreateTopic(t, source, topic, partitions, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	testbed.WaitLive(t, in, topic, partitions)
	l := testbed.StartLedger(t, topic, testbed.LedgerOptions{Writers: 8, PerSecond: 8 * 2000, Size: 100, From: time.Now()}, in.Seeds())
	for i := range 4 {
		l.WaitAcks(8000)
		if i%2 == 0 {
			if code := in.Stop(); code != 0 {
				t.Errorf("exit code after SIGTERM = %d, want 0", code)
			}
		} else {
			in.Kill()
		}
		in.Start()
	}
	l.WaitAcks(8000)
	l.Stop()
	if written, acked := l.Written.Load(), l.Acks.Load(); written != acked {
		t.Errorf("of %d records %d were acknowledged", written, acked)
	}
	in.WaitSettled(time.Now())
	l.Check(source, mirror, kafkatest.SameOffsets())
	l.WantOrder(source)
}

// wantCommitted fails unless the checkpoint on the source says exactly what the mirror holds; kmirror isn't running.
func wantCommitted(t testing.TB, source, mirror kafkatest.Cluster, in *testbed.Instance, topic string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	committed, err := kadm.NewClient(source.Client(t)).FetchOffsets(ctx, in.Group())
	if err != nil {
		t.Fatal(err)
	}
	for p, offsets := range kafkatest.LogOffsets(t, mirror, topic) {
		if got := committed[topic][int32(p)].At; got != offsets.End {
			t.Errorf("partition %d: committed offset %d, but the mirror ends at %d", p, got, offsets.End)
		}
	}
}

// longFetch sends a Fetch at a log's end, which the broker holds for wait, over a connection of its own.
func longFetch(t testing.TB, addr, topic string, wait time.Duration) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	req := kmsg.NewPtrFetchRequest()
	req.Version = 11 // the last that names topics and isn't flexible
	req.ReplicaID, req.MinBytes, req.MaxBytes, req.MaxWaitMillis, req.SessionEpoch = -1, 1, 1<<20, int32(wait.Milliseconds()), -1
	of := kmsg.NewFetchRequestTopic()
	of.Topic = topic
	p := kmsg.NewFetchRequestTopicPartition()
	p.CurrentLeaderEpoch, p.PartitionMaxBytes = -1, 1<<20
	of.Partitions = append(of.Partitions, p)
	req.Topics = append(req.Topics, of)
	if _, err := conn.Write(kmsg.NewRequestFormatter().AppendRequest(nil, req, 77)); err != nil {
		t.Fatal(err)
	}
	return conn
}

// TestShutdownAnswersWhatWasForwarded: a request that the broker still works on at SIGTERM gets its answer, and then kmirror exits 0.
func TestShutdownAnswersWhatWasForwarded(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 1, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	testbed.WaitLive(t, in, topic, 1)
	conn := longFetch(t, in.BrokerAddr(1), topic, 3*time.Second)
	in.WaitForwarded(1)
	in.Signal(syscall.SIGTERM)
	conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	frame, err := testbed.ReadFrame(conn)
	if err != nil {
		t.Fatalf("the answer to a request that was forwarded before SIGTERM: %v", err)
	}
	if id := binary.BigEndian.Uint32(frame[4:]); id != 77 {
		t.Errorf("correlation ID = %d, want 77", id)
	}
	if code := in.Wait(20 * time.Second); code != 0 {
		t.Errorf("exit code = %d, want 0", code)
	}
	if conn, err := net.Dial("tcp", in.BrokerAddr(1)); err == nil {
		conn.Close()
		t.Error("the broker's listener is still open after the exit")
	}
}

// TestSecondSignalExitsAtOnce: an operator needn't wait for the grace time.
func TestSecondSignalExitsAtOnce(t *testing.T) {
	source, mirror := kafkatest.Shared(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 1, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic)
	testbed.WaitLive(t, in, topic, 1)
	const held = 15 * time.Second // within the proxy's part of the grace time, 18 s: the first signal alone waits for it
	longFetch(t, in.BrokerAddr(1), topic, held)
	in.WaitForwarded(1)
	in.Signal(syscall.SIGTERM)
	kafkatest.Eventually(t, 10*time.Second, func() error { // the first signal has arrived
		if conn, err := net.Dial("tcp", in.Seeds()[0]); err == nil {
			conn.Close()
			return fmt.Errorf("the proxy still takes connections")
		}
		return nil
	})
	begun := time.Now()
	in.Signal(syscall.SIGTERM)
	code := in.Wait(2 * held)
	if took := time.Since(begun); code != 1 || took > held/3 {
		t.Errorf("exit code %d %v after the second signal, want 1 at once", code, took)
	}
}

// TestShortGraceWithAHungMirror: a mirror that doesn't answer doesn't use up even a short grace time, and the next start goes on.
func TestShortGraceWithAHungMirror(t *testing.T) {
	source, _ := kafkatest.Shared(t)
	mirror := kafkatest.Real(t)
	topic := testbed.TopicName(t)
	kafkatest.CreateTopic(t, source, topic, 2, 1)
	in := testbed.Start(t, source, mirror, "--topics", topic, "--grace", "6s")
	testbed.WaitLive(t, in, topic, 2)
	load := testbed.StartLoad(t, in.Seeds(), topic, 2, 500, 100)
	load.WaitAcked(500)
	mirror.Broker(1).Freeze(t)
	load.WaitAcked(500) // some of it is on its way to the mirror
	load.Stop()
	in.Stop() // exit code 0
	mirror.Broker(1).Thaw(t)
	in.Start()
	in.WaitCaughtUp(time.Minute)
	kafkatest.WaitEqual(t, source, mirror, topic, time.Minute, kafkatest.SameOffsets())
}
