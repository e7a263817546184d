// Package transactions shows what becomes of transactions: what was committed arrives, once, in order, for readers of either isolation level, and
// offsets stay the source's as far as the settings want.
package transactions

import (
	"testing"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

func TestMain(m *testing.M) { kafkatest.Main(m, testbed.RemoveProgram) }
