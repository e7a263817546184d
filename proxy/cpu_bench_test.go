package proxy

import (
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"kmirror/protocol"
)

// BenchmarkCPU measures what the processor spends on one Produce request of 16 KiB, five in flight, harness included: what a route costs is
// its figure less that of direct. The plain relay is the least that a proxy can cost.
func BenchmarkCPU(b *testing.B) {
	batch := make([]byte, 16<<10)
	copy(batch, records(1))
	batch[10], batch[11] = byte((len(batch)-12)>>8), byte(len(batch)-12)
	frame := requestFrame(produceTo(11, -1, batch), 7)
	answer := produced(protocol.ParseRequestHeader(frame), frame, nil)
	quarter := append(records(1), make([]byte, 4<<10-len(records(1)))...)
	quarter[10], quarter[11] = byte((len(quarter)-12)>>8), byte(len(quarter)-12)
	quarters := requestFrame(produceTo(11, -1, quarter, quarter, quarter, quarter), 7)
	opaque := rawRequest(68, 0, 7, make([]byte, len(frame)-12))
	for _, route := range []struct {
		name    string
		request []byte
		address func(b *testing.B, broker *scripted) net.Addr
	}{
		{"direct", frame, func(b *testing.B, broker *scripted) net.Addr { return broker.ln.Addr() }},
		{"relay", frame, plainRelay},
		{"opaque", opaque, func(b *testing.B, broker *scripted) net.Addr {
			return startBefore(b, broker, Options{Logger: nopLogger}).Addr()
		}},
		{"produce", frame, func(b *testing.B, broker *scripted) net.Addr {
			return startBefore(b, broker, Options{Logger: nopLogger}).Addr()
		}},
		{"tee", frame, func(b *testing.B, broker *scripted) net.Addr {
			return startBefore(b, broker, Options{Logger: nopLogger, Sink: &releaser{}}).Addr()
		}},
		{"tee of four partitions", quarters, func(b *testing.B, broker *scripted) net.Addr {
			return startBefore(b, broker, Options{Logger: nopLogger, Sink: &releaser{}}).Addr()
		}},
	} {
		b.Run(route.name, func(b *testing.B) {
			answer := answer
			if route.name == "tee of four partitions" {
				answer = produced(protocol.ParseRequestHeader(quarters), quarters, nil)
			}
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
