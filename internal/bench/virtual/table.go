package virtual

import (
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

// Table runs every policy on every scenario with every seed. The cells come in
// that order: scenarios, within them policies.
func Table(scenarios []workload.Scenario, policies []string, seeds []uint64) ([]Cell, error) {
	var cells []Cell
	var jobs []func() error
	for _, sc := range scenarios {
		for _, p := range policies {
			at := len(cells)
			cells = append(cells, Cell{Scenario: sc.Name, Policy: p, Runs: make([]stats.Summary, len(seeds))})
			for i, seed := range seeds {
				jobs = append(jobs, func() error {
					run, err := Run(sc, Options{Policy: p, Seed: seed})
					cells[at].Runs[i] = run.Summarise()
					return err
				})
			}
		}
	}
	return cells, parallel(jobs)
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
func Sweep(scenarios []workload.Scenario, policies []string, streams []int, seeds []uint64) ([]Capacity, error) {
	var out []Capacity
	var jobs []func() error
	var sums [][][]float64
	for _, sc := range scenarios {
		for _, p := range policies {
			at := len(out)
			out = append(out, Capacity{Scenario: sc.Name, Policy: p})
			sums = append(sums, make([][]float64, len(streams)))
			for j, n := range streams {
				sums[at][j] = make([]float64, len(seeds))
				for i, seed := range seeds {
					jobs = append(jobs, func() error {
						run, err := Run(sc.WithStreams(n), Options{Policy: p, Seed: seed})
						sums[at][j][i] = run.Summarise().RPS
						return err
					})
				}
			}
		}
	}
	if err := parallel(jobs); err != nil {
		return nil, err
	}
	for at := range out {
		for j, n := range streams {
			rps := stats.Mean(sums[at][j])
			out[at].Loads = append(out[at].Loads, Load{n, rps})
			out[at].Peak = max(out[at].Peak, rps)
		}
	}
	return out, nil
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
