package peers

import (
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/kafkatest"
	"kmirror/test/testbed"
)

func dial(t testing.TB, address string) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*net.TCPConn)
}

// frameOf is a request as it goes over the wire.
func frameOf(req kmsg.Request, correlationID int32) []byte {
	return kmsg.NewRequestFormatter(kmsg.FormatterClientID("raw")).AppendRequest(nil, req, correlationID)
}

// versionsRequest is the first request of most clients.
func versionsRequest() kmsg.Request {
	req := kmsg.NewPtrApiVersionsRequest()
	req.Version = 2
	return req
}

// ask sends a request that isn't flexible and decodes its answer.
func ask(c net.Conn, req kmsg.Request, within time.Duration) (kmsg.Response, error) {
	if err := c.SetDeadline(time.Now().Add(within)); err != nil {
		return nil, err
	}
	if _, err := c.Write(frameOf(req, 77)); err != nil {
		return nil, err
	}
	frame, err := testbed.ReadFrame(c)
	if err != nil {
		return nil, err
	}
	resp := req.ResponseKind()
	resp.SetVersion(req.GetVersion())
	return resp, resp.ReadFrom(frame[8:])
}

// state is what connections take of the process.
type state struct {
	goroutines, connections, inFlight, held float64
	descriptors, closeWaits                 int
}

func stateOf(in *testbed.Instance) state {
	m := in.Metrics()
	return state{
		goroutines: m["go_goroutines"], connections: m["kmirror_proxy_connections"], inFlight: m["kmirror_proxy_requests_in_flight"],
		held: m["kmirror_proxy_held_bytes"], descriptors: in.Descriptors(),
	}
}

// settledState waits for the last connection's end.
func settledState(t testing.TB, in *testbed.Instance) state {
	t.Helper()
	kafkatest.Eventually(t, 30*time.Second, func() error {
		if n := in.Metrics()["kmirror_proxy_connections"]; n != 0 {
			return fmt.Errorf("%v connections are left", n)
		}
		return nil
	})
	return stateOf(in)
}

// spare is how many goroutines and descriptors kmirror's own clients may take or give back meanwhile.
const spare = 8

// wantBack waits until the process is as it was before, with nothing left in CLOSE_WAIT.
func wantBack(t testing.TB, in *testbed.Instance, before state) {
	t.Helper()
	kafkatest.Eventually(t, 30*time.Second, func() error {
		now, waits := stateOf(in), in.CloseWaits()
		switch {
		case waits > before.closeWaits:
			return fmt.Errorf("%d sockets are in CLOSE_WAIT", waits)
		case now.connections > before.connections || now.inFlight > before.inFlight || now.held > before.held,
			now.goroutines > before.goroutines+spare || now.descriptors > before.descriptors+spare:
			return fmt.Errorf("now %+v, before %+v", now, before)
		}
		return nil
	})
}
