package main

import (
	"crypto/tls"
	"os"
	"sync"
	"time"
)

// keyPair is a certificate and its key, read again when a file changes. A pair that can't be read or doesn't match leaves the one
// before in use.
type keyPair struct {
	certFile, keyFile string

	mu      sync.Mutex
	pair    *tls.Certificate
	changed [2]time.Time // modification times of the files that were tried last
	checked time.Time
}

// keyPairCheck is how often the files are looked at, at most.
const keyPairCheck = time.Second

func newKeyPair(certFile, keyFile string) (*keyPair, error) {
	k := &keyPair{certFile: certFile, keyFile: keyFile, changed: modTimes(certFile, keyFile), checked: time.Now()}
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		return nil, err
	}
	k.pair = &pair
	return k, nil
}

// current returns the pair to use now. It is called once a handshake.
func (k *keyPair) current() *tls.Certificate {
	k.mu.Lock()
	defer k.mu.Unlock()
	if time.Since(k.checked) < keyPairCheck {
		return k.pair
	}
	k.checked = time.Now()
	changed := modTimes(k.certFile, k.keyFile)
	if changed == k.changed {
		return k.pair
	}
	pair, err := tls.LoadX509KeyPair(k.certFile, k.keyFile)
	if err == nil {
		// Only now: files that are replaced one after the other match at the second.
		k.pair, k.changed = &pair, changed
	}
	return k.pair
}

func modTimes(files ...string) (times [2]time.Time) {
	for i, file := range files {
		if stat, err := os.Stat(file); err == nil {
			times[i] = stat.ModTime()
		}
	}
	return times
}
