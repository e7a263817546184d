// Package topics shows what becomes of topics on the mirror: their names, settings, partitions, and the lists of those that are mirrored.
package topics

import (
	"testing"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

func TestMain(m *testing.M) { kafkatest.Main(m, testbed.RemoveProgram) }
