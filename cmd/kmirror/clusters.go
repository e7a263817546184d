package main

import (
	"context"
	"crypto/tls"
	"net"
	"os"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"

	"kmirror/config"
	"kmirror/forwarder"
)

const dialTimeout = 5 * time.Second

// cluster is how a cluster is reached.
type cluster struct {
	config config.Cluster
	dial   dialFunc           // TCP
	tls    func() *tls.Config // of a new connection; nil: plain connections
	header int                // version of the PROXY protocol header that kmirror's own connections begin with; 0: none
}

func newCluster(report *fileReports, c config.Cluster) (cluster, error) {
	tlsConfig, err := clientTLS(report, c.TLS)
	if err != nil {
		return cluster{}, err
	}
	dial, err := newDial(string(c.ProxyURL))
	return cluster{config: c, dial: dial, tls: tlsConfig}, err
}

// newSource is newCluster for the source, which may stand behind a load balancer's PROXY protocol.
func newSource(report *fileReports, c config.Config) (cluster, error) {
	x, err := newCluster(report, c.Source)
	x.header = sentHeaders[c.Proxy.SendProxyProtocol]
	return x, err
}

// options are what the forwarder takes.
func (c cluster) options() forwarder.ClusterOptions {
	return forwarder.ClusterOptions{Seeds: c.config.Bootstrap, Dial: inTime(withTLS(withHeader(c.dial, c.header), c.tls)), SASL: mechanisms(c.config.SASL)}
}

// clientOptions turns them into options of a franz-go client.
func clientOptions(clientID string, c forwarder.ClusterOptions) []kgo.Opt {
	opts := []kgo.Opt{
		kgo.SeedBrokers(c.Seeds...),
		kgo.ClientID(clientID),
		kgo.DisableClientMetrics(),
	}
	if c.Dial != nil {
		opts = append(opts, kgo.Dialer(c.Dial))
	}
	if len(c.SASL) > 0 {
		opts = append(opts, kgo.SASL(c.SASL...))
	}
	return opts
}

// clientTLS returns nil for plain connections, else what makes the configuration of a new one, of its own: with the certificate, key and authorities that
// the files have then. crypto/tls checks the broker's certificate, with the ServerName that the caller sets where none is configured.
func clientTLS(report *fileReports, c config.ClientTLS) (func() *tls.Config, error) {
	if !c.Enabled {
		return nil, nil
	}
	base := &tls.Config{ServerName: c.ServerName, InsecureSkipVerify: c.InsecureSkipVerify, MinVersion: tls.VersionTLS12}
	if c.CertFile != "" {
		pair, err := newKeyPair(report, c.CertFile, c.KeyFile)
		if err != nil {
			return nil, err
		}
		base.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return pair.current(), nil }
	}
	if c.CAFile == "" {
		return base.Clone, nil
	}
	pool, err := newCertPool(report, c.CAFile)
	if err != nil {
		return nil, err
	}
	return func() *tls.Config {
		result := base.Clone()
		result.RootCAs = pool.current()
		return result
	}, nil
}

// serverTLS returns nil for plain listeners.
func serverTLS(report *fileReports, c config.ServerTLS) (*tls.Config, error) {
	if c.CertFile == "" {
		return nil, nil
	}
	pair, err := newKeyPair(report, c.CertFile, c.KeyFile)
	if err != nil {
		return nil, err
	}
	result := &tls.Config{
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return pair.current(), nil },
		MinVersion:     tls.VersionTLS12,
	}
	if c.ClientCAFile != "" {
		pool, err := newCertPool(report, c.ClientCAFile)
		if err != nil {
			return nil, err
		}
		result.ClientAuth, result.ClientCAs = tls.RequireAndVerifyClientCert, pool.current()
		base := result.Clone()
		result.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
			if now := pool.current(); now != base.ClientCAs {
				changed := base.Clone()
				changed.ClientCAs = now
				return changed, nil
			}
			return nil, nil
		}
	}
	return result, nil
}

// mechanisms returns the SASL mechanism of c, or none. Files are read at each log-in, so that a changed secret is taken up.
func mechanisms(c config.SASL) []sasl.Mechanism {
	switch c.Mechanism {
	case "PLAIN":
		return []sasl.Mechanism{plain.Plain(func(context.Context) (plain.Auth, error) {
			password, err := secret(c.Password, c.PasswordFile)
			return plain.Auth{User: c.Username, Pass: password}, err
		})}
	case "SCRAM-SHA-256":
		return []sasl.Mechanism{scram.Sha256(func(context.Context) (scram.Auth, error) { return scramAuth(c) })}
	case "SCRAM-SHA-512":
		return []sasl.Mechanism{scram.Sha512(func(context.Context) (scram.Auth, error) { return scramAuth(c) })}
	case "OAUTHBEARER":
		return []sasl.Mechanism{oauth.Oauth(func(context.Context) (oauth.Auth, error) {
			token, err := secret(c.Token, c.TokenFile)
			return oauth.Auth{Token: token}, err
		})}
	}
	return nil
}

func scramAuth(c config.SASL) (scram.Auth, error) {
	password, err := secret(c.Password, c.PasswordFile)
	return scram.Auth{User: c.Username, Pass: password}, err
}

// secret returns the secret itself or what its file holds, without the line end that editors add.
func secret(value config.Secret, file string) (string, error) {
	if file == "" {
		return string(value), nil
	}
	text, err := os.ReadFile(file)
	return strings.TrimRight(string(text), "\r\n"), err
}

// dialProbe opens and closes a TCP connection.
func dialProbe(ctx context.Context, address string) error {
	conn, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return conn.Close()
}
