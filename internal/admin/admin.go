// Package admin is the operator's HTTP listener: metrics, health, readiness, the status as JSON and as a page.
//
// It knows neither the proxy nor the forwarder; what it shows comes from the functions in its Options. It changes nothing and has no
// log-in: bind it to an address that only operators reach.
//
//	s, err := admin.New(admin.Options{Listen: "127.0.0.1:9180", …}) // listens, serves nothing yet
//	err = s.Run(ctx)                                               // serves until ctx ends
//
// The paths are listed in docs/operations.md.
package admin

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"
)

// Status is what /api/status answers.
type Status struct {
	Name     string   `json:"name"`
	Version  string   `json:"version"`
	Roles    []string `json:"roles"`
	Ready    bool     `json:"ready"`
	NotReady string   `json:"not_ready,omitempty"` // why not
	Proxy    any      `json:"proxy,omitempty"`     // proxy.Status
	Mirror   any      `json:"mirror,omitempty"`    // forwarder.Status
	// MirrorError is why the mirror part ended although the process goes on.
	MirrorError string `json:"mirror_error,omitempty"`
}

// Options configure a Server. The functions are called concurrently.
type Options struct {
	Listen   string // host:port
	Gatherer prometheus.Gatherer
	Ready    func() error // nil once clients may come; an error says why not yet
	Status   func() Status
	// Look returns after a look at the source that began after the call; /api/status?fresh=1 calls it before Status.
	Look   func(context.Context) error
	Logger *zap.Logger
}

// Server serves the operator's paths.
type Server struct {
	opts     Options
	listener net.Listener
}

const (
	lookTimeout     = 15 * time.Second
	shutdownTimeout = time.Second
)

// New opens the listener; Run serves it.
func New(opts Options) (*Server, error) {
	listener, err := net.Listen("tcp", opts.Listen)
	if err != nil {
		return nil, fmt.Errorf("admin: %w", err)
	}
	return &Server{opts: opts, listener: listener}, nil
}

// Addr is the address that the server listens on.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// Close closes the listener of a server that never ran.
func (s *Server) Close() error { return s.listener.Close() }

// Run serves until ctx ends, gives running requests a second, and returns after the last of its goroutines.
func (s *Server) Run(ctx context.Context) error {
	server := &http.Server{
		Handler:           s.handler(),
		ReadHeaderTimeout: 5 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ErrorLog:          zap.NewStdLog(s.opts.Logger),
	}
	var wg sync.WaitGroup
	ended, end := context.WithCancel(ctx)
	wg.Go(func() { shutdown(ended, server) })
	err := server.Serve(s.listener)
	end()
	wg.Wait()
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("admin: %w", err)
}

// shutdown ends server once ctx ends.
func shutdown(ctx context.Context, server *http.Server) {
	<-ctx.Done()
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	if server.Shutdown(grace) != nil {
		_ = server.Close() // what still runs is cut off
	}
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", servePage)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", s.serveReady)
	mux.HandleFunc("GET /api/status", s.serveStatus)
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.opts.Gatherer, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return mux
}

//go:embed page.html
var page []byte

func servePage(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'")
	_, _ = w.Write(page) // the browser left
}

func (s *Server) serveReady(w http.ResponseWriter, _ *http.Request) {
	if err := s.opts.Ready(); err != nil {
		http.Error(w, "not ready: "+err.Error(), http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ready")
}

func (s *Server) serveStatus(w http.ResponseWriter, r *http.Request) {
	if r.URL.Query().Has("fresh") && s.opts.Look != nil {
		ctx, cancel := context.WithTimeout(r.Context(), lookTimeout)
		defer cancel()
		if err := s.opts.Look(ctx); err != nil {
			http.Error(w, "look at the source: "+err.Error(), http.StatusServiceUnavailable)
			return
		}
	}
	status := s.opts.Status()
	if err := s.opts.Ready(); err != nil {
		status.NotReady = err.Error()
	}
	status.Ready = status.NotReady == ""
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	if err := json.NewEncoder(w).Encode(status); err != nil {
		s.opts.Logger.Debug("status not sent", zap.Error(err))
	}
}
