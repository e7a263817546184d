package forwarder

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl"

	"kmirror/internal/bufpool"
)

// login is how a connection logs in. It belongs to the dialling goroutine, then to the writer's.
type login struct {
	mechanisms []sasl.Mechanism // none: it doesn't
	renewAt    time.Time        // when to log in again, before the broker ends the session; zero: never
}

// asker sends a request and returns the body of the answer.
type asker func(kmsg.Request) ([]byte, error)

// logIn logs in, and notes when to do so again. Clients of Kafka take the same part of the session (KIP-368).
func (c *conn) logIn(ctx context.Context, ask asker) error {
	lifetime, err := c.authenticate(ctx, ask)
	c.login.renewAt = time.Time{}
	if lifetime > 0 {
		c.login.renewAt = time.Now().Add(lifetime * 85 / 100)
	}
	return err
}

// renewLogin logs in again if it is time and something waits to be written: brokers don't close idle connections for a session's end.
// What was written before is answered first, and what waits is written after, so requests keep their order.
func (c *conn) renewLogin() error {
	if c.login.renewAt.IsZero() || time.Now().Before(c.login.renewAt) {
		return nil
	}
	c.mu.Lock()
	idle := len(c.writes) == 0 || c.err != nil
	c.mu.Unlock()
	if idle {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
	defer cancel()
	return c.logIn(ctx, c.interject)
}

// interject sends req before all that isn't written yet, and waits for its answer. Only the writer's goroutine calls it.
func (c *conn) interject(req kmsg.Request) ([]byte, error) {
	type answer struct {
		body []byte
		err  error
	}
	answered := make(chan answer, 1)
	deadline := time.Now().Add(answerTimeout)
	c.mu.Lock()
	if c.err != nil {
		defer c.mu.Unlock()
		return nil, c.err
	}
	c.corr++
	frame := c.format.AppendRequest(nil, req, c.corr)
	written := max(0, len(c.calls)-len(c.writes)) // each request that waits has a call
	c.calls = slices.Insert(c.calls, written, call{c.corr, flexibleAnswer(req), deadline, func(body []byte, buf *bufpool.Buf, err error) {
		if buf != nil {
			body = bytes.Clone(body)
			buf.Release()
		}
		answered <- answer{body, err}
	}})
	if written == 0 {
		c.nc.SetReadDeadline(deadline)
	}
	c.mu.Unlock()
	c.nc.SetWriteDeadline(deadline)
	if _, err := c.nc.Write(frame); err != nil {
		return nil, err
	}
	select {
	case a := <-answered:
		return a.body, a.err
	case <-c.ended: // the reader waits for this goroutine before it fails the calls
		return nil, errConnClosed
	}
}

// authenticate logs in with the first of the mechanisms that the broker offers: SaslHandshake v1, then SaslAuthenticate (KIP-152). It
// returns how long the broker takes the session for good, 0 if for ever.
func (c *conn) authenticate(ctx context.Context, ask asker) (time.Duration, error) {
	mechanisms := c.login.mechanisms
	mechanism := mechanisms[0]
	for tried := map[string]bool{}; ; {
		tried[mechanism.Name()] = true
		req := kmsg.NewPtrSASLHandshakeRequest()
		req.Version, req.Mechanism = 1, mechanism.Name()
		body, err := ask(req)
		if err != nil {
			return 0, fmt.Errorf("SaslHandshake: %w", err)
		}
		resp := req.ResponseKind().(*kmsg.SASLHandshakeResponse)
		if err := resp.ReadFrom(body); err != nil {
			return 0, fmt.Errorf("SaslHandshake: %w", err)
		}
		if resp.ErrorCode == 0 {
			break
		}
		next := offered(mechanisms, resp.SupportedMechanisms, tried)
		if next == nil {
			return 0, fmt.Errorf("SASL mechanism %s, broker offers %v: %w", mechanism.Name(), resp.SupportedMechanisms, kerr.ErrorForCode(resp.ErrorCode))
		}
		mechanism = next
	}
	session, token, err := mechanism.Authenticate(ctx, c.addr)
	if err != nil {
		return 0, fmt.Errorf("SASL %s: %w", mechanism.Name(), err)
	}
	return c.exchange(mechanism.Name(), session, token, ask)
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
func (c *conn) exchange(name string, session sasl.Session, token []byte, ask asker) (lifetime time.Duration, err error) {
	version := max(0, min(2, c.versions[int16(kmsg.SASLAuthenticate)]))
	for done := false; !done || len(token) > 0; {
		req := kmsg.NewPtrSASLAuthenticateRequest()
		req.Version, req.SASLAuthBytes = version, token
		body, err := ask(req)
		if err != nil {
			return 0, fmt.Errorf("SaslAuthenticate %s: %w", name, err)
		}
		resp := req.ResponseKind().(*kmsg.SASLAuthenticateResponse)
		if err := resp.ReadFrom(body); err != nil {
			return 0, fmt.Errorf("SaslAuthenticate %s: %w", name, err)
		}
		if err := kerr.ErrorForCode(resp.ErrorCode); err != nil {
			if resp.ErrorMessage != nil {
				err = errors.Join(err, errors.New(*resp.ErrorMessage))
			}
			return 0, fmt.Errorf("SaslAuthenticate %s: %w", name, err)
		}
		lifetime = time.Duration(resp.SessionLifetimeMillis) * time.Millisecond
		if done {
			break
		}
		if done, token, err = session.Challenge(resp.SASLAuthBytes); err != nil {
			return 0, fmt.Errorf("SASL %s: %w", name, err)
		}
	}
	return lifetime, nil
}
