package protocol

import "encoding/binary"

// The newest version of each API that this package parses. A test compares them with kmsg, so that a new version is a decision.
const (
	maxProduce          = 13
	maxFetch            = 15 // 16 brings broker addresses at the frame's end (KIP-951); up to 15 a Fetch streams unread
	maxMetadata         = 13
	maxFindCoordinator  = 6
	maxSASLHandshake    = 1
	maxAPIVersions      = 5
	maxDescribeCluster  = 2
	maxShareFetch       = 2
	maxShareAcknowledge = 2
)

// MaxVersion returns the newest version of an API that may pass; ok is false for APIs that pass in any version.
func MaxVersion(key int16) (version int16, ok bool) {
	switch key {
	case KeyProduce:
		return maxProduce, true
	case KeyFetch:
		return maxFetch, true
	case KeyMetadata:
		return maxMetadata, true
	case KeyFindCoordinator:
		return maxFindCoordinator, true
	case KeySASLHandshake:
		return maxSASLHandshake, true
	case KeyAPIVersions:
		return maxAPIVersions, true
	case KeyDescribeCluster:
		return maxDescribeCluster, true
	case KeyShareFetch:
		return maxShareFetch, true
	case KeyShareAcknowledge:
		return maxShareAcknowledge, true
	}
	return 0, false
}

// CutVersions appends to dst an ApiVersions response whose ranges end where MaxVersion does. Everything else is copied byte for
// byte: other APIs, unknown ones too, minimum versions, feature tags. An API whose minimum is above MaxVersion is left out.
//
// A broker that doesn't know the request's version refuses it in v0 form, and the client asks again on the same connection
// (KIP-511). A broker that does know a version above MaxVersion answers in a form that can't be read here; the client then gets
// the refusal in its place.
func CutVersions(dst, frame []byte, version int16) ([]byte, error) {
	switch {
	case apiVersionsRefused(frame):
		version = 0
	case version > maxAPIVersions && len(frame) >= ResponsePrefix:
		return appendRefusal(dst, CorrelationID(frame)), nil
	}
	c := copier{w: responseBody(frame, KeyAPIVersions, version), dst: dst, start: len(dst)}
	c.w.skip(2)
	c.array(6, func() bool {
		key := c.w.int16()
		minVersion := c.w.int16()
		limit, ok := MaxVersion(key)
		if ok && minVersion > limit {
			c.w.skip(2)
			c.w.tags()
			return false
		}
		c.copied()
		if highest := c.w.int16(); ok && highest > limit {
			c.replaced()
			c.dst = appendInt16(c.dst, limit)
		}
		c.w.tags()
		return true
	})
	if version >= 1 {
		c.w.skip(4)
	}
	c.w.tags()
	return c.finish(KeyAPIVersions, version)
}

// apiVersionsRefused reports whether an ApiVersions response says UNSUPPORTED_VERSION, in v0 form whatever version was asked.
func apiVersionsRefused(frame []byte) bool {
	return len(frame) >= ResponsePrefix+2 && int16(binary.BigEndian.Uint16(frame[ResponsePrefix:])) == codeUnsupportedVersion
}

// appendRefusal appends what a broker says that knows ApiVersions up to MaxVersion: v0 form, error UNSUPPORTED_VERSION, the range
// of ApiVersions alone.
func appendRefusal(dst []byte, correlationID int32) []byte {
	dst = appendInt32(dst, 4+2+4+6)
	dst = appendInt32(dst, correlationID)
	dst = appendInt16(dst, codeUnsupportedVersion)
	dst = appendInt32(dst, 1)
	dst = appendInt16(dst, KeyAPIVersions)
	dst = appendInt16(dst, 0)
	return appendInt16(dst, maxAPIVersions)
}
