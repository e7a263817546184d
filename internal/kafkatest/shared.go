package kafkatest

import (
	"errors"
	"os"
	"sync"
	"testing"

	"golang.org/x/sync/errgroup"
)

// shared is the pair of single brokers that the tests of one process share, since each broker costs a second of CPU.
var shared sharedPair

type sharedPair struct {
	main bool // set by Main before any test runs

	mu             sync.Mutex
	source, mirror *RealCluster
	err            error
}

func (p *sharedPair) usable() bool { return p.main }

// Main runs the tests of a package that uses Shared, and ends the shared brokers after them, then calls after:
//
//	func TestMain(m *testing.M) { kafkatest.Main(m) }
func Main(m *testing.M, after ...func()) {
	shared.main = true
	code := m.Run()
	shared.close()
	for _, f := range after {
		f()
	}
	os.Exit(code)
}

// Shared returns two real clusters of one broker each, started by the first caller and shared by all tests of the
// package. Tests use topic names of their own and leave the brokers running as they found them. It needs Main.
func Shared(t testing.TB) (source, mirror *RealCluster) {
	t.Helper()
	inst := needKafka(t)
	if !shared.usable() {
		t.Fatal("kafkatest: Shared needs func TestMain(m *testing.M) { kafkatest.Main(m) } in this package")
	}
	if err := shared.start(inst); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		shared.source.showLogs(t)
		shared.mirror.showLogs(t)
	})
	return shared.source, shared.mirror
}

func (p *sharedPair) start(inst installation) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil || p.source != nil {
		return p.err
	}
	var g errgroup.Group
	g.Go(func() (err error) { p.source, err = newRealCluster(inst, newOptions(nil)); return err })
	g.Go(func() (err error) { p.mirror, err = newRealCluster(inst, newOptions(nil)); return err })
	p.err = g.Wait()
	return p.err
}

func (p *sharedPair) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range []*RealCluster{p.source, p.mirror} {
		if c != nil {
			c.close()
		}
	}
	p.source, p.mirror, p.err = nil, nil, errors.New("kafkatest: the shared clusters have ended")
}
