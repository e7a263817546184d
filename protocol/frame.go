package protocol

import (
	"encoding/binary"
	"fmt"
)

const (
	// SizePrefix is the number of bytes before a frame that say its size; they don't count themselves.
	SizePrefix = 4
	// RequestPrefix is what the proxy reads of any request: size, API key, API version, correlation ID.
	RequestPrefix = SizePrefix + 8
	// ResponsePrefix is what the proxy reads of any response: size, correlation ID.
	ResponsePrefix = SizePrefix + 4
)

// RequestSize reads the four bytes before a request and returns the number of bytes that follow, between 8 and limit.
// Anything else is a *SizeError.
func RequestSize(prefix []byte, limit int) (int, error) {
	size := int32(binary.BigEndian.Uint32(prefix))
	switch {
	case size > int32(min(limit, 1<<31-1)):
		cause := foreign(prefix, "client", "this listener")
		if cause == "" {
			cause = fmt.Sprintf("larger than the limit of %d bytes, or not a Kafka client", limit)
		}
		return 0, &SizeError{Size: size, Cause: cause}
	case size < RequestPrefix-SizePrefix:
		return 0, &SizeError{Size: size, Cause: "smaller than a request header: not a Kafka client"}
	}
	return int(size), nil
}

// ResponseSize reads the four bytes before a response and returns the number of bytes that follow, at least 4.
// Anything else is a *SizeError.
func ResponseSize(prefix []byte) (int, error) {
	size := int32(binary.BigEndian.Uint32(prefix))
	if size < ResponsePrefix-SizePrefix {
		cause := foreign(prefix, "broker", "kmirror")
		if cause == "" {
			cause = "smaller than a response header: not a Kafka broker"
		}
		return 0, &SizeError{Size: size, Cause: cause}
	}
	return int(size), nil
}

// TokenSize reads the four bytes before a raw SASL token, which has no header and may be empty.
func TokenSize(prefix []byte, limit int) (int, error) {
	size := int32(binary.BigEndian.Uint32(prefix))
	if size < 0 || int(size) > limit {
		return 0, &SizeError{Size: size, Cause: "not the size of a SASL token"}
	}
	return int(size), nil
}

// ForeignResponse names what else than Kafka the first bytes from a broker are; "" if it can't tell. A TLS alert of seven
// bytes ends before a response header does, so fewer than eight bytes are enough.
func ForeignResponse(b []byte) string {
	if len(b) < SizePrefix {
		return ""
	}
	return foreign(b, "broker", "kmirror")
}

// ForeignToTLS names what else than a TLS handshake the first bytes from a client are, at least SizePrefix of them.
func ForeignToTLS(b []byte) string {
	if b[1] == 3 && (b[0] == 0x15 || b[0] == 0x16) {
		return "a damaged TLS record"
	}
	if cause := foreign(b, "client", "this listener"); cause != "" {
		return cause
	}
	if b[0] == 0 && b[1] < 16 { // the size of a request of less than a mebibyte
		return "a Kafka client without TLS, which this listener speaks"
	}
	return "not a client that speaks TLS"
}

// foreign recognises other protocols by the four bytes where a frame has its size.
func foreign(prefix []byte, peer, us string) string {
	if prefix[0] == 0x16 && prefix[1] == 0x03 {
		return "a TLS hello: the " + peer + " speaks TLS, " + us + " doesn't"
	}
	if prefix[0] == 0x15 && prefix[1] == 0x03 {
		return "a TLS alert: the " + peer + " speaks TLS, " + us + " doesn't"
	}
	switch string(prefix[:4]) {
	case "GET ", "POST", "PUT ", "HEAD", "OPTI", "DELE", "PATC", "CONN", "TRAC", "PRI ":
		return "an HTTP request, not a Kafka client"
	case "HTTP":
		return "an HTTP response: the " + peer + " is a web server"
	case "SSH-":
		return "SSH, not Kafka"
	case "PROX", "\r\n\r\n":
		return "a PROXY protocol header, which " + us + " doesn't expect"
	}
	return ""
}
