package fleetsim_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/fleetsim"
)

// long is a request that takes 20 simulated seconds.
const long = `{"prompt":[1,2,3],"max_tokens":1000`

// begin sends a request and returns its response, or the error.
func begin(t *testing.T, ctx context.Context, w *fleetsim.Worker, body string) (*http.Response, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, "POST", w.URL()+"/v1/completions", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	return client(t).Do(req)
}

// A client that goes away frees its blocks, streaming or not.
func TestAbortOnDisconnect(t *testing.T) {
	for _, stream := range []string{`,"stream":true}`, `}`} {
		w := start(t, fleetsim.Config{TimeScale: 1})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			resp, err := begin(t, ctx, w, long+stream)
			if err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		})
		eventually(t, "request runs", func() bool { return w.Stats(0).Running == 1 && w.Stats(0).GeneratedTokens > 0 })
		gone := time.Now()
		cancel()
		eventually(t, "abort", func() bool { return w.Stats(0).Aborted == 1 })
		t.Logf("blocks are free %v after the client left", time.Since(gone))
		if st := w.Stats(0); st.Running != 0 || st.FreeBlocks != small.Blocks {
			t.Errorf("%+v", st)
		}
		if w.Aborted() != 1 {
			t.Errorf("aborted %d", w.Aborted())
		}
		wg.Wait()
	}
}

func TestRequestFaults(t *testing.T) {
	w := start(t, fleetsim.Config{Admin: true})
	ask := func(n int) (int, string, error) {
		resp, err := begin(t, t.Context(), w, fmt.Sprintf(`{"prompt":[1,2,3],"max_tokens":%d,"stream":true}`, n))
		if err != nil {
			return 0, "", err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		return resp.StatusCode, string(b), err
	}
	if status, _, text := post(t, w, "/sim/faults", `{"errorNext":1,"errorStatus":503,"closeNext":1,"closeAfterNext":1,"closeAfterTokens":2}`); status != 200 {
		t.Fatal(text)
	}
	if _, _, err := ask(5); !errors.Is(err, io.EOF) {
		t.Errorf("closed before the first byte: %v", err)
	}
	if status, text, err := ask(5); err != nil || status != 503 || !strings.Contains(text, `"code":503`) {
		t.Errorf("%d %s %v", status, text, err)
	}
	if status, text, err := ask(2000); status != 200 || strings.Count(text, "data: {") != 2 || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("cut after two tokens: %d %v %s", status, err, text)
	}
	if status, text, err := ask(5); status != 200 || err != nil || !strings.HasSuffix(text, "data: [DONE]\n\n") {
		t.Errorf("healthy again: %d %v %s", status, err, text)
	}
	eventually(t, "the cut request is aborted", func() bool { return w.Stats(0).Aborted == 1 })

	w.SetFaults(fleetsim.Faults{Hang: true})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := begin(t, ctx, w, long+`}`); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("hang: %v", err)
	}
	if status, _, _ := get(t, w, "/health"); status != 200 {
		t.Errorf("a hanging worker is healthy: %d", status)
	}
	w.SetFaults(fleetsim.Faults{Unhealthy: true})
	if status, _, _ := get(t, w, "/health"); status != 503 {
		t.Errorf("health: %d", status)
	}
	w.SetFaults(fleetsim.Faults{ErrorRate: 0.5})
	bad := 0
	for range 100 {
		if status, _, _ := ask(5); status == 500 {
			bad++
		}
	}
	if bad < 30 || bad > 70 {
		t.Errorf("%d of 100 failed, want about half", bad)
	}
}

// 20 iterations of 21 ms, a hundred times slower: 42 s at least.
func TestSlow(t *testing.T) {
	w := start(t, fleetsim.Config{TimeScale: 400})
	w.SetFaults(fleetsim.Faults{Slow: 100})
	from := w.Now()
	post(t, w, "/v1/completions", `{"prompt":[1,2,3],"max_tokens":20}`)
	if took := w.Now() - from; took < 41.9 {
		t.Errorf("took %.2f s", took)
	}
}

func TestSleep(t *testing.T) {
	w := start(t, fleetsim.Config{DevMode: true, TimeScale: 1})
	var wg sync.WaitGroup
	wg.Go(func() {
		_, _, text := post(t, w, "/v1/completions", long+`}`)
		if c := decode[completion](t, text); *c.Choices[0].FinishReason != "abort" {
			t.Errorf("%s", text)
		}
	})
	eventually(t, "request runs", func() bool { return w.Stats(0).Running == 1 })
	post(t, w, "/sleep?level=2", "")
	wg.Wait()
	if _, _, text := get(t, w, "/is_sleeping"); text != `{"is_sleeping":true}` {
		t.Error(text)
	}
	if _, _, text := get(t, w, "/metrics"); !strings.Contains(text, `sleep_state="discard_all"} 1.0`) {
		t.Error(text)
	}
	wg.Go(func() {
		if status, _, text := post(t, w, "/v1/completions", `{"prompt":[1],"max_tokens":1}`); status != 200 {
			t.Error(text)
		}
	})
	eventually(t, "request waits", func() bool { return w.Stats(0).Waiting == 1 })
	post(t, w, "/wake_up", "")
	wg.Wait()
}

func TestStop(t *testing.T) {
	for _, c := range []struct {
		name  string
		grace time.Duration
		done  bool
		n     int // tokens
	}{{"drain", time.Minute, true, 100}, {"abort", 0, false, 2000}} {
		t.Run(c.name, func(t *testing.T) {
			w := start(t, fleetsim.Config{TimeScale: 20, ShutdownTimeout: c.grace})
			resp, err := begin(t, t.Context(), w, fmt.Sprintf(`{"prompt":[1,2,3],"max_tokens":%d,"stream":true}`, c.n))
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			line, err := bufio.NewReader(resp.Body).ReadString('\n')
			if err != nil {
				t.Fatal(line, err)
			}
			var wg sync.WaitGroup
			wg.Go(w.Stop)
			rest, err := io.ReadAll(resp.Body)
			if done := strings.HasSuffix(string(rest), "[DONE]\n\n") && err == nil; done != c.done {
				t.Errorf("finished %v (%v), want %v", done, err, c.done)
			}
			wg.Wait()
			if _, err := begin(t, t.Context(), w, long+`}`); err == nil {
				t.Error("still serving")
			}
		})
	}
}

func TestWipeUnderLoad(t *testing.T) {
	w := start(t, fleetsim.Config{Admin: true, TimeScale: 10})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			_, _, text := post(t, w, "/v1/completions", `{"prompt":`+ids(1, 100)+`,"max_tokens":500}`)
			if c := decode[completion](t, text); c.Usage.Completion != 500 {
				t.Error(text)
			}
		})
	}
	eventually(t, "running", func() bool { return w.Stats(0).Running == 4 })
	if _, _, text := post(t, w, "/sim/wipe", ""); text != `{"success":true}` {
		t.Error(text)
	}
	wg.Wait()
	if st := w.Stats(0); st.Preemptions == 0 {
		t.Errorf("%+v", st)
	}
	if status, _, text := get(t, w, "/sim/stats"); status != 200 || !strings.Contains(text, `"Preemptions":`) {
		t.Error(text)
	}
	if status, _, _ := post(t, w, "/sim/restart", ""); status != 202 {
		t.Error(status)
	}
	eventually(t, "restart", func() bool { return w.Stats(0).Steps == 0 })
}
