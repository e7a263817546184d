package proxy

import (
	"strings"

	"go.uber.org/zap"

	"kmirror/protocol"
)

// login is who a client says it is. It is never changed: a client may send the next log-in before the answer to this one.
type login struct {
	mechanism string
	principal string // of PLAIN and SCRAM, which send it in the clear
}

// maxSASLAuthenticate is the newest version whose answer is read.
const maxSASLAuthenticate = 2

// noteLogin looks into a SASL request of the client's for who logs in how, and reports whether its answer is to be looked at. Tokens without a
// header, after a SaslHandshake v0, aren't looked into.
func (c *conn) noteLogin(h protocol.RequestHeader, n int) (watch bool, err error) {
	if n > maxPeek || h.APIKey != protocol.KeySASLHandshake && h.APIKey != protocol.KeySASLAuthenticate {
		return false, nil
	}
	b, err := c.requests.peek(n)
	if err != nil {
		return false, err
	}
	if h.APIKey == protocol.KeySASLHandshake {
		c.login.Store(&login{mechanism: clip(protocol.SASLMechanism(b[:n]))})
		return true, nil
	}
	if h.APIVersion > maxSASLAuthenticate {
		return false, nil
	}
	if who := c.who(); who.principal == "" {
		who.principal = clip(principal(who.mechanism, protocol.SASLToken(b[:n])))
		c.login.Store(&who)
	}
	return true, nil
}

func (c *conn) who() login {
	if l := c.login.Load(); l != nil {
		return *l
	}
	return login{}
}

// principal reads the user's name from the first token of a log-in (RFC 4616, RFC 5802), "" where it can't.
func principal(mechanism string, token []byte) string {
	switch mechanism = strings.ToUpper(mechanism); {
	case mechanism == "PLAIN":
		if parts := strings.SplitN(string(token), "\x00", 3); len(parts) == 3 {
			return parts[1]
		}
	case strings.HasPrefix(mechanism, "SCRAM-"):
		for part := range strings.SplitSeq(string(token), ",") {
			if name, ok := strings.CutPrefix(part, "n="); ok {
				return strings.NewReplacer("=2C", ",", "=3D", "=").Replace(name)
			}
		}
	}
	return ""
}

// clip bounds what a client can write into the log.
func clip(s string) string { return strings.ToValidUTF8(s[:min(len(s), 200)], "?") }

// lastStep is the number of SaslAuthenticate answers after which a mechanism is done; of others each answer is told.
var lastStep = map[string]int{"PLAIN": 1, "OAUTHBEARER": 1, "SCRAM-SHA-256": 2, "SCRAM-SHA-512": 2}

// handshakeAnswered tells of a mechanism that the broker refuses.
func (c *conn) handshakeAnswered(frame []byte) {
	if code, ok := protocol.SASLHandshakeCode(frame); ok && code != 0 {
		c.loginRefused(code)
	}
}

// loginAnswered tells how a log-in went.
func (c *conn) loginAnswered(frame []byte, version int16) {
	code, ok := protocol.SASLAuthenticateCode(frame, version)
	if !ok {
		return
	}
	if code != 0 {
		c.loginRefused(code)
	} else if c.access != nil {
		c.access.steps++
		if last := lastStep[strings.ToUpper(c.who().mechanism)]; c.access.steps >= last {
			c.accessAuthenticated("ok")
		}
	}
}

func (c *conn) loginRefused(code int16) {
	outcome := protocol.ErrorName(code)
	fields := []zap.Field{zap.Stringer("client", c.ends.client), zap.String("mechanism", c.who().mechanism), zap.String("error", outcome)}
	if c.broker != nil {
		fields = append(fields, zap.Int32("broker", c.broker.id))
	}
	c.s.warnings.warn("login", c.peer(), "the broker refused a client's log-in", fields...)
	if c.access != nil {
		c.accessAuthenticated(outcome)
	}
}

func (c *conn) accessAuthenticated(outcome string) {
	c.access.steps = 0
	who := c.who()
	c.access.log.add("authenticate", c.accessFields(zap.String("mechanism", who.mechanism), zap.String("principal", who.principal), zap.String("outcome", outcome))...)
}
