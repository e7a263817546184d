// Package compaction shows compacted topics on the mirror: what the source's cleaner leaves, while kmirror reads it, is killed, or hands it over.
package compaction

import (
	"testing"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

func TestMain(m *testing.M) { kafkatest.Main(m, testbed.RemoveProgram) }
