// Command kmirror mirrors a Kafka cluster record batch by record batch, as producers write through its proxy.
//
// This package reads settings, wires the parts together and turns their outcome into an exit code; what the parts do is decided in
// proxy and forwarder. The commands are described in docs/operations.md.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

// exitCode is an error that only sets the exit code; what there was to say was printed.
type exitCode int

func (c exitCode) Error() string { return fmt.Sprintf("exit code %d", int(c)) }

func main() {
	ctx, stop := context.WithCancel(context.Background())
	go stopOnSignal(stop)
	os.Exit(execute(ctx, os.Args[1:]))
}

// stopOnSignal calls stop at the first SIGINT or SIGTERM and ends the process at the second.
func stopOnSignal(stop context.CancelFunc) {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	<-signals
	stop()
	<-signals
	os.Exit(1)
}

func execute(ctx context.Context, args []string) int {
	root := newRoot()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	var code exitCode
	switch {
	case err == nil:
		return 0
	case errors.As(err, &code):
		return int(code)
	}
	fmt.Fprintln(root.ErrOrStderr(), "kmirror:", err)
	return 1
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "kmirror",
		Short: "Mirror a Kafka cluster record batch by record batch, as producers write",
		// Errors are printed once, by execute, and a failure at run time is no reason to show how flags are written.
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.AddCommand(newProxyCommand(), newStatusCommand(), newVerifyCommand(), newOffsetsCommand(), newConfigCommand(), newDemoCommand(), newVersionCommand())
	return root
}
