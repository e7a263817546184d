package sock

import (
	"context"
	"net"
)

// Dialer is a net.Dialer whose TCP connections are of this package.
type Dialer struct{ net.Dialer }

// DialContext connects as net.Dialer's does.
func (d *Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := d.Dialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return Wrap(c), nil
}

// Dial connects as net.Dialer's does.
func (d *Dialer) Dial(network, address string) (net.Conn, error) {
	return d.DialContext(context.Background(), network, address)
}
