package protocol

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// TestParsedVersionsAreTheNewest fails when a new kmsg knows a newer version of an API that is parsed here: extend the walk,
// then the constant.
func TestParsedVersionsAreTheNewest(t *testing.T) {
	for key := int16(0); key <= kmsg.MaxKey; key++ {
		limit, ok := MaxVersion(key)
		if !ok || key == KeyFetch { // Fetch stops before the version with addresses
			continue
		}
		if newest := kmsg.RequestForKey(key).MaxVersion(); newest != limit {
			t.Errorf("%s: MaxVersion = %d, kmsg knows %d", apiName(key), limit, newest)
		}
	}
}

// apiVersionsResponse is what a broker newer than this package may say.
func apiVersionsResponse(version int16) *kmsg.ApiVersionsResponse {
	response := newResponse(KeyAPIVersions, version).(*kmsg.ApiVersionsResponse)
	for key := int16(0); key <= kmsg.MaxKey+5; key++ {
		response.ApiKeys = append(response.ApiKeys, kmsg.ApiVersionsResponseApiKey{ApiKey: key, MinVersion: key % 3, MaxVersion: 99})
	}
	response.ApiKeys[KeyMetadata].MaxVersion = 7                                                                             // an old broker
	response.ApiKeys[KeySASLHandshake].MinVersion = 0                                                                        // else without a common version
	response.ApiKeys = append(response.ApiKeys, kmsg.ApiVersionsResponseApiKey{ApiKey: 10500, MinVersion: 3, MaxVersion: 9}) // somebody's own
	response.SupportedFeatures = []kmsg.ApiVersionsResponseSupportedFeature{{Name: "transaction.version", MaxVersion: 2}}
	response.FinalizedFeaturesEpoch = 70
	response.FinalizedFeatures = []kmsg.ApiVersionsResponseFinalizedFeature{{Name: "transaction.version", MaxVersionLevel: 2}}
	response.UnknownTags.Set(77, []byte("kept"))
	response.ApiKeys[5].UnknownTags.Set(3, []byte("kept too"))
	return response
}

func TestCutVersionsChangesOnlyMaximums(t *testing.T) {
	for version := int16(0); version <= maxAPIVersions; version++ {
		response := apiVersionsResponse(version)
		frame := responseFrame(response, 7)
		for i := range response.ApiKeys {
			k := &response.ApiKeys[i]
			if limit, ok := MaxVersion(k.ApiKey); ok {
				k.MaxVersion = min(k.MaxVersion, limit)
			}
		}
		if fetch := response.ApiKeys[KeyFetch].MaxVersion; fetch != 15 {
			t.Errorf("Fetch is cut to v%d, want v15", fetch)
		}
		got, err := CutVersions(nil, frame, version)
		if want := responseFrame(response, 7); err != nil || !bytes.Equal(got, want) {
			t.Errorf("v%d: CutVersions(%x)\n got %x, %v\nwant %x", version, frame, got, err, want)
		}
		for n := range len(frame) {
			prefix := bytes.Clone(frame[:n])
			if n >= 4 {
				binary.BigEndian.PutUint32(prefix, uint32(n-4))
			}
			if _, err := CutVersions(nil, prefix, version); !errors.Is(err, ErrMalformed) {
				t.Fatalf("v%d: CutVersions of %d of %d bytes = %v, want ErrMalformed", version, n, len(frame), err)
			}
		}
	}
}

func TestAnAPIWithoutACommonVersionIsLeftOut(t *testing.T) {
	for version := int16(0); version <= maxAPIVersions; version++ {
		response := newResponse(KeyAPIVersions, version).(*kmsg.ApiVersionsResponse)
		response.ApiKeys = []kmsg.ApiVersionsResponseApiKey{
			{ApiKey: KeyFetch, MinVersion: 16, MaxVersion: 20}, {ApiKey: KeyMetadata, MinVersion: 13, MaxVersion: 13}, {ApiKey: 68, MaxVersion: 1}}
		frame := responseFrame(response, 7)
		response.ApiKeys = response.ApiKeys[1:]
		got, err := CutVersions(nil, frame, version)
		if want := responseFrame(response, 7); err != nil || !bytes.Equal(got, want) {
			t.Errorf("v%d: CutVersions(%x)\n got %x, %v\nwant %x", version, frame, got, err, want)
		}
	}
}

// refusal is a broker's answer in v0 form to an ApiVersions version that it doesn't know.
func refusal(keys ...kmsg.ApiVersionsResponseApiKey) []byte {
	response := newResponse(KeyAPIVersions, 0).(*kmsg.ApiVersionsResponse)
	response.ErrorCode, response.ApiKeys = 35, keys
	return responseFrame(response, 7)
}

func TestABrokersRefusalPasses(t *testing.T) {
	none, old, newer := refusal(), refusal(kmsg.ApiVersionsResponseApiKey{ApiKey: 18, MaxVersion: 3}), refusal(kmsg.ApiVersionsResponseApiKey{ApiKey: 18, MaxVersion: 7})
	for version := int16(0); version <= maxAPIVersions+2; version++ {
		for _, tc := range []struct{ in, want []byte }{{none, none}, {old, old}, {newer, refusal(kmsg.ApiVersionsResponseApiKey{ApiKey: 18, MaxVersion: maxAPIVersions})}} {
			if got, err := CutVersions(nil, tc.in, version); err != nil || !bytes.Equal(got, tc.want) {
				t.Errorf("v%d: CutVersions(%x) = %x, %v, want %x", version, tc.in, got, err, tc.want)
			}
		}
	}
}

func TestAnAnswerInAnUnknownVersionBecomesARefusal(t *testing.T) {
	frame := append([]byte{0, 0, 0, 60, 0, 0, 0, 7}, make([]byte, 56)...)
	got, err := CutVersions(nil, frame, maxAPIVersions+1)
	if want := refusal(kmsg.ApiVersionsResponseApiKey{ApiKey: 18, MaxVersion: maxAPIVersions}); err != nil || !bytes.Equal(got, want) {
		t.Errorf("CutVersions = %x, %v, want %x", got, err, want)
	}
}

func TestFlexibleAgreesWithKmsg(t *testing.T) {
	for key := int16(0); key <= kmsg.MaxKey; key++ {
		request := kmsg.RequestForKey(key)
		if request == nil {
			continue
		}
		for version := int16(0); version <= request.MaxVersion(); version++ {
			request.SetVersion(version)
			if got := Flexible(key, version); got != request.IsFlexible() {
				t.Errorf("Flexible(%s v%d) = %v, want %v", apiName(key), version, got, request.IsFlexible())
			}
		}
	}
	for _, key := range []int16{-1, kmsg.MaxKey + 1, 10500, 32767} {
		if Flexible(key, 5) {
			t.Errorf("Flexible(%d) = true, want false", key)
		}
	}
}

func TestFrameSizes(t *testing.T) {
	for _, tc := range []struct{ name, prefix, cause string }{
		{"a small request", "\x00\x00\x00\x08", ""},
		{"the limit", "\x06\x40\x00\x00", ""},
		{"above the limit", "\x06\x40\x00\x01", "larger than the limit of 104857600 bytes, or not a Kafka client"},
		{"a huge size", "\x7f\xff\xff\xff", "larger than the limit of 104857600 bytes, or not a Kafka client"},
		{"junk", "blah", "larger than the limit of 104857600 bytes, or not a Kafka client"},
		{"negative", "\xff\xff\xff\xff", "smaller than a request header: not a Kafka client"},
		{"zero", "\x00\x00\x00\x00", "smaller than a request header: not a Kafka client"},
		{"too small for a header", "\x00\x00\x00\x07", "smaller than a request header: not a Kafka client"},
		{"TLS hello", "\x16\x03\x01\x02", "a TLS hello: the client speaks TLS, this listener doesn't"},
		{"HTTP", "GET ", "an HTTP request, not a Kafka client"},
		{"PROXY protocol v1", "PROX", "a PROXY protocol header, which this listener doesn't expect"},
		{"PROXY protocol v2", "\r\n\r\n", "a PROXY protocol header, which this listener doesn't expect"},
	} {
		_, err := RequestSize([]byte(tc.prefix), 100<<20)
		var size *SizeError
		if errors.As(err, &size); (tc.cause == "") != (err == nil) || err != nil && size.Cause != tc.cause {
			t.Errorf("%s: RequestSize(%q) = %v, want cause %q", tc.name, tc.prefix, err, tc.cause)
		}
	}
	if cause := ForeignResponse([]byte("\x15\x03\x03\x00\x02\x02\x28")); cause != "a TLS alert: the broker speaks TLS, kmirror doesn't" {
		t.Errorf("ForeignResponse of a TLS alert = %q", cause)
	}
	for prefix, want := range map[string]string{
		"\x00\x00\x00\x1d\x00": "a Kafka client without TLS, which this listener speaks", "GET /": "an HTTP request, not a Kafka client", "PROXY": "a PROXY protocol header, which this listener doesn't expect",
		"\x16\x03\x01\xff\xff": "a damaged TLS record", "blah\n": "not a client that speaks TLS",
	} {
		if cause := ForeignToTLS([]byte(prefix)); cause != want {
			t.Errorf("ForeignToTLS(%q) = %q, want %q", prefix, cause, want)
		}
	}
	if _, err := ResponseSize([]byte{0, 0, 0, 3}); err == nil {
		t.Error("ResponseSize(3) = nil error")
	}
	if n, err := TokenSize([]byte{0, 0, 0, 0}, 100); n != 0 || err != nil {
		t.Errorf("TokenSize(0) = %d, %v, want 0", n, err)
	}
}

func TestCutVersionsAllocatesNothing(t *testing.T) {
	frame := responseFrame(apiVersionsResponse(4), rand.Int31())
	dst := make([]byte, 0, 2*len(frame))
	if n := testing.AllocsPerRun(100, func() { CutVersions(dst, frame, 4) }); n != 0 {
		t.Errorf("CutVersions allocates %v times, want 0", n)
	}
}
