package proxy

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"
)

// SNI is the listener model with one port for all brokers: the TLS server name that a client asks for chooses the broker.
type SNI struct {
	Pattern string // host name of broker n, {id} stands for n; "": a port for each broker instead
	Port    int    // that clients are told; 0: the bootstrap listener's
}

const idPlaceholder = "{id}"

// host is the name of a broker.
func (s SNI) host(id int32) string {
	return strings.Replace(s.Pattern, idPlaceholder, strconv.Itoa(int(id)), 1)
}

// broker returns which broker a server name stands for; false for a name that doesn't follow the pattern. Names are compared without case.
func (s SNI) broker(name string) (int32, bool) {
	before, after, _ := strings.Cut(strings.ToLower(s.Pattern), idPlaceholder)
	rest, ok := strings.CutPrefix(strings.ToLower(name), before)
	if !ok {
		return 0, false
	}
	if rest, ok = strings.CutSuffix(rest, after); !ok {
		return 0, false
	}
	id, err := strconv.ParseUint(rest, 10, 31)
	if err != nil || rest != strconv.FormatUint(id, 10) {
		return 0, false // one name for each broker
	}
	return int32(id), true
}

// route returns the broker that a client's server name stands for, nil for the bootstrap. A client that names none, as one that
// dials an IP address, may only bootstrap.
func (s *Server) route(serverName string) (*broker, error) {
	id, ok := s.o.SNI.broker(serverName)
	switch {
	case ok:
		if b := s.lookUp(id); b != nil {
			return b, nil
		}
		return nil, fmt.Errorf("server name %q: the source has no broker %d that is known here", serverName, id)
	case serverName == "" || s.o.Advertise == "" || strings.EqualFold(serverName, s.o.Advertise):
		return nil, nil
	}
	return nil, fmt.Errorf("server name %q is neither %q nor one of %q", serverName, s.o.Advertise, s.o.SNI.Pattern)
}

// lookUpEvery bounds how often names that clients make up have the source asked.
const lookUpEvery = time.Second

// lookUp returns a broker; one that isn't known here yet, as another replica's client may name it, is asked for. Who comes meanwhile waits for the
// same answer.
func (s *Server) lookUp(id int32) *broker {
	if b := s.brokers.get(id); b != nil || s.o.Brokers == nil {
		return b
	}
	s.lookMu.Lock()
	defer s.lookMu.Unlock()
	if b := s.brokers.get(id); b != nil || time.Since(s.looked) < lookUpEvery {
		return b
	}
	ctx, cancel := context.WithTimeout(s.base, dialTimeout)
	defer cancel()
	if _, _, err := s.listBrokers(ctx); err != nil {
		s.warnings.warn("look-up", "", "brokers of the source cluster can't be listed", zap.Error(err))
	}
	s.looked = time.Now()
	return s.brokers.get(id)
}

// bindSNI makes the entry of a broker: its name needs no listener of its own.
func (s *Server) bindSNI(id int32) (*broker, error) {
	return &broker{id: id, host: s.o.SNI.host(id), port: int32(s.sniPort())}, nil
}

func (s *Server) sniPort() int {
	if s.o.SNI.Port != 0 {
		return s.o.SNI.Port
	}
	return portOf(s.ln.Addr())
}
