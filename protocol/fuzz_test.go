package protocol

import (
	"bytes"
	"encoding/binary"
	"math/rand"
	"reflect"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// sized sets the size of a frame that a fuzzer made, so that the rest of it is looked at.
func sized(frame []byte) []byte {
	if len(frame) < ResponsePrefix {
		return nil
	}
	frame = bytes.Clone(frame)
	binary.BigEndian.PutUint32(frame, uint32(len(frame)-SizePrefix))
	return frame
}

// canonical decodes a response frame with kmsg; ok is false if kmsg doesn't read it or would write it differently (longer
// varints, null where empty is meant, bytes behind the end).
func canonical(frame []byte, key, version int16) (response kmsg.Response, body int, ok bool) {
	w := responseBody(frame, key, version)
	if w.bad {
		return nil, 0, false
	}
	response = newResponse(key, version)
	if response.ReadFrom(bytes.Clone(frame[w.at:])) != nil {
		return nil, 0, false
	}
	return response, w.at, bytes.Equal(response.AppendTo(nil), frame[w.at:])
}

// FuzzRewrite: no panic; what kmsg reads and writes alike, Rewrite rewrites as kmsg does; no address stays.
func FuzzRewrite(f *testing.F) {
	r := rand.New(rand.NewSource(1))
	eachRewritten(func(key, version int16) {
		f.Add(key, version, responseFrame(filledResponse(r, key, version), 7))
	})
	f.Fuzz(func(t *testing.T, key, version int16, frame []byte) {
		limit, ok := MaxVersion(key)
		if frame = sized(frame); frame == nil || !ok || version < 0 || version > limit || !Rewrites(key, version) {
			return
		}
		before := bytes.Clone(frame)
		got, err := Rewrite(nil, frame, key, version, translate)
		if !bytes.Equal(frame, before) {
			t.Fatal("Rewrite changed its input")
		}
		response, body, same := canonical(frame, key, version)
		if d, ok := response.(*kmsg.DescribeClusterResponse); ok && version >= 1 && d.EndpointType != endpointTypeBrokers {
			return
		}
		if same {
			kmsgRewrite(response, translate)
			want := response.AppendTo(bytes.Clone(frame[:body]))
			binary.BigEndian.PutUint32(want, uint32(len(want)-SizePrefix))
			if err != nil || !bytes.Equal(got, want) {
				t.Fatalf("%s v%d: Rewrite(%x)\n got %x, %v\nwant %x", apiName(key), version, frame, got, err, want)
			}
		}
		if err != nil {
			return
		}
		rewritten, _, _ := canonical(got, key, version)
		eachHost(reflect.ValueOf(rewritten), func(nodeID int32, host, port reflect.Value) {
			if want, _, _ := translate(nodeID, nil, 0); host.String() != want && host.String() != "" {
				t.Fatalf("%s v%d: Rewrite(%x) kept host %q", apiName(key), version, frame, host.String())
			}
		})
	})
}

// FuzzCutVersions: no panic; agrees with kmsg.
func FuzzCutVersions(f *testing.F) {
	for version := int16(0); version <= maxAPIVersions; version++ {
		f.Add(version, responseFrame(apiVersionsResponse(version), 7))
	}
	f.Add(int16(3), refusal(kmsg.ApiVersionsResponseApiKey{ApiKey: 18, MaxVersion: 9}))
	f.Fuzz(func(t *testing.T, version int16, frame []byte) {
		if frame = sized(frame); frame == nil || version < 0 || version > maxAPIVersions {
			return
		}
		got, err := CutVersions(nil, frame, version)
		if apiVersionsRefused(frame) {
			version = 0
		}
		response, body, same := canonical(frame, KeyAPIVersions, version)
		if !same {
			return
		}
		versions := response.(*kmsg.ApiVersionsResponse)
		var keys []kmsg.ApiVersionsResponseApiKey
		for _, k := range versions.ApiKeys {
			if limit, ok := MaxVersion(k.ApiKey); ok {
				if k.MinVersion > limit {
					continue
				}
				k.MaxVersion = min(k.MaxVersion, limit)
			}
			keys = append(keys, k)
		}
		versions.ApiKeys = keys
		want := versions.AppendTo(bytes.Clone(frame[:body]))
		binary.BigEndian.PutUint32(want, uint32(len(want)-SizePrefix))
		if err != nil || !bytes.Equal(got, want) {
			t.Fatalf("v%d: CutVersions(%x)\n got %x, %v\nwant %x", version, frame, got, err, want)
		}
	})
}

// FuzzProduceRequest: no panic; what kmsg reads, the walk reads alike.
func FuzzProduceRequest(f *testing.F) {
	r := rand.New(rand.NewSource(1))
	for version := int16(0); version <= maxProduce; version++ {
		request := newProduceRequest(version)
		fill(r, reflect.ValueOf(request).Elem())
		f.Add(requestFrame(request, 7, kmsg.StringPtr("client"), 1))
	}
	f.Fuzz(func(t *testing.T, frame []byte) {
		if len(frame) < RequestPrefix {
			return
		}
		h := ParseRequestHeader(frame)
		acks, transactional, acksErr := ProduceAcks(frame, h)
		got, err := walkRequest(frame)
		if h.APIKey != KeyProduce || !ReadsProduce(h.APIVersion) {
			return
		}
		w := requestBody(frame, h)
		request := newProduceRequest(h.APIVersion)
		if w.bad || request.ReadFrom(bytes.Clone(frame[w.at:])) != nil || !bytes.HasPrefix(frame[w.at:], request.AppendTo(nil)) {
			return
		}
		if want := kmsgRequest(request); err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("walk over %x\n got %v, %v\nwant %v", frame, got, err, want)
		}
		if acksErr != nil || acks != request.Acks || transactional != (request.TransactionID != nil) {
			t.Fatalf("ProduceAcks(%x) = %d, %v, %v, want %d, %v", frame, acks, transactional, acksErr, request.Acks, request.TransactionID != nil)
		}
	})
}

// FuzzProduceResponse: no panic; what kmsg reads, the walk reads alike.
func FuzzProduceResponse(f *testing.F) {
	r := rand.New(rand.NewSource(1))
	for version := int16(0); version <= maxProduce; version++ {
		f.Add(version, responseFrame(filledResponse(r, KeyProduce, version), 7))
	}
	f.Fuzz(func(t *testing.T, version int16, frame []byte) {
		if frame = sized(frame); frame == nil || !ReadsProduce(version) {
			return
		}
		got, endpoints, err := walkResponse(frame, version)
		response, _, same := canonical(frame, KeyProduce, version)
		if !same {
			return
		}
		want := kmsgResponse(response.(*kmsg.ProduceResponse))
		if err != nil || !reflect.DeepEqual(got, want) || endpoints != (len(response.(*kmsg.ProduceResponse).Brokers) > 0) {
			t.Fatalf("v%d: walk over %x\n got %v, %v, %v\nwant %v", version, frame, got, endpoints, err, want)
		}
	})
}
