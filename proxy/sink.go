package proxy

import "kmirror/protocol"

// Sink takes what the source cluster answered to producers. No method blocks; all are safe for concurrent use.
type Sink interface {
	// Offer hands over a record batch that the source acknowledged with acks=all. After true the sink owns b's memory.
	// After false it kept nothing and will read that offset range from the source log.
	Offer(b protocol.AckedBatch) bool
	// Grown says that the partition's log on the source reaches at least end (an acknowledged batch that can't be offered:
	// acks=1, transactional, old format), so that the catch-up path needn't wait for its next look.
	Grown(topic string, topicID protocol.TopicID, partition int32, end int64)
	// Doubt says that a Produce answer named UNKNOWN_TOPIC_OR_PARTITION, UNKNOWN_TOPIC_ID or NOT_LEADER_OR_FOLLOWER: the topic may
	// have been recreated or the source's log truncated, so nothing more of it is believed before the source was asked.
	Doubt(topic string, topicID protocol.TopicID, partition int32)
}
