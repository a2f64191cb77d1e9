package fleetsim_test

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/fleetsim"
)

// The truth that a worker tells about its requests adds up to what its metrics
// say, and those whose client left have it too.
func TestUsed(t *testing.T) {
	told := make(chan fleetsim.Used, 8)
	w, err := fleetsim.Start(context.Background(), fleetsim.Config{TimeScale: 20, Model: "m", OnUsed: func(u fleetsim.Used) { told <- u }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Kill)
	ask := func(ctx context.Context, id, more string) *http.Response {
		t.Helper()
		body := `{"model":"m","prompt":"` + strings.Repeat("word ", 500) + `","ignore_eos":true` + more + `}`
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.URL()+"/v1/completions", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-Request-Id", id)
		req.Header.Set("Content-Type", "application/json")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	next := func() fleetsim.Used {
		t.Helper()
		select {
		case u := <-told:
			return u
		case <-time.After(time.Minute):
			t.Fatal("nothing was told")
		}
		return fleetsim.Used{}
	}
	resp := ask(t.Context(), "whole", `,"max_tokens":7`)
	if body, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s, %v: %s", resp.Status, err, body)
	}
	resp.Body.Close()
	first := next()
	if first.RequestID != "whole" || first.Output != 7 || first.Sent != 7 || first.Aborted || first.Cached != 0 || first.Prompt < 500 {
		t.Errorf("got %+v", first)
	}
	ctx, cancel := context.WithCancel(t.Context())
	resp = ask(ctx, "left", `,"max_tokens":5000,"stream":true`)
	if _, err := io.ReadFull(resp.Body, make([]byte, 2000)); err != nil {
		t.Fatal(err)
	}
	cancel()
	resp.Body.Close()
	if u := next(); u.RequestID != "left" || u.Output < 1 || u.Output >= 5000 || u.Sent > u.Output || !u.Aborted || u.Cached == 0 || u.Prompt != first.Prompt {
		t.Errorf("got %+v", u)
	}
	http.DefaultClient.CloseIdleConnections()
}
