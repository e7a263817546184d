package protocol

import (
	"bytes"
	"fmt"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// recordedAnswers are those of Apache Kafka 4.3.1 in testdata/recorded: the versions that a broker of today has. ShareFetch and ShareAcknowledge v0
// are gone from it.
var recordedAnswers = map[int16][2]int16{
	KeyMetadata: {0, 13}, KeyFindCoordinator: {0, 6}, KeyDescribeCluster: {0, 2}, KeyProduce: {10, 13}, KeyShareFetch: {1, 2}, KeyShareAcknowledge: {1, 2},
}

// TestRecordedAnswers rewrites what a real broker sent: each address is replaced, and nothing else changes but sizes, as kmsg has it.
func TestRecordedAnswers(t *testing.T) {
	for key, versions := range recordedAnswers {
		for version := versions[0]; version <= versions[1]; version++ {
			path := filepath.Join("testdata", "recorded", fmt.Sprintf("%s-v%d.hex", strings.ToLower(apiName(key)), version))
			frame := readGolden(t, path)["broker"]
			response := newResponse(key, version)
			header := []byte(nil)
			body := frame[ResponsePrefix:]
			if response.IsFlexible() {
				header, body = body[:1], body[1:]
			}
			if err := response.ReadFrom(body); err != nil {
				t.Fatalf("%s: %v", path, err)
			}
			named := 0
			eachHost(reflect.ValueOf(response), func(_ int32, host, port reflect.Value) {
				if host.String() == "" {
					return
				}
				named++
				if !bytes.Contains(frame, append([]byte(host.String()), appendInt32(nil, int32(port.Int()))...)) {
					t.Errorf("%s: %s:%d isn't in the frame", path, host, port.Int())
				}
			})
			if named == 0 && key != KeyShareAcknowledge { // 4.3.1 has the field and leaves it empty

				t.Errorf("%s names no broker", path)
			}
			same := func(_ int32, host []byte, port int32) (string, int32, bool) { return string(host), port, true }
			if got, err := Rewrite(nil, frame, key, version, same); err != nil || !bytes.Equal(got, frame) {
				t.Errorf("%s: to the same addresses: %v\n got %x\nwant %x", path, err, got, frame)
			}
			kmsgRewrite(response, goldenAddress)
			want := response.AppendTo(append(bytes.Clone(frame[4:ResponsePrefix]), header...))
			want = append(appendInt32(nil, int32(len(want))), want...)
			if got, err := Rewrite(nil, frame, key, version, goldenAddress); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%s: %v\n got %x\nwant %x", path, err, got, want)
			}
		}
	}
}
