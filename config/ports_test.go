package config

import (
	"slices"
	"strings"
	"testing"
)

func TestBrokerIDs(t *testing.T) {
	for text, want := range map[string][]int32{"": nil, "3": {3}, "1-3, 1001": {1, 2, 3, 1001}, "0-0,": {0}} {
		if got, err := (BrokerPorts{IDs: text}).List(); err != nil || !slices.Equal(got, want) {
			t.Errorf("List of %q = %v, %v, want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"a", "3-1", "-1", "1-", "0-9999", "0-1500,3000-4500", "1;2"} {
		if got, err := (BrokerPorts{IDs: text}).List(); err == nil {
			t.Errorf("List of %q = %v, want an error", text, got)
		}
	}
}

func TestPortClashesAreNamed(t *testing.T) {
	for name, c := range map[string]struct {
		listen, admin, ids string
		base               int
		want               string // "": no problem
	}{
		"apart":                    {"127.0.0.1:9092", "127.0.0.1:9180", "0-5", 9100, ""},
		"the same port":            {"127.0.0.1:9092", "127.0.0.1:9092", "", 0, "admin.listen: admin.listen is 9092, which is that of proxy.listen too"},
		"on all addresses":         {"0.0.0.0:9092", "127.0.0.1:9092", "", 0, "that of proxy.listen too"},
		"on two addresses":         {"127.0.0.1:9092", "127.0.0.2:9092", "", 0, ""},
		"any free ports":           {"127.0.0.1:0", "127.0.0.1:0", "", 0, ""},
		"a broker and admin":       {"127.0.0.1:9092", "127.0.0.1:9103", "1-4", 9100, "the port of broker 3 is 9103, which is that of admin.listen too"},
		"a broker and listen":      {"127.0.0.1:9102", "127.0.0.1:9180", "1-4", 9100, "the port of broker 2 is 9102, which is that of proxy.listen too"},
		"brokers follow listen":    {"127.0.0.1:9092", "127.0.0.1:9094", "1", 0, "the port of broker 1 is 9094"},
		"a broker beyond the last": {"127.0.0.1:9092", "127.0.0.1:9180", "60000", 9100, "the port of broker 60000 would be 69100, above 65535"},
		"no base":                  {"127.0.0.1:0", "127.0.0.1:9180", "1", 0, "proxy.broker_ports.base: missing"},
		"named twice":              {"127.0.0.1:9092", "127.0.0.1:9180", "1,1", 9100, "that of the port of broker 1 too"},
	} {
		t.Run(name, func(t *testing.T) {
			settings := Default()
			settings.Source.Bootstrap, settings.Mirror.Bootstrap = Servers{"a:9092"}, Servers{"b:9092"}
			settings.Proxy.Listen, settings.Admin.Listen = c.listen, c.admin
			settings.Proxy.BrokerPorts = BrokerPorts{Base: c.base, IDs: c.ids}
			err := settings.Validate()
			switch {
			case c.want == "" && err != nil:
				t.Errorf("Validate = %v, want nil", err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("Validate = %v, want %q", err, c.want)
			}
		})
	}
}
