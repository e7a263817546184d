package main

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// recorder notes the order in which parts end.
type recorder struct {
	mu    sync.Mutex
	ended []string
}

func (r *recorder) part(name string, vital bool, drain time.Duration) part {
	return part{name: name, vital: vital, run: func(ctx context.Context) error {
		<-ctx.Done()
		time.Sleep(drain) // in a synctest bubble
		r.mu.Lock()
		defer r.mu.Unlock()
		r.ended = append(r.ended, name)
		return nil
	}}
}

func TestPartsStopInOrderEachAfterTheOneBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r recorder
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Minute, cancel)
		err := runParts(ctx, 30*time.Second, []part{r.part("proxy", true, 9*time.Second), r.part("mirror", true, 3*time.Second), r.part("admin", true, 0)})
		if err != nil || !slices.Equal(r.ended, []string{"proxy", "mirror", "admin"}) {
			t.Errorf("runParts = %v, ended in order %v, want proxy, mirror, admin", err, r.ended)
		}
	})
}

func TestPartThatDoesNotStopIsGivenUpAfterTheGraceTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		begun := time.Now()
		var r recorder
		err := runParts(ctx, 30*time.Second, []part{r.part("proxy", true, time.Hour)})
		if err == nil || !strings.Contains(err.Error(), "proxy did not stop") || time.Since(begun) != 30*time.Second {
			t.Errorf("runParts = %v after %v, want it to give up after 30s", err, time.Since(begun))
		}
		time.Sleep(2 * time.Hour) // in the bubble: the part ends too
	})
}

func TestFailureOfAVitalPartStopsTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("broken")
		var r recorder
		err := runParts(t.Context(), time.Minute, []part{r.part("proxy", true, 0),
			{name: "mirror", vital: true, run: func(context.Context) error { return broken }}})
		if !errors.Is(err, broken) || !slices.Equal(r.ended, []string{"proxy"}) {
			t.Errorf("runParts = %v, ended %v, want the failure and the proxy stopped", err, r.ended)
		}
	})
}

func TestFailureOfTheMirrorLeavesTheProxyRunning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r recorder
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			done <- runParts(ctx, time.Minute, []part{r.part("proxy", true, 0),
				{name: "mirror", run: func(context.Context) error { return errors.New("broken") }}})
		}()
		synctest.Wait()
		if len(r.ended) != 0 {
			t.Errorf("ended %v when the mirror failed, want the proxy to go on", r.ended)
		}
		cancel()
		if err := <-done; err != nil {
			t.Errorf("runParts = %v, want nil", err)
		}
	})
}
