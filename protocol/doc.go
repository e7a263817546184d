// Package protocol knows the bytes of Kafka: frames, headers, record batches, and the few requests and responses that kmirror
// must understand to stand between a client and its cluster. It has no sockets, clocks or logs, and it isn't a codec: it walks
// bytes where they lie and changes as little of them as it can. Everything that it doesn't know is left alone.
//
//	size, err := protocol.RequestSize(prefix, limit)   // is this a Kafka frame at all?
//	h := protocol.ParseRequestHeader(frame)            // API key, version, correlation ID
//	acks, err := protocol.ProduceAcks(frame)           // will there be an answer?
//	out, err := protocol.Rewrite(out[:0], response, h.APIKey, h.APIVersion, address)
//	out, err = protocol.CutVersions(out[:0], response, h.APIVersion)
//
// A frame always means all of its bytes, the four of the size included. The formats are Kafka's message definitions
// (clients/src/main/resources/common/message in apache/kafka); the tests compare with package kmsg.
package protocol
