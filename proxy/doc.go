// Package proxy stands between Kafka clients and the source cluster. It relays frames between one client connection and one
// broker connection, so that the broker sees each client as it is, rewrites the addresses of brokers to its own listeners, and
// shows the acknowledged record batches to a Sink. It isn't a client of its own: it sends no request that a client didn't
// send, holds no credentials, retries nothing and reorders nothing.
//
//	s, err := proxy.New(proxy.Options{Listen: "127.0.0.1:9092", Seeds: []string{"a:9092"}, BrokerPortBase: 9100, ...})
//	err = s.Run(ctx) // returns when ctx has ended and the last request in flight was answered
//
// A connection has two goroutines, conn.relayRequests and conn.relayResponses, each with a pipe: a read buffer that is
// borrowed while bytes flow and written from where it lies. They share a flight, the queue of requests that wait for an
// answer. docs/protocol.md lists what is parsed, cut and rewritten.
package proxy
