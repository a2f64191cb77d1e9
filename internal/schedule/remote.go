package schedule

import (
	"maps"
	"math"
	"slices"
	"time"

	"github.com/kinference/kinference/internal/kvhash"
)

// DeltaKind is what happened to a request.
type DeltaKind uint8

// Kinds of deltas.
const (
	Routed DeltaKind = iota
	Began            // its first token came
	Ended
	Waits // in the line, for Worker most of all
)

// Delta is one change of a router's ledger, for the other routers.
type Delta struct {
	Kind DeltaKind
	// ID names the request among those of its router.
	ID string
	// At is when it happened, by the clock of the Scheduler that tells it or is told:
	// whoever carries deltas brings those of other clocks in line.
	At time.Time

	// What follows is set for Routed and, but for Class, Group, Cached, MaxTokens,
	// Work, TTFT and Whole, for Waits.

	Worker, Class, Group string
	// Tokens is the prompt's length, Cached the part that was predicted not to
	// be prefilled, MaxTokens the limit of the output or 0.
	Tokens, Cached, MaxTokens int
	BlockSize                 int
	// Hashes are those of every Stride-th block of the prompt, beginning with
	// block Stride-1: at most 64.
	Hashes []kvhash.Hash
	Stride int
	// Work is the predicted prefill, TTFT the predicted time to first token.
	Work, TTFT time.Duration
	Whole      bool
}

// Learned is what a router's calibration knows of one worker.
type Learned struct {
	// Slowness is the factor on the prior speed of the class, from Samples first tokens.
	Slowness float64
	Samples  int
	// Reuse is the share of predicted cached tokens that came true, from Hits answers.
	Reuse float64
	Hits  int
}

// Constants of what routers tell each other.
const (
	// maxDeltas bounds what is kept for the next call of Deltas.
	maxDeltas = 4096
	// maxTold bounds the hashes of a delta.
	maxTold = 64
	// maxRemoteAge is the age in seconds from which what was routed elsewhere is
	// left to the gauges: told a second late, it is worse than not told at all
	// (docs/decisions/0011).
	maxRemoteAge = 0.3
	// lostRemote is the time in seconds without news of another router's request
	// after which the gauges decide whether it is still there.
	lostRemote = 5
)

// remotes is what goes between this router and others.
type remotes struct {
	asked  bool // somebody fetches the deltas
	deltas []Delta
}

// tell notes a change of the ledger for the other routers.
func (s *Scheduler) tell(t float64, e *entry, k DeltaKind) {
	if !s.asked || e.from != "" {
		return
	}
	if len(s.deltas) >= maxDeltas { // nobody asks any more
		s.asked, s.deltas = false, nil
		return
	}
	d := Delta{Kind: k, ID: e.id, At: s.time(t)}
	if k == Routed {
		told := thin(e.prompt.hashes, maxTold)
		d.Worker, d.Class, d.Group, d.Whole = e.w.name, e.w.class, e.group, e.whole
		d.Tokens, d.Cached, d.MaxTokens, d.BlockSize = e.tokens, e.cached, e.maxTokens, e.blockSize
		d.Hashes, d.Stride = told.hashes, told.stride
		d.Work, d.TTFT = s.duration(e.work), s.duration(e.ttft)
	}
	s.deltas = append(s.deltas, d)
}

// Deltas returns what this router did since the last call, oldest first; the
// first call begins it. At most 4096 are kept: when that many were not fetched,
// it ends until the next call.
func (s *Scheduler) Deltas(now time.Time) []Delta {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clock(now)
	d := s.deltas
	s.asked, s.deltas = true, nil
	return d
}

// Remote takes in what another router said at time at. What was routed more than 0.3 s ago is left to the gauges. Deltas of
// workers that are not known here, of requests that were left out, and those that
// make no sense are ignored. from names the router.
func (s *Scheduler) Remote(now time.Time, from string, at time.Time, d []Delta) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.clock(now)
	for i := range d {
		id := from + "\x00" + d[i].ID
		e := s.entries[id]
		s.unawait(id)
		switch d[i].Kind {
		case Routed:
			when := d[i].At
			if when.IsZero() {
				when = at
			}
			age := now.Sub(when).Seconds() * s.scale
			if age > maxRemoteAge*s.scale || len(s.entries) >= s.maxInFlight {
				continue
			}
			s.remove(t, e)
			s.returned(t, d[i].prompt())
			s.bookRemote(t, t-max(age, 0), id, from, &d[i])
		case Began:
			if e != nil && e.first == 0 {
				s.begin(t, e)
			}
		case Ended:
			s.remove(t, e)
		case Waits:
			if e == nil {
				s.await(t, id, from, &d[i])
			}
		}
	}
}

// bookRemote enters a request that another router has sent to a worker.
func (s *Scheduler) bookRemote(t, routed float64, id, from string, d *Delta) {
	w := s.workers[d.Worker]
	if w == nil || !d.makesSense() {
		return
	}
	s.enterLedger(t, &entry{
		id: id, from: from, group: d.Group, w: w, prompt: d.prompt(), blockSize: d.BlockSize, tokens: d.Tokens, cached: clamp(d.Cached, 0, d.Tokens),
		maxTokens: d.MaxTokens, whole: d.Whole, routed: routed, heard: t, work: d.Work.Seconds() * s.scale,
		ttft: d.TTFT.Seconds() * s.scale, due: routed + d.TTFT.Seconds()*s.scale,
	})
}

// makesSense tells whether the ledger can take what another router said.
func (d *Delta) makesSense() bool {
	return d.Tokens >= 0 && d.Work >= 0 && len(d.Hashes) <= maxTold && d.Stride >= 0 && d.Stride&(d.Stride-1) == 0
}

// prompt is what it says of the prompt's blocks.
func (d *Delta) prompt() blocks {
	p := blocks{d.Hashes, max(d.Stride, 1)}
	if d.BlockSize <= 0 || p.len() > d.Tokens/d.BlockSize {
		return blocks{stride: 1}
	}
	return p
}

// Gone drops what another router has in line and in flight: it has stopped.
func (s *Scheduler) Gone(now time.Time, from string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.clock(now)
	for id, x := range s.waits {
		if x.from == from {
			s.unawait(id)
		}
	}
	for f := s.silent.Front(); f != nil; {
		e := f.Value.(*entry)
		if f = f.Next(); e.from == from && from != "" {
			s.remove(t, e)
		}
	}
}

// lost drops requests of other routers that a sample of a worker, taken at time
// at, shows to be gone: the word of their end did not come.
func (s *Scheduler) lost(t, at, known float64, w *worker) {
	n := 0
	var old *entry
	for e := range w.flight() {
		if e.routed > at {
			continue
		}
		n++
		if e.from != "" && e.heard < at-lostRemote*s.scale && (old == nil || e.heard < old.heard) {
			old = e
		}
	}
	if old == nil || float64(n) <= known {
		return
	}
	s.expired++
	s.remove(t, old)
	s.lost(t, at, known, w)
}

// Calibration returns what was learned of every worker, for other routers.
func (s *Scheduler) Calibration() map[string]Learned {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make(map[string]Learned, len(s.workers))
	for name, w := range s.workers {
		if w.samples+w.hits > 0 {
			out[name] = Learned{Slowness: math.Exp(w.logS), Samples: w.samples, Reuse: 1 - w.waste, Hits: w.hits}
		}
	}
	return out
}

// Learn takes in what another router has learned. A worker's own figures move
// towards those by half of the other's share in the samples of both: a router
// that is new believes the others, and all agree after a while.
func (s *Scheduler) Learn(now time.Time, from string, workers map[string]Learned) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.clock(now)
	groups := map[*learned]*mean{}
	for _, name := range slices.Sorted(maps.Keys(workers)) { // in one order: a mean rounds by it
		o, w := workers[name], s.workers[name]
		if w == nil || o.Samples < 0 || o.Hits < 0 {
			continue
		}
		if logS := math.Log(o.Slowness); o.Samples > 0 && logS >= math.Log(minS)-1e-9 && logS <= math.Log(maxS)+1e-9 {
			if w.samples == 0 {
				w.logS, w.samples, w.sampledSpeed = logS, min(o.Samples, warm), t
			} else {
				w.logS += share(o.Samples, w.samples) * (logS - w.logS)
			}
			if w.group.samples < warm {
				if groups[w.group] == nil {
					groups[w.group] = &mean{}
				}
				g := groups[w.group]
				g.n++
				g.value += (logS - g.value) / float64(g.n)
			}
		}
		if waste := 1 - o.Reuse; o.Hits > 0 && waste >= 0 && waste <= 1 {
			w.waste += share(o.Hits, w.hits) * (waste - w.waste)
			w.hits = max(w.hits, min(o.Hits, warm))
		}
		s.changed(w)
	}
	for g, m := range groups {
		g.logS, g.samples = m.value, warm
	}
}

// share is how far to go towards the figures of another router.
func share(theirs, own int) float64 {
	if own == 0 {
		return 1
	}
	return 0.5 * float64(theirs) / float64(theirs+own)
}
