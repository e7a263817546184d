package protocol

import (
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kerr"
)

var (
	// ErrMalformed says that a frame isn't what its API key and version promise. Nothing of it may be passed on as understood.
	ErrMalformed = errors.New("malformed frame")
	// ErrShort says that a frame's beginning ends before what was looked for: ask again with more of it.
	ErrShort = errors.New("more of the frame is needed")
)

// Error codes that the proxy acts on.
var (
	codeUnsupportedVersion      = kerr.UnsupportedVersion.Code
	codeCoordinatorNotAvailable = kerr.CoordinatorNotAvailable.Code
	codeUnknownTopicOrPartition = kerr.UnknownTopicOrPartition.Code
	codeUnknownTopicID          = kerr.UnknownTopicID.Code
	codeNotLeaderOrFollower     = kerr.NotLeaderForPartition.Code
)

// DoubtfulCode reports whether a Produce answer with this error code puts the partition's identity or log in doubt: the topic
// may have been recreated (UNKNOWN_TOPIC_OR_PARTITION, UNKNOWN_TOPIC_ID) or the log truncated by a new leader
// (NOT_LEADER_OR_FOLLOWER).
func DoubtfulCode(code int16) bool {
	return code == codeUnknownTopicOrPartition || code == codeUnknownTopicID || code == codeNotLeaderOrFollower
}

// SizeError says why four bytes aren't the size of a Kafka frame.
type SizeError struct {
	Size  int32  // the four bytes read as a size
	Cause string // the likely cause, for a person
}

func (e *SizeError) Error() string {
	return fmt.Sprintf("frame size %d: %s", e.Size, e.Cause)
}

// ErrorName is Kafka's name of an error code.
func ErrorName(code int16) string {
	if e, ok := errors.AsType[*kerr.Error](kerr.ErrorForCode(code)); ok {
		return e.Message
	}
	return "NONE"
}
