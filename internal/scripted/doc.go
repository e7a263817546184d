// Package scripted is a Kafka cluster in memory, for tests of rules that need a broker to do the wrong thing at the right moment.
//
// It listens on real loopback ports and speaks Kafka's protocol, so any client works with it. It follows Apache Kafka 4.3 in
// what exactly-once mirroring stands on: the idempotent-producer check and what its state survives, leader epochs and fencing, the
// high watermark, DescribeProducers from any replica, the order of requests on one connection. The package's fact tests run the
// same rows on a real broker. It is not a model of replication: a partition has one log, and the hooks say where replicas differ.
//
//	c := scripted.New(t, scripted.Options{Brokers: 3})
//	c.CreateTopic("orders", 6)
//	late := make(chan struct{})
//	c.InterceptNext(1, 0, nil, func(*scripted.Request) scripted.Action { return scripted.ApplyLate(late) }) // API key 0: Produce
//	… run kmirror against c.Seeds(); close(late); look at c.Records("orders", 0), c.Requests(0, nil), c.Producer(…) …
//
// # Script
//
// An Interceptor sees each request, decoded, before the broker works on it and chooses its Action:
//
//	Pass()                    as Kafka does
//	Delay(release)            wait, then apply and answer; what follows on the connection waits too
//	ApplyThenDelay(release)   apply now, answer later
//	ApplyThenDrop()           apply, then break the connection: an unknown outcome that did happen
//	DropBefore()              break the connection: an unknown outcome that did not happen
//	ApplyLate(release)        break the connection now, apply later: a late request
//	HoldForever()             neither apply nor answer
//	Fail(err)                 the error for every partition; FailPartition for one
//	Answer(resp), Edit(f)     another answer; the real one changed
//
// # Hooks
//
// Brokers: Freeze, Thaw, CatchUp, Kill, Restart, BreakConnections. Partitions: MoveLeader, UncleanElection, ReplaceReplica,
// HoldHighWatermark, ReleaseHighWatermark, DeleteRecords, AddPartitions, RecreateTopic, DeleteTopic, SetConfig. Producer state:
// Expire, Reload, ForgetProducers. Writers: Append, AppendForeign, AppendMarker, AppendHole. Transactions: HoldMarkers,
// ReleaseMarkers, ForgetTransactionalIDs. Groups: Commit, Committed, Expel. All may be called in the middle of traffic.
//
// # What differs from Kafka
//
// Records inside a batch aren't validated, and compression.type is not applied. Every Fetch is answered in full, without a fetch
// session. Replicas are all brokers and always in sync. Fetch is answered by the leader alone. There is no TLS, SASL, quota or
// authorizer.
package scripted
