package clients

import (
	"os/exec"
	"strconv"
	"testing"
)

// SaramaLogIn returns a command of sarama's that prints how a log-in goes, by SaslHandshake v0 or v1.
func SaramaLogIn(t testing.TB, bootstrap, mechanism string, handshake int, user, secret string) *exec.Cmd {
	t.Helper()
	return Client{Name: "sarama", script: "sarama"}.command(t, "login", bootstrap, mechanism, strconv.Itoa(handshake), user, secret)
}
