package acceptance

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/rpc"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1/kvtrackerv1connect"
)

// A prompt goes where its prefix is cached, the answer says so, and the record
// of the decision tells why.
func TestSamePrefixGoesToTheSameWorker(t *testing.T) {
	e := start(t, settings{})
	prefix := words(1, 2000)
	first := e.chat(req{text: prefix + " one", max: 2})
	if first.status != http.StatusOK || first.usage.Details.Cached > 100 {
		t.Fatalf("cold request: got status %d, %d cached tokens: %s", first.status, first.usage.Details.Cached, first.body)
	}
	home := e.explain(first).Chosen
	for i := range 6 {
		ask := req{text: prefix + strings.Repeat(" more", i+1), max: 2}
		if i%2 == 0 {
			ask.stream, ask.extra = true, `,"stream_options":{"include_usage":true}`
		}
		// The index follows the engine's events; until they have arrived the
		// router's own memory must do.
		r := e.chat(ask)
		d := e.explain(r)
		if d.Chosen != home {
			t.Errorf("request %d went to %s, want %s (%s)", i, d.Chosen, home, d.Reason)
		}
		if d.Reason == "" || len(d.Candidates) != 3 {
			t.Errorf("request %d: record has reason %q and %d candidates, want a reason and 3", i, d.Reason, len(d.Candidates))
		}
		if r.usage.Details.Cached < 1900 {
			t.Errorf("request %d: %d tokens were cached, want the prefix of about 2000", i, r.usage.Details.Cached)
		}
	}
	// Once the events are in, the index itself must know the prefix.
	e.eventually("index knows the prefix", func() bool {
		for _, c := range e.explain(e.chat(req{text: prefix + " again", max: 1})).Candidates {
			if c.Worker == home && c.MatchedTokens >= 1900 {
				return true
			}
		}
		return false
	})
}

// Requests that match nothing must not pile up on one worker, whether they
// come one after the other or at once (Infera 103 and 107).
func TestColdTrafficSpreads(t *testing.T) {
	// A higher scale would make noise of the host look like slow workers.
	e := start(t, settings{scale: 10})
	served := map[string]int{}
	for i := range 30 {
		r := e.chat(req{text: words(100+i, 300), max: 1})
		served[e.explain(r).Chosen]++
	}
	for w, n := range served {
		if n > 20 {
			t.Errorf("%s served %d of 30 requests without any reuse", w, n)
		}
	}
	if len(served) != 3 {
		t.Errorf("requests went to %d workers, want all 3: %v", len(served), served)
	}

	var mu sync.Mutex
	var wg sync.WaitGroup
	var burst []answer
	for i := range 24 {
		wg.Go(func() {
			r := e.chat(req{text: words(500+i, 300), max: 1})
			mu.Lock()
			defer mu.Unlock()
			burst = append(burst, r)
		})
	}
	wg.Wait()
	served = map[string]int{}
	for _, r := range burst {
		served[e.explain(r).Chosen]++
	}
	for w, n := range served {
		if n > 14 {
			t.Errorf("%s got %d of a burst of 24", w, n)
		}
	}
}

// A worker that restarts on the same address has lost its cache: nothing must
// be expected there (llm-d-router 1738).
func TestRestartedWorkerGetsNoFalseHit(t *testing.T) {
	e := start(t, settings{workers: 1})
	prompts := make([]string, 20) // each is asked for once after the restart
	for i := range prompts {
		prompts[i] = words(1000+i, 500)
		e.chat(req{text: prompts[i], max: 1})
	}
	last := prompts[len(prompts)-1]
	e.eventually("prompts are in the index", func() bool {
		return e.explain(e.chat(req{text: last + " x", max: 1})).Candidates[0].MatchedTokens >= 400
	})
	epoch := e.epoch()
	if err := e.workers[0].Restart(); err != nil {
		t.Fatal(err)
	}
	for i, p := range prompts {
		var r answer
		e.eventually("worker answers again", func() bool {
			r = e.chat(req{text: p + " y", max: 1})
			return r.status == http.StatusOK
		})
		// This engine is back within a millisecond, as no real one is: the first
		// request may be there before the loss of the connection is known.
		c := e.explain(r).Candidates[0]
		if i == 0 {
			e.eventually("restart is seen", func() bool { return e.epoch() != epoch })
			continue
		}
		if int(c.MatchedTokens+c.AnticipatedTokens) > r.usage.Details.Cached {
			t.Errorf("prompt %d: %d+%d tokens were expected, the new engine had %d", i, c.MatchedTokens, c.AnticipatedTokens, r.usage.Details.Cached)
		}
	}
}

// epoch is the first worker's run as the tracker sees it.
func (e *env) epoch() string {
	e.t.Helper()
	ctx, cancel := context.WithCancel(e.t.Context())
	defer cancel()
	stream, err := rpc.Client(ctx, e.stack.KVTrackerURL(), kvtrackerv1connect.NewKVTrackerServiceClient).WatchWorkers(ctx, &kvtrackerv1.WatchWorkersRequest{})
	if err != nil {
		e.t.Fatal(err)
	}
	defer stream.Close()
	if !stream.Receive() || len(stream.Msg().Workers) == 0 {
		e.t.Fatalf("no workers: %v", stream.Err())
	}
	return stream.Msg().Workers[0].Epoch
}

// A wiped cache is seen although vLLM announces it only with its next step.
func TestWipedCacheIsSeen(t *testing.T) {
	e := start(t, settings{workers: 1})
	prefix := words(3, 1000)
	e.chat(req{text: prefix, max: 1})
	e.eventually("prefix is in the index", func() bool {
		return e.explain(e.chat(req{text: prefix + " x", max: 1})).Candidates[0].MatchedTokens >= 900
	})
	e.eventually("engine is idle", func() bool { return e.workers[0].WipeCache() })
	e.chat(req{text: "carries the event", max: 1})
	e.eventually("index forgets the prefix", func() bool {
		// A prompt that differs in its last words only, so that it does not
		// itself fill the cache again with what is looked for.
		other := e.chat(req{text: words(3, 1000)[:1200] + words(int(e.workers[0].Now()), 50), max: 1})
		return other.status == http.StatusOK && e.explain(other).Candidates[0].MatchedTokens < 900
	})
}

// Without any tokenizer the worker's own render route tokenises.
func TestWithoutTokenizerTheWorkerRenders(t *testing.T) {
	e := start(t, settings{workers: 2, worker: func(_ int, c *fleetsim.Config) {}})
	e.write("fleet.yaml", dropLine(e.workerSet(""), "tokenizer:"))
	prefix := words(4, 1500)
	e.eventually("prefix is found by rendering", func() bool {
		r := e.chat(req{text: prefix, max: 1})
		if r.status != http.StatusOK {
			return false
		}
		for _, c := range e.explain(r).Candidates {
			if c.MatchedTokens >= 1400 {
				return strings.Contains(e.metrics(), `mode="render"`)
			}
		}
		return false
	})
}

func dropLine(s, with string) string {
	var out []string
	for _, l := range strings.Split(s, "\n") {
		if !strings.Contains(l, with) {
			out = append(out, l)
		}
	}
	return strings.Join(out, "\n")
}

func (e *env) metrics() string {
	e.t.Helper()
	resp, err := e.client.Get(e.stack.AdminURL() + "/metrics")
	if err != nil {
		e.t.Fatal(err)
	}
	defer resp.Body.Close()
	var b strings.Builder
	buf := make([]byte, 32<<10)
	for {
		n, err := resp.Body.Read(buf)
		b.Write(buf[:n])
		if err != nil {
			return b.String()
		}
	}
}
