package parity

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

const (
	hashCause  = routerv1.ParityCause_PARITY_CAUSE_HASH
	eventCause = routerv1.ParityCause_PARITY_CAUSE_EVENTS
	falseHits  = routerv1.ParityCause_PARITY_CAUSE_FALSE_HITS
)

// promised is a prompt of 1000 blocks of which the index says so many tokens, in
// a decision that counted on as many as expected.
func promised(index, expected int) Promise {
	return Promise{Profile: "p", Worker: "w/0", Tokens: 16000, BlockSize: 16, GPU: index, CPU: index, Expected: expected}
}

func TestCompare(t *testing.T) {
	change := func(p Promise, f func(*Promise)) Promise { f(&p); return p }
	tests := []struct {
		name   string
		p      Promise
		cached int
		want   Result
	}{
		{"exact", promised(1600, 1600), 1600, Agree},
		{"cold and cold", promised(0, 0), 0, Uninformative},
		{"less than a block", promised(0, 0), 15, Uninformative},
		{"not reported", promised(1600, 1600), -1, NotReported},
		{"the tail was evicted", promised(1600, 1600), 1216, Agree},
		{"speculative decoding gives up a block", promised(32, 32), 16, Agree},
		{"all was evicted, or never there", promised(1600, 1600), 0, TooMany},
		{"the request waited behind others", change(promised(1600, 1600), func(p *Promise) { p.Wait = 5 * time.Second }), 0, Uninformative},
		{"nothing known", promised(0, 0), 1600, TooFew},
		{"the system prompt known, the rest not", promised(480, 480), 1600, TooFew},
		{"a request on its way had computed it", promised(0, 1600), 1600, Uninformative},
		{"a request on its way has not", promised(0, 1600), 0, Uninformative},
		{"the last block cannot be cached", promised(16000, 15984), 15984, Agree},
		{"CPU blocks were fetched", change(promised(160, 1600), func(p *Promise) { p.CPU = 1600 }), 1600, Agree},
		{"CPU blocks were not fetched", change(promised(160, 1600), func(p *Promise) { p.CPU = 1600 }), 160, Agree},
		{"own memory stands in, the index was right", change(promised(1600, 1600), func(p *Promise) { p.Remembered = true }), 1600, Agree},
		{"own memory stands in, the index knows a part", change(promised(160, 1600), func(p *Promise) { p.Remembered = true }), 1600, TooFew},
		{"own memory stands in, the index may be early", change(promised(0, 1600), func(p *Promise) { p.Remembered = true }), 1600, Uninformative},
		{"own memory stands in, the index still promises", change(promised(1600, 0), func(p *Promise) { p.Remembered = true }), 0, TooMany},
		{"block size unknown", change(promised(0, 0), func(p *Promise) { p.BlockSize = 0 }), 1600, TooFew},
		{"a hybrid's pages", change(promised(784*5, 784*5), func(p *Promise) { p.BlockSize = 784 }), 784 * 4, Agree},
	}
	c := NewCached(Settings{})
	for _, tt := range tests {
		if got := c.compare(&tt.p, tt.cached); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

// bench drives a Cached through time.
type bench struct {
	*Cached
	now     time.Time
	n       int
	changes []string
}

func newBench() *bench {
	b := &bench{now: start}
	b.Cached = NewCached(Settings{
		Why: func(string) routerv1.ParityCause { return hashCause },
		Changed: func(profile, worker string, cause routerv1.ParityCause) {
			b.changes = append(b.changes, fmt.Sprint(profile, " ", worker, " ", int(cause)))
		},
	})
	return b
}

// serve is one request, a second after the last one.
func (b *bench) serve(p Promise, cached int) int {
	b.n++
	b.now = b.now.Add(time.Second)
	id := fmt.Sprint("r", b.n)
	p.At, p.Remembered = b.now, b.Distrusted(p.Profile)[p.Worker] != 0
	b.Promised(id, p)
	return b.Done(b.now, id, p.Tokens, cached)
}

func (b *bench) cause() routerv1.ParityCause { return b.Distrusted("p")["w/0"] }

// An index that knows nothing is found out, told once, and trusted again when it
// agrees for a while.
func TestBlind(t *testing.T) {
	b := newBench()
	for range least - 1 {
		b.serve(promised(0, 0), 1600)
	}
	if b.cause() != 0 {
		t.Error("distrusted after few requests")
	}
	if s := b.Profile("p"); s.State != unknown {
		t.Errorf("state %v before there is enough to tell", s.State)
	}
	for range 30 {
		b.serve(promised(0, 0), 1600)
	}
	if s := b.Profile("p"); b.cause() != hashCause || s.State != differs || s.Cause != hashCause || s.Wrong["w/0"] != hashCause {
		t.Errorf("cause %v, summary %+v", b.cause(), s)
	}
	for range 200 { // it stays so while nothing proves the contrary
		b.serve(promised(0, 1600), 1600)
	}
	if b.cause() == 0 {
		t.Error("trusted again without reason")
	}
	for range window {
		b.serve(promised(1600, 1600), 1600)
	}
	if s := b.Profile("p"); b.cause() != 0 || s.State != agrees || len(s.Wrong) != 0 {
		t.Errorf("cause %v, summary %+v", b.cause(), s)
	}
	if len(b.changes) != 2 || b.changes[1] != "p w/0 0" {
		t.Errorf("told %v", b.changes)
	}
}

func TestFalseHits(t *testing.T) {
	b := newBench()
	for range 60 {
		b.serve(promised(1600, 1600), 0)
	}
	if b.cause() != falseHits {
		t.Errorf("cause %v", b.cause())
	}
}

// What happens on every fleet is no reason for distrust.
func TestNoise(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	tests := []struct {
		name string
		run  func(b *bench)
	}{
		{"a third of the prefixes are evicted before the start", func(b *bench) {
			for range 20_000 {
				if rng.IntN(3) == 0 {
					b.serve(promised(1600, 1600), 16*rng.IntN(100))
				} else {
					b.serve(promised(1600, 1600), 1600)
				}
			}
		}},
		{"the cache is emptied with a hundred requests on their way", func(b *bench) {
			for range 50 {
				b.serve(promised(1600, 1600), 1600)
			}
			for i := range 100 {
				p := promised(1600, 1600)
				p.At = b.now
				b.Promised(fmt.Sprint("burst", i), p)
			}
			for i := range 100 { // some are done at once, some after minutes
				if i > 50 {
					b.serve(promised(0, 0), 0)
					b.serve(promised(1600, 1600), 1600)
				}
				b.Done(b.now, fmt.Sprint("burst", i), 16000, 0)
			}
		}},
		{"events are late for some seconds", func(b *bench) {
			for range 50 {
				b.serve(promised(1600, 1600), 1600)
			}
			for i := range 200 {
				p := promised(0, 0)
				p.At = b.now.Add(time.Duration(i) * 40 * time.Millisecond)
				b.Promised("late", p)
				b.Done(p.At, "late", 16000, 1600)
			}
			b.now = b.now.Add(8 * time.Second)
			for range 50 {
				b.serve(promised(1600, 1600), 1600)
			}
		}},
		{"what was on its way did not come", func(b *bench) {
			for range 500 {
				b.serve(promised(0, 1600), 0)
			}
		}},
		{"all wait in overload", func(b *bench) {
			p := promised(1600, 1600)
			p.Wait = 10 * time.Second
			for range 500 {
				b.serve(p, 0)
			}
		}},
		{"most of a hybrid's prefixes have a page less", func(b *bench) {
			p := promised(784*3, 784*3)
			p.BlockSize = 784
			for range 500 {
				b.serve(p, 784)
			}
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench()
			tt.run(b)
			if len(b.changes) > 0 {
				t.Errorf("told %v", b.changes)
			}
		})
	}
}

// Only the worker that is wrong is distrusted, and the profile is told of once.
func TestWorkersApart(t *testing.T) {
	b := newBench()
	for i := range 80 {
		for w := range 4 {
			p := promised(1600, 1600)
			p.Worker = fmt.Sprintf("w%d/0", w)
			if w < 2 && i > 10 {
				p.GPU, p.CPU, p.Expected = 0, 0, 0
			}
			b.serve(p, 1600)
		}
	}
	if wrong := b.Distrusted("p"); len(wrong) != 2 || wrong["w0/0"] != hashCause || wrong["w1/0"] != hashCause {
		t.Errorf("distrusted %v", wrong)
	}
	if len(b.changes) != 1 {
		t.Errorf("told %v", b.changes)
	}
	b.Forget("w0/0")
	if wrong := b.Distrusted("p"); len(wrong) != 1 {
		t.Errorf("after one left: %v", wrong)
	}
}

// Engines that report hits only, or nothing, or whose requests fail.
func TestReporting(t *testing.T) {
	b := newBench()
	for range 50 {
		b.serve(promised(1600, 1600), -1)
	}
	if s := b.Profile("p"); s.State != unknown || s.Cause != routerv1.ParityCause_PARITY_CAUSE_NOT_REPORTED || s.Counts[NotReported] != 50 {
		t.Errorf("nothing is reported: %+v", s)
	}
	b.serve(promised(1600, 1600), 1600)
	if got := b.serve(promised(1600, 1600), -1); got != 0 {
		t.Errorf("no report of an engine that reports hits is %d, want 0", got)
	}
	if s := b.Profile("p"); s.Counts[Agree] != 1 || s.Counts[TooMany] != 1 || s.Cause != 0 {
		t.Errorf("%+v", s)
	}
	b.Promised("x", promised(1600, 1600))
	b.Dropped("x")
	if got := b.Done(b.now, "x", 16000, 7); got != 7 || b.Profile("p").Counts[TooMany] != 1 {
		t.Error("a request that failed is compared")
	}
	if got := b.Done(b.now, "never", -1, -1); got != -1 {
		t.Errorf("unknown request: %d", got)
	}
}

// Thousands of profiles and workers, requests that never end and ids that come
// again leave no more than the bounds.
func TestCachedIsBounded(t *testing.T) {
	c := NewCached(Settings{})
	p := promised(1600, 1600)
	for i := range 3 * maxPending {
		c.Promised(fmt.Sprint(i), p)
		c.Promised("again", p)
	}
	c.Promised("", p)
	if len(c.pending) > maxPending {
		t.Errorf("%d promises", len(c.pending))
	}
	for i := range maxLinks + 5000 {
		p.Profile, p.Worker = fmt.Sprint("p", i%3000), fmt.Sprint("w", i/3000)
		c.Promised("r", p)
		c.Done(start, "r", 16000, 1600)
	}
	if len(c.links) > maxLinks {
		t.Errorf("%d links", len(c.links))
	}
	c.Keep(func(id string) bool { return id == "p7" })
	if len(c.profiles) != 1 || len(c.links) > 30 {
		t.Errorf("%d profiles and %d links are left of one profile", len(c.profiles), len(c.links))
	}
}
