package scripted

import (
	"slices"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Request is one request that a broker received.
type Request struct {
	Broker        int32 // node ID
	Conn          int64 // serial number of the connection in the cluster
	ClientID      string
	Key, Version  int16
	CorrelationID int32
	Body          kmsg.Request // read only
	Applied       bool         // the broker worked on it; see Cluster.Requests
}

// Action is what happens to a request. The zero value is Pass.
type Action struct {
	before, after <-chan struct{}
	drop          drop
	skip          bool
	reply         kmsg.Response
	edit          func(kmsg.Response)
	fail          func(topic string, partition int32) *kerr.Error
}

type drop int8

const (
	keep      drop = iota
	dropFirst      // close the connection, then go on
	dropLast       // go on, then close the connection
)

// Pass lets the broker do as Kafka does.
func Pass() Action { return Action{} }

// Delay holds the request, and all that follow it on its connection, until release is closed; then it is applied and answered.
func Delay(release <-chan struct{}) Action { return Action{before: release} }

// ApplyThenDelay applies the request at once and holds the answer until release is closed.
func ApplyThenDelay(release <-chan struct{}) Action { return Action{after: release} }

// ApplyThenDrop applies the request and closes the connection instead of answering.
func ApplyThenDrop() Action { return Action{drop: dropLast} }

// DropBefore closes the connection without applying the request.
func DropBefore() Action { return Action{drop: dropFirst, skip: true} }

// ApplyLate closes the connection at once and applies the request when release is closed: a late request.
func ApplyLate(release <-chan struct{}) Action { return Action{drop: dropFirst, before: release} }

// HoldForever never applies and never answers the request; its connection stays open.
func HoldForever() Action { return Action{before: make(chan struct{})} }

// Fail answers with err for the request and every partition in it, applying nothing.
func Fail(err *kerr.Error) Action {
	return Action{fail: func(string, int32) *kerr.Error { return err }}
}

// FailPartition answers with err for one partition; what else the request holds is applied.
func FailPartition(topic string, partition int32, err *kerr.Error) Action {
	return Action{fail: func(t string, p int32) *kerr.Error {
		if t == topic && p == partition {
			return err
		}
		return nil
	}}
}

// Answer sends resp without applying the request; resp must be of the request's kind and version.
func Answer(resp kmsg.Response) Action { return Action{reply: resp} }

// Edit applies the request and lets f change the answer.
func Edit(f func(kmsg.Response)) Action { return Action{edit: f} }

// Interceptor decides about a request before the broker works on it. It runs on the request's connection without any lock
// held, so it may block and may call the cluster. Interceptors run in the order in which they were added; the first that
// doesn't say Pass decides.
type Interceptor func(r *Request) Action

type interceptor struct {
	id int
	f  Interceptor
}

// Intercept adds f; remove takes it away again.
func (c *Cluster) Intercept(f Interceptor) (remove func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nextIntercept++
	id := c.nextIntercept
	c.interceptors = append(c.interceptors, interceptor{id, f})
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.interceptors = slices.DeleteFunc(slices.Clone(c.interceptors), func(i interceptor) bool { return i.id == id })
	}
}

// InterceptNext has f decide about the next n requests of an API (by API key) that match accepts (nil: all) and passes all others.
// The returned channel yields each such request when it arrives.
func (c *Cluster) InterceptNext(n int, key int16, match func(*Request) bool, f Interceptor) <-chan *Request {
	seen := make(chan *Request, n)
	left := n
	c.Intercept(func(r *Request) Action {
		if r.Key != key || match != nil && !match(r) {
			return Pass()
		}
		c.mu.Lock()
		left--
		mine := left >= 0
		c.mu.Unlock()
		if !mine {
			return Pass()
		}
		seen <- r
		return f(r)
	})
	return seen
}

// decide records the request and asks the interceptors.
func (c *Cluster) decide(r *Request) Action {
	c.mu.Lock()
	c.requests = append(c.requests, r)
	list := c.interceptors
	c.bump()
	c.mu.Unlock()
	for _, i := range list {
		if a := i.f(r); !a.pass() {
			return a
		}
	}
	return Pass()
}

func (a Action) pass() bool {
	return a.before == nil && a.after == nil && a.drop == keep && !a.skip && a.reply == nil && a.edit == nil && a.fail == nil
}
