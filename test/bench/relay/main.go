// Command relay passes TCP connections on, byte for byte, with io.Copy (which splices in the kernel on Linux): the least that a
// proxy in front of a broker can cost, and what kmirror's produce path is measured against. It knows nothing of Kafka, so the
// broker itself must advertise the relay's address.
//
//	relay -listen 127.0.0.1:9093 -to 127.0.0.1:9092
package main

import (
	"context"
	"errors"
	"flag"
	"io"
	"log"
	"net"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:0", "`host:port` to listen on")
	to := flag.String("to", "", "the broker's `host:port`")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	listener, err := net.Listen("tcp", *listen)
	if err != nil {
		log.Fatal("relay: ", err)
	}
	if err := serve(ctx, listener, *to); err != nil {
		log.Fatal("relay: ", err)
	}
}

// serve accepts until ctx ends and returns after the last connection.
func serve(ctx context.Context, listener net.Listener, to string) error {
	defer context.AfterFunc(ctx, func() { listener.Close() })()
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		client, err := listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		wg.Go(func() { relay(ctx, client.(*net.TCPConn), to) })
	}
}

// relay joins client to a new connection to the broker until both directions have ended or ctx has.
func relay(ctx context.Context, client *net.TCPConn, to string) {
	defer client.Close()
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", to)
	if err != nil {
		log.Print("relay: ", err)
		return
	}
	broker := conn.(*net.TCPConn)
	defer broker.Close()
	defer context.AfterFunc(ctx, func() { client.Close(); broker.Close() })()
	var wg sync.WaitGroup
	wg.Go(func() { pipe(broker, client) })
	wg.Go(func() { pipe(client, broker) })
	wg.Wait()
}

// pipe copies one direction to its end and passes the end on.
func pipe(to, from *net.TCPConn) {
	if _, err := io.Copy(to, from); err != nil {
		from.Close() // the other direction must end too
	}
	to.CloseWrite()
}
