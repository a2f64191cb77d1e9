package schedule

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/kvhash"
)

// fleetOf is a loaded fleet: each worker has inFlight requests of 8 to 32
// thousand tokens, three of four past their first token, and a cache full of what
// others left behind. prompt makes the candidates of the i-th request.
func fleetOf(b *testing.B, policy string, workers, inFlight, promptBlocks, blockSize int) (s *Scheduler, prompt func(i int) []Candidate) {
	b.Helper()
	s, err := New(Settings{Policy: policy})
	if err != nil {
		b.Fatal(err)
	}
	var names []string
	for i := range workers {
		names = append(names, fmt.Sprintf("inference.qwen.worker-%d/0", i))
	}
	// Twelve prefixes of half the prompt; what follows is new.
	prompt = func(i int) []Candidate {
		hashes := chain(string(rune('a'+i%12)), promptBlocks)
		for j := promptBlocks / 2; j < promptBlocks; j++ {
			hashes[j] = kvhash.Extra(hashes[j-1], fmt.Sprint(i))
		}
		c := candidates(strings.Join(names, " "), promptBlocks*blockSize+9, blockSize, hashes)
		for j := range c {
			c[j].Load = Load{Known: true, Running: float64(inFlight), KVUsage: 0.5}
			c[j].TotalBlocks = 133_000 / blockSize
			if j%12 == i%12 {
				c[j].GPUTokens = promptBlocks / 2 * blockSize
			}
		}
		return c
	}
	now := start
	id := 0
	for range 3 { // what two rounds left behind is in the mirrors
		for _, e := range slices.Collect(mapKeys(s.entries)) {
			s.Done(now, e, Outcome{OK: true, CachedTokens: -1, OutputTokens: 200})
		}
		for i := range workers * inFlight {
			id++
			c := prompt(id)
			name := fmt.Sprint("b", id)
			s.DecideBy(now, Request{ID: name}, c[i%workers:i%workers+1], pickAt(0))
			if i%4 > 0 {
				s.FirstToken(now, name, time.Second)
			}
		}
		now = now.Add(20 * time.Second)
	}
	return s, prompt
}

func mapKeys[V any](m map[string]V) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

func pickAt(first int) Choose {
	return func([]Estimate, func([]int)) ([]int, bool) { return []int{first}, true }
}

// go test -run - -bench Dispatch -count 5 ./internal/schedule
//
// BenchmarkDispatch is one request's way through the line of K2, which it leaves
// at once, with its end.
func BenchmarkDispatch(b *testing.B) {
	for _, n := range []struct{ workers, inFlight, blocks, size int }{{8, 8, 500, 16}, {64, 8, 500, 16}, {1000, 8, 500, 16}, {64, 4, 26, 784}} {
		b.Run(fmt.Sprintf("workers=%d/blocks=%d", n.workers, n.blocks), func(b *testing.B) {
			s, prompt := fleetOf(b, K2, n.workers, n.inFlight, n.blocks, n.size)
			// One worker is free: what waits long is not what is measured here.
			for _, e := range slices.Collect(mapKeys(s.entries)) {
				if x := s.entries[e]; x.w.name == "inference.qwen.worker-1/0" || x.first == 0 {
					s.Done(start.Add(time.Minute), e, Outcome{OK: true, CachedTokens: -1})
				}
			}
			c := prompt(5)
			now := start.Add(2 * time.Minute)
			lat := make([]time.Duration, 0, 1<<16)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				now = now.Add(time.Millisecond)
				for j := range c {
					c[j].Load.Age = time.Duration(i%250) * time.Millisecond
				}
				began := time.Now()
				if err := s.Enter(now, Request{ID: "r"}, c, nil); err != nil {
					b.Fatal(err)
				}
				d := s.Pass(now)
				if lat = append(lat, time.Since(began)); len(lat) == cap(lat) {
					lat = lat[:0]
				}
				if len(d) != 1 || !d[0].Booked {
					b.Fatal("not dispatched")
				}
				s.Done(now, "r", Outcome{OK: true, CachedTokens: -1})
			}
			slices.Sort(lat)
			b.ReportMetric(float64(lat[len(lat)/2])/1e3, "p50-µs")
			b.ReportMetric(float64(lat[len(lat)*99/100])/1e3, "p99-µs")
		})
	}
}

// BenchmarkLine is a pass after an event while many requests wait, none of which
// can go: what overload costs.
func BenchmarkLine(b *testing.B) {
	for _, n := range []struct{ workers, waiting int }{{8, 100}, {64, 1000}, {1000, 1000}} {
		b.Run(fmt.Sprintf("workers=%d/waiting=%d", n.workers, n.waiting), func(b *testing.B) {
			s, prompt := fleetOf(b, K2, n.workers, 8, 100, 80)
			now := start.Add(2 * time.Minute)
			for i := range n.waiting {
				if err := s.Enter(now, Request{ID: fmt.Sprint("w", i)}, prompt(i), nil); err != nil {
					b.Fatal(err)
				}
			}
			s.Pass(now)
			left := s.Waits()
			var some []string
			for id := range s.entries {
				some = append(some, id)
			}
			slices.Sort(some)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				now = now.Add(10 * time.Millisecond)
				s.FirstToken(now, some[i%len(some)], time.Second)
				s.Pass(now)
			}
			b.ReportMetric(float64(left), "waiting")
		})
	}
}
