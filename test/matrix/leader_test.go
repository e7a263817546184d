package matrix

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/kafkatest"
	"kmirror/test/clients"
)

// leaderChange lets a partition's leader move while librdkafka and Java write and read it: the old leader refuses what its clients ask it, and says who
// leads now; clients go on, through the proxy as directly, and each record is there once.
func (c cluster) leaderChange(t *testing.T, program kafkatest.JavaProgram) {
	const records = 40
	for name, command := range map[string]func(seed, topic string) *exec.Cmd{
		"java": func(seed, topic string) *exec.Cmd {
			return program.Command(t, "LeaderChange", seed, topic, fmt.Sprint(records))
		},
		"confluent-kafka": func(seed, topic string) *exec.Cmd { return clients.Scripted()[0].LeaderChange(t, seed, topic, records) },
	} {
		for _, w := range c.ways("leader-" + name) {
			t.Run(name+" "+strings.SplitN(w.name, "-", 2)[0], parallel(func(t *testing.T) {
				topic := w.name + "topic"
				kafkatest.CreateTopic(t, c.source, topic, 1, 3)
				cmd := command(w.seeds[0], topic)
				stdin, err := cmd.StdinPipe()
				if err != nil {
					t.Fatal(err)
				}
				stdout, err := cmd.StdoutPipe()
				if err != nil {
					t.Fatal(err)
				}
				var errs strings.Builder
				cmd.Stderr = &errs
				if err := kafkatest.Spawn(cmd); err != nil {
					t.Fatal(err)
				}
				timer := time.AfterFunc(patience, func() { cmd.Process.Kill() })
				defer timer.Stop()
				lines := bufio.NewScanner(stdout)
				if !lines.Scan() || lines.Text() != "half" {
					t.Fatalf("printed %q, want half\n%s", lines.Text(), errs.String())
				}
				old := c.moveLeader(t, topic)
				c.wantRefusals(t, w, topic, old)
				if _, err := io.WriteString(stdin, "go\n"); err != nil {
					t.Fatal(err)
				}
				if want := fmt.Sprint("all ", records); !lines.Scan() || lines.Text() != want {
					t.Errorf("printed %q, want %q\n%s", lines.Text(), want, errs.String())
				}
				if err := cmd.Wait(); err != nil {
					t.Errorf("%v\n%s", err, errs.String())
				}
				if got := kafkatest.LogOffsets(t, c.source, topic)[0].End; got != records {
					t.Errorf("the log ends at %d, want %d", got, records)
				}
			}))
		}
	}
}

// moveLeader makes another replica of partition 0 the leader and returns the one before.
func (c cluster) moveLeader(t *testing.T, topic string) (old int32) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	admin := kadm.NewClient(c.source.Client(t))
	leader := func() (int32, []int32) {
		topics, err := admin.ListTopics(ctx, topic)
		if err != nil {
			t.Fatal(err)
		}
		p := topics[topic].Partitions[0]
		return p.Leader, p.Replicas
	}
	old, replicas := leader()
	var move kadm.AlterPartitionAssignmentsReq
	move.Assign(topic, 0, append(replicas[1:len(replicas):len(replicas)], replicas[0])) // the old leader comes last
	if resp, err := admin.AlterPartitionAssignments(ctx, move); err != nil || resp.Error() != nil {
		t.Fatal(err, resp.Error())
	}
	set := make(kadm.TopicsSet)
	set.Add(topic, 0)
	kafkatest.Eventually(t, time.Minute, func() error {
		_, _ = admin.ElectLeaders(ctx, kadm.ElectPreferredReplica, set) // refused until the replicas have their new order
		if now, _ := leader(); now == old || now < 0 {
			return fmt.Errorf("broker %d leads partition 0 of %s", now, topic)
		}
		return nil
	})
	return old
}

// wantRefusals asks the old leader, with no epoch and with the old one, as a client does that hasn't heard of the change.
func (c cluster) wantRefusals(t *testing.T, w way, topic string, old int32) {
	t.Helper()
	cl := c.source.Client(t)
	if w.seeds[0] != c.source.Seeds()[0] {
		var err error
		if cl, err = kgo.NewClient(kgo.SeedBrokers(w.seeds...)); err != nil {
			t.Fatal(err)
		}
		defer cl.Close()
	}
	ask := func(epoch int32) error {
		req := kmsg.NewPtrListOffsetsRequest()
		asked := kmsg.NewListOffsetsRequestTopic()
		asked.Topic = topic
		p := kmsg.NewListOffsetsRequestTopicPartition()
		p.CurrentLeaderEpoch, p.Timestamp = epoch, -1
		asked.Partitions = append(asked.Partitions, p)
		req.Topics, req.ReplicaID = append(req.Topics, asked), -1
		resp, err := cl.Broker(int(old)).Request(t.Context(), req)
		if err != nil {
			return err
		}
		return kerr.ErrorForCode(resp.(*kmsg.ListOffsetsResponse).Topics[0].Partitions[0].ErrorCode)
	}
	kafkatest.Eventually(t, time.Minute, func() error {
		if got := ask(-1); !errors.Is(got, kerr.NotLeaderForPartition) { // it may not have heard of it yet
			return fmt.Errorf("the old leader says %v, want %v", got, kerr.NotLeaderForPartition)
		}
		return nil
	})
	if got := ask(0); !errors.Is(got, kerr.FencedLeaderEpoch) {
		t.Errorf("with the old epoch the old leader says %v, want %v", got, kerr.FencedLeaderEpoch)
	}
}
