package acceptance

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/testenv"
)

// Each service runs as a process of its own too, found by addresses only, and
// they may start in any order.
func TestServicesAsProcesses(t *testing.T) {
	bin := build(t, "services/ingress/cmd/ingress", "services/router/cmd/router", "services/kvtracker/cmd/kvtracker",
		"services/limiter/cmd/limiter", "services/classifier/cmd/classifier", "services/accounting/cmd/accounting")
	nats := testenv.NATS(t)
	w, err := fleetsim.Start(t.Context(), fleetsim.Config{Name: "w0", TimeScale: 50, Model: modelName})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Kill)
	e := &env{t: t, dir: t.TempDir(), workers: []*fleetsim.Worker{w}, client: &http.Client{}}
	t.Cleanup(e.client.CloseIdleConnections)
	e.write("fleet.yaml", e.workerSet(""))

	next := func() string { return testenv.FreeAddr(t) }
	ingress, router, tracker, admin := next(), next(), next(), next()
	start := func(name string, args ...string) {
		run(t, filepath.Join(bin, name), append(args, "--drain-timeout", "2s", "--admin-listen", next())...)
	}
	start("ingress", "--listen", ingress, "--router-url", "http://"+router)
	start("kvtracker", "--mode", "relay", "--nats-url", nats, "--router-url", "http://"+router)
	start("kvtracker", "--mode", "tracker", "--nats-url", nats, "--listen", tracker)
	tokens := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(tokens, fmt.Appendf(nil, "test read %x\n", sha256.Sum256([]byte("test-token"))), 0o600); err != nil {
		t.Fatal(err)
	}
	start("router", "--admin-api-listen", admin, "--admin-tokens", tokens, "--config", e.dir, "--listen", router, "--kvtracker-url", "http://"+tracker, "--time-scale", "50")
	for _, name := range []string{"limiter", "classifier", "accounting"} {
		addr := next()
		start(name, "--listen", addr)
		e.eventually(name+" is healthy", func() bool {
			resp, err := e.client.Post("http://"+addr+"/grpc.health.v1.Health/Check", "application/json", strings.NewReader("{}"))
			if err != nil {
				return false
			}
			resp.Body.Close()
			return resp.StatusCode == http.StatusOK
		})
	}

	// The tracker knows the prompt by the events, and the router says so.
	prompt := req{text: words(1, 4000)}.body()
	e.eventually("the prompt is in the index", func() bool {
		resp, err := e.client.Post("http://"+ingress+"/v1/chat/completions", "application/json", strings.NewReader(prompt))
		if err != nil {
			return false
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return false
		}
		body := `{"requestId":"` + resp.Header.Get("X-Request-Id") + `"}`
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+admin+"/kinference.admin.v1.AdminService/Explain", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Authorization", "Bearer test-token")
		resp, err = e.client.Do(r)
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		raw, err := io.ReadAll(resp.Body)
		if err != nil {
			return false
		}
		var out struct {
			Decision struct {
				Candidates []struct{ MatchedTokens int }
			}
		}
		return json.Unmarshal(raw, &out) == nil && len(out.Decision.Candidates) == 1 && out.Decision.Candidates[0].MatchedTokens > 700
	})
}
