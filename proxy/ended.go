package proxy

import (
	"errors"
	"os"
	"strconv"
	"syscall"

	"go.uber.org/zap"

	"kmirror/protocol"
)

// limitCauses are what the log tells of a connection that a limit ended.
var limitCauses = map[string]string{
	reasonFirstRequest: "connection closed: no request came",
	reasonUnread:       "connection closed: the client took nothing of a large answer, and others waited for its memory",
	reasonBroker:       "connection closed: the broker stopped midway in a large answer, and others waited for its memory",
}

// closed counts the end of a connection, and logs it if someone should know.
func (s *Server) closed(c *conn, requestErr, responseErr error) {
	reason, err := reasonClient, requestErr
	if quiet(requestErr) && !quiet(responseErr) {
		err = responseErr
	}
	fields := []zap.Field{zap.Stringer("client", c.ends.client)}
	if c.broker != nil {
		fields = append(fields, zap.Int32("broker", c.broker.id))
	}
	if ce, ok := errors.AsType[*closeError](err); ok {
		s.metrics.closedBy[ce.reason].Inc()
		s.warnings.warn(ce.reason, c.about(ce), "connection closed", append(fields, zap.String("reason", ce.reason), zap.Error(ce.err))...)
		c.accessEnded(ce.reason, ce.err)
		return
	}
	s.mu.Lock()
	draining := s.draining
	s.mu.Unlock()
	switch limit := c.endReason.Load(); {
	case limit != nil:
		reason = *limit
		if cause, told := limitCauses[reason]; told {
			about := c.peer()
			if reason == reasonBroker {
				about = c.brokerName()
			}
			s.warnings.warn(reason, about, cause, append(fields, zap.Stringer("broker_address", c.source.RemoteAddr()))...)
		}
	case draining:
		reason = reasonShutdown
	case c.endedBy.Load() == endedByClient && (errors.Is(requestErr, syscall.ETIMEDOUT) || errors.Is(responseErr, syscall.ETIMEDOUT)):
		reason = reasonUnread
		s.warnings.warn(reason, c.peer(), "connection closed: the client took nothing of its answers, or is gone without a word",
			append(fields, zap.Duration("limit", s.o.Limits.Unread))...)
	case c.endedBy.Load() == endedByBroker:
		reason = reasonBroker
		if asked, answered := c.flight.totals(); asked > 0 && answered == 0 {
			s.warnings.warn(reason, c.brokerName(), "broker closed the connection without an answer: does it expect TLS or SASL?",
				append(fields, zap.Stringer("broker_address", c.source.RemoteAddr()))...)
		}
	case errors.Is(requestErr, os.ErrDeadlineExceeded):
		reason = reasonTimeout
		s.warnings.warn(reason, c.peer(), "connection closed: a request stopped midway", fields...)
	}
	s.metrics.closedBy[reason].Inc()
	if requestErr != errNothingSent {
		c.accessEnded(reason, nil)
	}
	s.log.Debug("connection ended", append(fields, zap.String("reason", reason), zap.NamedError("request_error", requestErr), zap.NamedError("response_error", responseErr))...)
}

// about is whom a warning of e's reason is about: who must act.
func (c *conn) about(e *closeError) string {
	switch e.reason {
	case reasonDial, reasonResponse, reasonForeign:
		return c.brokerName()
	case reasonServerName:
		return e.Error() // has the name
	}
	if size, ok := errors.AsType[*protocol.SizeError](e.err); ok {
		return c.peer() + " " + size.Cause
	}
	return c.peer()
}

// peer is the client's address without the port, which changes with each connection.
func (c *conn) peer() string { return addressOf(c.ends.client).String() }

// brokerName is the broker that the connection is for, "" for the bootstrap.
func (c *conn) brokerName() string {
	if c.broker == nil {
		return ""
	}
	return strconv.Itoa(int(c.broker.id))
}

func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}
