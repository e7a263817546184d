package protocol

import (
	"encoding/binary"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// API keys of the requests that kmirror looks into.
const (
	KeyProduce          = int16(kmsg.Produce)
	KeyFetch            = int16(kmsg.Fetch)
	KeyMetadata         = int16(kmsg.Metadata)
	KeyFindCoordinator  = int16(kmsg.FindCoordinator)
	KeySASLHandshake    = int16(kmsg.SASLHandshake)
	KeyAPIVersions      = int16(kmsg.ApiVersions)
	KeySASLAuthenticate = int16(kmsg.SASLAuthenticate)
	KeyDescribeCluster  = int16(kmsg.DescribeCluster)
	KeyShareFetch       = int16(kmsg.ShareFetch)
	KeyShareAcknowledge = int16(kmsg.ShareAcknowledge)
)

// RequestHeader is what every request begins with.
//
//	0 size  int32 | 4 API key  int16 | 6 API version  int16 | 8 correlation ID  int32
//	12 client ID, nullable string with an int16 length, also in flexible versions (header v1 and v2)
//	then in header v2 (flexible versions): tagged fields
type RequestHeader struct {
	APIKey        int16
	APIVersion    int16
	CorrelationID int32
}

// ParseRequestHeader reads the first RequestPrefix bytes of a frame, which must be there.
func ParseRequestHeader(frame []byte) RequestHeader {
	_ = frame[RequestPrefix-1]
	return RequestHeader{
		APIKey:        int16(binary.BigEndian.Uint16(frame[4:])),
		APIVersion:    int16(binary.BigEndian.Uint16(frame[6:])),
		CorrelationID: int32(binary.BigEndian.Uint32(frame[8:])),
	}
}

// CorrelationID reads the first ResponsePrefix bytes of a response frame, which must be there.
func CorrelationID(frame []byte) int32 {
	return int32(binary.BigEndian.Uint32(frame[SizePrefix:]))
}

// flexibleFrom has the first flexible version of each API key that kmsg knows.
var flexibleFrom = func() (from [kmsg.MaxKey + 1]int16) {
	for key := range from {
		from[key] = 1<<15 - 1
		request := kmsg.RequestForKey(int16(key))
		if request == nil {
			continue
		}
		for version := int16(0); version <= request.MaxVersion(); version++ {
			if request.SetVersion(version); request.IsFlexible() {
				from[key] = version
				break
			}
		}
	}
	return from
}()

// Flexible reports whether requests and responses of this API and version are flexible (KIP-482), so that request headers are
// v2 and response headers v1. For APIs that kmsg doesn't know it says no.
func Flexible(key, version int16) bool {
	return key >= 0 && int(key) < len(flexibleFrom) && version >= flexibleFrom[key]
}

// requestBody returns a walker behind the header of a request.
func requestBody(frame []byte, h RequestHeader) walker {
	w := walker{b: frame}
	w.skip(RequestPrefix)
	w.nullableString() // the client ID is never compact
	w.flexible = Flexible(h.APIKey, h.APIVersion)
	w.tags()
	return w
}

// responseBody returns a walker behind the header of a response.
func responseBody(frame []byte, key, version int16) walker {
	w := walker{b: frame, flexible: Flexible(key, version)}
	w.bad = len(frame) < ResponsePrefix || int(binary.BigEndian.Uint32(frame)) != len(frame)-SizePrefix
	w.skip(ResponsePrefix)
	// ApiVersions responses keep header v0 in flexible versions, so that a client that asks in a version the broker doesn't
	// know can read the answer (KIP-511).
	if key != KeyAPIVersions {
		w.tags()
	}
	return w
}

// apiName is Kafka's name of an API, for errors.
func apiName(key int16) string { return kmsg.NameForKey(key) }

// SASLMechanism reads the mechanism that a SaslHandshake request asks for; "" if it can't.
func SASLMechanism(frame []byte) string {
	w := requestBody(frame, ParseRequestHeader(frame))
	return string(w.string())
}

// SASLHandshakeAccepted reports whether a SaslHandshake response says that the mechanism is taken.
func SASLHandshakeAccepted(frame []byte) bool {
	code, ok := SASLHandshakeCode(frame)
	return ok && code == 0
}

// SASLHandshakeCode reads the error code of a SaslHandshake response; false if it can't.
func SASLHandshakeCode(frame []byte) (code int16, ok bool) {
	w := responseBody(frame, KeySASLHandshake, 0)
	code = w.int16()
	return code, !w.bad
}

// SASLToken reads the token of a SaslAuthenticate request, aliasing frame; nil if it can't.
func SASLToken(frame []byte) []byte {
	w := requestBody(frame, ParseRequestHeader(frame))
	return w.nullableBytes()
}

// SASLAuthenticateAnswer reads the error code and the token of a SaslAuthenticate response, which aliases frame; false if it can't.
func SASLAuthenticateAnswer(frame []byte, version int16) (code int16, token []byte, ok bool) {
	w := responseBody(frame, KeySASLAuthenticate, version)
	code = w.int16()
	w.nullableString() // error message
	token = w.nullableBytes()
	return code, token, !w.bad
}
