package vllm_test

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/vllm"
	"github.com/kinference/kinference/internal/zmtp"
)

// TestDifferentialCache compares events and cached tokens of a small engine
// that works in chunks of 256 tokens and evicts all the time.
func TestDifferentialCache(t *testing.T) {
	p := newTwins(t, twinShape{blocks: 63, length: 1024, batched: 256, seqs: 8, args: []string{"--enable-log-requests"}})
	w := p.watch(t)
	t.Run("request by request", w.requests)
	t.Run("in one step", w.concurrent)
	t.Run("random", w.random)
	t.Run("metrics", p.counters)
	t.Run("reset while running", w.resetRunning)
	t.Run("client leaves", w.disconnect)
	t.Run("replay", w.replay)
	t.Run("flags that are not set", p.closed)
	t.Run("restart", w.restart)
}

// requests sends one request after the other.
func (w *watch) requests(t *testing.T) {
	type step struct {
		name   string
		prompt diffPrompt
		cached int
	}
	all := func(first, n, output int) diffPrompt { return diffPrompt{ids: idSpan(first, n), output: output} }
	salted := func(salt string, output int) diffPrompt {
		return diffPrompt{ids: idSpan(1000, 100), output: output, salt: salt}
	}
	steps := []step{
		{"a prompt", all(1000, 100, 1), 0},
		{"a hit", all(1000, 100, 1), 96},
		{"part of a hit", all(1000, 50, 1), 32},
		{"a longer prompt", all(1000, 140, 1), 96},
		{"less than a block", all(1500, 31, 1), 0},
		{"an aligned prompt", all(2000, 96, 1), 0},
		{"an aligned prompt again: a second copy of its last block", all(2000, 96, 1), 64},
		{"and a third", all(2000, 96, 1), 64},
		{"one token more: no copy", all(2000, 97, 1), 96},
		{"blocks of generated tokens", all(3000, 60, 70), 0},
		{"the next turn", diffPrompt{ids: slices.Concat(idSpan(3000, 60), forced(70), idSpan(3500, 40)), output: 1}, 128},
		{"output up to the end of a block", all(3600, 60, 4), 0},
		{"its last token was not computed", diffPrompt{ids: slices.Concat(idSpan(3600, 60), forced(4), idSpan(3800, 1)), output: 1}, 32},
		{"a salt", salted("s1", 40), 0},
		{"the same salt", salted("s1", 1), 96},
		{"another salt", salted("s2", 1), 0},
		{"a prompt in chunks", all(4000, 1000, 20), 0},
		{"up to the context length", all(4000, 1023, 1), 992},
	}
	for i := range 6 {
		steps = append(steps, step{"evictions", all(10_000+1000*i, 320+32*i, 1), 0})
	}
	for i := range 6 {
		steps = append(steps, step{"what was evicted", all(10_000+1000*i, 320+32*i, 1), -1})
	}
	for _, s := range steps {
		t.Run(s.name, func(t *testing.T) {
			if got := w.both(t, s.prompt); s.cached >= 0 && got.Cached != s.cached {
				t.Errorf("cached %d, want %d", got.Cached, s.cached)
			}
			w.compare(t)
		})
	}
	t.Run("reset when idle: the event comes with the next request", func(t *testing.T) {
		w.reset(t)
		w.compare(t)
		if got := w.both(t, all(4000, 1000, 1)); got.Cached != 0 {
			t.Errorf("cached %d after the reset", got.Cached)
		}
		w.compare(t)
	})
}

// concurrent has several sequences start in the same step. How real clients
// interleave is a matter of chance, so they come in one request while
// scheduling stands still.
func (w *watch) concurrent(t *testing.T) {
	body := func(prompts string, output int, more string) diffCall {
		return diffCall{path: "/v1/completions", body: fmt.Sprintf(
			`{"model":"qwen","prompt":%s,"max_tokens":%d,"ignore_eos":true,"allowed_token_ids":[%d]%s}`, prompts, output, forcedID, more)}
	}
	lists := func(prompts ...[]int) string {
		var out []string
		for _, p := range prompts {
			out = append(out, idList(p))
		}
		return "[" + strings.Join(out, ",") + "]"
	}
	for _, s := range []struct {
		name      string
		sequences int
		call      diffCall
	}{
		{"siblings", 4, body(lists(idSpan(5000, 70), idSpan(5000, 70), idSpan(5000, 64), idSpan(5000, 70)), 5, "")},
		{"siblings in a stream", 3, body(lists(idSpan(5000, 70), idSpan(5200, 70), idSpan(5200, 40)), 5, `,"stream":true,"stream_options":{"include_usage":true}`)},
		{"more tokens than a step holds", 3, body(lists(idSpan(5000, 200), idSpan(6000, 150), idSpan(7000, 300)), 40, "")},
		{"more sequences than a step holds", 12, body(lists(slices.Repeat([][]int{idSpan(8000, 40)}, 12)...), 10, "")},
		{"preemption", 3, body(lists(idSpan(20_000, 200), idSpan(21_000, 210), idSpan(22_000, 290)), 600, "")},
		{"several choices", 3, body(idList(idSpan(23_000, 128)), 40, `,"n":3`)},
		{"several choices again, in a stream", 3, body(idList(idSpan(23_000, 128)), 40, `,"n":3,"stream":true,"stream_options":{"include_usage":true}`)},
		{"longer prompts wait for room", 4, body(lists(idSpan(24_000, 900), idSpan(25_000, 900), idSpan(26_000, 900), idSpan(27_000, 30)), 30, "")},
	} {
		t.Run(s.name, func(t *testing.T) {
			w.paused(t, s.sequences, s.call)
			w.compare(t)
		})
	}
}

// paused sends a request while scheduling stands still, so that all of its
// sequences are there when it goes on, and compares usage.
func (w *watch) paused(t *testing.T, sequences int, c diffCall) {
	t.Helper()
	var got [2]tally
	i := 0
	w.each(func(s *twin) {
		s.do(t, diffCall{method: "POST", path: "/pause?mode=keep&clear_cache=false"})
		before := w.added(s)
		answer := make(chan diffReply, 1)
		go func() { answer <- s.ask(t.Context(), c) }()
		wait(t, s.name+": the engine has all sequences", func() bool { return w.added(s) >= before+sequences })
		s.do(t, diffCall{method: "POST", path: "/resume"})
		got[i] = tallyOf(t, <-answer)
		i++
	})
	if strings.Contains(c.body, `"stream":true`) {
		// Those of the prompt whose first token the server happens to see first.
		got[0].Cached, got[1].Cached = 0, 0
	}
	if got[0] != got[1] {
		t.Errorf("usage: real %+v, sim %+v", got[0], got[1])
	}
}

// added counts the sequences that a side's engine has got.
func (w *watch) added(s *twin) int {
	if s == &w.sim {
		return w.worker.Stats(0).Waiting
	}
	return strings.Count(w.engine.Log().Tail(1<<20), "Added request ")
}

// random sends conversations that grow, repeat and share prefixes, in a cache
// that holds few of them.
func (w *watch) random(t *testing.T) {
	const requests, longest = 300, 900
	r := rand.New(rand.NewPCG(1, 32))
	var talks []diffPrompt
	fresh := 40_000
	user := func() []int {
		n := 1 + r.IntN(120)
		fresh += n
		return idSpan(fresh-n, n)
	}
	hits := 0
	for i := range requests {
		q := diffPrompt{output: 1 + r.IntN(40)}
		if r.IntN(10) == 0 {
			q.salt = "salt" + string(rune('a'+r.IntN(3)))
		}
		switch kind := r.IntN(10); {
		case kind < 3 || len(talks) == 0: // one of a few system prompts, and a new question
			q.ids = slices.Concat(idSpan(30_000+1000*r.IntN(5), 64+16*r.IntN(8)), user())
		case kind < 7: // a talk goes on
			last := talks[len(talks)-1-r.IntN(min(len(talks), 12))]
			q.salt = last.salt
			q.ids = slices.Concat(last.ids, forced(last.output), user())
		case kind < 9: // a talk is asked again, or a part of it
			last := talks[len(talks)-1-r.IntN(min(len(talks), 20))]
			q.salt = last.salt
			q.ids = last.ids[:1+r.IntN(len(last.ids))]
		default: // something with nothing before it, of whole blocks
			fresh += 128
			q.ids = idSpan(fresh-128, diffBlock*(1+r.IntN(4)))
		}
		if len(q.ids) > longest {
			q.ids = q.ids[:longest]
		}
		if got := w.both(t, q); got.Cached > 0 {
			hits++
		}
		talks = append(talks, q)
		if t.Failed() {
			t.Fatalf("stopped at request %d", i)
		}
		if i%20 == 0 {
			w.compare(t)
		}
	}
	w.compare(t)
	t.Logf("%d requests, %d of them with hits", requests, hits)
}

// stream starts a long answer and reads its first n events.
func (s *twin) stream(t *testing.T, ctx context.Context, ids []int, n int) (rest func() string) {
	t.Helper()
	q := diffPrompt{ids: ids, output: 400, more: `,"stream":true,"stream_options":{"include_usage":true}`}
	resp, err := s.send(ctx, q.call())
	if err != nil {
		t.Fatalf("%s: %v", s.name, err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: status %d", s.name, resp.StatusCode)
	}
	var head strings.Builder
	buf := make([]byte, 4096)
	for strings.Count(head.String(), "\n\n") < n {
		k, err := resp.Body.Read(buf)
		head.Write(buf[:k])
		if err != nil {
			t.Fatalf("%s: %v after %q", s.name, err, head.String())
		}
	}
	return func() string {
		tail, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Errorf("%s: %v", s.name, err)
		}
		return head.String() + string(tail)
	}
}

// resetRunning resets the cache under a request. When it happens is a matter of
// chance, so only what is certain is compared.
func (w *watch) resetRunning(t *testing.T) {
	w.resync(t)
	ids := idSpan(70_000, 200)
	w.each(func(s *twin) {
		rest := s.stream(t, t.Context(), ids, 3)
		if r := s.do(t, diffCall{method: "POST", path: "/reset_prefix_cache"}); r.body != `{"success":false}` {
			t.Errorf("%s: blocks are in use: %s", s.name, r.body)
		}
		if r := s.do(t, diffCall{method: "POST", path: "/reset_prefix_cache?reset_running_requests=true"}); r.body != `{"success":true}` {
			t.Errorf("%s: %s", s.name, r.body)
		}
		r := diffReply{status: 200, header: http.Header{"Content-Type": {"text/event-stream"}}, body: rest()}
		if u := tallyOf(t, r); u != (tally{200, 400, 0}) {
			t.Errorf("%s: usage %+v", s.name, u)
		}
	})
	token := w.fence(t)
	var kinds [2][]string
	for i, e := range w.events {
		wait(t, "events of the fence", func() bool { return e.has(token) })
		batches, seqs := e.take(t)
		w.next[i] = seqs[len(seqs)-1] + 1
		for _, b := range batches {
			for _, ev := range b.Events {
				switch {
				case ev.Kind == vllm.AllBlocksCleared:
					kinds[i] = append(kinds[i], "cleared")
				case ev.Kind == vllm.BlockStored && ev.Tokens[0] == uint32(ids[0]):
					kinds[i] = append(kinds[i], fmt.Sprintf("prompt stored, parent %v", ev.HasParent))
				}
			}
		}
	}
	want := []string{"prompt stored, parent false", "cleared", "prompt stored, parent false"}
	for i, k := range kinds {
		if d := cmp.Diff(want, k); d != "" {
			t.Errorf("%s (-want +got):\n%s", [2]string{"real", "sim"}[i], d)
		}
	}
	// Prompt and output were computed again: they are in the cache now.
	if u := w.both(t, diffPrompt{ids: slices.Concat(ids, forced(400)), output: 1}); u.Cached != 576 {
		t.Errorf("cached %d, want 576", u.Cached)
	}
	w.resync(t)
}

// disconnect leaves in the middle of a stream: the engine stops, and what it
// computed stays in the cache.
func (w *watch) disconnect(t *testing.T) {
	w.resync(t)
	ids := idSpan(72_000, 200)
	w.each(func(s *twin) {
		ctx, cancel := context.WithCancel(t.Context())
		s.stream(t, ctx, ids, 40)
		cancel()
	})
	// Some tokens came before the engine knew, how many is a matter of chance.
	w.each(func(s *twin) {
		if u := tallyOf(t, s.do(t, diffPrompt{ids: slices.Concat(ids, forced(400)), output: 1}.call())); u.Cached < 224 || u.Cached == 576 {
			t.Errorf("%s: cached %d: want the prompt and some of the output, not all", s.name, u.Cached)
		}
	})
	w.resync(t)
}

// replay asks both replay sockets for all batches.
func (w *watch) replay(t *testing.T) {
	var frames [2][]string
	i := 0
	w.each(func(s *twin) {
		conn, err := zmtp.Dial(t.Context(), s.replay, zmtp.Dealer, zmtp.Options{})
		if err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
		defer conn.Close()
		if err := conn.Send(vllm.ReplayRequest(0)...); err != nil {
			t.Fatal(err)
		}
		for next := uint64(0); ; next++ {
			m, err := conn.Recv()
			if err != nil {
				t.Fatalf("%s: %v", s.name, err)
			}
			seq, payload, end, err := vllm.ParseReplay(m)
			if err != nil {
				t.Fatalf("%s: %v", s.name, err)
			}
			if next == 0 || end {
				frames[i] = append(frames[i], fmt.Sprintf("%d frames, the payload is empty: %v", len(m), len(payload) == 0))
			}
			if end {
				if next != w.next[i] {
					t.Errorf("%s: %d batches replayed, %d came", s.name, next, w.next[i])
				}
				break
			}
			if seq != next {
				t.Fatalf("%s: batch %d, want %d", s.name, seq, next)
			}
		}
		i++
	})
	if d := cmp.Diff(frames[0], frames[1]); d != "" {
		t.Errorf("messages differ (-real +sim):\n%s", d)
	}
}

// closed asks for what an engine does without further flags.
func (p *twins) closed(t *testing.T) {
	for _, c := range []diffCall{
		{path: "/v1/chat/completions/render", body: `{"model":"qwen","messages":[{"role":"user","content":"hi"}]}`},
		{path: "/v1/completions/render", body: `{"prompt":"hi"}`},
		{path: "/load"},
		diffPrompt{ids: idSpan(1, 3), output: 1}.call(),
	} {
		c.header = map[string]string{"X-Request-Id": "abc"}
		p.same(t, c)
	}
}

// restart kills both and starts them again on the same addresses: numbers from
// 0, nothing cached, the same hashes (0.32 seeds them with a constant).
func (w *watch) restart(t *testing.T) {
	q := diffPrompt{ids: idSpan(80_000, 100), output: 1}
	w.both(t, q)
	w.compare(t)
	for _, e := range w.events {
		e.stop()
	}
	w.engine.Restart()
	if err := w.worker.Restart(); err != nil {
		t.Fatal(err)
	}
	w.attach(t)
	if w.next[0] > 100 || w.next[1] > 100 {
		t.Errorf("batches are numbered from %v", w.next)
	}
	if u := w.both(t, q); u.Cached != 0 {
		t.Errorf("cached %d after the restart", u.Cached)
	}
	w.compare(t)
}
