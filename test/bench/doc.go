// Package bench measures kmirror side by side with what else could do its work, on real clusters, each peer after the other and
// again, in one run. It is no guard against regressions: figures are for people, and no test here fails for being slow.
//
//	make bench                                                        everything, about half an hour
//	go test ./test/bench -run 'TestBench/catch-up' -v -timeout 1h -kmirror.bench -kmirror.bench.json figures.json
//
// The parts are:
//   - catch-up: kmirror, a naive copy of raw batches (naive/) and MirrorMaker 2 each fill an empty mirror from a full source;
//   - produce: ProducerPerformance straight to the source, through a plain TCP relay (relay/), and through kmirror;
//   - ack-latency: the time from send to acknowledgement over the same routes, at 1,000 records a second;
//   - replication: the time from an acknowledgement to the record's being readable on the mirror, at 1,000 records a second;
//   - idle: processor time, goroutines and memory with 2,000 quiet partitions.
//
// Everything shares one machine, so a throughput includes the competition for its cores: read it with the processor times, and
// ratios rather than figures. Another machine's, or a busy one's, can't be compared.
package bench
