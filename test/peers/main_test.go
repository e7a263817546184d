// Package peers shows the built kmirror between peers that behave badly, slowly or in their own way: wrong bytes, aborted connections, black holes,
// groups and producers over a shutdown, load balancers, tunnels and IPv6, with real brokers on both sides.
package peers

import (
	"testing"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

func TestMain(m *testing.M) { kafkatest.Main(m, testbed.RemoveProgram) }
