package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// part is one long-lived piece of the process.
type part struct {
	name string
	run  func(context.Context) error
	// vital parts take the others down when they fail.
	vital bool
}

// runParts runs parts side by side until ctx ends or a vital one fails. Then it stops them one after the other in the order given,
// each only after the one before returned, and returns what they failed with. It gives up after grace.
func runParts(ctx context.Context, grace time.Duration, parts []part) error {
	ctx, fail := context.WithCancel(ctx)
	defer fail()
	var (
		wg      sync.WaitGroup
		failure = make([]error, len(parts))
		ended   = make([]chan struct{}, len(parts))
		stop    = make([]context.CancelFunc, len(parts))
	)
	for i, p := range parts {
		partCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
		defer cancel()
		ended[i], stop[i] = make(chan struct{}), cancel
		wg.Go(func() {
			defer close(ended[i])
			if failure[i] = p.run(partCtx); failure[i] != nil && p.vital {
				fail()
			}
		})
	}
	<-ctx.Done()
	limit := time.NewTimer(grace)
	defer limit.Stop()
	for i, p := range parts {
		stop[i]()
		select {
		case <-ended[i]:
		case <-limit.C:
			return fmt.Errorf("%s did not stop within %v", p.name, grace)
		}
	}
	wg.Wait()
	return errors.Join(vitalFailures(parts, failure)...)
}

func vitalFailures(parts []part, failure []error) (vital []error) {
	for i, p := range parts {
		if p.vital {
			vital = append(vital, failure[i])
		}
	}
	return vital
}
