package parity

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/openai"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/catalog"
	"github.com/kinference/kinference/services/ingress/internal/prompt"
)

// probes are the requests whose ids are compared: the plain text first, which
// tells a tokenizer that differs from a template that does. They hold what
// tokenizers and templates are known to treat differently, and are short: an
// engine makes the ids of all of them in a few milliseconds.
var probes = sync.OnceValue(func() []*openai.Request {
	const (
		system = `{"role":"system","content":"You are a helpful assistant.\nAnswer briefly."}`
		user   = `{"role":"user","content":"What's the capital of France?"}`
		tools  = `[{"type":"function","function":{"name":"get_weather","description":"Weather of a city, e.g. \"Oslo\".",` +
			`"parameters":{"type":"object","properties":{"city":{"type":"string"},"days":{"type":"integer","default":1}},"required":["city"]}}}]`
		call = `{"role":"assistant","content":"","tool_calls":[{"id":"call_1","type":"function",` +
			`"function":{"name":"get_weather","arguments":"{\"city\": \"Zürich\", \"days\": 2}"}}]}`
		result = `{"role":"tool","tool_call_id":"call_1","content":"{\"sky\": \"clear\", \"max\": 21.5}"}`
	)
	out := []*openai.Request{parse(openai.RouteCompletions,
		`"prompt":"The year is 2026; it's  over 1,234,567.89 (or 5e-3)...\n\n\tfor i := range n { x += i }\r\nGrüße, naïve café, 世界 \u05e9\u05dc\u05d5\u05dd 🙂 e\u0301 \u00a0don't WE'LL"`)}
	for _, chat := range []string{
		`"messages":[` + system + `,` + user + `]`,
		`"messages":[` + system + `,` + user + `,{"role":"assistant","content":"Paris."},{"role":"user","content":"  And of Peru?\n"}]`,
		`"messages":[{"role":"user","content":"Grüße aus 北京 🙂\n\n<b>1 < 2 & \"3\"</b>  "}]`,
		`"messages":[` + user + `],"tools":` + tools,
		`"messages":[` + system + `,` + user + `,` + call + `,` + result + `],"tools":` + tools,
		`"messages":[` + user + `],"chat_template_kwargs":{"enable_thinking":false}`,
	} {
		out = append(out, parse(openai.RouteChat, chat))
	}
	return out
})

// parse makes a request of members that are known to be good.
func parse(route openai.Route, members string) *openai.Request {
	r := &openai.Request{}
	if e := r.Parse(route, []byte(`{"model":"probe","max_tokens":1,`+members+`}`), 16); e != nil {
		panic("probe: " + e.Message)
	}
	return r
}

// Run probes and reports until ctx is done.
func (c *Checker) Run(ctx context.Context) {
	var tasks sync.WaitGroup
	defer tasks.Wait()
	tasks.Go(func() { c.report(ctx) })
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-c.wake:
		}
		for ctx.Err() == nil {
			w, after := c.next(time.Now())
			if w == nil {
				timer.Reset(after)
				break
			}
			c.probe(ctx, w)
		}
	}
}

// next returns the worker to probe now, or nil and the time until there may be
// one. Workers that have not failed to answer come first: those that hang must
// not hold up new ones.
func (c *Checker) next(now time.Time) (best *worker, after time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	after = c.set.Every
	for _, w := range c.workers {
		if wait := w.due.Sub(now); wait > 0 {
			after = min(after, wait)
			continue
		}
		if best == nil || w.before(best) {
			best = w
		}
	}
	return best, after
}

func (w *worker) before(x *worker) bool {
	if failed := w.faults > 0; failed != (x.faults > 0) {
		return !failed
	}
	return w.due.Before(x.due)
}

// probe asks one worker and enters the verdict.
func (c *Checker) probe(ctx context.Context, w *worker) {
	c.mu.Lock()
	profile, url, epoch := w.set.probe, w.URL, w.Epoch
	c.mu.Unlock()
	state, cause, chats, err := c.ask(ctx, profile, url)
	if ctx.Err() != nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	result := "unanswered"
	switch {
	case epoch != "" && w.Epoch != epoch:
		return // the engine was restarted meanwhile, so it is due again
	case err != nil:
		// What was known stays: the engine may be busy.
		w.due = now.Add(jitter(min(retryLeast<<min(w.faults, 10), retryMost)))
		w.faults++
	default:
		w.faults, w.due = 0, now.Add(jitter(c.set.Every))
		if state != unknown {
			result = map[routerv1.ParityState]string{agrees: "agrees", differs: "differs"}[state]
			w.checked = now
		}
	}
	c.set.Checked(profile.ID, "probe", result)
	if err != nil || c.workers[w.UID] != w { // or it left meanwhile
		return
	}
	if state == agrees && w.state == differs {
		// Whatever was counted was counted with the wrong ids.
		for _, p := range w.set.profiles {
			p.window, p.n, p.since = 0, 0, time.Time{}
		}
	}
	w.state, w.cause, w.chats = state, cause, chats
	c.tally(w.set)
	notify(c.news)
}

// ask compares the ids of all probes. The verdict is unknown if the worker tells
// none of them, and an error says that it could not be asked now.
func (c *Checker) ask(ctx context.Context, p *catalog.Profile, url string) (state routerv1.ParityState, cause routerv1.ParityCause, chats bool, err error) {
	for _, r := range probes() {
		question, cancel := context.WithTimeout(ctx, probeTime)
		is, err := c.set.Compare(question, r, p, url)
		cancel()
		switch {
		case err != nil:
			return unknown, 0, false, err
		case is == prompt.Same:
			state, chats = agrees, chats || r.Route == openai.RouteChat
		case is == prompt.Differs && r.Route == openai.RouteCompletions:
			return differs, tokenizer, false, nil
		case is == prompt.Differs:
			return differs, template, false, nil
		}
	}
	return state, 0, chats, nil
}

// jitter changes d by up to a tenth.
func jitter(d time.Duration) time.Duration { return d - d/10 + rand.N(d/5+1) }
