package schedule

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kinference/kinference/internal/kvhash"
)

// homeFleet has two workers of 200 pages of 100 tokens: "a" is idle and keeps two
// prompts of 30 pages that were asked before, "b" one, which n requests decode on.
func homeFleet(t *testing.T, n int) *Scheduler {
	s := newScheduler(t, Settings{})
	send := func(id, worker, prompt string, ends bool) {
		s.Decide(start, Request{ID: id}, homeCandidates(worker, 3000, prompt))
		s.FirstToken(start, id, 3*time.Second)
		if ends {
			s.Done(start, id, Outcome{OK: true, CachedTokens: -1, OutputTokens: 10})
		}
	}
	send("1", "a", "x", true)
	send("2", "a", "y", true)
	for i := range n {
		send(fmt.Sprint("b", i), "b", "z", false)
	}
	return s
}

func homeCandidates(workers string, tokens int, prompt string) []Candidate {
	c := candidates(workers, tokens, 100, chain(prompt, tokens/100))
	for i := range c {
		c[i].TotalBlocks, c[i].Load = 200, Load{Known: true}
	}
	return c
}

// Which worker has a decoder less at the moment says little of the minutes for which
// a new prefix will live there.
func TestNewPrefixesSettleWhereThereIsRoom(t *testing.T) {
	now := at(10 * time.Second)
	tests := []struct {
		name     string
		decoders int
		tokens   int
		cached   int // of them at a
		o        Objective
		load     Load // of b
		want     string
	}{
		{"new prefix", 1, 3000, 0, Balanced, Load{Known: true, Running: 1}, "b"},
		{"for throughput", 1, 3000, 0, Throughput, Load{Known: true, Running: 1}, "b"},
		{"for the least TTFT", 1, 3000, 0, TTFT, Load{Known: true, Running: 1}, "a"},
		{"costs a prefill more there", 12, 3000, 0, Balanced, Load{Known: true, Running: 12}, "a"},
		{"too large to settle", 1, 5200, 0, Balanced, Load{Known: true, Running: 1}, "a"},
		{"has a home", 1, 3000, 2000, Balanced, Load{Known: true, Running: 1}, "a"},
		{"nobody knows who is there", 1, 3000, 0, Balanced, Load{Known: true, Running: 3}, "a"},
		{"no news from there", 1, 3000, 0, Balanced, Load{}, "a"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := homeFleet(t, tt.decoders)
			for i := range 20 {
				s.Sample(at(time.Duration(i)*250*ms), "b", tt.load)
			}
			c := homeCandidates("a b", tt.tokens, "new")
			c[0].GPUTokens, c[1].Load = tt.cached, tt.load
			enter(t, s, now, Request{ID: "r", Objective: tt.o}, c)
			out := s.Pass(now)
			if len(out) != 1 {
				t.Fatalf("%d dispatches", len(out))
			}
			d := out[0].Decision
			expect(t, "worker", first(d), tt.want)

			// A record of the decision says the same.
			var p []Predicted
			var ties []kvhash.Hash
			for i := range d.Estimates {
				p = append(p, d.Estimates[i].Predicted())
				ties = append(ties, TieHash("r", c[i].Hashes, c[i].Worker))
			}
			if ties[1] > ties[0] {
				p[0].Tie = 1
			} else {
				p[1].Tie = 1
			}
			order := []int{0, 1}
			if !Rank(K2, order, p) {
				t.Fatal("not ranked by its record")
			}
			if diff := cmp.Diff(d.Order, order); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// Prefixes that fit in the fleet are shared out so that each worker can keep its own,
// whoever decodes when one comes for the first time (the benchmark's W32).
func TestPrefixesThatFitAreSharedOut(t *testing.T) {
	s := newScheduler(t, Settings{})
	for i := range 9 { // long answers to short prompts, at all workers but a
		id, w := fmt.Sprint("long", i), string(rune('b'+i%3))
		s.Decide(start, Request{ID: id}, homeCandidates(w, 100, "short"))
		s.FirstToken(start, id, 100*time.Millisecond)
	}
	homes := map[string]int{}
	for i := range 12 {
		now, id := at(time.Duration(i)*10*time.Second), fmt.Sprint(i)
		c := homeCandidates("a b c d", 3000, string(rune('A'+i)))
		for j := range c {
			c[j].Load.Running = float64(s.InFlight(c[j].Worker))
		}
		d := s.Decide(now, Request{ID: id}, c)
		homes[first(d)]++
		s.FirstToken(now.Add(3*time.Second), id, d.Estimates[d.Order[0]].TTFT)
		s.Done(now.Add(9*time.Second), id, Outcome{OK: true, CachedTokens: -1, OutputTokens: 100})
	}
	for w, n := range homes {
		if n != 3 {
			t.Errorf("%s has %d prefixes of 12, want 3", w, n)
		}
	}
}

// A second worker does not compute what another one is computing: it saves next to
// no time, and takes the memory of one prefix more for good.
func TestNobodyComputesWhatAnotherOneComputes(t *testing.T) {
	s := newScheduler(t, Settings{})
	ask := func(id, prompt string) []Dispatch {
		enter(t, s, start, Request{ID: id}, homeCandidates("a b", 8000, prompt))
		return s.Pass(start)
	}
	out := ask("1", "x")
	if len(out) != 1 {
		t.Fatalf("%d dispatches", len(out))
	}
	home := first(out[0].Decision)
	if out := ask("2", "x"); len(out) != 0 {
		t.Errorf("the second goes to %s", first(out[0].Decision))
	}
	if line := s.Line(start); len(line) != 1 || line[0].Worker != home {
		t.Errorf("the line is %+v, want one who waits for %s", line, home)
	}
	if out := ask("3", "y"); len(out) != 1 || first(out[0].Decision) == home {
		t.Errorf("another prompt goes to %v, want the idle worker", out)
	}
	// At once, without a line, it is the same.
	d := s.Decide(start, Request{ID: "4"}, homeCandidates("a b c", 8000, "x"))
	expect(t, "worker without a line", first(d), home)
}

// Of what is in use, prompts count whole, the rest of the moment half.
func TestWanted(t *testing.T) {
	s := homeFleet(t, 4) // with a prompt of 30 pages and a page each
	w := s.workers["b"]
	c := homeCandidates("b", 3000, "new")
	t0 := s.clock(start)
	s.look(t0, w, &c[0])
	if got := w.wanted(t0); got != 32 {
		t.Errorf("%v pages of b are wanted, want 32", got)
	}
}

func TestSettle(t *testing.T) {
	inf := math.Inf(1)
	tests := []struct {
		name   string
		rivals []rival
		want   []float64
	}{
		{"least wanted", []rival{{1, 1, 0, 5}, {1.5, 1, 0, 4}, {1.9, 1, 0, 4}}, []float64{inf, 1.5, 1.9}},
		{"not for more than a prefill", []rival{{1, 1, 0, 5}, {2.1, 1, 0, 0}}, []float64{1, inf}},
		{"not at a loss", []rival{{1, 1, .1, 5}, {1.5, 1, .2, 0}}, []float64{1, inf}},
		{"all alike", []rival{{1, 1, 0, 3}, {1.2, 1, 0, 3}}, []float64{1, 1.2}},
		{"barred", []rival{{1, 1, 0, 3}, {inf, 0, 0, 0}}, []float64{1, inf}},
	}
	for _, tt := range tests {
		least := settle(tt.rivals, 0)
		var got []float64
		for _, r := range tt.rivals {
			got = append(got, r.score)
		}
		if !slices.Equal(got, tt.want) || least != slices.Min(got) {
			t.Errorf("%s: %v, least %v, want %v", tt.name, got, least, tt.want)
		}
	}
}
