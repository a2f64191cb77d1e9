// Package parity checks that the token ids made here are those of the engines.
//
// Wrong ids are never an error that anybody sees: the prompt's blocks are just
// not found in any cache. So the Checker asks each new engine, and all of them
// again every now and then, for the ids of a few small requests, and compares
// the number of prompt tokens that engines report with ours in all that they
// serve. A profile whose ids differ does without its tokenizer until they agree
// again, and ids are passed on only to an engine that proved to have the same.
//
// ingress tells it of catalogs and served requests, asks it for each prompt, and
// runs its loop, which probes one engine at a time beside the requests and
// reports to the router. All methods are safe for concurrent use. An engine that
// cannot be asked proves nothing and is asked again later.
package parity

import (
	"context"
	"log/slog"
	"math/bits"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/openai"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/catalog"
	"github.com/kinference/kinference/services/ingress/internal/prompt"
)

// Short names of the verdicts.
const (
	unknown = routerv1.ParityState_PARITY_STATE_UNSPECIFIED
	agrees  = routerv1.ParityState_PARITY_STATE_AGREES
	differs = routerv1.ParityState_PARITY_STATE_DIFFERS

	tokenizer = routerv1.ParityCause_PARITY_CAUSE_TOKENIZER
	template  = routerv1.ParityCause_PARITY_CAUSE_TEMPLATE
	count     = routerv1.ParityCause_PARITY_CAUSE_COUNT
)

const (
	// counted is how many of a profile's newest requests are compared by their
	// number of tokens, and tooMany how many of them may not differ: no kind of
	// request that is known to be counted otherwise is compared, but an odd one
	// now and then shall not cost all the others their exact ids.
	counted = 20
	tooMany = 3
	// probeTime bounds one question to an engine.
	probeTime = 5 * time.Second
	// An engine that does not answer may be starting: it is asked again soon,
	// then less and less often.
	retryLeast, retryMost = time.Second, time.Minute
	// spread is the jitter of a first probe, so that many ingresses that start
	// together do not all ask the same engine first.
	spread = 200 * time.Millisecond
)

// Settings of a Checker. All but Checked are required.
type Settings struct {
	// Compare asks a worker: prompt.Maker.Compare.
	Compare func(ctx context.Context, r *openai.Request, p *catalog.Profile, url string) (prompt.Comparison, error)
	// Loaded tells whether a tokenizer is in use: prompt.Maker.Loaded.
	Loaded func(path string) bool
	// Report sends all verdicts to the router. An error is tried again later.
	Report func(context.Context, *routerv1.ParityReport) error
	// Name of this ingress in reports.
	Name string
	// Every is the time between two probes of a worker.
	Every time.Duration
	Log   *slog.Logger
	// Checked is told of every check of a profile; kind is "probe" or "count",
	// result "agrees", "differs" or "unanswered".
	Checked func(profile, kind, result string)
}

// Checker holds the verdicts. Use New.
type Checker struct {
	set  Settings
	wake chan struct{} // has a token when there may be something to probe
	news chan struct{} // has a token when there is something to report

	mu       sync.Mutex
	workers  map[string]*worker // by uid
	sets     map[string]*set    // worker sets with a tokenizer, by name
	profiles map[string]*profile
}

// worker is an engine and what its probes said.
type worker struct {
	catalog.Worker
	set     *set
	state   routerv1.ParityState
	cause   routerv1.ParityCause
	chats   bool // chats were compared and agree
	checked time.Time
	due     time.Time
	faults  int // probes without an answer in a row
}

// set is a worker set: engines of one model with one tokenizer. What a probe
// finds holds for all profiles of it.
type set struct {
	name          string
	profiles      []*profile
	probe         *catalog.Profile // with which its workers are asked
	agree, differ int              // workers
	cause         routerv1.ParityCause
	example       string // uid of a worker that differs
	said          string // what was logged last
}

// profile is what requests are served by.
type profile struct {
	*catalog.Profile
	set    *set
	window uint32 // newest requests, a bit for each whose count differs
	n      int    // requests in window
	// since is when the counts began to differ; zero: they do not.
	since time.Time
	cause routerv1.ParityCause // why its ids are distrusted; 0: they are not
}

// New makes a Checker that knows no catalog yet.
func New(s Settings) *Checker {
	if s.Checked == nil {
		s.Checked = func(string, string, string) {}
	}
	return &Checker{set: s, wake: make(chan struct{}, 1), news: make(chan struct{}, 1),
		workers: map[string]*worker{}, sets: map[string]*set{}, profiles: map[string]*profile{}}
}

// Watch takes a catalog whose tokenizers are loaded. What is known of workers and
// profiles that it still has is kept.
func (c *Checker) Watch(v *catalog.View) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	workers, sets, profiles := map[string]*worker{}, map[string]*set{}, map[string]*profile{}
	for _, p := range v.Profiles {
		if p.TokenizerPath == "" || !c.set.Loaded(p.TokenizerPath) {
			continue
		}
		s := sets[p.Set]
		if s == nil {
			if s = c.sets[p.Set]; s == nil || s.probe.TokenizerPath != p.TokenizerPath {
				s = &set{name: p.Set}
			}
			s.probe, s.profiles = p, nil
			sets[p.Set] = s
		} else if s.probe.LoRA != "" && p.LoRA == "" {
			s.probe = p
		}
		own := c.profiles[p.ID]
		if own == nil || own.set != s {
			own = &profile{}
		}
		own.Profile, own.set = p, s
		s.profiles = append(s.profiles, own)
		profiles[p.ID] = own
		for _, w := range p.Workers {
			if workers[w.UID] == nil {
				workers[w.UID] = c.worker(now, w, s)
			}
		}
	}
	c.workers, c.sets, c.profiles = workers, sets, profiles
	for _, s := range sets {
		c.tally(s)
	}
	notify(c.wake)
	notify(c.news)
}

// worker returns the entry of w. Another process there is to prove itself anew;
// until it was asked the verdict on the former one stands. The first word on an
// epoch names the process that was asked.
func (c *Checker) worker(now time.Time, w catalog.Worker, s *set) *worker {
	old := c.workers[w.UID]
	if old == nil || old.set != s || old.URL != w.URL {
		return &worker{Worker: w, set: s, due: now.Add(rand.N(spread))}
	}
	if old.Epoch != "" && w.Epoch != "" && old.Epoch != w.Epoch {
		old.chats, old.due, old.faults = false, now, 0
	}
	if w.Epoch != "" {
		old.Epoch = w.Epoch
	}
	return old
}

// tally counts the verdicts on the workers of a set and settles what becomes of
// its profiles. The lock is held.
func (c *Checker) tally(s *set) {
	s.agree, s.differ, s.cause, s.example = 0, 0, 0, ""
	for _, w := range s.probe.Workers {
		switch known := c.workers[w.UID]; {
		case known == nil || known.set != s:
		case known.state == agrees:
			s.agree++
		case known.state == differs:
			s.differ++
			s.cause, s.example = known.cause, w.UID
		}
	}
	said := ""
	switch {
	case s.distrusted():
		said = "distrusted " + s.cause.String()
	case s.differ > 0:
		said = "some " + s.cause.String()
	}
	if said != s.said {
		at := []any{"worker_set", s.name, "tokenizer", s.probe.TokenizerPath, "cause", word(s.cause), "worker", s.example, "differ", s.differ, "agree", s.agree}
		switch {
		case said == "":
			c.set.Log.Info("token ids are those of the engines again", at[:4]...)
		case s.distrusted():
			c.set.Log.Warn("token ids are not those of the engines: asking them instead", at...)
		default:
			c.set.Log.Warn("token ids are not those of some engines, which will get fewer cache hits", at...)
		}
		s.said = said
	}
	for _, p := range s.profiles {
		p.settle()
	}
}

// distrusted reports whether the ids made here are wrong for at least as many
// workers as they are right for. With fewer they still are the best: a prompt
// has one list of ids, whichever worker it then goes to.
func (s *set) distrusted() bool { return s.differ > 0 && s.differ >= s.agree }

// settle decides whether the ids of a profile are believed. The lock is held.
func (p *profile) settle() {
	switch {
	case p.set.distrusted():
		p.cause = p.set.cause
	case !p.since.IsZero():
		p.cause = count
	default:
		p.cause = 0
	}
}

// Distrusts reports that the ids made here for a profile are not those of its
// engines. Until a worker has been asked, the word of other ingresses counts.
func (c *Checker) Distrusts(p *catalog.Profile) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	own := c.profiles[p.ID]
	if own == nil || own.set.agree+own.set.differ == 0 && own.since.IsZero() {
		return p.Parity == differs
	}
	return own.cause != 0
}

// Proven reports whether a worker proved to make the ids of chats that are made
// here for a profile, so that it may take over ours.
func (c *Checker) Proven(p *catalog.Profile, uid string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	own, w := c.profiles[p.ID], c.workers[uid]
	return own != nil && own.cause == 0 && w != nil && w.set == own.set && w.state == agrees && w.chats
}

// Served takes the number of prompt tokens of a request that a worker served: by
// our tokenizer and as the engine reported it. Requests that engines count
// otherwise for a reason are not for it: several prompts, ids from elsewhere.
func (c *Checker) Served(id, uid string, ours, engine int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.profiles[id]
	if p == nil {
		return
	}
	if w := c.workers[uid]; w != nil && w.set == p.set && w.state == differs {
		return // its probe said it, and says when it is over
	}
	bit, result := uint32(0), "agrees"
	if ours != engine {
		bit, result = 1, "differs"
	}
	c.set.Checked(id, "count", result)
	p.window = (p.window<<1 | bit) & (1<<counted - 1)
	p.n = min(p.n+1, counted)
	bad := bits.OnesCount32(p.window)
	switch {
	case p.since.IsZero() && bad >= tooMany:
		p.since = time.Now()
		c.set.Log.Warn("engines count other numbers of prompt tokens: asking them instead of using the tokenizer",
			"profile", id, "tokenizer", p.TokenizerPath, "cause", word(count), "worker", uid, "ours", ours, "engine", engine)
	case !p.since.IsZero() && bad == 0 && p.n == counted && time.Since(p.since) >= c.set.Every:
		// Not sooner: requests of the kind that differs may be rare.
		p.since = time.Time{}
		c.set.Log.Info("engines count the same numbers of prompt tokens again", "profile", id)
	default:
		return
	}
	p.settle()
	notify(c.news)
}

// State is whether a profile's tokenizer is believed.
type State struct {
	Profile string
	// Cause is a word for metrics, "none" if its ids are believed.
	Cause string
}

// States returns the state of every profile with a tokenizer, in no order.
func (c *Checker) States() []State {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([]State, 0, len(c.profiles))
	for id, p := range c.profiles {
		out = append(out, State{id, word(p.cause)})
	}
	return out
}

func word(c routerv1.ParityCause) string {
	switch c {
	case tokenizer:
		return "tokenizer"
	case template:
		return "template"
	case count:
		return "count"
	}
	return "none"
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
