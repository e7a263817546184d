// Package matrix runs client programs twice, straight at a cluster of three brokers and through kmirror in front of it, and wants the same
// transcript of both: results, offsets, errors, settings, all but addresses and generated IDs.
package matrix

import (
	"testing"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

func TestMain(m *testing.M) { kafkatest.Main(m, testbed.RemoveProgram) }
