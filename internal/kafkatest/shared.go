package kafkatest

import (
	"errors"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/twmb/franz-go/pkg/kadm"
	"golang.org/x/sync/errgroup"
)

// shared is the pair of single brokers that the tests of one process share, since each broker costs a second of CPU.
var shared sharedPair

type sharedPair struct {
	main bool // set by Main before any test runs

	mu             sync.Mutex
	source, mirror *RealCluster
	users          map[string]testing.TB // of this round, by name
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
// package. Tests use topic names of their own and leave the brokers running as they found them. When a test comes a second
// time (-count), the clusters are emptied, so that each round finds them as the first did. It needs Main.
func Shared(t testing.TB) (source, mirror *RealCluster) {
	t.Helper()
	inst := needKafka(t)
	if !shared.usable() {
		t.Fatal("kafkatest: Shared needs func TestMain(m *testing.M) { kafkatest.Main(m) } in this package")
	}
	if err := shared.start(inst); err != nil {
		t.Fatal(err)
	}
	shared.use(t)
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

// use notes that t uses the clusters. It empties them first, while others wait, if a test of this name was here before, in an earlier round.
func (p *sharedPair) use(t testing.TB) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	was, ok := p.users[t.Name()]
	again := ok && was != t
	if again || p.users == nil {
		p.users = make(map[string]testing.TB)
	}
	p.users[t.Name()] = t
	if again {
		removeTopics(t, p.source)
		removeTopics(t, p.mirror)
	}
}

// removeTopics deletes all topics but the brokers' own, and with them what groups committed on them.
func removeTopics(t testing.TB, c *RealCluster) {
	t.Helper()
	own := []string{"__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata"}
	adm := kadm.NewClient(c.Client(t))
	topics, err := adm.ListTopicsWithInternal(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	names := slices.DeleteFunc(topics.Names(), func(name string) bool { return slices.Contains(own, name) })
	if len(names) == 0 {
		return
	}
	if _, err := adm.DeleteTopics(t.Context(), names...); err != nil {
		t.Fatal(err)
	}
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
