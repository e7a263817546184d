// Package brokers shows that clients find every broker at the proxy's port for it, whatever becomes of the brokers, and never at its own address.
package brokers

import (
	"testing"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

func TestMain(m *testing.M) { kafkatest.Main(m, testbed.RemoveProgram) }
