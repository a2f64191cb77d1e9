package vllm_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/rpc"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1/kvtrackerv1connect"
	"github.com/kinference/kinference/test/interop/vllm/rig"
)

// chain is engines, the control plane, and the recorder that knows better.
type chain struct {
	t       *testing.T
	engines []*rig.Engine
	front   *rig.Front
	rec     *recorder
	tracker kvtrackerv1connect.KVTrackerServiceClient
	uniq    atomic.Uint32

	mu     sync.Mutex
	states map[string]*kvtrackerv1.WorkerState
	lags   []time.Duration // of the index, as it reports them
	// published is what the relay says in the stream about each worker.
	published map[string]published
}

// published is the newest epoch of a worker in the stream.
type published struct {
	epoch, reason string // of its clear
	first, next   uint64 // batches
}

func newChain(t *testing.T, env rig.Env, options ...rig.Options) *chain {
	t.Helper()
	c := &chain{t: t, engines: rig.Start(t, env, options...), published: map[string]published{}}
	endpoints := map[string]string{}
	for _, e := range c.engines {
		endpoints[e.Name] = e.Events()
	}
	c.rec = record(t, env, endpoints)
	c.front = rig.NewFront(t, env, rig.FrontOptions{}, c.engines...)
	ctx, cancel := context.WithCancel(context.Background())
	conn, err := bus.Connect(ctx, c.front.NATSURL(), "history")
	if err != nil {
		t.Fatal(err)
	}
	c.tracker = rpc.Client(ctx, c.front.KVTrackerURL(), kvtrackerv1connect.NewKVTrackerServiceClient)
	var wg sync.WaitGroup
	wg.Go(func() { c.watch(ctx) })
	wg.Go(func() {
		forget := func() { // a stream that was lost and made anew
			c.mu.Lock()
			defer c.mu.Unlock()
			c.published = map[string]published{}
		}
		if err := conn.ConsumeKV(ctx, bus.StreamSettings{}, bus.Position{}, bus.KVHandler{Start: forget, Message: c.note}); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		cancel()
		wg.Wait()
		conn.Close()
	})
	return c
}

// id is an engine's worker id.
func id(e *rig.Engine) string { return "test." + e.Model + "." + e.Name + "/0" }

// note takes a message of the stream.
func (c *chain) note(d bus.Delivery) {
	var m bus.KVMessage
	w, err := bus.ParseKVSubject(d.Subject)
	if err == nil {
		err = m.Decode(d.Header, d.Data)
	}
	if err != nil {
		c.t.Errorf("message in the stream: %v", err)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.published[w.ID()]
	if p.epoch != m.Epoch {
		p = published{epoch: m.Epoch, reason: m.Reason, first: m.First, next: m.First}
	}
	if m.Kind == bus.KindBatch {
		if m.First != p.next {
			c.t.Errorf("%s: the stream has batch %d, want %d", w.ID(), m.First, p.next)
		}
		p.next = m.Last + 1
	}
	c.published[w.ID()] = p
}

func (c *chain) stream(e *rig.Engine) published {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.published[id(e)]
}

// watch keeps the tracker's view of the workers, across its restarts.
func (c *chain) watch(ctx context.Context) {
	for ctx.Err() == nil {
		stream, err := c.tracker.WatchWorkers(ctx, &kvtrackerv1.WatchWorkersRequest{})
		if err != nil {
			continue
		}
		c.mu.Lock()
		c.states = map[string]*kvtrackerv1.WorkerState{}
		c.mu.Unlock()
		for stream.Receive() {
			c.mu.Lock()
			for _, w := range stream.Msg().GetWorkers() {
				if old := c.states[w.GetWorker()]; old.GetIndex().GetLastSeq() != w.GetIndex().GetLastSeq() {
					c.lags = append(c.lags, w.GetIndex().GetLag().AsDuration())
				}
				c.states[w.GetWorker()] = w
			}
			c.mu.Unlock()
		}
		stream.Close()
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (c *chain) state(e *rig.Engine) *kvtrackerv1.WorkerState {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.states[id(e)]
}

// size is an engine's block size in tokens; some models have another one than
// they were told.
func (c *chain) size(e *rig.Engine) int {
	if n := c.state(e).GetBlockSize(); n > 0 {
		return int(n)
	}
	return e.BlockSize
}

// prompt is a request whose blocks are known.
type prompt struct {
	tokens     []uint32
	lora, salt string
}

func (p prompt) hashes(size int) []kvhash.Hash {
	return kvhash.Append(nil, kvhash.Root(p.lora, p.salt), p.tokens, size)
}

// ask has an engine complete a prompt, past the control plane.
func ask(e *rig.Engine, p prompt, maxTokens int) (cached int, err error) {
	body, _ := json.Marshal(p.body(e.Model, maxTokens))
	status, answer, err := e.Post("/v1/completions", body)
	if err != nil {
		return 0, err
	}
	a := rig.Answer{Status: status, Body: answer, Header: http.Header{}}
	if status != http.StatusOK {
		return 0, fmt.Errorf("status %d: %.200s", status, answer)
	}
	if u := a.Usage(); u.Prompt != len(p.tokens) {
		return 0, fmt.Errorf("the engine counts %d prompt tokens, want %d", u.Prompt, len(p.tokens))
	}
	return a.Usage().Details.Cached, nil
}

func (p prompt) body(model string, maxTokens int) map[string]any {
	body := map[string]any{"model": model, "prompt": p.tokens, "max_tokens": maxTokens, "ignore_eos": true, "temperature": 0}
	if p.lora != "" {
		body["model"] = p.lora
	}
	if p.salt != "" {
		body["cache_salt"] = p.salt
	}
	return body
}

// predict is how many tokens of a prompt the index says that an engine has, of
// those that the engine could report: it always computes the last one anew.
func (c *chain) predict(e *rig.Engine, p prompt) int {
	c.t.Helper()
	size := c.size(e)
	q := &kvtrackerv1.Query{BlockSize: uint32(size), WorkerSet: "test/" + e.Model}
	hashes := p.hashes(size)
	if len(p.tokens)%size == 0 {
		hashes = hashes[:len(hashes)-1]
	}
	for _, h := range hashes {
		q.BlockHashes = append(q.BlockHashes, uint64(h))
	}
	resp, err := c.tracker.Match(c.t.Context(), &kvtrackerv1.MatchRequest{Queries: []*kvtrackerv1.Query{q}})
	if err != nil {
		c.t.Fatalf("match: %v", err)
	}
	for _, m := range resp.GetResults()[0].GetMatches() {
		if m.GetWorker() == id(e) {
			return int(m.GetGpuTokens())
		}
	}
	return 0
}

// held asks the index about every block on its own.
func (c *chain) held(e *rig.Engine, of map[kvhash.Hash]bool) (map[kvhash.Hash]bool, error) {
	const perCall = 64
	out := map[kvhash.Hash]bool{}
	req, asked := &kvtrackerv1.MatchRequest{}, []kvhash.Hash{}
	send := func() error {
		resp, err := c.tracker.Match(c.t.Context(), req)
		if err != nil {
			return err
		}
		for i, r := range resp.GetResults() {
			for _, m := range r.GetMatches() {
				if m.GetWorker() == id(e) {
					out[asked[i]] = true
				}
			}
		}
		req, asked = &kvtrackerv1.MatchRequest{}, nil
		return nil
	}
	for h := range of {
		req.Queries = append(req.Queries, &kvtrackerv1.Query{BlockSize: uint32(c.size(e)), BlockHashes: []uint64{uint64(h)}})
		if asked = append(asked, h); len(asked) == perCall {
			if err := send(); err != nil {
				return nil, err
			}
		}
	}
	return out, send()
}

// fresh is a prompt of n tokens that nobody sent before.
func (c *chain) fresh(n int) prompt {
	u := c.uniq.Add(1)
	p := prompt{tokens: make([]uint32, n)}
	for i := range p.tokens {
		p.tokens[i] = 5000 + (u*31+uint32(i)*7)%4000
	}
	p.tokens[0], p.tokens[1] = 10_000+u%50_000, 10_000+u/50_000
	return p
}

// flush has an engine publish what it holds back, and waits until the recorder
// has all of it: the engine must have no other requests.
func (c *chain) flush(e *rig.Engine) {
	c.t.Helper()
	p := c.fresh(c.size(e) + 1)
	if _, err := ask(e, p, 1); err != nil {
		c.t.Fatalf("flush %s: %v", e.Name, err)
	}
	within(c.t, "the recorder has the last batch of "+e.Name, func() bool {
		return c.rec.storedAt(e.Name, p.tokens[:c.size(e)]) > 0
	})
}

// settled tells whether the index has applied all that the recorder has.
func (c *chain) settled(e *rig.Engine) bool {
	s := c.state(e).GetIndex()
	return s.GetLive() && s.GetLastSeq() == int64(c.rec.batches(e.Name))-1
}

// check waits until the index says of an engine exactly what follows from the
// batches that the relay could read, block by block, and all of it is true. The
// engine must be idle, and the recorder have its last batch.
func (c *chain) check(when string, e *rig.Engine) {
	c.t.Helper()
	var diff string
	ok := poll(func() bool {
		diff = c.compare(e)
		return diff == ""
	})
	if !ok {
		c.t.Fatalf("%s: %s: %s\nstate %v\nstream %+v", when, e.Name, diff, c.state(e), c.stream(e))
	}
	life, before := c.rec.life(e.Name)
	seen := map[kvhash.Hash]bool{}
	truth, err := life.truth(seen)
	if err != nil {
		c.t.Fatal(err)
	}
	p := c.stream(e)
	known := life.knowable(int(p.first))
	c.t.Logf("%s: %s: index = history from batch %d of %d (process %d, %s): %d blocks of %d that it holds, %d were ever stored",
		when, e.Name, p.first, len(life), before, p.reason, len(known.hashes), len(truth.hashes), len(seen))
}

// compare says what is wrong with the index; empty: nothing.
func (c *chain) compare(e *rig.Engine) string {
	c.t.Helper()
	life, _ := c.rec.life(e.Name)
	if !c.settled(e) {
		return fmt.Sprintf("not settled: the recorder has %d batches", len(life))
	}
	first := c.stream(e).first
	truth, err := life.truth(map[kvhash.Hash]bool{})
	if err != nil {
		c.t.Fatal(err)
	}
	want := life.knowable(int(first))
	if n := want.without(truth); n > 0 {
		return fmt.Sprintf("the oracles differ: %d blocks follow from the batches from %d on and are not there", n, first)
	}
	if first == 0 && (len(truth.hashes) != len(want.hashes) || truth.entries != want.entries) {
		return fmt.Sprintf("the oracles differ: %d blocks and %d entries, or %d and %d", len(truth.hashes), truth.entries, len(want.hashes), want.entries)
	}
	got, err := c.held(e, c.rec.everything())
	if err != nil {
		return err.Error()
	}
	index := contents{hashes: got}
	s := c.state(e)
	complete := first == 0 || life.cleared(int(first))
	switch {
	case index.without(truth) > 0:
		return fmt.Sprintf("%d FALSE blocks", index.without(truth))
	case index.without(want) > 0 || want.without(index) > 0:
		return fmt.Sprintf("%d blocks too many, %d are missing of %d", index.without(want), want.without(index), len(want.hashes))
	case int(s.GetIndex().GetBlocks()) != want.entries:
		return fmt.Sprintf("%d entries, want %d", s.GetIndex().GetBlocks(), want.entries)
	case s.GetIndex().GetComplete() != complete:
		return fmt.Sprintf("complete is %v, want %v", s.GetIndex().GetComplete(), complete)
	case want.size > 0 && int(s.GetBlockSize()) != want.size:
		return fmt.Sprintf("block size %d, want %d", s.GetBlockSize(), want.size)
	}
	return ""
}

// probe asks engines for prompts of the past, one by one, and compares what
// they have cached with what the index said: equal where the index is complete,
// and never less than it said.
func (c *chain) probe(when string, e *rig.Engine, prompts []prompt) {
	c.t.Helper()
	hits, tokens, less := 0, 0, 0
	exact := c.stream(e).first == 0
	// Engines of models with further cache groups report less: what all groups have.
	bound := strings.HasPrefix(e.Model, "hybrid")
	for _, p := range prompts {
		c.flush(e)
		within(c.t, "the index of "+e.Name+" settles", func() bool { return c.settled(e) })
		want := c.predict(e, p)
		got, err := ask(e, p, 1)
		if err != nil {
			c.t.Fatal(err)
		}
		switch {
		case bound && got < want:
			less++
		case got < want, exact && got != want:
			c.t.Errorf("%s: %s reports %d cached tokens of %d, the index said %d", when, e.Name, got, len(p.tokens), want)
		case got > want:
			less++
		}
		if want > 0 {
			hits++
		}
		tokens += want
	}
	c.flush(e)
	side := "less predicted"
	if bound {
		side = "more predicted, as the other groups lack a part,"
	}
	c.t.Logf("%s: %s: predicted = reported for %d of %d prompts (%d hits, %d tokens), %s for %d",
		when, e.Name, len(prompts)-less, len(prompts), hits, tokens, side, less)
}

// load sends prompts to engines until stop is called.
type load struct {
	wg     sync.WaitGroup
	cancel context.CancelFunc

	mu       sync.Mutex
	sent     map[string][]prompt // by engine, newest last
	answered int
}

// load keeps n requests in flight on each engine, past the control plane. They
// share prefixes, and have salts and adapters. Failures are allowed: engines die.
func (c *chain) load(n int, engines ...*rig.Engine) *load {
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{cancel: cancel, sent: map[string][]prompt{}}
	for _, e := range engines {
		for k := range n {
			seed := uint64(c.uniq.Add(1))
			size := c.size(e)
			l.wg.Go(func() {
				r := rand.New(rand.NewPCG(seed, uint64(k)))
				for ctx.Err() == nil {
					p := l.next(r, e, size)
					if _, err := ask(e, p, 1+r.IntN(48)); err != nil {
						select {
						case <-ctx.Done():
						case <-time.After(20 * time.Millisecond): // it may be down
						}
						continue
					}
					l.mu.Lock()
					l.answered++
					l.mu.Unlock()
				}
			})
		}
	}
	return l
}

// stop ends the load and tells how many requests were answered.
func (l *load) stop() int {
	l.cancel()
	l.wg.Wait()
	return l.answered
}

// next makes a prompt, often one that goes on where another one of that engine was.
func (l *load) next(r *rand.Rand, e *rig.Engine, size int) prompt {
	l.mu.Lock()
	defer l.mu.Unlock()
	var p prompt
	past := l.sent[e.Name]
	if len(past) > 0 && r.IntN(4) > 0 {
		old := past[r.IntN(len(past))]
		p.lora, p.salt = old.lora, old.salt
		p.tokens = append(p.tokens, old.tokens[:1+r.IntN(len(old.tokens))]...)
	} else {
		p.salt = []string{"", "", "tenant-a", "tenant-b"}[r.IntN(4)]
		for name := range e.LoRAs {
			if r.IntN(2) == 0 {
				p.lora = name
			}
		}
	}
	// Two at least: a prompt of one token ends vLLM 0.32 with a mamba model on CPU
	// ("causal_conv1d_fwd_cpu: expect x to be transposed").
	for range 2 + r.IntN(6*size) {
		p.tokens = append(p.tokens, 10+r.Uint32N(3000))
	}
	p.tokens = p.tokens[:min(len(p.tokens), e.MaxModelLen-64, 24*size)]
	if l.sent[e.Name] = append(past, p); len(past) >= 60 {
		l.sent[e.Name] = append([]prompt{}, l.sent[e.Name][1:]...)
	}
	return p
}

// recent are the newest n prompts of an engine.
func (l *load) recent(e *rig.Engine, n int) []prompt {
	l.mu.Lock()
	defer l.mu.Unlock()
	past := l.sent[e.Name]
	return append([]prompt{}, past[max(0, len(past)-n):]...)
}

// quantiles is a line about durations.
func quantiles(d []time.Duration) string {
	if len(d) == 0 {
		return "none"
	}
	s := slices.Sorted(slices.Values(d))
	at := func(q float64) time.Duration {
		return s[min(int(q*float64(len(s))), len(s)-1)].Round(10 * time.Microsecond)
	}
	return strings.TrimSpace(fmt.Sprintf("n=%d p50=%v p90=%v p99=%v max=%v", len(s), at(.5), at(.9), at(.99), s[len(s)-1].Round(10*time.Microsecond)))
}
