package proxy

import (
	"errors"
	"net"
	"syscall"
	"testing"

	"go.uber.org/zap"
)

// failing is a listener whose Accept fails with these errors, one after the other, and then as one that is closed.
type failing struct {
	net.Listener
	errs []error
}

func (f *failing) Accept() (net.Conn, error) {
	if len(f.errs) == 0 {
		return nil, net.ErrClosed
	}
	err := f.errs[0]
	f.errs = f.errs[1:]
	return nil, &net.OpError{Op: "accept", Net: "tcp", Err: err}
}

// TestAcceptGoesOn: what befalls one connection, or is short for a while, doesn't end a listener, and with it the proxy; a listener that is broken does.
func TestAcceptGoesOn(t *testing.T) {
	log, logs := observed()
	s := startBefore(t, script(t, nil), Options{Logger: log})
	c := dialRaw(t, s.Addr())
	c.send(rawRequest(68, 0, 1, nil))
	c.receive() // Run has begun, which accept needs
	once := []error{syscall.EMFILE, syscall.ENOMEM, syscall.EPROTO, syscall.EPERM, syscall.ENETDOWN, syscall.EHOSTUNREACH}
	if err := s.accept(&failing{errs: once}, nil); err != nil {
		t.Errorf("accept = %v, want it to go on", err)
	}
	if n := logs.FilterMessage("can't accept connections").Len(); n != 1 {
		t.Errorf("%d warnings, want one in 10 s", n)
	}
	for _, broken := range []error{syscall.EBADF, errors.New("broken")} {
		if err := s.accept(&failing{errs: []error{broken}}, nil); !errors.Is(err, broken) {
			t.Errorf("accept = %v, want %v", err, broken)
		}
	}
	if logs.FilterLevelExact(zap.ErrorLevel).Len() != 0 {
		t.Errorf("errors are logged: %v", logs.All())
	}
}
