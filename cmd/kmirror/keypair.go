package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
)

// watched is something that is made from files, and made again when one of them changed. What can't be made anew stays as it was; that is said once for
// each change, and counted.
type watched[T any] struct {
	files  []string
	read   func() (T, error)
	report *fileReports

	mu      sync.Mutex
	value   T
	inForce []os.FileInfo // of the files that value was made from; nil for one that isn't there
	refused []os.FileInfo // of the last ones that weren't usable
	checked time.Time
}

// fileReports tells of files that can't be used any more.
type fileReports struct {
	log    *zap.Logger
	errors prometheus.Counter
	look   []func() // at the files of each watched value
}

// run looks at the files until ctx ends, so that what is wrong with them is told though nobody connects.
func (r *fileReports) run(ctx context.Context) error {
	if len(r.look) == 0 {
		return nil
	}
	tick := time.NewTicker(fileCheck)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			for _, look := range r.look {
				look()
			}
		}
	}
}

func newFileReports(log *zap.Logger, registry prometheus.Registerer) *fileReports {
	r := &fileReports{log: log, errors: prometheus.NewCounter(prometheus.CounterOpts{
		Name: "kmirror_tls_reload_errors_total", Help: "Certificates, keys and authorities that changed and weren't usable; the ones before stay in use.",
	})}
	registry.MustRegister(r.errors)
	return r
}

// quietReports is for commands that end soon.
func quietReports() *fileReports { return newFileReports(zap.NewNop(), prometheus.NewRegistry()) }

// fileCheck is how often the files are looked at, at most.
const fileCheck = time.Second

func newWatched[T any](report *fileReports, read func() (T, error), files ...string) (*watched[T], error) {
	w := &watched[T]{files: files, read: read, report: report, inForce: filesNow(files), checked: time.Now()}
	var err error
	w.value, err = read()
	report.look = append(report.look, func() { w.current() })
	return w, err
}

// current returns what to use now. It is called once a handshake, and by run.
func (w *watched[T]) current() T {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Since(w.checked) < fileCheck {
		return w.value
	}
	w.checked = time.Now()
	changed := filesNow(w.files)
	if sameFiles(changed, w.inForce) {
		return w.value
	}
	value, err := w.read()
	if err == nil {
		// Only now: files that are replaced one after the other match at the second.
		w.value, w.inForce, w.refused = value, changed, nil
		w.report.log.Info("TLS files taken", zap.Strings("files", w.files))
		return value
	}
	if !sameFiles(changed, w.refused) {
		w.refused = changed
		w.report.errors.Inc()
		w.report.log.Error("TLS files aren't usable, the ones before stay in use", zap.Strings("files", w.files), zap.Error(err))
	}
	return w.value
}

func filesNow(files []string) []os.FileInfo {
	found := make([]os.FileInfo, len(files))
	for i, file := range files {
		if stat, err := os.Stat(file); err == nil {
			found[i] = stat
		}
	}
	return found
}

// sameFiles tells whether neither list has another file than the other, or one that was written since.
func sameFiles(a, b []os.FileInfo) bool {
	return slices.EqualFunc(a, b, func(x, y os.FileInfo) bool {
		if x == nil || y == nil {
			return x == nil && y == nil
		}
		return os.SameFile(x, y) && x.ModTime().Equal(y.ModTime()) && x.Size() == y.Size()
	})
}

// newKeyPair watches a certificate and its key.
func newKeyPair(report *fileReports, certFile, keyFile string) (*watched[*tls.Certificate], error) {
	return newWatched(report, func() (*tls.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(certFile, keyFile)
		return &pair, err
	}, certFile, keyFile)
}

// newCertPool watches the authorities in a PEM file.
func newCertPool(report *fileReports, file string) (*watched[*x509.CertPool], error) {
	return newWatched(report, func() (*x509.CertPool, error) {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s: no PEM certificate in it", file)
		}
		return pool, nil
	}, file)
}
