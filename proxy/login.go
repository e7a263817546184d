package proxy

import (
	"encoding/base64"
	"encoding/json"
	"strings"

	"go.uber.org/zap"

	"kmirror/protocol"
)

// login is who a client says it is. It is never changed: a client may send the next log-in before the answer to this one.
type login struct {
	mechanism string
	principal string // of PLAIN, SCRAM and OAUTHBEARER, which send it in the clear
}

// maxSASLAuthenticate is the newest version whose answer is read.
const maxSASLAuthenticate = 2

// noteLogin looks into a SASL request of the client's for who logs in how, and reports whether its answer is to be looked at.
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
	c.notePrincipal(protocol.SASLToken(b[:n]))
	return true, nil
}

// notePrincipal looks into a token for who logs in, unless one before told.
func (c *conn) notePrincipal(token []byte) {
	if who := c.who(); who.principal == "" {
		who.principal = clip(principal(who.mechanism, token))
		c.login.Store(&who)
	}
}

// noteToken is noteLogin for a token without a header, after a SaslHandshake v0, whose frame has n bytes.
func (c *conn) noteToken(n int) error {
	c.tokensSent++
	if n > maxPeek {
		return nil
	}
	b, err := c.requests.peek(n)
	if err != nil {
		return err
	}
	c.notePrincipal(b[protocol.SizePrefix:n])
	return nil
}

// tokenAnswered is loginAnswered for a token without a header, whose answer has size bytes.
func (c *conn) tokenAnswered(size int) {
	c.tokensTaken++
	c.loginStep(size)
}

// tokenRefused tells of a token without a header that the broker refused, for which it has no answer but to end the connection. Both goroutines are done.
func (c *conn) tokenRefused() {
	if last := lastStep[strings.ToUpper(c.who().mechanism)]; last > 0 && c.tokensSent > c.tokensTaken && c.endedBy.Load() == endedByBroker {
		c.loginRefused("the broker ended the connection")
	}
}

func (c *conn) who() login {
	if l := c.login.Load(); l != nil {
		return *l
	}
	return login{}
}

// principal reads the user's name from the first token of a log-in (RFC 4616, RFC 5802, RFC 7628), "" where it can't.
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
	case mechanism == "OAUTHBEARER":
		_, value, _ := strings.Cut(string(token), "\x01auth=")
		value, _, _ = strings.Cut(value, "\x01")
		_, value, _ = strings.Cut(value, " ") // Bearer
		return subject(value)
	}
	return ""
}

// subject reads the sub claim of a JSON Web Token (RFC 7519), from which brokers take the principal unless told otherwise (sasl.oauthbearer.sub.claim.name). Whether
// it's true is for the broker to say.
func subject(token string) string {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return ""
	}
	claims, err := base64.RawURLEncoding.DecodeString(strings.TrimRight(parts[1], "="))
	if err != nil {
		return ""
	}
	var who struct{ Sub string }
	if json.Unmarshal(claims, &who) != nil {
		return ""
	}
	return who.Sub
}

// clip bounds what a client can write into the log.
func clip(s string) string { return strings.ToValidUTF8(s[:min(len(s), 200)], "?") }

// lastStep is the number of answers after which a mechanism is done. Of others, GSSAPI among them, nobody can tell: each answer is told as what it is.
var lastStep = map[string]int{"PLAIN": 1, "OAUTHBEARER": 1, "SCRAM-SHA-256": 2, "SCRAM-SHA-512": 2}

// handshakeAnswered tells of a mechanism that the broker refuses.
func (c *conn) handshakeAnswered(frame []byte) {
	if code, ok := protocol.SASLHandshakeCode(frame); ok && code != 0 {
		c.loginRefused(protocol.ErrorName(code))
	}
}

// loginAnswered tells how a log-in went.
func (c *conn) loginAnswered(frame []byte, version int16) {
	code, token, ok := protocol.SASLAuthenticateAnswer(frame, version)
	switch {
	case !ok:
	case code != 0:
		c.loginRefused(protocol.ErrorName(code))
	default:
		c.loginStep(len(token))
	}
}

// loginStep tells of a log-in that is done, once its last token was answered without an error, by size bytes.
func (c *conn) loginStep(size int) {
	if c.access == nil {
		return
	}
	mechanism := strings.ToUpper(c.who().mechanism)
	if mechanism == "OAUTHBEARER" && size > 0 {
		return // why the token is refused (RFC 7628, 3.2.2); the error follows the client's next message
	}
	c.access.steps++
	switch last := lastStep[mechanism]; {
	case last == 0:
		c.accessAuthenticated("token accepted")
	case c.access.steps >= last:
		c.accessAuthenticated("ok")
	}
}

func (c *conn) loginRefused(outcome string) {
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
