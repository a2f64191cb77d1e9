package router_test

import (
	"fmt"
	"testing"
	"time"

	"connectrpc.com/connect"

	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/router"
)

// several is a request with more prompts, each of n blocks.
func several(id string, n int, seeds ...uint64) *routerv1.RouteRequest {
	r := request(id, hashes(seeds[0], n)...)
	for _, seed := range seeds[1:] {
		r.Prompts[0].Others = append(r.Prompts[0].Others, &routerv1.OtherPrompt{Tokens: uint32(16*n) + 8, BlockHashes: hashes(seed, n)})
	}
	return r
}

// A request with several prompts goes where most of all of them is cached, not
// where the first is, and weighs as much as all of them.
func TestSeveralPrompts(t *testing.T) {
	k := newTracker()
	k.serve(t)
	k.states = []*kvtrackerv1.WorkerState{ready("demo.sim.a/0", nil), ready("demo.sim.b/0", nil)}
	first := func(seed uint64) uint64 { return hashes(seed, 1)[0] }
	k.of = map[uint64]map[string]uint32{
		first(1): {"demo.sim.a/0": 320}, // the first is at a
		first(2): {"demo.sim.b/0": 320}, first(3): {"demo.sim.b/0": 320}, first(4): {"demo.sim.b/0": 320},
	}
	w := start(t, router.Config{KVTrackerURL: k.url()}, newEngine(t), newEngine(t))
	w.until("the tracker's block size", blockSize(16))

	if got := w.route(several("one", 20, 1)); got[0].Worker != "demo.sim.a/0" {
		t.Errorf("one prompt went to %s", got[0].Worker)
	}
	w.report("one", done(0))
	got := w.route(several("all", 20, 1, 2, 3, 4))
	if got[0].Worker != "demo.sim.b/0" {
		t.Errorf("four prompts went to %s", got[0].Worker)
	}
	tokens := int32(0)
	for _, c := range w.explain("all").Candidates {
		tokens = max(tokens, int32(c.PromptTokens))
	}
	if want := int32(4 * 328); tokens != want {
		t.Errorf("%d tokens, want %d", tokens, want)
	}
	w.report("all", done(0))

	// No prompt is longer than the context, though all together are.
	big := several("big", 20, 1, 2, 3, 4)
	for _, o := range big.Prompts[0].Others {
		o.Tokens = 30_000
	}
	w.route(big)
	w.report("big", done(0))
	big.Prompts[0].Others[2].Tokens = 40_000
	if _, err := w.client.Route(t.Context(), big); connect.CodeOf(err) != connect.CodeOutOfRange {
		t.Errorf("a prompt longer than the context: %v", err)
	}

	// More than the tracker answers at once are still routed.
	seeds := make([]uint64, 200)
	for i := range seeds {
		seeds[i] = uint64(i) + 1
	}
	w.route(several("many", 2, seeds...))
	w.report("many", done(0))
}

// Without kvtracker the router remembers where each prompt went.
func TestSeveralPromptsRemembered(t *testing.T) {
	w := start(t, router.Config{}, newEngine(t), newEngine(t), newEngine(t))
	w.until("m ready", modelReady("m"))
	for round := range 4 {
		id := fmt.Sprint("first", round)
		a, b, c := uint64(10*round+1), uint64(10*round+2), uint64(10*round+3)
		home := w.route(several(id, 20, a, b, c))[0].Worker
		w.report(id, firstToken(50*time.Millisecond), done(0))
		// In another order, behind a short first one that nobody has seen.
		id = fmt.Sprint("again", round)
		if got := w.route(several(id, 20, a+1000, b, c, a))[0].Worker; got != home {
			t.Errorf("round %d moved from %s to %s", round, home, got)
		}
		w.report(id, firstToken(50*time.Millisecond), done(0))
	}
}
