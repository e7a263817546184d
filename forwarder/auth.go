package forwarder

import (
	"context"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl"
)

// authenticate logs in with the first of the mechanisms that the broker offers: SaslHandshake v1, then SaslAuthenticate (KIP-152).
func (c *conn) authenticate(ctx context.Context, mechanisms []sasl.Mechanism) error {
	mechanism := mechanisms[0]
	for tried := map[string]bool{}; ; {
		tried[mechanism.Name()] = true
		req := kmsg.NewPtrSASLHandshakeRequest()
		req.Version, req.Mechanism = 1, mechanism.Name()
		body, err := c.roundTrip(req)
		if err != nil {
			return fmt.Errorf("SaslHandshake: %w", err)
		}
		resp := req.ResponseKind().(*kmsg.SASLHandshakeResponse)
		if err := resp.ReadFrom(body); err != nil {
			return fmt.Errorf("SaslHandshake: %w", err)
		}
		if resp.ErrorCode == 0 {
			break
		}
		next := offered(mechanisms, resp.SupportedMechanisms, tried)
		if next == nil {
			return fmt.Errorf("SASL mechanism %s, broker offers %v: %w", mechanism.Name(), resp.SupportedMechanisms, kerr.ErrorForCode(resp.ErrorCode))
		}
		mechanism = next
	}
	session, token, err := mechanism.Authenticate(ctx, c.addr)
	if err != nil {
		return fmt.Errorf("SASL %s: %w", mechanism.Name(), err)
	}
	return c.exchange(mechanism.Name(), session, token)
}

func offered(mechanisms []sasl.Mechanism, supported []string, tried map[string]bool) sasl.Mechanism {
	for _, m := range mechanisms {
		for _, name := range supported {
			if m.Name() == name && !tried[name] {
				return m
			}
		}
	}
	return nil
}

// exchange passes tokens until the session is done.
func (c *conn) exchange(name string, session sasl.Session, token []byte) error {
	version := max(0, min(2, c.versions[int16(kmsg.SASLAuthenticate)]))
	for done := false; !done || len(token) > 0; {
		req := kmsg.NewPtrSASLAuthenticateRequest()
		req.Version, req.SASLAuthBytes = version, token
		body, err := c.roundTrip(req)
		if err != nil {
			return fmt.Errorf("SaslAuthenticate %s: %w", name, err)
		}
		resp := req.ResponseKind().(*kmsg.SASLAuthenticateResponse)
		if err := resp.ReadFrom(body); err != nil {
			return fmt.Errorf("SaslAuthenticate %s: %w", name, err)
		}
		if err := kerr.ErrorForCode(resp.ErrorCode); err != nil {
			if resp.ErrorMessage != nil {
				err = errors.Join(err, errors.New(*resp.ErrorMessage))
			}
			return fmt.Errorf("SaslAuthenticate %s: %w", name, err)
		}
		if done {
			break
		}
		if done, token, err = session.Challenge(resp.SASLAuthBytes); err != nil {
			return fmt.Errorf("SASL %s: %w", name, err)
		}
	}
	return nil
}
