package protocol

import (
	"encoding/binary"
	"fmt"
	"math/rand"
	"reflect"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// The second opinion in these tests is package kmsg, which is generated from Kafka's message definitions.

// fill sets every field of a kmsg message to something random, unknown tags included.
func fill(r *rand.Rand, v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if v.Type().Elem().Kind() == reflect.Struct || r.Intn(4) > 0 {
			v.Set(reflect.New(v.Type().Elem()))
			fill(r, v.Elem())
		}
	case reflect.Struct:
		if tags, ok := v.Addr().Interface().(*kmsg.Tags); ok {
			for range r.Intn(3) {
				tags.Set(uint32(20+r.Intn(200)), []byte(randomString(r)))
			}
			return
		}
		for i := range v.NumField() {
			if v.Type().Field(i).Name != "Version" {
				fill(r, v.Field(i))
			}
		}
	case reflect.Slice:
		s := reflect.MakeSlice(v.Type(), r.Intn(4), 4)
		for i := range s.Len() {
			fill(r, s.Index(i))
		}
		v.Set(s)
	case reflect.Array:
		for i := range v.Len() {
			fill(r, v.Index(i))
		}
	case reflect.String:
		v.SetString(randomString(r))
	case reflect.Bool:
		v.SetBool(r.Intn(2) == 0)
	case reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		v.SetInt(r.Int63() >> (64 - v.Type().Bits()))
	case reflect.Uint8, reflect.Uint16, reflect.Uint32:
		v.SetUint(uint64(r.Int63()) & (1<<v.Type().Bits() - 1))
	case reflect.Float64:
		v.SetFloat(r.Float64())
	default:
		panic("fill: " + v.Kind().String())
	}
}

func randomString(r *rand.Rand) string {
	switch r.Intn(8) {
	case 0:
		return ""
	case 1:
		return strings.Repeat("x", 255) // two bytes of length in compact strings
	case 2:
		return "2001:db8::1"
	}
	return fmt.Sprintf("broker-%d.example.com", r.Intn(1000))
}

// responseFrame makes the frame of a response.
func responseFrame(response kmsg.Response, correlationID int32) []byte {
	frame := appendInt32(make([]byte, 4), correlationID)
	if response.IsFlexible() && response.Key() != KeyAPIVersions {
		frame = append(frame, 1, 50, 3, 'a', 'b', 'c') // a tagged field in the header
	}
	frame = response.AppendTo(frame)
	binary.BigEndian.PutUint32(frame, uint32(len(frame)-4))
	return frame
}

// readResponse is the inverse of responseFrame.
func readResponse(t testing.TB, response kmsg.Response, frame []byte) {
	t.Helper()
	body := 8
	if response.IsFlexible() && response.Key() != KeyAPIVersions {
		body += 6
	}
	if err := response.ReadFrom(frame[body:]); err != nil {
		t.Fatalf("kmsg can't read %T v%d: %v", response, response.GetVersion(), err)
	}
}

// requestFrame makes the frame of a request; clientID nil is null.
func requestFrame(request kmsg.Request, correlationID int32, clientID *string, headerTags int) []byte {
	frame := appendInt32(appendInt16(appendInt16(make([]byte, 4), request.Key()), request.GetVersion()), correlationID)
	if clientID == nil {
		frame = appendInt16(frame, -1)
	} else {
		frame = appendString(frame, *clientID, false)
	}
	if request.IsFlexible() {
		frame = append(frame, byte(headerTags))
		for tag := range headerTags {
			frame = append(frame, byte(60+tag), 4, 0, 0, 0, 0)
		}
	}
	frame = request.AppendTo(frame)
	binary.BigEndian.PutUint32(frame, uint32(len(frame)-4))
	return frame
}

// eachHost calls f for every pair of fields Host and Port below v, with the node ID beside it.
func eachHost(v reflect.Value, f func(nodeID int32, host, port reflect.Value)) {
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		if !v.IsNil() {
			eachHost(v.Elem(), f)
		}
	case reflect.Slice:
		for i := range v.Len() {
			eachHost(v.Index(i), f)
		}
	case reflect.Struct:
		host, port := v.FieldByName("Host"), v.FieldByName("Port")
		if host.IsValid() && port.IsValid() {
			f(int32(v.FieldByName("NodeID").Int()), host, port)
		}
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				eachHost(v.Field(i), f)
			}
		}
	}
}

// rewritten lists the APIs whose responses Rewrite changes.
var rewritten = []int16{KeyProduce, KeyMetadata, KeyFindCoordinator, KeyDescribeCluster, KeyShareFetch, KeyShareAcknowledge}

// eachRewritten calls f for every API and version that is rewritten.
func eachRewritten(f func(key, version int16)) {
	for _, key := range rewritten {
		limit, _ := MaxVersion(key)
		for version := int16(0); version <= limit; version++ {
			if Rewrites(key, version) {
				f(key, version)
			}
		}
	}
}

func newResponse(key, version int16) kmsg.Response {
	response := kmsg.ResponseForKey(key)
	response.SetVersion(version)
	return response
}

// filledResponse returns a random response, sane where Kafka is.
func filledResponse(r *rand.Rand, key, version int16) kmsg.Response {
	response := newResponse(key, version)
	fill(r, reflect.ValueOf(response).Elem())
	response.SetVersion(version)
	if d, ok := response.(*kmsg.DescribeClusterResponse); ok {
		d.EndpointType = endpointTypeBrokers
	}
	return response
}

// translate is the address function of the tests: another host and port for every node.
func translate(nodeID int32, host []byte, port int32) (string, int32, bool) {
	return fmt.Sprintf("proxy%d.example.net", nodeID%100), port/2 + 1, true
}
