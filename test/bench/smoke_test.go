package bench

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"

	"kmirror/internal/kafkatest"
	"kmirror/protocol"
)

// A peer that loses or changes records would make every ratio worthless.
func TestNaiveCopyKeepsEveryBatch(t *testing.T) {
	program := buildTool(t, "naive")
	for _, test := range []struct {
		name        string
		load        workload
		connections int
	}{
		{"one connection", workload{topic: "plain", records: 5000, size: 100}, 1},
		{"compressed", workload{topic: "packed", records: 1000, size: 1024, lz4: true}, 1},
		{"fewer connections than partitions", workload{topic: "shared", records: 5000, size: 100}, 3},
		{"more connections than partitions", workload{topic: "spare", records: 500, size: 100}, 7},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := &world{source: kafkatest.Fake(t), mirror: kafkatest.Fake(t), naive: program}
			test.load.load(t, w.source)
			p := naiveCopier(test.connections)(t, w, test.load.topic)
			kafkatest.WaitEqual(t, w.source, w.mirror, test.load.topic, time.Minute, kafkatest.SameOffsets())
			p.stop(t)
			for number := range int32(partitions) {
				want := rawBatches(t, w.source, test.load.topic, number)
				equalButForHeader(t, rawBatches(t, w.mirror, test.load.topic, number), want)
			}
		})
	}
}

// equalButForHeader compares all that a copy must keep: offsets, attributes, timestamps, records.
func equalButForHeader(t *testing.T, got, want []protocol.Batch) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("mirror has %d batches, want %d", len(got), len(want))
	}
	for i := range want {
		g, w := got[i], want[i]
		if g.BaseOffset() != w.BaseOffset() || g.Attributes() != w.Attributes() || g.LastOffsetDelta() != w.LastOffsetDelta() ||
			g.BaseTimestamp() != w.BaseTimestamp() || g.MaxTimestamp() != w.MaxTimestamp() || !bytes.Equal(g.Records(), w.Records()) {
			t.Errorf("batch %d at offset %d differs from the source's", i, w.BaseOffset())
		}
		if !g.VerifyCRC() {
			t.Errorf("batch %d at offset %d has a wrong CRC", i, g.BaseOffset())
		}
	}
}

// rawBatches reads a partition of a one-broker cluster from its start to its end as the broker keeps it.
func rawBatches(t *testing.T, cluster kafkatest.Cluster, topic string, number int32) []protocol.Batch {
	t.Helper()
	versions := kversion.V2_8_0() // fetches by topic name
	client := cluster.Client(t, kgo.MaxVersions(versions))
	var all []protocol.Batch
	for next := int64(0); ; next = all[len(all)-1].EndOffset() {
		req := kmsg.NewPtrFetchRequest()
		req.MaxBytes, req.SessionEpoch = 8<<20, -1
		rt, rp := kmsg.NewFetchRequestTopic(), kmsg.NewFetchRequestTopicPartition()
		rp.Partition, rp.FetchOffset, rp.PartitionMaxBytes = number, next, 1<<20
		rt.Topic, rt.Partitions = topic, append(rt.Partitions, rp)
		req.Topics = append(req.Topics, rt)
		resp, err := req.RequestWith(t.Context(), client)
		if err != nil {
			t.Fatal(err)
		}
		answer := resp.Topics[0].Partitions[0]
		if err := kerr.ErrorForCode(answer.ErrorCode); err != nil {
			t.Fatal(err)
		}
		rest := answer.RecordBatches
		if len(rest) == 0 {
			return all
		}
		for len(rest) > 0 {
			var b protocol.Batch
			if b, rest, err = protocol.ParseBatch(rest); err != nil {
				break // the fetch's end cut it off
			}
			all = append(all, b)
		}
	}
}

// The relay must pass on what is sent before a half-close, and what is answered after it.
func TestRelayPassesBothDirectionsToTheirEnds(t *testing.T) {
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	go answerAtEnd(server)

	address := loopback(kafkatest.PortBlock(t, 1))
	start(t, "relay", buildTool(t, "relay"), "-listen", address, "-to", server.Addr().String())
	var conn net.Conn
	kafkatest.Eventually(t, time.Minute, func() (err error) {
		conn, err = net.Dial("tcp", address)
		return err
	})
	defer conn.Close()
	sent := bytes.Repeat([]byte("records "), 1<<16)
	if _, err := conn.Write(sent); err != nil {
		t.Fatal(err)
	}
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(conn); err != nil || !bytes.Equal(got, sent) {
		t.Errorf("got %d bytes, error %v; want the %d bytes sent", len(got), err, len(sent))
	}
}

// answerAtEnd reads one connection to its end and sends everything back.
func answerAtEnd(server net.Listener) {
	conn, err := server.Accept()
	if err != nil {
		return
	}
	defer conn.Close()
	if b, err := io.ReadAll(conn); err == nil {
		_, _ = conn.Write(b) // the client sees a short answer
	}
}
