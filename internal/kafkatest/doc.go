// Package kafkatest gives tests Kafka clusters to talk to: kfake inside the test process, and Apache Kafka as processes
// of its own on ports and folders of its own, whose brokers a test can stop, kill, freeze and start again.
//
// It is not a mock: nothing here stands in for kmirror's own code, and nothing here is used outside tests.
//
//	kafkatest.Each(t, func(t *testing.T, c kafkatest.Cluster) { … })       // the same test on both kinds
//	source := kafkatest.Real(t, kafkatest.Brokers(3), kafkatest.Config("min.insync.replicas", "2"))
//	kafkatest.CreateTopic(t, source, "orders", 6, 3)
//	source.Broker(2).Kill(t)                                               // kill -9; Start brings it back
//	kafkatest.WaitEqual(t, source, mirror, "orders", time.Minute)
//
// The first real cluster on a machine needs Java 17, Maven and its package registry: the jars that kafka/pom.xml names are
// copied to .cache/kafka under the repository's root, together with an archive of loaded classes that cuts a broker's
// start from 3 s to 1 s. Without Java or Maven such a test is skipped; with CI=true in the environment it fails.
//
// Environment: KMIRROR_KAFKA_LOG sets the brokers' log level (warn; info and debug say more), KMIRROR_KEEP=1 keeps the
// folders of real clusters.
package kafkatest
