package main

import (
	"fmt"
	"strconv"
	"time"

	"github.com/IBM/sarama"
)

// staticToken is a token that never changes.
type staticToken string

// Token implements sarama.AccessTokenProvider.
func (t staticToken) Token() (*sarama.AccessToken, error) {
	return &sarama.AccessToken{Token: string(t)}, nil
}

// login prints how a log-in goes, once. The secret of OAUTHBEARER is its token; handshake is the version of SaslHandshake.
func login(bootstrap, mechanism, handshake, user, secret string) error {
	version, err := strconv.ParseInt(handshake, 10, 16)
	if err != nil {
		return err
	}
	c := newConfig()
	c.ApiVersionsRequest = version != 0 // sarama takes one of the two
	c.Metadata.Retry.Max = 0
	c.Net.DialTimeout, c.Net.ReadTimeout, c.Net.WriteTimeout = 10*time.Second, 10*time.Second, 10*time.Second
	c.Net.SASL.Enable, c.Net.SASL.Mechanism, c.Net.SASL.Version = true, sarama.SASLMechanism(mechanism), int16(version)
	c.Net.SASL.User, c.Net.SASL.Password, c.Net.SASL.TokenProvider = user, secret, staticToken(secret)
	client, err := sarama.NewClient([]string{bootstrap}, c)
	if err != nil {
		fmt.Println(err)
		return nil
	}
	fmt.Println("served")
	return client.Close()
}
