package schedule

// afar is what other routers say of their lines: by their name and the request's
// ID. What waits there counts among those that want its best worker (worker.held),
// and its blocks are protected, as if it waited here. Who goes first is each
// router's own affair.
type afar struct {
	waits map[string]*afarWait
	// coarse is the largest distance at which blocks were told.
	coarse int
}

// afarWait is a request in the line of another router.
type afarWait struct {
	from   string
	w      *worker // its best
	prompt blocks
	heard  float64
}

// Constants of what routers tell each other of their lines.
const (
	// maxToldWaits bounds the requests in line that a router tells of: the oldest.
	maxToldWaits = 256
	// tellGap is the least time in seconds after which a request is told again
	// whose best worker is another one now, tellAgain that for one that keeps it:
	// after lostRemote without news, others take it for gone.
	tellGap, tellAgain = 0.05, 2
)

func newAfar() afar { return afar{waits: map[string]*afarWait{}, coarse: 1} }

// tellLine tells the other routers who waits here for which worker.
func (s *Scheduler) tellLine(t float64) {
	if !s.asked {
		return
	}
	for _, x := range s.waiters[:min(len(s.waiters), maxToldWaits)] {
		if x.best < 0 || len(s.deltas) >= maxDeltas/2 { // room for what matters more
			continue
		}
		w, c, gap := x.p[x.best].w, &x.c[x.best], tellGap
		if x.told == w {
			gap = tellAgain
		}
		if x.told != nil && t-x.toldAt < gap*s.scale {
			continue
		}
		x.told, x.toldAt = w, t
		p := thin(x.hashes(), maxTold)
		s.deltas = append(s.deltas, Delta{Kind: Waits, ID: x.r.ID, At: s.time(t), Worker: w.name, Tokens: c.Tokens, BlockSize: c.BlockSize,
			Hashes: p.hashes, Stride: p.stride})
	}
}

// untell tells that a request has left the line. When it was sent to a worker,
// that is told next.
func (s *Scheduler) untell(x *waiter) {
	if s.asked && x.told != nil && len(s.deltas) < maxDeltas {
		s.deltas = append(s.deltas, Delta{Kind: Ended, ID: x.r.ID, At: s.time(x.toldAt)})
	}
}

// await notes a request in the line of another router.
func (s *Scheduler) await(t float64, id, from string, d *Delta) {
	w := s.workers[d.Worker]
	if w == nil || !d.makesSense() || len(s.waits) >= s.maxWaiting {
		return
	}
	x := &afarWait{from, w, d.prompt(), t}
	s.waits[id] = x
	s.coarse = max(s.coarse, x.prompt.stride)
	w.held++
	for _, h := range x.prompt.hashes {
		s.claims[h]++
	}
}

// unawait forgets it.
func (s *Scheduler) unawait(id string) {
	x := s.waits[id]
	if x == nil {
		return
	}
	delete(s.waits, id)
	x.w.held--
	s.disclaim(x.prompt.hashes)
}

// unawaitSilent forgets those of which nothing was heard for a while.
func (s *Scheduler) unawaitSilent(t float64) {
	for id, x := range s.waits {
		if t-x.heard > lostRemote*s.scale {
			s.unawait(id)
		}
	}
}
