package schedule

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestUnknownPolicy(t *testing.T) {
	if _, err := New(Settings{Policy: "nearest"}); err == nil || !strings.Contains(err.Error(), "roundrobin") {
		t.Errorf("error %v does not name the policies", err)
	}
}

func picks(s *Scheduler, n int, connection func(i int) string) []string {
	var got []string
	for i := range n {
		d := s.Decide(start, Request{ID: fmt.Sprint(i), Connection: connection(i)}, candidates("a b c", 1000, 100, nil))
		got = append(got, first(d))
	}
	return got
}

func TestRoundRobin(t *testing.T) {
	s := newScheduler(t, Settings{Policy: RoundRobin})
	none := func(int) string { return "" }
	if diff := cmp.Diff(picks(s, 5, none), []string{"a", "b", "c", "a", "b"}); diff != "" {
		t.Error(diff)
	}
	if got := first(s.Decide(start, Request{}, candidates("c a", 1, 0, nil))); got != "c" {
		t.Errorf("after b, without b: %s, want c", got)
	}
}

func TestLeastRequests(t *testing.T) {
	s := newScheduler(t, Settings{Policy: LeastRequests})
	got := picks(s, 6, func(int) string { return "" })
	for _, name := range []string{"a", "b", "c"} {
		if s.InFlight(name) != 2 {
			t.Errorf("%s has %d of %v", name, s.InFlight(name), got)
		}
	}
}

func TestConnectionSticks(t *testing.T) {
	s := newScheduler(t, Settings{Policy: Connection, Seed: 3})
	got := picks(s, 300, func(i int) string { return fmt.Sprint("conn-", i%30) })
	used := map[string]int{}
	for i, w := range got {
		if w != got[i%30] {
			t.Fatalf("connection %d moved from %s to %s", i%30, got[i%30], w)
		}
		used[w]++
	}
	if len(used) != 3 {
		t.Errorf("connections are not spread: %v", used)
	}
}

func TestRandomIsUniformAndSeeded(t *testing.T) {
	none := func(int) string { return "" }
	a := picks(newScheduler(t, Settings{Policy: Random, Seed: 7}), 300, none)
	b := picks(newScheduler(t, Settings{Policy: Random, Seed: 7}), 300, none)
	if diff := cmp.Diff(a, b); diff != "" {
		t.Errorf("same seed, other picks: %s", diff)
	}
	used := map[string]int{}
	for _, w := range a {
		used[w]++
	}
	for w, n := range used {
		if n < 70 || n > 130 {
			t.Errorf("%s got %d of 300", w, n)
		}
	}
}

func TestDecisionIsComplete(t *testing.T) {
	for _, name := range Policies() {
		t.Run(name, func(t *testing.T) {
			s := newScheduler(t, Settings{Policy: name})
			d := s.Decide(start, Request{ID: "r"}, candidates("a b c", 2000, 100, chain("x", 19)))
			seen := map[int]bool{}
			for _, i := range d.Order {
				seen[i] = true
			}
			if len(seen) != 3 || len(d.Estimates) != 3 || d.Policy != name {
				t.Errorf("decision %+v", d)
			}
			if !strings.HasPrefix(d.Reason, first(d)) || len(d.Reason) < 10 {
				t.Errorf("reason %q", d.Reason)
			}
			if d := s.Decide(start, Request{ID: "none"}, nil); len(d.Order) != 0 || s.entries["none"] != nil {
				t.Errorf("decision without candidates: %+v", d)
			}
		})
	}
}

func TestReason(t *testing.T) {
	s := newScheduler(t, Settings{Policy: PredictedTTFT})
	c := candidates("a b", 2000, 100, chain("x", 19))
	c[1].GPUTokens = 1900
	d := s.Decide(start, Request{ID: "r"}, c)
	want := "b answers soonest: 0.110 s with 1900 of 2000 tokens cached; next is a in 2.020 s"
	if d.Reason != want {
		t.Errorf("got %q, want %q", d.Reason, want)
	}
}

// go test -run - -bench Decide -count 10 ./internal/schedule
func BenchmarkDecide(b *testing.B) {
	for _, size := range []struct{ workers, blocks, blockSize, inFlight int }{
		{16, 26, 784, 8}, {16, 26, 784, 32}, {64, 1250, 16, 16},
	} {
		b.Run(fmt.Sprintf("workers=%d/blocks=%d/inflight=%d", size.workers, size.blocks, size.inFlight), func(b *testing.B) {
			s := newScheduler(b, Settings{Speeds: DefaultSpeeds()})
			var names []string
			for i := range size.workers {
				names = append(names, fmt.Sprintf("inference.qwen.worker-%d/0", i))
			}
			prompt := func(i int) []Candidate {
				// Twelve prefixes, the last block differs.
				hashes := chain(string(rune('a'+i%12)), size.blocks)
				hashes[size.blocks-1] += 1
				c := candidates(strings.Join(names, " "), size.blocks*size.blockSize+9, size.blockSize, hashes)
				for j := range c {
					c[j].Load = Load{Known: true, Running: float64(size.inFlight), KVUsage: 0.5}
					c[j].TotalBlocks = 200 * 784 / size.blockSize
				}
				return c
			}
			total := size.workers * size.inFlight
			for i := range total {
				c := prompt(i)
				s.Decide(start, Request{ID: fmt.Sprint(i)}, c[i%size.workers:i%size.workers+1])
				if i%4 > 0 {
					s.FirstToken(start, fmt.Sprint(i), time.Second)
				}
			}
			c := prompt(5)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				now := at(time.Duration(i) * time.Millisecond)
				for j := range c {
					c[j].Load.Age = time.Duration(i%250) * time.Millisecond
				}
				s.Decide(now, Request{ID: "r"}, c)
				s.Done(now, "r", Outcome{OK: true, CachedTokens: -1})
			}
		})
	}
}
