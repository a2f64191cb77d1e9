package vllm_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/kvindex"
	"github.com/kinference/kinference/internal/kvindex/ref"
	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/vllm"
	"github.com/kinference/kinference/internal/zmtp"
	"github.com/kinference/kinference/test/interop/vllm/rig"
)

const (
	cachedRequests = 2000
	cachedClients  = 5
	cachedBlocks   = 1000 // of 32 tokens on each of three engines: half of what the conversations have
	conversing     = 190  // conversations at a time
)

// adapters of the model qwen.
var adapters = map[string]string{"style-a": "qwen-lora-a", "style-b": "qwen-lora-b"}

// TestCachedTokens: the cached tokens that the router predicts for the worker it
// chooses are those that the engine then reports, for conversations that go on
// while engines evict all the time. Each difference must have a cause that the
// engine's own events show.
func TestCachedTokens(t *testing.T) {
	env := rig.Require(t)
	option := rig.Options{Blocks: cachedBlocks, MaxModelLen: 4096, LoRAs: adapters, Args: []string{"--max-loras", "2"}}
	engines := rig.Start(t, env, option, option, option)
	front := rig.NewFront(t, env, rig.FrontOptions{}, engines...)
	l := &conversations{t: t, front: front, local: newLocal(t, env.Model("qwen")), text: newGen(5), left: cachedRequests}
	began := time.Now()
	var wg sync.WaitGroup
	for client := range cachedClients {
		wg.Go(func() { l.client(rand.New(rand.NewPCG(uint64(client), 17))) })
	}
	wg.Wait()
	took := time.Since(began)

	byWorker := map[string][]*exchange{}
	for _, x := range l.done {
		byWorker[x.worker] = append(byWorker[x.worker], x)
	}
	stored, evicted := 0, 0
	for _, e := range engines {
		name := "test." + e.Model + "." + e.Name + "/0"
		s, r := explain(t, e, byWorker[name])
		t.Logf("%s: %d requests; %d blocks stored, %d evicted, of %d", e.Name, len(byWorker[name]), s, r, cachedBlocks)
		stored, evicted = stored+s, evicted+r
		if r < 2*cachedBlocks {
			t.Errorf("%s: too few evictions for this test", e.Name)
		}
	}
	report(t, l, took, stored, evicted)
}

// report logs the table and judges.
func report(t *testing.T, l *conversations, took time.Duration, stored, evicted int) {
	t.Helper()
	exact, tokens, cached, anticipated := 0, 0, 0, 0
	causes := map[string][]*exchange{}
	for _, x := range l.done {
		tokens, cached = tokens+x.tokens, cached+x.cached
		if x.anticipated > 0 {
			anticipated++
		}
		if x.cause == "" {
			exact++
			continue
		}
		causes[x.cause] = append(causes[x.cause], x)
	}
	share := 100 * float64(exact) / float64(len(l.done))
	t.Logf("%d requests and %d aborted ones in %.0f s (%d streams, %d with an adapter, %d with a salt, %d with an anticipated part): %d tokens, %.1f %% of them cached; %d blocks stored, %d evicted",
		len(l.done), l.aborted, took.Seconds(), l.streams, l.adapted, l.salted, anticipated, tokens, 100*float64(cached)/float64(max(tokens, 1)), stored, evicted)
	t.Logf("predicted = reported: %d of %d, %.2f %%", exact, len(l.done), share)
	for cause, list := range causes {
		over, under, late := 0, 0, time.Duration(0)
		for _, x := range list {
			if d := x.predicted() - x.cached; d > 0 {
				over += d
			} else {
				under -= d
			}
			late = max(late, x.late)
		}
		t.Logf("  %-66s %4d requests, %6d tokens too many, %6d too few, at most %v late", cause, len(list), over, under, late.Round(time.Millisecond))
	}
	for _, x := range causes[unexplained] {
		t.Errorf("unexplained: %d tokens of %d predicted (%d anticipated), %d reported; decided %.3f, answered %.3f; the events show %v",
			x.predicted(), x.tokens, x.anticipated, x.cached, seconds(x.decided), seconds(x.answered), x.trace)
	}
	if share < 99 {
		t.Errorf("only %.2f %% of the predictions are exact", share)
	}
}

// exchange is a request that was answered.
type exchange struct {
	worker                       string
	hashes                       []kvhash.Hash
	tokens                       int
	matched, anticipated, cached int
	decided, answered            time.Time
	behindAborted                bool // an aborted request with the same beginning was on its way
	before                       int  // what the engine held when it was decided, by its events
	trace                        []point
	cause                        string // empty if the prediction was exact
	late                         time.Duration
}

func (x *exchange) predicted() int { return x.matched + x.anticipated }

// usable is how much of what an engine holds it can use: not the last token.
func (x *exchange) usable(tokens int) int { return min(tokens, (x.tokens-1)/blockSize*blockSize) }

const blockSize = 32

// conversations are the load: clients that carry on conversations from a pool
// that is larger than the engines' caches.
type conversations struct {
	t     *testing.T
	front *rig.Front
	local *local

	mu                                sync.Mutex
	text                              *gen
	pool                              []*conversation
	left                              int
	done                              []*exchange
	streams, salted, adapted, aborted int
	cut                               []cut
}

// cut is a request that its client gave up.
type cut struct {
	worker string
	hashes []kvhash.Hash
	at     time.Time
}

type conversation struct {
	model, salt string
	messages    []any
	turns       int
}

// take picks a conversation that nobody else is at, or starts one.
func (l *conversations) take(r *rand.Rand) *conversation {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.left <= 0 {
		return nil
	}
	l.left--
	if len(l.pool) < conversing {
		shared := newGen(r.Uint64N(4)).words(250)
		c := &conversation{model: "qwen", messages: []any{map[string]any{"role": "system", "content": shared}}, turns: 2 + r.IntN(7)}
		switch {
		case r.IntN(100) < 15:
			c.model = []string{"style-a", "style-b"}[r.IntN(2)]
		case r.IntN(100) < 15:
			c.salt = fmt.Sprint("tenant ", r.IntN(2))
		}
		return c
	}
	i := r.IntN(len(l.pool))
	c := l.pool[i]
	l.pool = slices.Delete(l.pool, i, i+1)
	return c
}

func (l *conversations) client(r *rand.Rand) {
	for c := l.take(r); c != nil; c = l.take(r) {
		if l.turn(r, c) {
			l.mu.Lock()
			l.pool = append(l.pool, c)
			l.mu.Unlock()
		}
		// People and tools take a while until they go on.
		<-time.After(time.Duration(20+r.IntN(150)) * time.Millisecond)
	}
}

// turn sends the next message; it reports whether the conversation goes on.
func (l *conversations) turn(r *rand.Rand, c *conversation) bool {
	l.mu.Lock()
	text := l.text.text() + l.text.words(20+r.IntN(150))
	l.mu.Unlock()
	c.messages = append(c.messages, map[string]any{"role": "user", "content": text})
	request := map[string]any{"model": c.model, "messages": c.messages, "max_tokens": 1 + r.IntN(25), "temperature": 0}
	if c.salt != "" {
		request["cache_salt"] = c.salt
	}
	stream := r.IntN(2) == 0
	if stream {
		request["stream"], request["stream_options"] = true, map[string]any{"include_usage": true}
	}
	body, err := json.Marshal(request)
	if err != nil {
		l.t.Error(err)
		return false
	}
	ids, err := l.local.ids(openai.RouteChat, body)
	if err != nil {
		l.t.Error(err)
		return false
	}
	adapter := ""
	if c.model != "qwen" {
		adapter = c.model
	}
	hashes := kvhash.Append(nil, kvhash.Root(adapter, c.salt), ids, blockSize)
	if stream && r.IntN(100) < 8 {
		return l.abort(r, body, hashes)
	}
	a := serve(l.front, "/v1/chat/completions", body)
	answered := time.Now()
	if a.Status != http.StatusOK || a.Err != nil {
		l.t.Errorf("status %d %v: %.300s", a.Status, a.Err, a.Body)
		return false
	}
	d := l.front.Explain(a.ID)
	chosen, usage := rig.Chosen(d), a.Usage()
	if int(chosen.GetPromptTokens()) != usage.Prompt || len(ids) != usage.Prompt {
		l.t.Errorf("we count %d and %d tokens, the engine %d", len(ids), chosen.GetPromptTokens(), usage.Prompt)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	x := &exchange{
		worker: d.GetServedBy(), hashes: hashes, tokens: usage.Prompt, cached: usage.Details.Cached, matched: int(chosen.GetMatchedTokens()),
		anticipated: int(chosen.GetAnticipatedTokens()), decided: time.Unix(0, d.GetDecidedUnixNanos()), answered: answered,
	}
	for _, cut := range l.cut {
		if cut.worker == x.worker && len(cut.hashes) > 0 && len(hashes) > 0 && cut.hashes[0] == hashes[0] && x.decided.Sub(cut.at).Abs() < 5*time.Second {
			x.behindAborted = true
		}
	}
	l.done = append(l.done, x)
	for flag, n := range map[*int]bool{&l.streams: stream, &l.salted: c.salt != "", &l.adapted: adapter != ""} {
		if n {
			*flag++
		}
	}
	c.messages = append(c.messages, map[string]any{"role": "assistant", "content": a.Text()})
	c.turns--
	return c.turns > 0 && usage.Prompt < 3000
}

// abort sends a stream and leaves it a moment later.
func (l *conversations) abort(r *rand.Rand, body []byte, hashes []kvhash.Hash) bool {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(r.IntN(60))*time.Millisecond)
	defer cancel()
	id := fmt.Sprintf("cut-%016x", r.Uint64())
	l.front.Send(ctx, "/v1/chat/completions", body, http.Header{"X-Request-Id": {id}})
	l.mu.Lock()
	defer l.mu.Unlock()
	l.aborted++
	l.left++
	if d := l.front.Decision(id); d != nil {
		l.cut = append(l.cut, cut{d.GetChosen(), hashes, time.Now()})
	}
	return false
}

// point is how many leading tokens of a prompt the engine held from a time on.
type point struct {
	at     float64 // seconds, the engine's clock, which is ours
	tokens int
}

func (p point) String() string { return fmt.Sprintf("%.3f:%d", math.Mod(p.at, 1e4), p.tokens) }

func seconds(t time.Time) float64 { return float64(t.UnixNano()) / 1e9 }

// Causes of a difference. All but the last are what the events show.
const (
	evictedMeanwhile = "evicted between decision and start, or in the step then under way"
	storedMeanwhile  = "stored by another request between decision and start"
	removalOnItsWay  = "evicted just before, the event was on its way"
	storeOnItsWay    = "stored just before, the event was on its way"
	keptInMemory     = "evicted, but counted on for a while as just finished"
	cutShort         = "anticipated of a request that was then aborted"
	startedLater     = "anticipated of a request that had not got that far"
	unexplained      = "unexplained"
)

// memory is how long the router counts a finished prompt as cached, in seconds.
const memory = 2

// explain goes through all that an engine published and finds the cause of each
// difference. It returns how many blocks were stored and evicted.
func explain(t *testing.T, e *rig.Engine, all []*exchange) (stored, evicted int) {
	t.Helper()
	var differ []*exchange
	for _, x := range all {
		if x.predicted() != x.cached {
			differ = append(differ, x)
		}
	}
	index := ref.New()
	var overlaps []kvindex.Overlap
	for _, batch := range batchesOf(t, e) {
		for _, event := range batch.Events {
			switch event.Kind {
			case vllm.BlockStored:
				stored += len(event.Hashes)
			case vllm.BlockRemoved:
				evicted += len(event.Hashes)
			}
			// One by one: a step evicts for one request what the next one misses
			// and stores again.
			index.Apply(e.Name, &vllm.Batch{TS: batch.TS, Rank: batch.Rank, Events: []vllm.Event{event}})
			for _, x := range differ {
				if batch.TS >= seconds(x.decided)-60 && batch.TS <= seconds(x.answered)+1 {
					overlaps = index.Match(overlaps[:0], blockSize, x.hashes)
					x.saw(batch.TS, overlaps)
				}
			}
		}
	}
	for _, x := range differ {
		x.cause = x.why()
	}
	return stored, evicted
}

// saw notes what the engine held of x from a time on.
func (x *exchange) saw(at float64, overlaps []kvindex.Overlap) {
	held := 0
	for _, o := range overlaps {
		held = o.GPUBlocks * blockSize
	}
	if at <= seconds(x.decided) {
		x.before = held
	}
	if n := len(x.trace); n == 0 || x.trace[n-1].tokens != held {
		x.trace = append(x.trace, point{at, held})
	}
}

// why finds the cause of a difference.
func (x *exchange) why() string {
	decided, answered := seconds(x.decided), seconds(x.answered)
	before := x.usable(x.before)
	meanwhile := func(want func(tokens int) bool) bool { // at some time between decision and answer
		return slices.ContainsFunc(x.trace, func(p point) bool { return p.at > decided && p.at <= answered && want(x.usable(p.tokens)) })
	}
	since := func(want func(tokens int) bool, within float64) bool { // when it ended, not longer ago
		for i, p := range x.trace {
			end := decided
			if i+1 < len(x.trace) {
				end = x.trace[i+1].at
			}
			if p.at <= decided && end >= decided-within && want(x.usable(p.tokens)) {
				x.late = max(x.late, time.Duration(max(0, decided-end)*float64(time.Second)))
				return true
			}
		}
		return false
	}
	exactly := func(tokens int) bool { return tokens == x.cached }
	enough := func(tokens int) bool { return tokens >= x.predicted() }
	// The engine must have held just what it reported, at some time.
	if before != x.cached && !meanwhile(exactly) {
		return unexplained
	}
	switch {
	case x.predicted() < x.cached && before >= x.cached:
		for _, p := range x.trace {
			if p.at <= decided && x.usable(p.tokens) >= x.cached {
				x.late = time.Duration((decided - p.at) * float64(time.Second))
			}
		}
		return storeOnItsWay
	case x.predicted() < x.cached:
		return storedMeanwhile
	case before >= x.predicted():
		return evictedMeanwhile
	case x.usable(x.matched) > before && since(func(tokens int) bool { return tokens >= x.usable(x.matched) }, memory):
		return removalOnItsWay
	case since(enough, memory+10):
		return keptInMemory
	case x.behindAborted:
		return cutShort
	case meanwhile(enough):
		return startedLater
	}
	return unexplained
}

// batchesOf is everything that an engine published, from its replay.
func batchesOf(t *testing.T, e *rig.Engine) (all []vllm.Batch) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for done := false; !done; {
		if time.Now().After(deadline) {
			t.Fatalf("%s: no whole replay within a minute", e.Name)
		}
		var err error
		if all, done, err = replayMore(t.Context(), e, all); err != nil {
			t.Logf("%s: replay, %d batches so far: %v", e.Name, len(all), err)
		}
	}
	return all
}

// replayMore adds what follows the batches in all, of which batch i has the
// sequence number i. done is false if the engine's socket dropped some: it has
// room for a thousand.
func replayMore(ctx context.Context, e *rig.Engine, all []vllm.Batch) (more []vllm.Batch, done bool, err error) {
	conn, err := zmtp.Dial(ctx, e.Replay(), zmtp.Dealer, zmtp.Options{})
	if err != nil {
		return all, false, err
	}
	defer conn.Close()
	if err := conn.Send(vllm.ReplayRequest(uint64(len(all)))...); err != nil {
		return all, false, err
	}
	for {
		if err := conn.SetReadDeadline(time.Now().Add(2 * time.Second)); err != nil {
			return all, false, err
		}
		frames, err := conn.Recv()
		if err != nil {
			return all, false, err
		}
		seq, payload, end, err := vllm.ParseReplay(frames)
		switch {
		case err != nil:
			return all, false, err
		case end:
			return all, true, nil
		case seq != uint64(len(all)):
			return all, false, fmt.Errorf("batch %d follows %d", seq, len(all)-1)
		}
		var batch vllm.Batch
		var decoder vllm.Decoder
		if err := decoder.Decode(payload, &batch); err != nil {
			return all, false, err
		}
		all = append(all, batch)
	}
}
