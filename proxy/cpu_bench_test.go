package proxy

import (
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"kmirror/protocol"
)

// BenchmarkCPU measures what the processor spends on one Produce request, of one batch of 16 KiB or of four, as the Java producer sends them, five in
// flight, harness included: what a route costs is its figure less that of direct. The plain relay is the least that a proxy can cost.
func BenchmarkCPU(b *testing.B) {
	batch := batchOf(16 << 10)
	behind := func(o Options) func(*testing.B, *scripted) net.Addr {
		return func(b *testing.B, broker *scripted) net.Addr { return startBefore(b, broker, o).Addr() }
	}
	for _, load := range []struct {
		name    string
		batches [][]byte
	}{
		{"1 batch", [][]byte{batch}},
		{"4 batches", [][]byte{batch, batch, batch, batch}},
	} {
		frame := requestFrame(produceTo(11, -1, load.batches...), 7)
		answer := produced(protocol.ParseRequestHeader(frame), frame, nil)
		for _, route := range []struct {
			name    string
			request []byte
			address func(b *testing.B, broker *scripted) net.Addr
		}{
			{"direct", frame, func(b *testing.B, broker *scripted) net.Addr { return broker.ln.Addr() }},
			{"relay", frame, plainRelay},
			{"opaque", rawRequest(68, 0, 7, make([]byte, len(frame)-12)), behind(Options{Logger: nopLogger})},
			{"produce", frame, behind(Options{Logger: nopLogger})},
			{"tee", frame, behind(Options{Logger: nopLogger, Sink: &releaser{}})},
		} {
			b.Run(load.name+"/"+route.name, func(b *testing.B) {
				c := dialRaw(b, route.address(b, constant(b, len(route.request), answer)))
				c.SetDeadline(time.Time{})
				b.SetBytes(int64(len(route.request)))
				b.ReportAllocs()
				b.ResetTimer()
				before := processCPU(b)
				askInFlight(b, c, route.request, len(answer), 5)
				b.ReportMetric(float64((processCPU(b)-before).Nanoseconds())/float64(b.N), "cpu-ns/op")
			})
		}
	}
}

// askInFlight sends b.N requests, n of them in flight.
func askInFlight(b *testing.B, c *rawClient, request []byte, answerSize, n int) {
	answer := make([]byte, answerSize)
	sent := 0
	for range min(n, b.N) {
		c.Conn.Write(request)
		sent++
	}
	for range b.N {
		if _, err := io.ReadFull(c.r, answer); err != nil {
			b.Fatal(err)
		}
		if sent < b.N {
			c.Conn.Write(request)
			sent++
		}
	}
}

func processCPU(b *testing.B) time.Duration {
	var use syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &use); err != nil {
		b.Fatal(err)
	}
	return time.Duration(use.Utime.Nano() + use.Stime.Nano())
}

// plainRelay is a relay that knows nothing of Kafka.
func plainRelay(b *testing.B, broker *scripted) net.Addr {
	ln := listen(b)
	done := make(chan struct{})
	go func() {
		defer close(done)
		client, err := ln.Accept()
		if err != nil {
			return
		}
		source, err := net.Dial("tcp", broker.ln.Addr().String())
		if err != nil {
			b.Error(err)
			return
		}
		back := make(chan struct{})
		go func() {
			defer close(back)
			io.Copy(client, source)
			client.Close()
		}()
		io.Copy(source, client)
		source.Close()
		<-back
	}()
	b.Cleanup(func() { ln.Close(); <-done })
	return ln.Addr()
}
