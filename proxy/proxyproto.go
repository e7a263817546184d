package proxy

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/pires/go-proxyproto"
	"golang.org/x/sys/unix"

	"kmirror/internal/sock"
)

// ProxyHeader says what becomes of PROXY protocol headers (HAProxy's, versions 1 and 2) at the begin of client connections.
type ProxyHeader int8

// The ways.
const (
	ProxyHeaderOff      ProxyHeader = iota // none is expected; one is a wrong request
	ProxyHeaderAllowed                     // a connection may begin with one
	ProxyHeaderRequired                    // each must
)

const (
	maxHeaderV1 = 107       // bytes with the line end; the specification's bound
	headV2      = 16        // bytes up to the length of the rest
	maxHeaderV2 = 4 << 10   // of the rest; TLVs may follow the addresses
	signatureV1 = byte('P') // the first byte of "PROXY ". A Kafka request that began with it would be of 1.3 GB, a TLS record begins with 0x16.
	signatureV2 = byte('\r')
)

var errNoProxyHeader = errors.New("the connection doesn't begin with a PROXY protocol header, which proxy.proxy_protocol requires")

// errNothingSent says that a client ended its connection before its first byte, as health checks do.
var errNothingSent = errors.New("nothing was sent")

// endpoints are a connection's two ends as the client sees them.
type endpoints struct {
	client, proxy net.Addr
}

// endsOf are the connection's own.
func endsOf(client net.Conn) endpoints { return endpoints{client.RemoteAddr(), client.LocalAddr()} }

// readProxyHeader takes the header off a connection, if there is one, and nothing of what follows it. Health checks (LOCAL, UNKNOWN) keep the
// connection's own addresses.
func readProxyHeader(client net.Conn, way ProxyHeader, timeout time.Duration) (endpoints, error) {
	own := endsOf(client)
	if way == ProxyHeaderOff {
		return own, nil
	}
	first, err := awaitByte(client, timeout)
	if err != nil {
		return own, err
	}
	var b []byte
	switch {
	case first == signatureV1:
		b, err = readLine(client)
	case first == signatureV2:
		b, err = readV2(client)
	case way == ProxyHeaderRequired:
		return own, errNoProxyHeader
	default:
		return own, client.SetReadDeadline(time.Time{})
	}
	if err != nil {
		return own, fmt.Errorf("PROXY protocol header: %w", err)
	}
	header, err := proxyproto.Read(bufio.NewReader(bytes.NewReader(b)))
	switch {
	case err != nil && bytes.HasPrefix(b, []byte("PROXY ")):
		return own, fmt.Errorf("PROXY protocol header %q: %w", b, err)
	case err != nil: // whatever it is, it may hold a secret
		return own, fmt.Errorf("PROXY protocol header: %w", err)
	}
	if from, to, ok := header.TCPAddrs(); ok && header.Command.IsProxy() {
		own = endpoints{from, to}
	}
	return own, client.SetReadDeadline(time.Time{})
}

// awaitByte waits for a client's first byte, within a bound, and leaves it there; the read deadline stays set. A client that goes without one gives
// errNothingSent.
func awaitByte(client net.Conn, timeout time.Duration) (byte, error) {
	if err := client.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return 0, err
	}
	first, err := peekBytes(client, 1)
	if err == io.EOF || isReset(err) {
		return 0, errNothingSent
	}
	if err != nil {
		return 0, err
	}
	return first[0], nil
}

// peekBytes waits for the first n bytes and leaves them there.
func peekBytes(client net.Conn, n int) ([]byte, error) {
	socket, ok := client.(*sock.Conn)
	if !ok {
		return nil, errors.New("not a TCP connection")
	}
	first := make([]byte, n)
	var recvErr error
	err := socket.AwaitRead(func(fd uintptr) bool {
		got, done, err := socket.TryReceive(fd, first, unix.MSG_PEEK)
		recvErr = err
		return done && (err != nil || got == n) // more bytes, or the end, wake it again
	})
	return first, cmp.Or(err, recvErr)
}

// readLine reads a header of version 1 byte by byte, since what follows it isn't to be touched.
func readLine(r io.Reader) ([]byte, error) {
	line := make([]byte, 0, maxHeaderV1)
	for len(line) < maxHeaderV1 {
		line = line[:len(line)+1]
		if _, err := io.ReadFull(r, line[len(line)-1:]); err != nil {
			return nil, err
		}
		if line[len(line)-1] == '\n' {
			return line, nil
		}
	}
	return nil, fmt.Errorf("no line end in %d bytes", maxHeaderV1)
}

func readV2(r io.Reader) ([]byte, error) {
	b := make([]byte, headV2, headV2+216)
	if _, err := io.ReadFull(r, b); err != nil {
		return nil, err
	}
	rest := int(binary.BigEndian.Uint16(b[headV2-2:]))
	if rest > maxHeaderV2 {
		return nil, fmt.Errorf("%d bytes long", rest)
	}
	b = append(b, make([]byte, rest)...)
	_, err := io.ReadFull(r, b[headV2:])
	return b, err
}

// clientKey is the context key of the client that is dialled for.
type clientKey struct{}

func withClient(ctx context.Context, client endpoints) context.Context {
	return context.WithValue(ctx, clientKey{}, client)
}

// SendProxyHeader begins a connection with a header of that version (1 or 2), which tells the source's side which client ctx is about; a
// connection of kmirror's own says that it is one (LOCAL, UNKNOWN).
func SendProxyHeader(ctx context.Context, source net.Conn, version int) error {
	header := proxyproto.HeaderProxyFromAddrs(byte(version), nil, nil)
	if client, ok := ctx.Value(clientKey{}).(endpoints); ok {
		header = proxyproto.HeaderProxyFromAddrs(byte(version), client.client, client.proxy)
	}
	_, err := header.WriteTo(source)
	return err
}
