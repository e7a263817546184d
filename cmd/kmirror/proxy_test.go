package main

import (
	"testing"
	"time"

	"kmirror/config"
	"kmirror/forwarder"
)

func TestSettingsReachTheForwarder(t *testing.T) {
	c := config.Default()
	c.Name = "x"
	c.Proxy.Listen = "127.0.0.1:9192"
	c.Topics.Include, c.Topics.Exclude = []string{"a", "/b.*/"}, []string{"bx"}
	c.Topics.Start = "2026-01-31T12:00:00Z"
	c.Topics.OnDataLoss, c.Topics.OnDivergence = "stop", "stop"
	c.Topics.ReplicationFactor = 3
	c.Timing = config.Timing{Refresh: 1, Look: 2, Checkpoint: 3, SessionTimeout: 4, TakeoverWait: 5}
	got, err := forwarderOptions(c, forwarder.ClusterOptions{Seeds: []string{"s:1"}}, forwarder.ClusterOptions{Seeds: []string{"m:1"}})
	if err != nil {
		t.Fatal(err)
	}
	switch {
	case got.Name != "x" || got.Source.Seeds[0] != "s:1" || got.Mirror.Seeds[0] != "m:1" || got.Instance != "127.0.0.1:9192":
		t.Errorf("options = %+v, want name, clusters and instance", got)
	case len(got.Include) != 2 || !matchesAny(got.Exclude, "bx") || !matchesAny(got.Exclude, "__consumer_offsets") || matchesAny(got.Exclude, "b"):
		t.Errorf("topics = %v, %v", got.Include, got.Exclude)
	case got.Start != forwarder.StartTimestamp || !got.StartTimestamp.Equal(time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC)):
		t.Errorf("start = %v %v", got.Start, got.StartTimestamp)
	case !got.StopOnDataLoss || !got.StopOnDivergence || got.ReplicationFactor != 3:
		t.Errorf("policies = %+v", got)
	case got.RefreshEvery != 1 || got.LookEvery != 2 || got.CheckpointEvery != 3 || got.SessionTimeout != 4 || got.TakeoverWait != 5:
		t.Errorf("timing = %+v", got)
	case got.MemoryBytes+heldBytes(c) != int64(c.MirrorMemory):
		t.Errorf("memory = %d + %d, want %d together", got.MemoryBytes, heldBytes(c), c.MirrorMemory)
	}
	if got, err := forwarderOptions(config.Default(), forwarder.ClusterOptions{}, forwarder.ClusterOptions{}); err != nil || got.StopOnDataLoss || !got.StopOnDivergence ||
		got.Start != forwarder.StartEarliest {
		t.Errorf("defaults = %+v, %v", got, err)
	}
}

func TestBrokerPortsFollowTheListener(t *testing.T) {
	for _, tc := range []struct {
		listen     string
		base, want int
	}{{"0.0.0.0:9092", 0, 9093}, {"[::1]:9092", 9200, 9200}, {"127.0.0.1:0", 0, 0}} {
		got, err := brokerPortBase(config.Proxy{Listen: tc.listen, BrokerPorts: config.BrokerPorts{Base: tc.base}})
		if err != nil || got != tc.want {
			t.Errorf("brokerPortBase(%s, %d) = %d, %v, want %d", tc.listen, tc.base, got, err, tc.want)
		}
	}
}

func TestAddressesOfTheAdminListener(t *testing.T) {
	for address, want := range map[string]string{
		"127.0.0.1:9180": "http://127.0.0.1:9180", "0.0.0.0:9180": "http://127.0.0.1:9180", "[::]:1": "http://127.0.0.1:1",
		":9180": "http://127.0.0.1:9180", "https://kmirror.example.com/": "https://kmirror.example.com", "[::1]:9180": "http://[::1]:9180",
	} {
		cmd := newStatusCommand()
		if err := cmd.Flags().Set("admin", address); err != nil {
			t.Fatal(err)
		}
		if got, err := adminURL(cmd); err != nil || got != want {
			t.Errorf("adminURL(%s) = %s, %v, want %s", address, got, err, want)
		}
	}
}
