package admin

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"go.uber.org/zap/zaptest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// serve runs a server for the length of the test and returns its base URL.
func serve(t *testing.T, opts Options) string {
	t.Helper()
	opts.Listen = "127.0.0.1:0"
	opts.Logger = zaptest.NewLogger(t)
	if opts.Ready == nil {
		opts.Ready = func() error { return nil }
	}
	if opts.Status == nil {
		opts.Status = func() Status { return Status{Name: "test", Roles: []string{"proxy"}} }
	}
	if opts.Gatherer == nil {
		opts.Gatherer = prometheus.NewRegistry()
	}
	s, err := New(opts)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run = %v, want nil after ctx ended", err)
		}
		http.DefaultClient.CloseIdleConnections()
	})
	return "http://" + s.Addr()
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func TestReadinessFollowsTheProxyAndSaysWhyNot(t *testing.T) {
	var notReady atomic.Bool
	notReady.Store(true)
	url := serve(t, Options{Ready: func() error {
		if notReady.Load() {
			return errors.New("port of broker 3 isn't bound")
		}
		return nil
	}})
	if code, body := get(t, url+"/readyz"); code != 503 || !strings.Contains(body, "port of broker 3") {
		t.Errorf("readyz = %d %q, want 503 and the reason", code, body)
	}
	if code, _ := get(t, url+"/healthz"); code != 200 {
		t.Errorf("healthz = %d, want 200 while not ready", code)
	}
	var status Status
	_, body := get(t, url+"/api/status")
	if err := json.Unmarshal([]byte(body), &status); err != nil || status.Ready || status.NotReady == "" {
		t.Errorf("status = %s, %v, want it not ready", body, err)
	}
	notReady.Store(false)
	if code, body := get(t, url+"/readyz"); code != 200 {
		t.Errorf("readyz = %d %q, want 200", code, body)
	}
}

func TestFreshStatusLooksFirst(t *testing.T) {
	var looks atomic.Int32
	fail := errors.New("source is down")
	url := serve(t, Options{
		Look: func(context.Context) error {
			if looks.Add(1) > 1 {
				return fail
			}
			return nil
		},
		Status: func() Status { return Status{Mirror: map[string]int32{"looks": looks.Load()}} },
	})
	if _, body := get(t, url+"/api/status"); !strings.Contains(body, `"looks":0`) {
		t.Errorf("plain status = %s, want no look", body)
	}
	if _, body := get(t, url+"/api/status?fresh=1"); !strings.Contains(body, `"looks":1`) {
		t.Errorf("fresh status = %s, want a look before it", body)
	}
	if code, body := get(t, url+"/api/status?fresh=1"); code != 503 || !strings.Contains(body, "source is down") {
		t.Errorf("fresh status = %d %s, want 503 and the look's error", code, body)
	}
}

func TestMetricsAndPage(t *testing.T) {
	registry := prometheus.NewRegistry()
	counter := prometheus.NewCounter(prometheus.CounterOpts{Name: "kmirror_test_total", Help: "A test."})
	registry.MustRegister(counter)
	url := serve(t, Options{Gatherer: registry})
	if _, body := get(t, url+"/metrics"); !strings.Contains(body, "kmirror_test_total 0") {
		t.Errorf("metrics = %s", body)
	}
	code, body := get(t, url+"/")
	if code != 200 || !strings.Contains(body, "<title>kmirror</title>") {
		t.Errorf("page = %d %.80s", code, body)
	}
	if strings.Contains(body, "http://") || strings.Contains(body, "https://") {
		t.Error("the page loads something from elsewhere")
	}
	if code, _ := get(t, url+"/nothing"); code != 404 {
		t.Errorf("unknown path = %d, want 404", code)
	}
}
