// Package chaos kills and freezes kmirror and brokers at random moments, and counts what is on both sides afterwards.
package chaos

import (
	"testing"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

func TestMain(m *testing.M) { kafkatest.Main(m, testbed.RemoveProgram) }
