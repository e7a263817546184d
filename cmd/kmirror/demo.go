package main

import (
	"context"
	"net"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"kmirror/config"
	"kmirror/internal/demo"
)

func newDemoCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "demo", Short: "Run a source, a mirror, kmirror and a producer in one process", Args: cobra.NoArgs,
		Long: "Run a source and a mirror cluster inside this process, kmirror between them and a small producer. Nothing has to be\n" +
			"installed, nothing is kept. The ports are kmirror's usual ones if they are free.",
		RunE: runDemo,
	}
	cmd.Flags().String("log-level", "warn", "log level of kmirror: debug, info, warn or error")
	return cmd
}

func runDemo(cmd *cobra.Command, _ []string) error {
	d, err := demo.New()
	if err != nil {
		return err
	}
	defer d.Close()
	settings := config.Default()
	settings.Name = "demo"
	settings.Source.Bootstrap, settings.Mirror.Bootstrap = d.Source(), d.Mirror()
	settings.Proxy.Listen = freeAddress("127.0.0.1", 9092, 1+demo.Brokers)
	settings.Admin.Listen = freeAddress("127.0.0.1", 9180, 1)
	settings.Grace = 10 * time.Second
	settings.Log.Level, _ = cmd.Flags().GetString("log-level")
	if err := settings.Validate(); err != nil {
		return err
	}
	log, err := newLogger(settings.Log)
	if err != nil {
		return err
	}
	return runInstance(cmd.Context(), settings, log, func(x *instance) []part {
		at := demo.Addresses{Proxy: x.proxy.Addr().String(), Admin: x.admin.Addr()}
		return []part{{"demo", func(ctx context.Context) error { return d.Run(ctx, cmd.OutOrStdout(), at) }, true}}
	})
}

// freeAddress returns host:port if count ports from port on are free now, else any free port of the host.
func freeAddress(host string, port, count int) string {
	for i := range count {
		listener, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port+i)))
		if err != nil {
			return net.JoinHostPort(host, "0")
		}
		_ = listener.Close() // it was opened to see whether it can be
	}
	return net.JoinHostPort(host, strconv.Itoa(port))
}
