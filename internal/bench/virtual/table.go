package virtual

import (
	"fmt"
	"runtime"
	"sync"

	"github.com/kinference/kinference/internal/bench/stats"
	"github.com/kinference/kinference/internal/bench/workload"
)

// Cell is what one policy did on one scenario, by seed.
type Cell struct {
	Scenario, Policy string
	Runs             []stats.Summary
}

// Mean averages the cell's runs.
func (c Cell) Mean() stats.Summary { return stats.Average(c.Runs) }

// Runner makes tables and remembers what it has run, so that tables may share
// cells. It is safe for concurrent use.
type Runner struct {
	mu   sync.Mutex
	done map[runKey]stats.Summary
}

// runKey names a run. A name stands for the whole case: cases are built in, but
// for the number of streams.
type runKey struct {
	name, policy string
	streams      int
	seed         uint64
}

// NewRunner returns a Runner that has run nothing.
func NewRunner() *Runner { return &Runner{done: map[runKey]stats.Summary{}} }

// Know gives the runner a result from elsewhere, such as an earlier table.
func (r *Runner) Know(c Case, policy string, seed uint64, s stats.Summary) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.done[keyOf(c, policy, seed)] = s
}

func keyOf(c Case, policy string, seed uint64) runKey {
	return runKey{c.Name, policy, c.Scenario.Streams, seed}
}

func (r *Runner) run(c Case, policy string, seed uint64) (stats.Summary, error) {
	key := keyOf(c, policy, seed)
	r.mu.Lock()
	s, ok := r.done[key]
	r.mu.Unlock()
	if ok {
		return s, nil
	}
	run, err := c.Run(policy, seed)
	if err != nil {
		return s, fmt.Errorf("%s, %s, seed %d: %w", c.Name, policy, seed, err)
	}
	s = run.Summarise()
	r.mu.Lock()
	r.done[key] = s
	r.mu.Unlock()
	return s, nil
}

// Cells runs every policy on every case with every seed. They come in that
// order: cases, within them policies.
func (r *Runner) Cells(cases []Case, policies []string, seeds []uint64) ([]Cell, error) {
	var cells []Cell
	var jobs []func() error
	for _, c := range cases {
		for _, p := range policies {
			at := len(cells)
			cells = append(cells, Cell{Scenario: c.Name, Policy: p, Runs: make([]stats.Summary, len(seeds))})
			for i, seed := range seeds {
				jobs = append(jobs, func() (err error) {
					cells[at].Runs[i], err = r.run(c, p, seed)
					return err
				})
			}
		}
	}
	return cells, parallel(jobs)
}

// Table is Cells of a new Runner for plain scenarios.
func Table(scenarios []workload.Scenario, policies []string, seeds []uint64) ([]Cell, error) {
	return NewRunner().Cells(casesOf(scenarios), policies, seeds)
}

func casesOf(scenarios []workload.Scenario) []Case {
	var cases []Case
	for _, sc := range scenarios {
		cases = append(cases, Case{Name: sc.Name, Title: sc.Title, Scenario: sc})
	}
	return cases
}

// Load is the throughput at one number of streams.
type Load struct {
	Streams int
	RPS     float64
}

// Capacity is a policy's throughput by load, and its best.
type Capacity struct {
	Scenario, Policy string
	Loads            []Load
	Peak             float64
}

// SweepStreams are the loads of a capacity sweep.
var SweepStreams = []int{2, 4, 8, 12, 16, 24, 32, 48, 64, 96}

// Sweep finds each policy's peak throughput: the highest rate of completions
// at any number of streams, each the mean over the seeds.
func (r *Runner) Sweep(scenarios []workload.Scenario, policies []string, streams []int, seeds []uint64) ([]Capacity, error) {
	var cases []Case
	for _, sc := range scenarios {
		for _, n := range streams {
			cases = append(cases, Case{Name: sc.Name, Title: sc.Title, Scenario: sc.WithStreams(n)})
		}
	}
	cells, err := r.Cells(cases, policies, seeds)
	if err != nil {
		return nil, err
	}
	var out []Capacity
	for i, sc := range scenarios {
		for j, p := range policies {
			c := Capacity{Scenario: sc.Name, Policy: p}
			for k, n := range streams {
				rps := cells[(i*len(streams)+k)*len(policies)+j].Mean().RPS
				c.Loads = append(c.Loads, Load{n, rps})
				c.Peak = max(c.Peak, rps)
			}
			out = append(out, c)
		}
	}
	return out, nil
}

// Sweep is that of a new Runner.
func Sweep(scenarios []workload.Scenario, policies []string, streams []int, seeds []uint64) ([]Capacity, error) {
	return NewRunner().Sweep(scenarios, policies, streams, seeds)
}

// parallel runs independent jobs on all cores and returns the first error in
// their order.
func parallel(jobs []func() error) error {
	errs := make([]error, len(jobs))
	next := make(chan int, len(jobs))
	for i := range jobs {
		next <- i
	}
	close(next)
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for i := range next {
				errs[i] = jobs[i]()
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
