package security

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"

	"kmirror/internal/kafkatest"
)

const (
	user     = "alice"
	password = "s3cret-of-alice"
	// reauthentication is how long brokers take a log-in for good (connections.max.reauth.ms, KIP-368).
	reauthentication = 3 * time.Second
)

// secured is a cluster of one broker with a listener for every mechanism (SASL), the same with TLS (SECURE), and one for PLAIN alone (FEW).
type secured struct {
	*kafkatest.RealCluster
	ca *authority // of SECURE
}

func (c secured) Seeds() []string { return []string{c.Broker(1).Listener("SASL")} }

// Client is an administrator's, on the listener without log-ins.
func (c secured) Client(t testing.TB, opts ...kgo.Opt) *kgo.Client {
	return c.RealCluster.Client(t, opts...)
}

func startSecured(t testing.TB) secured {
	t.Helper()
	options := []kafkatest.Option{kafkatest.Listener("SASL", "SASL_PLAINTEXT"), kafkatest.Listener("SECURE", "SASL_SSL"), kafkatest.Listener("FEW", "SASL_PLAINTEXT")}
	set := func(key, value string) { options = append(options, kafkatest.Config(key, value)) }
	modules := map[string]string{
		"plain":         `org.apache.kafka.common.security.plain.PlainLoginModule required user_` + user + `="` + password + `";`,
		"scram-sha-256": `org.apache.kafka.common.security.scram.ScramLoginModule required;`,
		"scram-sha-512": `org.apache.kafka.common.security.scram.ScramLoginModule required;`,
		"oauthbearer":   `org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";`,
	}
	for _, listener := range []string{"sasl", "secure"} {
		for mechanism, module := range modules {
			set("listener.name."+listener+"."+mechanism+".sasl.jaas.config", module)
		}
		set("listener.name."+listener+".sasl.enabled.mechanisms", strings.Join(mechanisms, ","))
		set("listener.name."+listener+".connections.max.reauth.ms", fmt.Sprint(reauthentication.Milliseconds()))
	}
	ca := newAuthority(t, "broker-ca")
	for key, value := range ca.brokerSettings() {
		set("listener.name.secure."+key, value)
	}
	set("listener.name.few.plain.sasl.jaas.config", modules["plain"])
	set("listener.name.few.sasl.enabled.mechanisms", "PLAIN")
	c := secured{kafkatest.Real(t, options...), ca}
	for _, mechanism := range []kadm.ScramMechanism{kadm.ScramSha256, kadm.ScramSha512} { // a user may stand once in a request
		c.setPassword(t, mechanism, user, password)
	}
	return c
}

// setPassword makes or changes a user of SCRAM.
func (c secured) setPassword(t testing.TB, mechanism kadm.ScramMechanism, name, secret string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	altered, err := kadm.NewClient(c.Client(t)).AlterUserSCRAMs(ctx, nil, []kadm.UpsertSCRAM{{User: name, Mechanism: mechanism, Iterations: 4096, Password: secret}})
	if err == nil {
		err = altered.Error()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// token is an unsecured JSON Web Token (RFC 7515, "alg": "none") of a user, which brokers take where nothing better is configured.
func token(name string, expires time.Time) string {
	encode := func(x any) string {
		b, _ := json.Marshal(x) // plain maps
		return base64.RawURLEncoding.EncodeToString(b)
	}
	claims := map[string]any{"sub": name, "iat": float64(expires.Add(-time.Hour).Unix()), "exp": float64(expires.Unix())}
	return encode(map[string]string{"alg": "none"}) + "." + encode(claims) + "."
}

// login is a mechanism with a user's secret.
func login(mechanism, name, secret string) sasl.Mechanism {
	switch mechanism {
	case "PLAIN":
		return plain.Auth{User: name, Pass: secret}.AsMechanism()
	case "SCRAM-SHA-256":
		return scram.Auth{User: name, Pass: secret}.AsSha256Mechanism()
	case "SCRAM-SHA-512":
		return scram.Auth{User: name, Pass: secret}.AsSha512Mechanism()
	}
	return oauthOf(token(name, time.Now().Add(time.Hour)))
}

func oauthOf(token string) sasl.Mechanism { return oauth.Auth{Token: token}.AsMechanism() }

// ownLogin are the flags of kmirror's own log-in to a cluster.
func ownLogin(cluster, mechanism string) []string {
	flags := []string{"--" + cluster + ".sasl.mechanism", mechanism}
	if mechanism == "OAUTHBEARER" {
		return append(flags, "--"+cluster+".sasl.token", token("kmirror", time.Now().Add(time.Hour)))
	}
	return append(flags, "--"+cluster+".sasl.username", user, "--"+cluster+".sasl.password", password)
}

var mechanisms = []string{"PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"}

// wantNoSecret fails if a log shows a secret.
func wantNoSecret(t testing.TB, log string) {
	t.Helper()
	for _, secret := range []string{password, "wr0ng", strings.Split(token("kmirror", time.Now()), ".")[0]} {
		if strings.Contains(log, secret) {
			t.Errorf("kmirror's log shows %q", secret)
		}
	}
}
