package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
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
	inForce []time.Time // modification times of the files that value was made from
	refused []time.Time // and those of the last ones that weren't usable
	checked time.Time
}

// fileReports tells of files that can't be used any more.
type fileReports struct {
	log    *zap.Logger
	errors prometheus.Counter
}

func newFileReports(log *zap.Logger, registry prometheus.Registerer) *fileReports {
	r := &fileReports{log, prometheus.NewCounter(prometheus.CounterOpts{
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
	w := &watched[T]{files: files, read: read, report: report, inForce: modTimes(files), checked: time.Now()}
	var err error
	w.value, err = read()
	return w, err
}

// current returns what to use now. It is called once a handshake.
func (w *watched[T]) current() T {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Since(w.checked) < fileCheck {
		return w.value
	}
	w.checked = time.Now()
	changed := modTimes(w.files)
	if equalTimes(changed, w.inForce) {
		return w.value
	}
	value, err := w.read()
	if err == nil {
		// Only now: files that are replaced one after the other match at the second.
		w.value, w.inForce, w.refused = value, changed, nil
		w.report.log.Info("TLS files taken", zap.Strings("files", w.files))
		return value
	}
	if !equalTimes(changed, w.refused) {
		w.refused = changed
		w.report.errors.Inc()
		w.report.log.Error("TLS files aren't usable, the ones before stay in use", zap.Strings("files", w.files), zap.Error(err))
	}
	return w.value
}

func modTimes(files []string) []time.Time {
	times := make([]time.Time, len(files))
	for i, file := range files {
		if stat, err := os.Stat(file); err == nil {
			times[i] = stat.ModTime()
		}
	}
	return times
}

func equalTimes(a, b []time.Time) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if !a[i].Equal(b[i]) {
			return false
		}
	}
	return true
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
