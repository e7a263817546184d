// Package outages takes a cluster away, or kmirror itself, for a while: clients notice nothing that needn't be, and all goes on by itself.
package outages

import (
	"testing"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

func TestMain(m *testing.M) { kafkatest.Main(m, testbed.RemoveProgram) }
