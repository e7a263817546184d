package kafkatest

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
)

// SwapAddrs lets two brokers that are stopped have each other's address from their next start on; their IDs and folders stay.
func SwapAddrs(t testing.TB, a, b *Broker) {
	t.Helper()
	for _, x := range []*Broker{a, b} {
		x.mu.Lock()
		defer x.mu.Unlock()
		if x.running() {
			t.Fatalf("kafkatest: broker %d is running", x.ID)
		}
	}
	a.Addr, b.Addr = b.Addr, a.Addr
	for _, key := range []string{"listeners", "advertised.listeners"} {
		a.config[key], b.config[key] = swapListener(a.config[key], b.config[key])
	}
}

// swapListener exchanges the first listener of two lists.
func swapListener(a, b string) (string, string) {
	cut := func(s string) (string, string) {
		for i := range s {
			if s[i] == ',' {
				return s[:i], s[i:]
			}
		}
		return s, ""
	}
	firstA, restA := cut(a)
	firstB, restB := cut(b)
	return firstB + restA, firstA + restB
}

// AddBroker starts one more broker, which is no controller, and waits until it serves.
func (c *RealCluster) AddBroker(t testing.TB, id int32) *Broker {
	t.Helper()
	port, err := reservePorts(1)
	if err != nil {
		t.Fatal(err)
	}
	model := c.brokers[0]
	b := &Broker{ID: id, Addr: fmt.Sprintf("127.0.0.1:%d", port), inst: model.inst, flags: model.flags, dir: filepath.Join(c.dir, strconv.Itoa(int(id)))}
	model.mu.Lock()
	b.config = maps.Clone(model.config)
	model.mu.Unlock()
	b.config["process.roles"], b.config["node.id"], b.config["log.dirs"] = "broker", strconv.Itoa(int(id)), b.DataDir()
	b.config["listeners"] = "PLAINTEXT://" + b.Addr
	b.config["advertised.listeners"] = b.config["listeners"]
	if err := c.format(b); err != nil {
		t.Fatal(err)
	}
	c.brokers = append(c.brokers, b)
	b.Start(t)
	return b
}

// RemoveBroker stops a broker, which has no replica left, and makes the cluster forget it.
func (c *RealCluster) RemoveBroker(t testing.TB, b *Broker) {
	t.Helper()
	b.Stop(t)
	c.brokers = slices.DeleteFunc(slices.Clone(c.brokers), func(x *Broker) bool { return x == b })
	Tool(t, "org.apache.kafka.tools.ClusterTool", "unregister", "--bootstrap-server", c.brokers[0].Addr, "--id", strconv.Itoa(int(b.ID)))
}
