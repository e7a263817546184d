package proxy

import (
	"errors"
	"os"
	"syscall"

	"go.uber.org/zap"
)

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
		s.warnings.warn(ce.reason, "connection closed", append(fields, zap.String("reason", ce.reason), zap.Error(ce.err))...)
		c.accessEnded(ce.reason, ce.err)
		return
	}
	s.mu.Lock()
	draining := s.draining
	s.mu.Unlock()
	switch limit := c.endReason.Load(); {
	case limit != nil:
		if reason = *limit; reason == reasonFirstRequest {
			s.warnings.warn(reason, "connection closed: no request came", fields...)
		}
	case draining:
		reason = reasonShutdown
	case c.endedBy.Load() == endedByBroker:
		reason = reasonBroker
		if asked, answered := c.flight.totals(); asked > 0 && answered == 0 {
			s.warnings.warn(reason, "broker closed the connection without an answer: does it expect TLS or SASL?",
				append(fields, zap.Stringer("broker_address", c.source.RemoteAddr()))...)
		}
	case errors.Is(requestErr, os.ErrDeadlineExceeded):
		reason = reasonTimeout
		s.warnings.warn(reason, "connection closed: a request stopped midway", fields...)
	}
	s.metrics.closedBy[reason].Inc()
	c.accessEnded(reason, nil)
	s.log.Debug("connection ended", append(fields, zap.String("reason", reason), zap.NamedError("request_error", requestErr), zap.NamedError("response_error", responseErr))...)
}

func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}
