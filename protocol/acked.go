package protocol

// TopicID is Kafka's topic ID (KIP-516), a UUID in network byte order. The zero value means unknown.
type TopicID [16]byte

// Releaser ends one ownership of the memory behind a batch; see internal/bufpool.
type Releaser interface{ Release() }

// AckedBatch is one record batch that the source cluster acknowledged with acks=all and no error.
type AckedBatch struct {
	Topic      string  // "" where the request named the topic by ID only (Produce v13)
	TopicID    TopicID // zero where the request named the topic by name only (Produce v0-12)
	Partition  int32
	BaseOffset int64 // as the source assigned it, >= 0
	// Batch is the batch as the producer sent it, with the producer's own base offset. The owner may change it in place.
	Batch Batch
	// Memory holds Batch; the owner calls Release once.
	Memory Releaser
}
