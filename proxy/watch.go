package proxy

import (
	"context"
	"time"

	"go.uber.org/zap"
)

// watchSeeds tells of dead seeds at start, and ends Run if all of them stay dead.
func (s *Server) watchSeeds(ctx context.Context) {
	if err := s.seeds.probe(ctx, s.o.StartTimeout); err != nil {
		s.stop(err)
	}
}

// watchBrokers keeps the listeners in step with the cluster.
func (s *Server) watchBrokers(ctx context.Context) {
	if s.o.Brokers == nil {
		s.ready.Store(true)
		return
	}
	const firstWait = 200 * time.Millisecond
	wait, failing := firstWait, ""
	for ctx.Err() == nil {
		err := s.refreshBrokers(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			if failing != "" {
				s.log.Info("brokers of the source cluster are listed again")
			}
			wait, failing = s.o.RefreshEvery, ""
		default:
			if failing != err.Error() {
				s.log.Warn("brokers of the source cluster can't be listed", zap.Error(err))
			}
			failing = err.Error()
			if len(s.o.BrokerIDs) > 0 && !s.listed.Load() && !s.ready.Swap(true) {
				s.log.Info("proxy is ready with the brokers of the settings alone", zap.Int("brokers", s.brokers.len()))
			}
			wait = min(2*wait, s.o.RefreshEvery)
		}
		pause(ctx, wait)
	}
}

// refreshBrokers asks for the brokers once, and tells whether clients may come.
func (s *Server) refreshBrokers(ctx context.Context) error {
	listed, bound, err := s.listBrokers(ctx)
	if err != nil {
		return err
	}
	s.listed.Store(true)
	if ready := bound && listed > 0 && ctx.Err() == nil; ready != s.ready.Swap(ready) && ready {
		s.mu.Lock()
		clusterID := s.clusterID
		s.mu.Unlock()
		s.log.Info("proxy is ready", zap.String("cluster_id", clusterID), zap.Int("brokers", listed))
	}
	return nil
}

// listBrokers asks for the brokers once, and binds and re-points listeners. It returns how many there are and whether each has its listener.
func (s *Server) listBrokers(ctx context.Context) (listed int, bound bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	clusterID, list, err := s.o.Brokers.Brokers(ctx)
	if err != nil {
		return 0, false, err
	}
	s.mu.Lock()
	was := s.clusterID
	s.clusterID = clusterID
	s.mu.Unlock()
	if was != "" && was != clusterID {
		s.log.Error("the source cluster's ID changed: do the bootstrap addresses belong to one cluster?", zap.String("was", was), zap.String("is", clusterID))
	}
	bound = true
	for _, b := range list {
		_, ok := s.brokers.learn(b.ID, []byte(b.Host), b.Port)
		bound = bound && ok
	}
	return len(list), bound, nil
}
