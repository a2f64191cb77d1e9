package acceptance

import (
	"bufio"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/fleetsim/model"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
)

// What users of other inference gateways have reported as broken, told as
// stories of this one. TESTING.md lists all such reports and their tests.

// candidate is one worker in the record of a decision; nil if it was none.
func candidate(d *adminv1.Decision, suffix string) *adminv1.Candidate {
	for _, c := range d.Candidates {
		if strings.HasSuffix(c.Worker, suffix) {
			return c
		}
	}
	return nil
}

// A new worker that gets the address of one that is gone inherits none of its
// blocks (llm-d-router 1738).
func TestNewWorkerOnAnOldAddress(t *testing.T) {
	e := start(t, settings{workers: 1})
	prompt := words(1, 1000)
	e.eventually("prompt is in the index", func() bool {
		c := candidate(e.explain(e.chat(req{text: prompt, max: 1})), ".w0/0")
		return c != nil && c.MatchedTokens >= 900
	})
	if err := e.workers[0].RestartEngine(); err != nil {
		t.Fatal(err)
	}
	e.write("fleet.yaml", strings.Replace(e.workerSet(""), `name: "w0"`, `name: "w9"`, 1))
	var first answer
	e.eventually("the new worker serves", func() bool {
		first = e.chat(req{text: prompt, max: 1})
		return first.status == http.StatusOK && candidate(e.explain(first), ".w9/0") != nil
	})
	d := e.explain(first)
	if c := candidate(d, ".w9/0"); int(c.MatchedTokens+c.AnticipatedTokens) > first.usage.Details.Cached {
		t.Errorf("%d+%d tokens were expected of the new worker, it had %d", c.MatchedTokens, c.AnticipatedTokens, first.usage.Details.Cached)
	}
	if c := candidate(d, ".w0/0"); c != nil {
		t.Errorf("the old worker is a candidate still: %v", c)
	}
	e.eventually("the new worker's own blocks are hits", func() bool {
		c := candidate(e.explain(e.chat(req{text: prompt, max: 1})), ".w9/0")
		return c != nil && c.MatchedTokens >= 900
	})
}

// The size of a block is what the engine says, whenever it says it, and a
// hybrid's other cache groups do not count: no resource names either of them
// (Infera 73 and 98, llm-d-router 2363).
func TestBlockSizeIsLearned(t *testing.T) {
	e := start(t, settings{workers: 1})
	hybrid, err := fleetsim.Start(context.Background(), fleetsim.Config{Name: "hybrid", Profile: engine.L40SQwen27B, TimeScale: 50, Model: modelName})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(hybrid.Kill)
	if len(engine.L40SQwen27B.Groups) < 2 {
		t.Fatal("the profile is no hybrid any more")
	}
	e.workers = []*fleetsim.Worker{hybrid}
	e.write("fleet.yaml", e.workerSet(""))
	prompt := words(2, 4000)
	const page = 784
	e.eventually("whole pages are matched, as many as the engine has", func() bool {
		r := e.chat(req{text: prompt, max: 1})
		if r.status != http.StatusOK {
			return false
		}
		c := candidate(e.explain(r), ".hybrid/0")
		return c != nil && c.MatchedTokens >= 5*page && c.MatchedTokens%page == 0 && int(c.MatchedTokens) == r.usage.Details.Cached
	})
}

// Prompts that are shorter than one block are known to no index; they spread
// all the same (Infera 107).
func TestShortPromptsSpread(t *testing.T) {
	// A higher scale would make noise of the host look like slow workers.
	e := start(t, settings{scale: 10, worker: func(_ int, c *fleetsim.Config) { c.Profile = engine.L40SQwen27B }})
	// What brought the fleet up counts as work of late: the worker that had it is
	// spared at first; one that the host made look slow is for longer.
	const n = 60
	served := map[string]int{}
	for i := range n {
		served[e.explain(e.chat(req{text: words(100+i, 100), max: 1})).Chosen]++
	}
	for _, w := range e.workers {
		if got := served["test.sim."+w.Name()+"/0"]; got > n*2/3 {
			t.Errorf("%s got %d of %d short prompts: %v", w.Name(), got, n, served)
		}
	}
}

// Conversations of one user at a time, whose load is zero whenever the next
// turn comes: each stays where its history is, and together they use the whole
// fleet (Infera 103).
func TestSerialConversationsUseTheFleet(t *testing.T) {
	// At a higher scale an event would be late when the next turn comes.
	e := start(t, settings{workers: 2, scale: 10})
	fresh := 1000
	// What brought the fleet up counts as work of late: the worker that had it is
	// spared until the other one has had as much.
	e.eventually("both had as much work of late", func() bool {
		fresh++
		c := e.explain(e.chat(req{text: words(fresh, 300), max: 1})).Candidates
		return len(c) == 2 && math.Abs(c[0].RecentWork-c[1].RecentWork) < c[0].Work
	})
	const conversations, turns = 8, 4
	history, home := make([]string, conversations), make([]string, conversations)
	served := map[string]int{}
	var first [][]*adminv1.Candidate
	for turn := range turns {
		for i := range conversations {
			history[i] += words(10*i+turn, 300)
			d := e.explain(e.chat(req{text: history[i], max: 1}))
			chosen := d.Chosen
			served[chosen]++
			if turn == 0 {
				first = append(first, d.Candidates)
			}
			if turn > 0 && chosen != home[i] {
				t.Errorf("turn %d of conversation %d went to %s, its history is on %s, by %v", turn, i, chosen, home[i], d.Candidates)
			}
			home[i] = chosen
		}
	}
	for w, n := range served {
		if len(served) != 2 || n < conversations*turns/4 {
			t.Errorf("%s got %d of %d turns: %v; first turns by %v", w, n, conversations*turns, served, first)
		}
	}
}

// A worker that leaves the resources, as a pod that terminates does, gets no
// new request and loses none that it has (production-stack 601).
func TestWorkerThatLeavesFinishesItsStreams(t *testing.T) {
	e := start(t, settings{workers: 2, scale: 10})
	resp, err := e.client.Post(e.stack.URL()+"/v1/chat/completions", "application/json",
		strings.NewReader(req{text: "a long story", max: 300, stream: true, extra: `,"ignore_eos":true`}.body()))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	in := bufio.NewReader(resp.Body)
	if _, err := in.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	leaving := e.explain(answer{id: resp.Header.Get("X-Request-Id")}).Chosen
	all := e.workers
	e.workers = nil
	for _, w := range all {
		if leaving != "test.sim."+w.Name()+"/0" {
			e.workers = append(e.workers, w)
		}
	}
	e.write("fleet.yaml", e.workerSet(""))
	e.eventually("the worker has left", func() bool {
		return len(e.explain(e.chat(req{text: "x", max: 1})).Candidates) == 1
	})
	for i := range 5 {
		if d := e.explain(e.chat(req{text: words(i, 50), max: 1})); d.Chosen == leaving {
			t.Errorf("a new request went to %s", leaving)
		}
	}
	last := ""
	for {
		line, err := in.ReadString('\n')
		if strings.TrimSpace(line) != "" {
			last = strings.TrimSpace(line)
		}
		if err != nil {
			break
		}
	}
	if last != "data: [DONE]" {
		t.Errorf("the stream was cut: it ends with %.200q", last)
	}
}

// Many long prompts at once are all answered, and what they share is tokenised
// once rather than for each of them (llm-d-router 1109). How fast is shown in
// docs/benchmarks/overhead.md.
func TestManyLongPromptsAtOnce(t *testing.T) {
	e := start(t, settings{})
	var text strings.Builder
	model.Text(&text, rand.New(rand.NewPCG(1, 2)), 40_000)
	shared := text.String()
	if len(shared) < 220_000 {
		t.Fatalf("the prompt has %d bytes, want 220,000", len(shared))
	}
	if r := e.chat(req{text: shared, max: 1}); r.status != http.StatusOK {
		t.Fatalf("got status %d: %.300s", r.status, r.body)
	}
	hits, misses := e.cacheTokens()
	var wg sync.WaitGroup
	for client := range 20 {
		wg.Go(func() {
			for i := range 4 {
				ask := req{text: fmt.Sprintf("%s and then %d %d", shared, client, i), max: 1, stream: true}
				r := e.chat(ask)
				// Tests share their cores with each other: a gateway that cannot
				// follow its workers says when to come back.
				for tries := 0; r.header.Get("Retry-After") != "" && tries < 100; tries++ {
					r = e.chat(ask)
				}
				if r.status != http.StatusOK || r.err != nil || !strings.Contains(r.body, "[DONE]") {
					t.Errorf("client %d, request %d: got status %d, %v: %.300s", client, i, r.status, r.err, r.body)
				}
			}
		})
	}
	wg.Wait()
	moreHits, moreMisses := e.cacheTokens()
	if hits, misses = moreHits-hits, moreMisses-misses; misses > hits/20 {
		t.Errorf("%.0f prompt tokens were tokenised anew, %.0f were known", misses, hits)
	}
}

// cacheTokens is what ingress counted of its token cache.
func (e *env) cacheTokens() (hits, misses float64) {
	for _, line := range strings.Split(e.metrics(), "\n") {
		if !strings.HasPrefix(line, "kinference_ingress_token_cache_tokens_total{") {
			continue
		}
		var v float64
		if _, err := fmt.Sscan(line[strings.LastIndexByte(line, ' ')+1:], &v); err != nil {
			e.t.Fatalf("metric %q: %v", line, err)
		}
		if strings.Contains(line, `result="hit"`) {
			hits += v
		} else {
			misses += v
		}
	}
	return hits, misses
}
