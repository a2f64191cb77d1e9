package classifier_test

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/kinference/kinference/internal/testenv"
	"github.com/kinference/kinference/services/classifier"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestServesHealthUntilStopped(t *testing.T) {
	l := testenv.Listen(t)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- (&classifier.Service{Config: classifier.Config{Listener: l}}).Run(ctx) }()
	resp, err := http.Post("http://"+l.Addr().String()+"/grpc.health.v1.Health/Check", "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("health: got %s, want 200", resp.Status)
	}
	stop()
	if err := <-done; err != nil {
		t.Errorf("Run: %v", err)
	}
}
