package protocol

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand"
	"reflect"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"
)

func newProduceRequest(version int16) *kmsg.ProduceRequest {
	request := kmsg.NewPtrProduceRequest()
	request.Version = version
	return request
}

func TestProduceAcksInEveryVersionAndHeader(t *testing.T) {
	long := strings.Repeat("c", 32767)
	txn := strings.Repeat("t", 200)
	clients := []*string{nil, kmsg.StringPtr(""), kmsg.StringPtr("client"), &long}
	transactions := []*string{nil, kmsg.StringPtr(""), kmsg.StringPtr("x"), &txn}
	for version := int16(0); version <= maxProduce; version++ {
		for _, client := range clients {
			for _, id := range transactions {
				for _, tags := range []int{0, 2} {
					for _, acks := range []int16{0, 1, -1} {
						request := newProduceRequest(version)
						request.Acks, request.TransactionID = acks, id
						frame := requestFrame(request, 9, client, tags)
						got, transactional, err := ProduceAcks(frame, ParseRequestHeader(frame))
						if err != nil || got != acks || transactional != (id != nil && version >= 3) {
							t.Fatalf("v%d: ProduceAcks(%.60x) = %d, %v, %v, want %d, %v", version, frame, got, transactional, err, acks, id != nil && version >= 3)
						}
					}
				}
			}
		}
	}
}

func TestProduceAcksAsksForMore(t *testing.T) {
	request := newProduceRequest(9)
	request.Acks = -1
	frame := requestFrame(request, 9, kmsg.StringPtr("client"), 2)
	h := ParseRequestHeader(frame)
	enough := 0
	for n := RequestPrefix; n <= len(frame); n++ {
		acks, _, err := ProduceAcks(frame[:n], h)
		switch {
		case err == nil && acks != -1:
			t.Fatalf("ProduceAcks of %d of %d bytes = %d, want -1", n, len(frame), acks)
		case err == nil && enough == 0:
			enough = n
		case err != nil && enough > 0:
			t.Fatalf("ProduceAcks of %d bytes = %v after %d were enough", n, err, enough)
		case err != nil && err != ErrShort:
			t.Fatalf("ProduceAcks of %d bytes = %v, want ErrShort", n, err)
		}
	}
	if enough == 0 {
		t.Fatal("ProduceAcks of a whole frame failed")
	}
}

// walkRequest lists what ProduceRequest walks over.
func walkRequest(frame []byte) (list []string, err error) {
	r := NewProduceRequest(frame)
	for r.Next() {
		list = append(list, fmt.Sprintf("%q %x %d %v %x", r.Topic, r.TopicID, r.Partition, r.Records == nil, r.Records))
	}
	return list, r.Err()
}

// kmsgRequest lists the same by kmsg.
func kmsgRequest(request *kmsg.ProduceRequest) (list []string) {
	for _, topic := range request.Topics {
		for _, p := range topic.Partitions {
			name, id := topic.Topic, topic.TopicID
			if request.Version >= topicIDProduce {
				name = ""
			} else {
				id = [16]byte{}
			}
			list = append(list, fmt.Sprintf("%q %x %d %v %x", name, id, p.Partition, p.Records == nil, p.Records))
		}
	}
	return list
}

func TestProduceRequestAgreesWithKmsg(t *testing.T) {
	r := rand.New(rand.NewSource(1))
	for version := int16(0); version <= maxProduce; version++ {
		for i := range 200 {
			request := newProduceRequest(version)
			fill(r, reflect.ValueOf(request).Elem())
			frame := requestFrame(request, 9, kmsg.StringPtr("client"), r.Intn(3))
			got, err := walkRequest(frame)
			if want := kmsgRequest(request); err != nil || !reflect.DeepEqual(got, want) {
				t.Fatalf("v%d: walk over %x\n got %v, %v\nwant %v", version, frame, got, err, want)
			}
			for n := RequestPrefix; i < 20 && n < len(frame); n++ {
				if _, err := walkRequest(frame[:n]); !errors.Is(err, ErrMalformed) {
					t.Fatalf("v%d: walk over %d of %d bytes = %v, want ErrMalformed", version, n, len(frame), err)
				}
			}
		}
	}
}

// walkResponse lists what ProduceResponse walks over.
func walkResponse(frame []byte, version int16) (list []string, endpoints bool, err error) {
	r := NewProduceResponse(frame, version)
	for r.Next() {
		list = append(list, fmt.Sprintf("%q %x %d error %d at %d, %d", r.Topic, r.TopicID, r.Partition, r.ErrorCode, r.BaseOffset, r.LogAppendTime))
	}
	return list, r.NodeEndpoints(), r.Err()
}

// kmsgResponse lists the same by kmsg.
func kmsgResponse(response *kmsg.ProduceResponse) (list []string) {
	for _, topic := range response.Topics {
		for _, p := range topic.Partitions {
			name, id := topic.Topic, topic.TopicID
			if response.Version >= topicIDProduce {
				name = ""
			} else {
				id = [16]byte{}
			}
			appended := p.LogAppendTime
			if response.Version < 2 {
				appended = -1
			}
			list = append(list, fmt.Sprintf("%q %x %d error %d at %d, %d", name, id, p.Partition, p.ErrorCode, p.BaseOffset, appended))
		}
	}
	return list
}

func TestProduceResponseAgreesWithKmsg(t *testing.T) {
	r := rand.New(rand.NewSource(2))
	for version := int16(0); version <= maxProduce; version++ {
		for i := range 200 {
			response := filledResponse(r, KeyProduce, version).(*kmsg.ProduceResponse)
			frame := responseFrame(response, 9)
			got, endpoints, err := walkResponse(frame, version)
			if want := kmsgResponse(response); err != nil || !reflect.DeepEqual(got, want) {
				t.Fatalf("v%d: walk over %x\n got %v, %v\nwant %v", version, frame, got, err, want)
			}
			if want := version >= 9 && len(response.Brokers) > 0; endpoints != want {
				t.Fatalf("v%d: NodeEndpoints = %v, want %v", version, endpoints, want)
			}
			for n := 0; i < 20 && n < len(frame); n++ {
				prefix := bytes.Clone(frame[:n])
				if n >= 4 {
					binary.BigEndian.PutUint32(prefix, uint32(n-4))
				}
				if _, _, err := walkResponse(prefix, version); !errors.Is(err, ErrMalformed) {
					t.Fatalf("v%d: walk over %d of %d bytes = %v, want ErrMalformed", version, n, len(frame), err)
				}
			}
		}
	}
}

func TestDoubtfulCodes(t *testing.T) {
	for code := int16(-1); code < 150; code++ {
		if got, want := DoubtfulCode(code), code == 3 || code == 6 || code == 100; got != want {
			t.Errorf("DoubtfulCode(%d) = %v, want %v", code, got, want)
		}
	}
}

// produceFrames returns a request and a response of n partitions with records of size bytes.
func produceFrames(version int16, n, size int) (request, response []byte) {
	in := newProduceRequest(version)
	in.Acks = -1
	out := newResponse(KeyProduce, version).(*kmsg.ProduceResponse)
	inTopic, outTopic := kmsg.ProduceRequestTopic{Topic: "orders"}, kmsg.ProduceResponseTopic{Topic: "orders"}
	for p := range int32(n) {
		inTopic.Partitions = append(inTopic.Partitions, kmsg.ProduceRequestTopicPartition{Partition: p,
			Records: randomBatch(rand.New(rand.NewSource(1)), size)})
		outPartition := kmsg.NewProduceResponseTopicPartition()
		outPartition.Partition, outPartition.BaseOffset = p, 1000
		outTopic.Partitions = append(outTopic.Partitions, outPartition)
	}
	in.Topics, out.Topics = append(in.Topics, inTopic), append(out.Topics, outTopic)
	return requestFrame(in, 9, kmsg.StringPtr("producer-1"), 0), responseFrame(out, 9)
}

func TestProduceWalksAllocateNothing(t *testing.T) {
	request, response := produceFrames(11, 10, 1000)
	walk := func() {
		h := ParseRequestHeader(request)
		if _, _, err := ProduceAcks(request, h); err != nil {
			t.Fatal(err)
		}
		in := NewProduceRequest(request)
		for in.Next() {
		}
		out := NewProduceResponse(response, h.APIVersion)
		for out.Next() {
		}
		if in.Err() != nil || out.Err() != nil {
			t.Fatal(in.Err(), out.Err())
		}
	}
	if n := testing.AllocsPerRun(100, walk); n != 0 {
		t.Errorf("walks over Produce allocate %v times, want 0", n)
	}
}

func BenchmarkProduceWalk(b *testing.B) {
	request, response := produceFrames(11, 1, 1000)
	b.ReportAllocs()
	b.SetBytes(int64(len(request)))
	for b.Loop() {
		h := ParseRequestHeader(request)
		ProduceAcks(request, h)
		in := NewProduceRequest(request)
		for in.Next() {
		}
		out := NewProduceResponse(response, h.APIVersion)
		for out.Next() {
		}
	}
}
