package protocol

// The shape of a Produce request; * in flexible versions (9 and later) compact, with tagged fields at the end of each part.
//
//	header | transactional ID string* (v3-) | acks int16 | timeout int32 | topics [ name string* (-v12) or topic ID (v13)
//	       | partitions [ partition int32 | records bytes* ] ]
//
// and of the response:
//
//	header | topics [ name string* or topic ID | partitions [ partition int32 | error code int16 | base offset int64
//	       | log append time int64 (v2-) | log start offset int64 (v5-) | error records [ int32 | string* ] and error
//	         message string* (v8-) ] ] | throttle time int32 (v1-) | tag 0: node endpoints (v10-)
const (
	batchProduce   = 3 // earlier versions carry message sets, of formats v0 and v1
	topicIDProduce = 13
)

// ReadsProduce reports whether Produce requests and responses of this version are understood here.
func ReadsProduce(version int16) bool { return version >= 0 && version <= maxProduce }

// ProducesBatches reports whether Produce requests of this version carry record batches; those before carry message sets.
func ProducesBatches(version int16) bool { return version >= batchProduce && version <= maxProduce }

// ProduceAcks reads what a Produce request of any version asks for: acks, and whether it is part of a transaction. The frame may
// end early; ErrShort then asks for more of it, up to the whole.
func ProduceAcks(frame []byte, h RequestHeader) (acks int16, transactional bool, err error) {
	w := requestBody(frame, h)
	if h.APIVersion >= batchProduce {
		transactional = w.nullableString() != nil
	}
	acks = w.int16()
	if w.bad {
		return 0, false, ErrShort
	}
	return acks, transactional, nil
}

// ProduceRequest walks over the partitions of a Produce request, v0 to v13:
//
//	for r := NewProduceRequest(frame); r.Next(); {
//		r.Topic, r.Partition, r.Records …
//	}
//
// What it returns aliases the frame. After the last Next, Err tells whether the frame was whole.
type ProduceRequest struct {
	Topic     []byte // v0-12, else nil
	TopicID   TopicID
	Partition int32
	Records   []byte // a message set before v3; nil for null

	partitionWalk
}

// partitionWalk is the walk over topics and their partitions that requests and responses share.
type partitionWalk struct {
	w          walker
	version    int16
	topics     int // still to come
	partitions int // of the current topic still to come
	inTopic    bool
	done       bool
}

// NewProduceRequest begins the walk; frame must have at least RequestPrefix bytes.
func NewProduceRequest(frame []byte) ProduceRequest {
	h := ParseRequestHeader(frame)
	w := requestBody(frame, h)
	w.bad = w.bad || h.APIKey != KeyProduce || !ReadsProduce(h.APIVersion)
	if h.APIVersion >= batchProduce {
		w.nullableString() // transactional ID
	}
	w.skip(2 + 4)
	r := ProduceRequest{partitionWalk: partitionWalk{w: w, version: h.APIVersion}}
	r.topics = r.w.count(2)
	return r
}

// nextPartition stands before the next partition. It returns false at the end of the topics or of what is readable.
func (p *partitionWalk) nextPartition(topic *[]byte, id *TopicID, minPartition int) bool {
	for p.partitions == 0 {
		if p.inTopic {
			p.w.tags()
			p.inTopic = false
		}
		if p.topics == 0 || p.w.bad {
			return false
		}
		p.topics--
		p.inTopic = true
		if p.version >= topicIDProduce {
			*id = p.w.topicID()
		} else {
			*topic = p.w.string()
		}
		p.partitions = p.w.count(minPartition)
	}
	p.partitions--
	return !p.w.bad
}

// Next moves to the next partition; false at the end.
func (r *ProduceRequest) Next() bool {
	if r.done {
		return false
	}
	if r.nextPartition(&r.Topic, &r.TopicID, 5) {
		r.Partition = r.w.int32()
		r.Records = r.w.nullableBytes()
		r.w.tags()
		if !r.w.bad {
			return true
		}
	}
	r.w.tags()
	r.done = true
	return false
}

// Err is nil if the walk got to the end of a well-formed request.
func (r *ProduceRequest) Err() error { return r.w.err("Produce request", r.version) }

// ProduceResponse walks over the partitions of a Produce response, v0 to v13, as ProduceRequest does.
type ProduceResponse struct {
	Topic         []byte // v0-12, else nil
	TopicID       TopicID
	Partition     int32
	ErrorCode     int16
	BaseOffset    int64 // -1 on error
	LogAppendTime int64 // milliseconds; -1 if the batch kept the producer's timestamps, and before v2

	partitionWalk
	endpoints bool
}

// minAnswer is the size of the smallest partition in a Produce response, that of v0.
const minAnswer = 4 + 2 + 8

// NewProduceResponse begins the walk over a response frame.
func NewProduceResponse(frame []byte, version int16) ProduceResponse {
	w := responseBody(frame, KeyProduce, version)
	w.bad = w.bad || !ReadsProduce(version)
	r := ProduceResponse{partitionWalk: partitionWalk{w: w, version: version}}
	r.topics = r.w.count(2)
	return r
}

// Next moves to the next partition; false at the end.
func (r *ProduceResponse) Next() bool {
	if r.done {
		return false
	}
	if r.nextPartition(&r.Topic, &r.TopicID, minAnswer) {
		r.readPartition()
		if !r.w.bad {
			return true
		}
	}
	skipThrottleTime(&r.w, r.version)
	if r.w.flexible {
		for range r.w.tagCount() {
			tag := r.w.uvarint()
			r.w.skip(r.w.uvarint())
			r.endpoints = r.endpoints || tag == tagNodeEndpoints
			if r.w.bad {
				break
			}
		}
	}
	r.done = true
	return false
}

func (r *ProduceResponse) readPartition() {
	r.Partition = r.w.int32()
	r.ErrorCode = r.w.int16()
	r.BaseOffset = r.w.int64()
	r.LogAppendTime = -1
	if r.version >= 2 {
		r.LogAppendTime = r.w.int64()
	}
	skipProducePartition(&r.w, r.version)
}

// skipThrottleTime skips what ends a Produce response that isn't flexible.
func skipThrottleTime(w *walker, version int16) {
	if version >= 1 {
		w.skip(4)
	}
}

// skipProducePartition skips what follows the log append time in a partition of a Produce response.
func skipProducePartition(w *walker, version int16) {
	if version >= 5 {
		w.skip(8) // log start offset
	}
	if version >= 8 {
		for range w.count(5) {
			w.skip(4)
			w.nullableString()
			w.tags()
			if w.bad {
				return
			}
		}
		w.nullableString()
	}
	w.tags()
}

// Err is nil if the walk got to the end of a well-formed response.
func (r *ProduceResponse) Err() error { return r.w.err("Produce response", r.version) }

// NodeEndpoints reports, after the walk, whether the response carries broker addresses (KIP-951) and must go through Rewrite.
func (r *ProduceResponse) NodeEndpoints() bool { return r.endpoints }
