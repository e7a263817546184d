// Package forwarder copies record batches from the source cluster to the mirror cluster, each once, in source order.
//
// It takes what the proxy offers as the source acknowledged it (live) and reads what it wasn't offered from the source log
// (catch-up). It is not a Kafka client library: it speaks raw Produce, Fetch and DescribeProducers on connections of its own,
// because exactly once depends on what is sent on which connection and on nothing being resent behind its back.
//
//	f, err := forwarder.New(options) // starts nothing
//	go f.Run(ctx)                    // until ctx ends; drains, commits the checkpoint, leaves the group
//	f.Offer(batch)                   // by the proxy, any goroutine, never blocks
//
// One goroutine, the loop in forwarder.go, owns every stream's state; all I/O happens elsewhere and comes back as an event. What a
// stream does with a batch is decided by the pure partition in partition.go. The rules are named N, S, R and T, and the facts about brokers
// that they rest on F, as in docs/guarantees.md.
package forwarder
