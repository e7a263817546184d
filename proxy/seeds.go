package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
)

const (
	dialTimeout   = 3 * time.Second
	seedPutAside  = 10 * time.Second // a seed that failed is tried last for so long, twice as long after each failure more,
	maxPutAside   = 3 * time.Minute  // up to this: a client waits in vain for each try of a seed that swallows packets
	probeInterval = 2 * time.Second
)

// seeds are the bootstrap addresses of the source cluster. They are used in turn; one that failed is put aside for a while.
type seeds struct {
	dial func(ctx context.Context, address string) (net.Conn, error)
	log  *zap.Logger

	mu    sync.Mutex
	list  []seed
	next  int
	alive bool // one was ever reached
}

type seed struct {
	address string
	aside   time.Time     // until when it's tried last
	wait    time.Duration // how long it was put aside; 0 if the last dial succeeded, or there was none
	err     error         // of the last dial
}

func newSeeds(addresses []string, dial func(context.Context, string) (net.Conn, error), log *zap.Logger) *seeds {
	s := &seeds{dial: dial, log: log}
	for _, a := range addresses {
		if a = strings.TrimSpace(a); a != "" {
			s.list = append(s.list, seed{address: a})
		}
	}
	return s
}

// order returns the seeds in the order to try them: in turn, the ones put aside last.
func (s *seeds) order(now time.Time) []int {
	s.mu.Lock()
	defer s.mu.Unlock()
	var order, aside []int
	for i := range s.list {
		i = (i + s.next) % len(s.list)
		if now.Before(s.list[i].aside) {
			aside = append(aside, i)
		} else {
			order = append(order, i)
		}
	}
	s.next++
	return append(order, aside...)
}

// connect dials the first seed that answers.
func (s *seeds) connect(ctx context.Context) (net.Conn, error) {
	var errs []error
	for _, i := range s.order(time.Now()) {
		c, err := s.try(ctx, i)
		if err == nil {
			return c, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// try dials one seed and remembers how it went. It logs when that changed.
func (s *seeds) try(ctx context.Context, i int) (net.Conn, error) {
	address := s.list[i].address // never changes
	c, err := s.dial(ctx, address)
	if err != nil && ctx.Err() != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	wasFailed := s.list[i].err != nil
	s.list[i].err = err
	if err != nil {
		s.list[i].wait = min(max(2*s.list[i].wait, seedPutAside), maxPutAside)
		s.list[i].aside = time.Now().Add(s.list[i].wait)
		if !wasFailed {
			s.log.Warn("bootstrap broker can't be reached", zap.String("broker_address", address), zap.Error(err))
		}
		return nil, fmt.Errorf("%s: %w", address, err)
	}
	s.list[i].aside, s.list[i].wait, s.alive = time.Time{}, 0, true
	if wasFailed {
		s.log.Info("bootstrap broker is reached again", zap.String("broker_address", address))
	}
	return c, nil
}

// probe dials all seeds at once, until one answers or the time is up; then it names each one's error.
func (s *seeds) probe(ctx context.Context, within time.Duration) error {
	if len(s.list) == 0 {
		return errors.New("no bootstrap brokers are configured")
	}
	until := time.Now().Add(within)
	for {
		var wg sync.WaitGroup
		for i := range s.list {
			wg.Go(func() {
				if c, err := s.try(ctx, i); err == nil {
					c.Close()
				}
			})
		}
		wg.Wait()
		s.mu.Lock()
		alive, errs := s.alive, []error(nil)
		for _, d := range s.list {
			if d.err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", d.address, d.err))
			}
		}
		s.mu.Unlock()
		switch {
		case alive || ctx.Err() != nil:
			return nil
		case time.Now().Add(probeInterval).After(until):
			return fmt.Errorf("no bootstrap broker of the source cluster can be reached: %w", errors.Join(errs...))
		}
		pause(ctx, probeInterval)
	}
}

// pause waits for d or the end of ctx.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
