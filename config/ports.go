package config

import (
	"cmp"
	"fmt"
	"net"
	"strconv"
	"strings"
)

// maxBrokerIDs bounds what proxy.broker_ports.ids can name.
const maxBrokerIDs = 2000

// List returns the broker IDs of proxy.broker_ports.ids, in their order there.
func (b BrokerPorts) List() (ids []int32, err error) {
	for item := range strings.SplitSeq(b.IDs, ",") {
		if item = strings.TrimSpace(item); item == "" {
			continue
		}
		low, high, isRange := strings.Cut(item, "-")
		first, err := strconv.ParseUint(strings.TrimSpace(low), 10, 31)
		last := first
		if err == nil && isRange {
			last, err = strconv.ParseUint(strings.TrimSpace(high), 10, 31)
		}
		if err != nil || last < first {
			return nil, fmt.Errorf("want broker IDs as in 0-5,1001, got %q", item)
		}
		if last-first >= maxBrokerIDs || len(ids)+int(last-first) >= maxBrokerIDs {
			return nil, fmt.Errorf("want at most %d brokers, got more", maxBrokerIDs)
		}
		for id := first; id <= last; id++ {
			ids = append(ids, int32(id))
		}
	}
	return ids, nil
}

// listener is a port that an instance opens.
type listener struct {
	path, host string
	port       int
}

// checkPorts names every two listeners of the instance that would be the same port.
func (c Config) checkPorts(p *Problems) {
	ids, err := c.Proxy.BrokerPorts.List()
	if err != nil {
		p.add("proxy.broker_ports.ids", "%v", err)
	}
	if c.Proxy.SNI.Pattern != "" && len(ids) > 0 {
		p.add("proxy.broker_ports.ids", "set, and proxy.sni.pattern too: with it no broker has a port of its own")
		return
	}
	var all []listener
	for _, l := range []listener{{path: "proxy.listen", host: c.Proxy.Listen}, {path: "admin.listen", host: c.Admin.Listen}} {
		host, port, err := net.SplitHostPort(l.host)
		if n, _ := strconv.Atoi(port); err == nil && n > 0 { // another check names what is wrong
			all = append(all, listener{l.path, host, n})
		}
	}
	if len(ids) > 0 && (len(all) == 0 || all[0].path != "proxy.listen") && c.Proxy.BrokerPorts.Base == 0 {
		p.add("proxy.broker_ports.base", "missing, but proxy.broker_ports.ids is set and proxy.listen has no port that the brokers' could follow")
		return
	}
	for _, id := range ids {
		base := c.Proxy.BrokerPorts.Base
		if base == 0 {
			base = all[0].port + 1
		}
		host, _, _ := net.SplitHostPort(c.Proxy.Listen)
		all = append(all, listener{fmt.Sprintf("the port of broker %d", id), host, base + int(id)})
	}
	seen := make(map[int][]listener)
	for _, l := range all {
		if l.port > 65535 {
			p.add("proxy.broker_ports.ids", "%s would be %d, above 65535", l.path, l.port)
		}
		for _, other := range seen[l.port] {
			if sameHost(l.host, other.host) {
				p.add(cmp.Or(settingOf(l.path), "proxy.broker_ports.ids"), "%s is %d, which is that of %s too", l.path, l.port, other.path)
			}
		}
		seen[l.port] = append(seen[l.port], l)
	}
}

// settingOf is path, if it's that of a setting.
func settingOf(path string) string {
	if strings.Contains(path, " ") {
		return ""
	}
	return path
}

// sameHost tells whether one port can't be opened on both hosts: they are equal, or one is all addresses.
func sameHost(a, b string) bool {
	for _, host := range []string{a, b} {
		if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
			return true
		}
	}
	return strings.EqualFold(a, b)
}
