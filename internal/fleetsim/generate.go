package fleetsim

import (
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/vllm"
)

func (l *life) chatCompletions(w http.ResponseWriter, r *http.Request) { l.generate(w, r, true) }

func (l *life) completions(w http.ResponseWriter, r *http.Request) { l.generate(w, r, false) }

// choice is one of the sequences that a request generates.
type choice struct {
	index     int
	prompt    prompt
	r         *engine.Request
	stream    stream
	core      *core
	ending    ending
	text      strings.Builder // all text, shown or not
	sent      int             // bytes of text that were streamed
	ids       []uint32        // kept for return_token_ids
	generated int
	reason    string // why it ended; "": it has not
}

func (l *life) generate(w http.ResponseWriter, r *http.Request, chat bool) {
	arrived := l.w.clock.now()
	l.requests.Add(1)
	defer l.requests.Add(-1)
	var req request
	e := l.wording().body(w, r, &req)
	f := l.w.faults.request()
	switch {
	case f.hang:
		<-r.Context().Done()
		panic(http.ErrAbortHandler)
	case f.drop:
		panic(http.ErrAbortHandler)
	case f.status != 0:
		writeError(w, vllm.Error{Message: "simulated fault", Type: "InternalServerError", Code: f.status})
		return
	}
	var j *job
	if e == nil {
		j, e = l.prepare(r, &req, chat)
	}
	if e != nil {
		writeError(w, *e)
		return
	}
	notify := make(chan struct{}, 1)
	choices, e := l.submit(arrived, j, notify)
	if e != nil {
		writeError(w, *e)
		return
	}
	a := &answer{life: l, job: j, choices: choices, w: w, created: time.Now().Unix(), cut: f.cutAfter}
	if kind := r.Header.Get("endpoint-load-metrics-format"); kind != "" && !j.stream {
		a.loadFormat = kind
	}
	// The engine is rid of the request whatever happens to its client.
	defer func() {
		for _, c := range choices {
			if c.reason == "" {
				c.core.abort(c.r)
			}
		}
		if l.w.cfg.OnUsed != nil {
			l.w.cfg.OnUsed(a.used(r.Header.Get("X-Request-Id")))
		}
	}()
	for open := len(choices); open > 0; {
		select {
		case <-notify:
		case <-r.Context().Done():
			l.aborted.Add(1)
			panic(http.ErrAbortHandler)
		}
		for _, c := range choices {
			if c.reason != "" {
				continue
			}
			ids, reason := c.stream.take()
			if len(ids) == 0 && reason == "" {
				continue
			}
			a.advance(c, ids, reason)
			if reason != "" {
				open--
			}
		}
		a.flush()
	}
	a.finish()
}

// used is what the request used. Its sequences have left their engines.
func (a *answer) used(id string) Used {
	u := Used{RequestID: id, Sent: a.sent}
	for i, c := range a.choices {
		if i%a.job.n == 0 {
			u.Prompt += len(c.prompt.ids)
		}
		u.Cached += c.r.Cached
		u.Output += c.r.Generated
		u.Aborted = u.Aborted || c.reason == ""
	}
	return u
}

// submit hands all sequences of a request to engines.
func (l *life) submit(arrived float64, j *job, notify chan struct{}) ([]*choice, *vllm.Error) {
	var list []*choice
	for i, p := range j.prompts {
		n := j.length(len(p.ids))
		for k := range j.n {
			seed := uint64(k)
			if j.req.Seed != nil {
				seed += uint64(*j.req.Seed) << 16
			}
			c := &choice{index: i*j.n + k, prompt: p, core: l.core(j.rank)}
			c.stream.notify = notify
			c.r = &engine.Request{
				// The number keeps IDs apart if a client uses one twice.
				ID:     fmt.Sprintf("%s-%d", j.id, l.nextID.Add(1)),
				Tokens: p.ids, MaxTokens: max(1, j.maxTokens(len(p.ids))), LoRA: j.lora, Tag: &c.stream,
			}
			output := l.w.text.words.only(j.req.AllowedTokenIDs).answer(p.ids, seed, n, j.chat)
			c.r.Output, c.ending = j.ending(l.w.text, output)
			if j.req.CacheSalt != nil {
				c.r.Salt = *j.req.CacheSalt
			}
			if err := c.core.submit(arrived, c.r); err != nil {
				for _, c := range list {
					c.core.abort(c.r)
				}
				return nil, fail(vllm.Internal(err.Error()))
			}
			list = append(list, c)
		}
	}
	return list, nil
}

// core picks the engine: the one asked for, or the least loaded as vLLM's
// internal balancer counts.
func (l *life) core(rank int) *core {
	if rank >= 0 {
		return l.cores[rank]
	}
	best, least := l.cores[0], -1
	if len(l.cores) == 1 {
		return best
	}
	// Equals are taken in turn.
	first := int(l.nextID.Load()) % len(l.cores)
	for i := range l.cores {
		k := l.cores[(first+i)%len(l.cores)]
		running, waiting := k.load()
		if score := 4*waiting + running; least < 0 || score < least {
			best, least = k, score
		}
	}
	return best
}
