package proxy

import (
	"encoding/json"
	"net"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"kmirror/protocol"
)

func TestEveryMetricIsInTheTable(t *testing.T) {
	registry := prometheus.NewRegistry()
	b := script(t, func(c net.Conn, h protocol.RequestHeader, frame []byte) { c.Write(produced(h, frame, nil)) })
	s := startBefore(t, b, Options{Registry: registry, Sink: &recorder{}})
	c := dialRaw(t, s.Addr())
	c.send(requestFrame(produceTo(9, -1, records(3)), 1))
	c.receive()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	help := make(map[string]string)
	for _, m := range Metrics {
		help[m.Name] = m.Help
	}
	values := make(map[string]float64)
	for _, f := range families {
		if help[f.GetName()] == "" || help[f.GetName()] != f.GetHelp() {
			t.Errorf("%s has help %q, want %q", f.GetName(), f.GetHelp(), help[f.GetName()])
		}
		delete(help, f.GetName())
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			values[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	for name := range help {
		t.Errorf("%s is in the table and isn't exported", name)
	}
	for name, want := range map[string]float64{"kmirror_proxy_batches_total offered": 1, "kmirror_proxy_requests_total Produce": 1,
		"kmirror_proxy_connections_total": 1, "kmirror_proxy_connections": 1, "kmirror_proxy_ready": 1, "kmirror_proxy_held_bytes": 0} {
		if values[name] != want {
			t.Errorf("%s = %v, want %v", name, values[name], want)
		}
	}
	status, err := json.Marshal(s.Status())
	if err != nil || s.Status().Batches.Offered != 1 {
		t.Errorf("status %s, %v, want one batch offered", status, err)
	}
}
