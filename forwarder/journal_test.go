package forwarder

import (
	"context"
	"encoding/hex"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/zap/zaptest"

	"kmirror/internal/scripted"
	"kmirror/protocol"
)

// A broker that doesn't answer holds up what needs its answer, and nothing else. Each test leaves an answer out for ever, shows that somebody waits for it,
// and has the others go on meanwhile.

// promptly runs do, which must not wait for anything that is held.
func promptly(t *testing.T, what string, do func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		do()
	}()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatalf("%s waits for the answer that doesn't come", what)
	}
}

// hungRegistry is a registry with one birth on a mirror whose segments topic is led by broker 2 and its positions topic by broker 3. hang leaves
// that broker's next answer about offsets out; hung yields the question.
func hungRegistry(t *testing.T) (r *registry, born identity, hang func(broker int32) (hung <-chan *scripted.Request)) {
	t.Parallel()
	mirror := scripted.New(t, scripted.Options{Brokers: 3})
	client, err := kgo.NewClient(append(clientOptions(ClusterOptions{Seeds: mirror.Seeds()}, "test"), kgo.ProducerLinger(0))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	r = newRegistry(client, "test", "source", "", 1, zaptest.NewLogger(t))
	born = identity{sourceCluster: "source", topicID: protocol.TopicID{1}, mirrorTopicID: protocol.TopicID{2}}
	adoptBirth(t, r, born)
	if _, err := r.runsEnd(t.Context()); err != nil {
		t.Fatal(err)
	}
	mirror.MoveLeader(r.segments.topic, 0, 2)
	mirror.MoveLeader(r.runs.topic, 0, 3)
	adoptBirth(t, r, born) // the client learns of the leader
	return r, born, func(broker int32) <-chan *scripted.Request {
		return mirror.InterceptNext(1, 2, func(req *scripted.Request) bool {
			_, is := req.Body.(*kmsg.ListOffsetsRequest)
			return is && req.Broker == broker
		},
			func(*scripted.Request) scripted.Action { return scripted.HoldForever() })
	}
}

func adoptBirth(t *testing.T, r *registry, id identity) {
	t.Helper()
	err := r.adopt(t.Context(), []segmentRecord{{
		TopicID: hex.EncodeToString(id.topicID[:]), MirrorTopicID: hex.EncodeToString(id.mirrorTopicID[:]), Partition: id.partition, Birth: true, Source: 7, Position: 7,
	}})
	if err != nil {
		t.Fatal(err)
	}
}

// background runs do with a context that ends with the test, and waits for it.
func background(t *testing.T, do func(context.Context)) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		do(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
}

// The loop looks things up, so nothing that it looks up may wait for the segments topic's broker (registry.go: mu, which isn't held over a read).
func TestLookUpsDoNotWaitForTheSegmentsTopic(t *testing.T) {
	r, born, hang := hungRegistry(t)
	hung := hang(2)
	background(t, func(ctx context.Context) { r.refresh(ctx) })
	<-hung
	promptly(t, "a look-up", func() {
		if n, ok := r.lookUp(born); !ok || n.segments[0].source != 7 {
			t.Errorf("the stream was looked up as %+v, %t", n, ok)
		}
		r.settings(born.topicID, born.mirrorTopicID)
		r.bornWith(born.topicID, born.mirrorTopicID)
		r.spreadOver(born.topicID, born.mirrorTopicID)
		r.lives(born.topicID, born.mirrorTopicID)
		r.generations(born)
	})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	promptly(t, "a refresh that was given up", func() {
		if err := r.refresh(ctx); err == nil {
			t.Error("it said that it had read to the end")
		}
	})
}

// Dense streams need the segments topic alone: the positions topic's broker doesn't hold them up (journal.go: fetch, which isn't the client's one
// consumer; positions.go, which takes no lock).
func TestTheSegmentsTopicIsReadWhileThePositionsTopicHangs(t *testing.T) {
	r, born, hang := hungRegistry(t)
	hung := hang(3)
	background(t, func(ctx context.Context) { r.lookUpRuns(ctx, []*runsLookup{{of: landmark{1, 0, 1}}}) })
	<-hung
	promptly(t, "a birth", func() {
		born.partition = 1
		adoptBirth(t, r, born)
	})
	if _, ok := r.lookUp(born); !ok {
		t.Error("the birth isn't there")
	}
}

// Where records of the segments topic were deleted, reading goes on behind them (journal.go: read, OffsetOutOfRange).
func TestTheSegmentsTopicIsReadOnBehindADeletion(t *testing.T) {
	t.Parallel()
	mirror := scripted.New(t, scripted.Options{Brokers: 2})
	client, err := kgo.NewClient(append(clientOptions(ClusterOptions{Seeds: mirror.Seeds()}, "test"), kgo.ProducerLinger(0))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	writer, reader := newRegistry(client, "test", "source", "", 1, zaptest.NewLogger(t)), newRegistry(client, "test", "source", "", 1, zaptest.NewLogger(t))
	id := identity{sourceCluster: "source", topicID: protocol.TopicID{1}, mirrorTopicID: protocol.TopicID{2}}
	for range 3 {
		adoptBirth(t, writer, id)
		id.partition++
	}
	mirror.DeleteRecords(writer.segments.topic, 0, 2)
	mirror.MoveLeader(writer.segments.topic, 0, 2)
	if err := reader.refresh(t.Context()); err != nil || reader.position.offset != 3 {
		t.Fatalf("the topic was read up to %d, %v; want 3", reader.position.offset, err)
	}
	for partition, want := range []bool{false, false, true} {
		id.partition = int32(partition)
		if _, ok := reader.lookUp(id); ok != want {
			t.Errorf("partition %d was born: %t, want %t", partition, ok, want)
		}
	}
}
