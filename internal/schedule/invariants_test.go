package schedule

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/kvhash"
)

// checkLine checks what must hold between any two calls.
func checkLine(t testing.TB, s *Scheduler) {
	t.Helper()
	held := map[*worker]int{}
	claims := map[kvhash.Hash]int32{}
	waiting := map[*tenant]int{}
	for i, x := range s.waiters {
		if s.byID[x.r.ID] != x || i > 0 && s.waiters[i-1].seq >= x.seq {
			t.Errorf("%s is not where it belongs", x.r.ID)
		}
		waiting[x.tenant]++
		if x.best >= 0 {
			held[x.p[x.best].w]++
		}
		if x.claimed {
			for _, h := range x.hashes() {
				claims[h]++
			}
		}
	}
	for _, x := range s.waits {
		held[x.w]++
		for _, h := range x.prompt.hashes {
			claims[h]++
		}
	}
	if len(s.byID) != len(s.waiters) || len(claims) != len(s.claims) {
		t.Errorf("%d in line and %d by id; %d claims and %d counted", len(s.waiters), len(s.byID), len(claims), len(s.claims))
	}
	for h, n := range claims {
		if s.claims[h] != n {
			t.Errorf("a block is claimed %d times, counted %d", n, s.claims[h])
		}
	}
	for _, x := range s.tenants.known {
		if x.waiting != waiting[x] || math.IsNaN(x.vtc) || x.vtc < 0 {
			t.Errorf("tenant %s: %d wait, counted %d; vtc %v", x.name, waiting[x], x.waiting, x.vtc)
		}
	}
	entries := 0
	for _, w := range s.workers {
		entries += w.inFlight()
		if w.held != held[w] {
			t.Errorf("%s: held %d, counted %d", w.name, held[w], w.held)
		}
		cached := 0
		for _, r := range w.mirror.runs {
			if r.lo < 0 || r.lo >= r.hi || len(r.hashes) > 0 && r.hi > r.len() {
				t.Errorf("%s: run %d..%d of %d", w.name, r.lo, r.hi, r.len())
			}
			cached += r.hi - r.lo
		}
		distinct := 0
		seen := map[kvhash.Hash]bool{}
		remote := false
		for e := range w.flight() {
			remote = remote || e.from != ""
			for _, h := range e.prompt.hashes {
				if !seen[h] {
					seen[h] = true
					distinct++
				}
			}
		}
		if cached != w.mirror.cached || w.pages.act < 0 || !remote && w.pages.act != distinct || w.pages.bias < 0 || !(w.pages.extra >= 0) {
			t.Errorf("%s: mirror %d, counted %d; %d different blocks, counted %d; bias %v, extra %v", w.name, cached, w.mirror.cached, distinct, w.pages.act, w.pages.bias, w.pages.extra)
		}
		if w.work < -1e-6 || w.context < 0 || !(w.view.free <= math.Inf(1)) {
			t.Errorf("%s: work %v, context %v, free %v", w.name, w.work, w.context, w.view.free)
		}
	}
	if entries != len(s.entries) || s.silent.Len() != entries {
		t.Errorf("%d entries at workers, %d by id, %d in order", entries, len(s.entries), s.silent.Len())
	}
}

// driver calls a scheduler with events in an order that bytes decide, and keeps
// book of what became of each request.
type driver struct {
	s        *Scheduler
	now      time.Time
	n        int
	waiting  map[string]bool
	inFlight []string
	gone     map[string]string
}

func (d *driver) prompt(b byte) []Candidate {
	name := []string{"aaaab", "aaaac", "aabbb", "cdefg", "c"}[b%5]
	n := 3 + int(b/5)%30
	c := candidates([]string{"u", "u v", "u v w", "w"}[b/64], n*100+int(b), 100, chain(name, n))
	for i := range c {
		c[i].TotalBlocks = 60
		c[i].GPUTokens = int(b) % 7 * 100
		c[i].Load = Load{Known: b%3 == 0, Running: float64(b % 5), Waiting: float64(b % 2), KVUsage: float64(b) / 256, Age: time.Duration(b) * ms}
	}
	return c
}

func (d *driver) step(t testing.TB, op, b byte) {
	d.now = d.now.Add(time.Duration(b) * 7 * ms)
	pick := func() string { return d.inFlight[int(b)%len(d.inFlight)] }
	switch op % 10 {
	case 0, 1, 2:
		d.n++
		id := fmt.Sprint("r", d.n)
		r := Request{ID: id, Tenant: fmt.Sprint("t", b%3), QoS: []QoS{Interactive, "", Batch, Deferrable}[b%4], Objective: []Objective{"", TTFT, Throughput}[b%3], Whole: b%11 == 0}
		if d.s.Enter(d.now, r, d.prompt(b), nil) == nil {
			d.waiting[id] = true
		}
	case 3:
		if len(d.inFlight) > 0 {
			d.s.FirstToken(d.now, pick(), time.Duration(b)*10*ms)
		}
	case 4, 5:
		if len(d.inFlight) > 0 {
			id := pick()
			d.s.Done(d.now, id, Outcome{OK: b%4 > 0, CachedTokens: int(b%3)*100 - 1, OutputTokens: int(b)})
			d.inFlight = drop2(d.inFlight, id)
			d.gone[id] = "done"
		}
	case 6:
		for id := range d.waiting {
			d.s.Leave(d.now, id)
			delete(d.waiting, id)
			d.gone[id] = "left"
			break
		}
	case 7:
		for id := range d.waiting {
			d.s.Refresh(d.now, id, d.prompt(b), nil)
			break
		}
	case 8:
		d.s.Sample(d.now, []string{"u", "v", "w", "x"}[b%4], Load{Known: true, Running: float64(b % 9), KVUsage: float64(b%100) / 100})
	case 9:
		switch b % 4 {
		case 0:
			d.s.Restarted("u")
		case 1:
			d.s.Forget("v")
		case 2:
			if len(d.inFlight) > 0 {
				d.s.Moved(d.now, pick(), "w")
			}
		case 3:
			d.s.Remote(d.now, "other", d.now, []Delta{
				{Kind: Routed, ID: fmt.Sprint(b), At: d.now, Worker: "u", Tokens: 500, BlockSize: 100, Hashes: chain("aaaab", 5), Stride: 1, Work: time.Second, TTFT: time.Second},
				{Kind: DeltaKind(b % 3), ID: fmt.Sprint(b + 4)},
			})
		}
	}
	d.pass(t)
}

func (d *driver) pass(t testing.TB) {
	for _, x := range d.s.Pass(d.now) {
		if !d.waiting[x.ID] {
			t.Errorf("%s was dispatched and did not wait", x.ID)
		}
		delete(d.waiting, x.ID)
		if !x.Booked {
			t.Errorf("%s was not booked", x.ID)
		}
		d.inFlight = append(d.inFlight, x.ID)
	}
}

func drop2(list []string, id string) []string {
	for i := range list {
		if list[i] == id {
			return append(list[:i], list[i+1:]...)
		}
	}
	return list
}

// drain ends all requests, and checks that every one that waits gets its turn.
func (d *driver) drain(t testing.TB) {
	for id := range d.waiting { // workers come back
		d.s.Refresh(d.now, id, d.prompt(200), nil)
	}
	for range 100_000 {
		d.pass(t)
		if len(d.inFlight) > 0 {
			id := d.inFlight[0]
			d.inFlight = d.inFlight[1:]
			d.now = d.now.Add(10 * ms)
			d.s.FirstToken(d.now, id, 10*ms)
			d.s.Done(d.now, id, Outcome{OK: true, CachedTokens: -1, OutputTokens: 5})
			continue
		}
		wake, ok := d.s.Wake(d.now)
		if !ok {
			break
		}
		if !wake.After(d.now) {
			t.Fatalf("wake at %v, now is %v", wake, d.now)
		}
		d.now = wake
	}
	if len(d.waiting) > 0 {
		t.Errorf("%d requests wait for ever: %+v", len(d.waiting), d.s.Line(d.now))
	}
	d.s.Gone(d.now, "other")
	checkLine(t, d.s)
	if in, _ := d.s.Totals(); in != 0 || d.s.Waits() != 0 {
		t.Errorf("%d in flight and %d in line at the end", in, d.s.Waits())
	}
	for _, w := range d.s.workers {
		if w.pages.act != 0 || w.held != 0 || w.work != 0 || w.context != 0 {
			t.Errorf("%s keeps %d pages, %d held, %v work, %v context", w.name, w.pages.act, w.held, w.work, w.context)
		}
	}
}

func newDriver(t testing.TB) *driver {
	return &driver{s: newScheduler(t, Settings{MaxWaiting: 40}), now: start, waiting: map[string]bool{}, gone: map[string]string{}}
}

// Whatever the order of events: the books agree, nothing waits for ever, and all
// is as before when all is done.
func TestAnyOrderOfEvents(t *testing.T) {
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 1))
		d := newDriver(t)
		for range 300 {
			d.step(t, byte(rng.Uint32()), byte(rng.Uint32()))
			checkLine(t, d.s)
		}
		d.drain(t)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func FuzzOrderOfEvents(f *testing.F) {
	f.Add([]byte{0, 9, 0, 200, 3, 1, 4, 1})
	f.Add([]byte{0, 250, 1, 251, 2, 252, 9, 3, 8, 80, 7, 7, 6, 1, 9, 1, 5, 5})
	f.Fuzz(func(t *testing.T, ops []byte) {
		d := newDriver(t)
		for i := 0; i+1 < len(ops) && i < 400; i += 2 {
			d.step(t, ops[i], ops[i+1])
		}
		checkLine(t, d.s)
		d.drain(t)
	})
}
