package protocol

import (
	"encoding/binary"
	"slices"
)

// tagNodeEndpoints is the tagged field of Produce responses (v10 and later) that names new leaders' addresses (KIP-951).
const tagNodeEndpoints = 0

// AddressFunc says where clients reach the broker with this ID, whose address in the source cluster is host:port. ok false
// means nowhere: the address must not reach the client. It must not keep host, which aliases the frame.
type AddressFunc func(nodeID int32, host []byte, port int32) (clientHost string, clientPort int32, ok bool)

// Rewrites reports whether responses of this API and version carry broker addresses, always or at times, and so must go
// through Rewrite.
func Rewrites(key, version int16) bool {
	switch key {
	case KeyMetadata, KeyFindCoordinator, KeyDescribeCluster, KeyShareFetch, KeyShareAcknowledge:
		return true
	case KeyProduce:
		return version >= 10
	}
	return false
}

// Rewrite appends to dst the response with every broker address replaced by address(node ID). Only hosts, ports and the sizes
// around them change; node IDs and all else stay byte for byte. Where no address is known (node -1, host "" or port -1)
// nothing changes. A broker for which address returns false is left out of lists, and as a coordinator becomes
// COORDINATOR_NOT_AVAILABLE. For an API or version that Rewrites doesn't name, or that MaxVersion excludes, it is an error.
func Rewrite(dst, frame []byte, key, version int16, address AddressFunc) ([]byte, error) {
	c := copier{w: responseBody(frame, key, version), dst: dst, start: len(dst), address: address}
	if limit, ok := MaxVersion(key); !ok || version < 0 || version > limit {
		c.w.bad = true
	}
	switch key {
	case KeyProduce:
		c.produce(version)
	case KeyMetadata:
		c.metadata(version)
	case KeyFindCoordinator:
		c.findCoordinator(version)
	case KeyDescribeCluster:
		c.describeCluster(version)
	case KeyShareFetch:
		c.shareFetch(version)
	case KeyShareAcknowledge:
		c.shareAcknowledge(version)
	default:
		c.w.bad = true
	}
	return c.finish(key, version)
}

// copier walks over a response and copies it to dst, except for what is replaced on the way.
//
// Invariant: the bytes of w.b before from are in dst, or were replaced.
type copier struct {
	w       walker
	dst     []byte
	start   int // of this frame in dst
	from    int
	address AddressFunc
}

// copied copies what was walked over since the last call.
func (c *copier) copied() {
	c.dst = append(c.dst, c.w.b[c.from:c.w.at]...)
	c.from = c.w.at
}

// replaced leaves out what was walked over since the last call.
func (c *copier) replaced() { c.from = c.w.at }

// finish copies the rest and sets the frame's size. dst is returned unchanged with an error.
func (c *copier) finish(key, version int16) ([]byte, error) {
	if c.w.bad {
		return c.dst[:c.start], c.w.err(apiName(key)+" response", version)
	}
	c.w.at = len(c.w.b)
	c.copied()
	binary.BigEndian.PutUint32(c.dst[c.start:], uint32(len(c.dst)-c.start-SizePrefix))
	return c.dst, nil
}

// array walks over an array and keeps the elements for which element returns true; its count changes only if one is left out.
func (c *copier) array(minSize int, element func() bool) {
	c.copied()
	at := len(c.dst)
	total, kept := c.w.count(minSize), 0
	c.copied() // the count, as it was
	end := len(c.dst)
	for range total {
		mark := len(c.dst)
		if element() {
			kept++
			c.copied()
		} else {
			c.dst = c.dst[:mark]
			c.replaced()
		}
		if c.w.bad {
			return
		}
	}
	if kept < total {
		var count [10]byte
		c.dst = slices.Replace(c.dst, at, end, appendCount(count[:0], kept, c.w.flexible)...)
	}
}

// endpoint walks over node ID, host and port, in which all messages agree, and replaces the latter two. It returns false if
// the broker must be left out.
func (c *copier) endpoint() bool {
	nodeID := c.w.int32()
	c.copied()
	host := c.w.string()
	port := c.w.int32()
	if c.w.bad || len(host) == 0 {
		return true // the caller finds bad; without a host there is nothing to hide (Kafka's Node.noNode)
	}
	clientHost, clientPort, ok := c.address(nodeID, host, port)
	if !ok {
		return false
	}
	c.replaced()
	c.dst = appendString(c.dst, clientHost, c.w.flexible)
	c.dst = appendInt32(c.dst, clientPort)
	return true
}

// nodeEndpoints walks over an array of node ID, host, port, rack.
func (c *copier) nodeEndpoints() {
	c.array(10, func() bool {
		ok := c.endpoint()
		c.w.nullableString() // rack
		c.w.tags()
		return ok
	})
}

func (c *copier) metadata(version int16) {
	w := &c.w
	if version >= 3 {
		w.skip(4) // throttle time
	}
	c.array(10, func() bool {
		ok := c.endpoint()
		if version >= 1 {
			w.nullableString() // rack
		}
		w.tags()
		return ok
	})
	if version >= 2 {
		w.nullableString() // cluster ID
	}
	if version >= 1 {
		w.skip(4) // controller ID
	}
	for range w.count(7) {
		if skipMetadataTopic(w, version); w.bad {
			return
		}
	}
	if version >= 8 && version <= 10 {
		w.skip(4) // authorized operations
	}
	if version >= 13 {
		w.skip(2) // error code
	}
	w.tags()
}

// MetadataTopics calls each with the topics that a Metadata response names by both name and ID (v10 and later); both alias frame. It stops where the
// frame can't be read.
func MetadataTopics(frame []byte, version int16, each func(name []byte, id TopicID)) {
	if limit, _ := MaxVersion(KeyMetadata); version < 10 || version > limit {
		return
	}
	w := responseBody(frame, KeyMetadata, version)
	w.skip(4) // throttle time
	for range w.count(10) {
		w.skip(4) // node ID
		w.string()
		w.skip(4) // port
		w.nullableString()
		w.tags()
	}
	w.nullableString() // cluster ID
	w.skip(4)          // controller ID
	for range w.count(7) {
		topic := w
		topic.skip(2)
		name, id := topic.nullableString(), topic.topicID()
		if skipMetadataTopic(&w, version); w.bad {
			return
		}
		if len(name) > 0 && id != (TopicID{}) {
			each(name, id)
		}
	}
}

func skipMetadataTopic(w *walker, version int16) {
	w.skip(2)
	w.nullableString()
	if version >= 10 {
		w.skip(16)
	}
	if version >= 1 {
		w.skip(1) // internal
	}
	for range w.count(12) {
		w.skip(2 + 4 + 4)
		if version >= 7 {
			w.skip(4) // leader epoch
		}
		w.int32s() // replicas
		w.int32s() // in-sync replicas
		if version >= 5 {
			w.int32s() // offline replicas
		}
		if w.tags(); w.bad {
			return
		}
	}
	if version >= 8 {
		w.skip(4) // authorized operations
	}
	w.tags()
}

func (c *copier) findCoordinator(version int16) {
	w := &c.w
	if version >= 1 {
		w.skip(4) // throttle time
	}
	if version <= 3 {
		c.copied()
		errorAt := len(c.dst)
		w.skip(2)
		if version >= 1 {
			w.nullableString()
		}
		if !c.endpoint() {
			c.noCoordinator()
			binary.BigEndian.PutUint16(c.dst[errorAt:], uint16(codeCoordinatorNotAvailable))
		}
		w.tags()
		return
	}
	c.array(13, func() bool {
		w.string() // key
		if c.endpoint() {
			w.skip(2)
		} else {
			c.noCoordinator()
			w.skip(2)
			c.replaced()
			c.dst = appendInt16(c.dst, codeCoordinatorNotAvailable)
		}
		w.nullableString() // error message
		w.tags()
		return true
	})
	w.tags()
}

// noCoordinator replaces an endpoint that endpoint refused by Kafka's Node.noNode.
func (c *copier) noCoordinator() {
	c.replaced()
	c.dst = appendInt32(c.dst[:len(c.dst)-4], -1)
	c.dst = appendString(c.dst, "", c.w.flexible)
	c.dst = appendInt32(c.dst, -1)
}

// endpointTypeBrokers is the endpoint type of brokers in DescribeCluster v1 and later; 2 is controllers, for which no
// listener stands, so that they are left out (KIP-919).
const endpointTypeBrokers = 1

func (c *copier) describeCluster(version int16) {
	w := &c.w
	w.skip(4 + 2) // throttle time, error code
	w.nullableString()
	endpointType := int8(endpointTypeBrokers)
	if version >= 1 {
		endpointType = w.int8()
	}
	w.string() // cluster ID
	w.skip(4)  // controller ID
	c.array(11, func() bool {
		ok := c.endpoint()
		w.nullableString() // rack
		if version >= 2 {
			w.skip(1) // fenced
		}
		w.tags()
		return ok && endpointType == endpointTypeBrokers
	})
	w.skip(4) // authorized operations
	w.tags()
}

func (c *copier) shareFetch(version int16) {
	w := &c.w
	w.skip(4 + 2) // throttle time, error code
	w.nullableString()
	if version >= 1 {
		w.skip(4) // acquisition lock timeout
	}
	skipShareTopics(w, func() {
		w.skip(4 + 2) // partition, error code
		w.nullableString()
		w.skip(2) // acknowledge error code
		w.nullableString()
		w.skip(4 + 4) // current leader
		w.tags()
		w.nullableBytes() // records
		for range w.count(19) {
			w.skip(8 + 8 + 2)
			if w.tags(); w.bad {
				return
			}
		}
	})
	c.nodeEndpoints()
	w.tags()
}

func (c *copier) shareAcknowledge(version int16) {
	w := &c.w
	w.skip(4 + 2) // throttle time, error code
	w.nullableString()
	if version >= 2 {
		w.skip(4) // acquisition lock timeout
	}
	skipShareTopics(w, func() {
		w.skip(4 + 2) // partition, error code
		w.nullableString()
		w.skip(4 + 4) // current leader
		w.tags()
	})
	c.nodeEndpoints()
	w.tags()
}

// skipShareTopics skips topics by ID and their partitions, of which partition skips all but the tags.
func skipShareTopics(w *walker, partition func()) {
	for range w.count(18) {
		w.skip(16)
		for range w.count(9) {
			partition()
			if w.tags(); w.bad {
				return
			}
		}
		if w.tags(); w.bad {
			return
		}
	}
}

// produce replaces the addresses in the node endpoints of a Produce response; without any it's a copy.
func (c *copier) produce(version int16) {
	r := ProduceResponse{partitionWalk: partitionWalk{w: c.w, version: version}}
	r.w.bad = r.w.bad || !ReadsProduce(version)
	r.topics = r.w.count(2)
	for r.nextPartition(&r.Topic, &r.TopicID, minAnswer) {
		r.readPartition()
	}
	c.w = r.w
	skipThrottleTime(&c.w, version)
	if !c.w.flexible {
		return
	}
	for range c.w.tagCount() {
		tag := c.w.uvarint()
		c.copied()
		size := c.w.uvarint()
		if tag != tagNodeEndpoints || version < 10 {
			c.w.skip(size)
		} else {
			c.taggedEndpoints(size)
		}
		if c.w.bad {
			return
		}
	}
}

// taggedEndpoints rewrites the content of a tagged field of size bytes, and its size.
func (c *copier) taggedEndpoints(size int) {
	c.replaced()
	sizeAt := len(c.dst)
	whole, end := c.w.b, c.w.at+size
	if c.w.bad || size > len(whole)-c.w.at {
		c.w.bad = true
		return
	}
	c.w.b = whole[:end]
	c.nodeEndpoints()
	if c.w.bad {
		c.w.b = whole
		return
	}
	c.w.at = end
	c.copied()
	c.w.b = whole
	var prefix [10]byte
	c.dst = slices.Insert(c.dst, sizeAt, binary.AppendUvarint(prefix[:0], uint64(len(c.dst)-sizeAt))...)
}
