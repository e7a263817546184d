package proxy

import (
	"errors"
	"fmt"
)

// bindPredicted opens the listeners of Options.BrokerIDs, so that clients that know only brokers' ports find them after a restart, also where
// the proxy can't ask for the brokers itself. The error names every broker whose port can't be had.
func (s *Server) bindPredicted() error {
	s.brokers.mu.Lock()
	defer s.brokers.mu.Unlock()
	var errs []error
	for _, id := range s.o.BrokerIDs {
		if s.brokers.byID[id] != nil {
			continue
		}
		k, err := s.listenFor(id)
		if err != nil {
			errs = append(errs, fmt.Errorf("listener of broker %d: %w", id, err))
			continue
		}
		s.brokers.byID[id] = k
		s.predicted = append(s.predicted, k)
	}
	return errors.Join(errs...)
}

// guesses tells whether a connection to b's listener may go to a bootstrap broker: nobody has named b yet, and whether the source has it can't
// be asked for. The client then learns the brokers from its own Metadata answer, and until then gets errors that make it ask for them.
func (s *Server) guesses(b *broker) bool { return !b.named.Load() && !s.listed.Load() }

// endGuesses ends the connections that were made for b before it was known where it is, each after the answers it waits for, so that its client comes again.
// The one whose answer named b is among them.
func (s *Server) endGuesses(b *broker) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		switch {
		case !c.guessed || c.broker != b:
		case c.responseBytes.Load() == 0: // a plain end before the first answer would be taken for a wrong protocol
			reset(c.client)
			c.abort()
		default:
			c.drain()
		}
	}
}
