package fleetsim_test

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
)

// outcome is what one request of the closed loop saw, in simulated seconds.
type outcome struct {
	ttft, e2e float64
	cached    int
}

const (
	loopClients  = 3
	loopRequests = 6 // of each client
	loopOutput   = 40
)

// loopPrompt gives the prompts: two prefixes of 5,000 tokens, suffixes of 100.
func loopPrompt(client, i int) (from [2]int, n [2]int) {
	return [2]int{100_000 * ((client + i) % 2), 1_000_000 + 1000*client + 100*i}, [2]int{5000, 100}
}

// virtual runs the loop on a bare engine.
func virtual(t *testing.T, p engine.Profile) (out []outcome) {
	e := engine.New(engine.Config{Profile: p})
	next := make([]int, loopClients)
	send := func(now float64, client int) {
		from, n := loopPrompt(client, next[client])
		next[client]++
		tokens := make([]uint32, 0, n[0]+n[1])
		for k := range 2 {
			for i := range n[k] {
				tokens = append(tokens, uint32(from[k]+i))
			}
		}
		if err := e.Submit(now, &engine.Request{ID: fmt.Sprint(client, "/", next[client]), Tokens: tokens, MaxTokens: loopOutput, Tag: client}); err != nil {
			t.Fatal(err)
		}
	}
	for c := range loopClients {
		send(0, c)
	}
	for now := 0.0; ; {
		end, ok := e.Begin(now)
		if !ok {
			return out
		}
		now = end
		for _, r := range e.End().Finished {
			out = append(out, outcome{r.FirstToken - r.Arrived, r.Finished - r.Arrived, r.Cached})
			if c := r.Tag.(int); next[c] < loopRequests {
				send(now, c)
			}
		}
	}
}

// wall runs the loop over HTTP on a worker.
func wall(t *testing.T, w *fleetsim.Worker) (out []outcome) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	c := client(t)
	for k := range loopClients {
		wg.Go(func() {
			for i := range loopRequests {
				from, n := loopPrompt(k, i)
				body := fmt.Sprintf(`{"prompt":%s,%s,"max_tokens":%d,"stream":true,"stream_options":{"include_usage":true}}`,
					strings.TrimSuffix(ids(from[0], n[0]), "]"), strings.TrimPrefix(ids(from[1], n[1]), "["), loopOutput)
				sent := w.Now()
				resp, err := c.Post(w.URL()+"/v1/completions", "application/json", strings.NewReader(body))
				if err != nil {
					t.Error(err)
					return
				}
				r := bufio.NewReader(resp.Body)
				if _, err := r.ReadString('\n'); err != nil || resp.StatusCode != http.StatusOK {
					t.Error(resp.Status, err)
				}
				first := w.Now()
				rest, err := io.ReadAll(r)
				resp.Body.Close()
				if err != nil {
					t.Error(err)
					return
				}
				ev := sse(t, string(rest))
				u := decode[completion](t, ev[len(ev)-2]).Usage
				mu.Lock()
				out = append(out, outcome{first - sent, w.Now() - sent, u.Details.Cached})
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return out
}

func percentile(list []outcome, p float64, of func(outcome) float64) float64 {
	var v []float64
	for _, o := range list {
		v = append(v, of(o))
	}
	slices.Sort(v)
	return v[int(p*float64(len(v)-1))]
}

// The server in scaled wall time tells the same story as the bare engine in
// virtual time. How close they come depends on how busy the machine is, so the
// figures are only logged. On any machine the same tokens are found in the
// cache, and nothing is faster than the model allows.
func TestWallAgreesWithVirtual(t *testing.T) {
	want := virtual(t, engine.L40SQwen27B)
	w := start(t, fleetsim.Config{Profile: engine.L40SQwen27B, TimeScale: 20})
	got := wall(t, w)
	if len(got) != len(want) {
		t.Fatalf("%d requests, want %d", len(got), len(want))
	}
	for _, m := range []struct {
		name string
		of   func(outcome) float64
	}{{"TTFT", func(o outcome) float64 { return o.ttft }}, {"e2e", func(o outcome) float64 { return o.e2e }}} {
		for _, p := range []float64{0.5, 0.9} {
			v, x := percentile(want, p, m.of), percentile(got, p, m.of)
			t.Logf("%s p%.0f: virtual %.3f s, wall %.3f s (%+.1f %%)", m.name, 100*p, v, x, 100*(x/v-1))
		}
		if v, x := percentile(want, 0, m.of), percentile(got, 0, m.of); x < 0.9*v {
			t.Errorf("shortest %s: virtual %.3f s, wall %.3f s", m.name, v, x)
		}
	}
	total := func(list []outcome) (n int) {
		for _, o := range list {
			n += o.cached
		}
		return n
	}
	if v, x := total(want), total(got); x < v*8/10 || x > v*12/10 {
		t.Errorf("cached tokens: virtual %d, wall %d", v, x)
	}
}
