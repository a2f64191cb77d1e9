package virtual

import (
	"cmp"
	"slices"
	"time"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/schedule"
)

// router is one of those who decide, as services/router is in production: it
// puts requests in its scheduler's line, looks at the line whenever something
// has happened, and tells the other routers what it did.
type router struct {
	name      string
	scheduler *schedule.Scheduler
	line      map[string]*call
	wake      float64 // when the next look at the line is due; 0: no
}

// settings are those of the i-th router's scheduler.
func (s *sim) settings(i int) schedule.Settings {
	policy := s.o.Policy
	if policy == Kinference {
		policy = "" // the default
	}
	// Further routers draw other numbers.
	return schedule.Settings{Policy: policy, Seed: s.o.Seed + uint64(i)<<32, Speeds: s.speeds()}
}

// routerOf spreads connections over the routers, as a Service before them does.
func (s *sim) routerOf(connection int) *router {
	if len(s.routers) == 1 {
		return s.routers[0]
	}
	h := kvhash.Extra(0, ConnectionName(s.o.Seed, connection))
	return s.routers[uint64(h)%uint64(len(s.routers))]
}

// enter puts a call in its router's line.
func (s *sim) enter(c *call) {
	r := c.router
	err := r.scheduler.Enter(s.clock(), schedule.Request{
		ID: c.id, Tenant: c.tenant, Connection: ConnectionName(s.o.Seed, c.connection), MaxTokens: c.limit, Objective: s.o.Objective,
	}, s.candidates(c), nil)
	if err != nil {
		s.err = err
		return
	}
	r.line[c.id] = c
	s.pass(r)
}

// candidates lists the workers as a router sees them now.
func (s *sim) candidates(c *call) []schedule.Candidate {
	p := s.o.Profile
	out := make([]schedule.Candidate, len(s.workers))
	for i, w := range s.workers {
		out[i] = schedule.Candidate{
			Worker: w.name, Tokens: len(c.prompt), BlockSize: p.BlockSize, Hashes: c.hashes, Class: s.class(), Group: "l40s",
			TotalBlocks: p.Blocks, Load: s.loadOf(w),
		}
	}
	if s.o.Oracle {
		n := s.knownBlocks(c) * p.BlockSize
		for i := range out {
			out[i].GPUTokens = n
		}
		return out
	}
	for _, o := range s.index.Match(nil, p.BlockSize, c.hashes) {
		w := &out[s.byName[o.Worker]]
		w.GPUTokens, w.CPUTokens = o.GPUBlocks*p.BlockSize, o.CPUBlocks*p.BlockSize
	}
	return out
}

// loadOf is the newest sample of a worker's load that has arrived.
func (s *sim) loadOf(w *worker) schedule.Load {
	load := w.load
	load.Age = seconds(s.now - w.sampled)
	return load
}

// passAll lets every router look at its line.
func (s *sim) passAll() {
	for _, r := range s.routers {
		s.pass(r)
	}
}

// pass dispatches what can go now.
func (s *sim) pass(r *router) {
	if len(r.line) == 0 {
		return
	}
	for _, d := range r.scheduler.Pass(s.clock()) {
		c := r.line[d.ID]
		delete(r.line, d.ID)
		s.dispatch(c, d.Decision)
	}
	at, ok := r.scheduler.Wake(s.clock())
	if !ok {
		return
	}
	// Not at once again, whatever the scheduler says: time must go on.
	t := max(at.Sub(origin).Seconds(), s.now+1e-3)
	if r.wake > s.now && r.wake <= t {
		return
	}
	r.wake = t
	s.at(t, func() {
		if r.wake == t {
			r.wake = 0
			s.pass(r)
		}
	})
}

// tell brings a worker's newest load to all routers.
func (s *sim) tell(w *worker) {
	for _, r := range s.routers {
		if len(r.line) > 0 {
			r.scheduler.Sample(s.clock(), w.name, s.loadOf(w))
		}
	}
}

// refresh asks the index anew for those that wait, and lets them go on.
func (s *sim) refresh() {
	for _, r := range s.routers {
		if len(r.line) == 0 {
			continue
		}
		waiting := make([]*call, 0, len(r.line))
		for _, c := range r.line {
			waiting = append(waiting, c)
		}
		slices.SortFunc(waiting, func(a, b *call) int { return cmp.Compare(a.sample.Index, b.sample.Index) })
		for _, c := range waiting {
			r.scheduler.Refresh(s.clock(), c.id, s.candidates(c), nil)
		}
		s.pass(r)
	}
}

// gossipEvery is how often a router tells what it did; calibrationEvery what it
// has learned.
const (
	gossipEvery      = 0.025
	calibrationEvery = 10
)

// gossip makes the routers tell each other, Options.Gossip seconds late in all.
func (s *sim) gossip() {
	if len(s.routers) < 2 || s.o.Gossip <= 0 {
		return
	}
	every := min(gossipEvery, s.o.Gossip/2)
	next := 0.0
	var tick func()
	tick = func() {
		learned := s.now >= next
		if learned {
			next = s.now + calibrationEvery
		}
		for _, from := range s.routers {
			now, deltas := s.clock(), from.scheduler.Deltas(s.clock())
			var calibration map[string]schedule.Learned
			if learned {
				calibration = from.scheduler.Calibration()
			}
			if len(deltas) == 0 && len(calibration) == 0 {
				continue
			}
			s.at(s.now+s.o.Gossip-every/2, func() { s.hear(from, now, deltas, calibration) })
		}
		if s.busy() {
			s.at(s.now+every, tick)
		}
	}
	s.at(0, tick)
}

func (s *sim) hear(from *router, at time.Time, deltas []schedule.Delta, calibration map[string]schedule.Learned) {
	for _, r := range s.routers {
		if r == from {
			continue
		}
		if len(deltas) > 0 {
			r.scheduler.Remote(s.clock(), from.name, at, deltas)
		}
		if len(calibration) > 0 {
			r.scheduler.Learn(s.clock(), from.name, calibration)
		}
		s.pass(r)
	}
}

// errorSteps is the number of different errors of Options.Error.
const errorSteps = 13

// class is the accelerator class that a candidate claims: with Options.Error one
// of classes that are off by a factor.
func (s *sim) class() string {
	if s.noise == nil {
		return "l40s"
	}
	return s.classes[s.noise.IntN(errorSteps)]
}

// speeds are the priors of the classes that are wrong.
func (s *sim) speeds() map[string]schedule.Speed {
	if s.noise == nil {
		return nil
	}
	out := map[string]schedule.Speed{}
	for i, name := range s.classes {
		p := schedule.DefaultSpeeds()["l40s"]
		f := 1 - s.o.Error + 2*s.o.Error*float64(i)/(errorSteps-1)
		p.W, p.A, p.Q, p.Ovh, p.S, p.K = p.W*f, p.A*f, p.Q*f, p.Ovh*f, p.S*f, p.K*f
		out[name] = p
	}
	return out
}
