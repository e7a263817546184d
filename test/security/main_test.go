// Package security shows that log-ins and TLS pass through the proxy untouched, and that kmirror's own clients log in with every mechanism.
package security

import (
	"testing"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

func TestMain(m *testing.M) { kafkatest.Main(m, testbed.RemoveProgram) }
