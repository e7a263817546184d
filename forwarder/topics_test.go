package forwarder

import (
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"kmirror/internal/scripted"
)

// Brokers that don't answer about their settings leave a refresh time for the rest (topics.go: expiryTimeout); what another one says counts.
func TestSilentBrokersLeaveARefreshItsTime(t *testing.T) {
	t.Parallel()
	mirror := scripted.New(t, scripted.Options{Brokers: 3, ProducerIDExpiration: 7 * time.Hour})
	client, err := kgo.NewClient(clientOptions(ClusterOptions{Seeds: mirror.Seeds()}, "test")...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	view, err := askView(t.Context(), client, nil)
	if err != nil {
		t.Fatal(err)
	}
	hung := mirror.InterceptNext(1000, 32, func(req *scripted.Request) bool {
		_, is := req.Body.(*kmsg.DescribeConfigsRequest)
		return is && req.Broker != 3
	},
		func(*scripted.Request) scripted.Action { return scripted.HoldForever() })
	r := refresher{mirror: client}
	promptly(t, "the question", func() {
		for len(hung) < 2 { // the order is random
			if expiry := r.askExpiry(t.Context(), view); expiry != 7*time.Hour {
				t.Errorf("the mirror's producer.id.expiration.ms is %s, want 7h", expiry)
				return
			}
		}
	})
}
