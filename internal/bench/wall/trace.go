package wall

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/bench/load"
	"github.com/kinference/kinference/internal/bench/stats"
	"github.com/kinference/kinference/internal/bench/workload"
	"github.com/kinference/kinference/internal/kvhash"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
)

// Reuse compares what was reused of a trace's prompts with what could have
// been, in tokens, summed over the requests that were answered.
type Reuse struct {
	Requests, Failed int
	Prompt           int
	// Cached is what the engines reported in usage.cached_tokens.
	Cached int
	// Matched is what the router took to be in the chosen worker's cache when
	// it chose, Anticipated what it expected requests under way to add until
	// the prompt's turn comes.
	Matched, Anticipated int
	// Truth is what was in the chosen worker's cache just before the request
	// was sent: what an ideal index would have said. Best is the most that any
	// worker held.
	Truth, Best int
	// Bound is what one cache that never forgets would have served, in blocks
	// of the workers' size; BoundFine the same in the trace's 512-token blocks.
	// No fleet can exceed it.
	Bound, BoundFine int
	// Unexplained counts requests whose decision record could not be read; they
	// are left out of Matched and Truth alike.
	Unexplained int
}

// TraceOptions say how a trace is replayed.
type TraceOptions struct {
	// Stretch multiplies the trace's times of arrival.
	Stretch float64
	Route   Route
	// Explain, when set, is asked for the decision on each request.
	Explain func(ctx context.Context, requestID string) (*adminv1.Decision, error)
}

// RunTrace replays a trace on a fleet: each request at its time, whatever
// became of the ones before it. Times in the samples are simulated seconds.
func RunTrace(ctx context.Context, text *Text, trace []workload.TraceRequest, fleet *Fleet, o TraceOptions) (stats.Run, Reuse, error) {
	client := load.NewClient()
	defer client.Close()
	block := fleet.Workers[0].Config().Profile.BlockSize
	var mu sync.Mutex
	var run stats.Run
	var reuse Reuse
	ever := map[kvhash.Hash]bool{} // blocks of all prompts so far
	fine, _ := workload.Reusable(trace)
	reuse.BoundFine = fine

	start := time.Now()
	var wg sync.WaitGroup
	defer wg.Wait()
	for i, r := range trace {
		prompt := r.Tokens(text.Vocab)
		body := load.Completion(Model, text.String(prompt), r.Output)
		due := time.NewTimer(time.Until(start.Add(time.Duration(r.At * o.Stretch / fleet.Scale * float64(time.Second)))))
		select {
		case <-due.C:
		case <-ctx.Done():
			due.Stop()
			return run, reuse, ctx.Err()
		}
		hashes := kvhash.Append(nil, kvhash.Root("", ""), prompt, block)
		usable := 0 // never the last token: computing it makes the first output
		for usable < min(len(hashes), (len(prompt)-1)/block) && ever[hashes[usable]] {
			usable++
		}
		for _, h := range hashes {
			ever[h] = true
		}
		mu.Lock()
		url := o.Route(i)
		reuse.Bound += usable * block
		mu.Unlock()
		wg.Go(func() {
			truth := map[string]int{}
			best := 0
			for _, w := range fleet.Workers {
				truth[w.Name()] = w.Lookup(0, prompt, "", "")
				best = max(best, truth[w.Name()])
			}
			sent := time.Since(start)
			got := client.Do(ctx, load.Request{URL: url + "/v1/completions", Body: body})
			var decision *adminv1.Decision
			var chosen *adminv1.Candidate
			if o.Explain != nil && got.Err == nil {
				if d, err := o.Explain(ctx, got.ID); err == nil {
					decision = d
					for _, c := range d.Candidates {
						if c.Worker == d.Chosen {
							chosen = c
						}
					}
				}
			}
			mu.Lock()
			defer mu.Unlock()
			s := stats.Sample{Index: i, Measured: true, Worker: -1, Matched: -1, Possible: -1, Failed: got.Err != nil, Sent: sent.Seconds() * fleet.Scale,
				TTFT: got.TTFT.Seconds() * fleet.Scale, E2E: got.E2E.Seconds() * fleet.Scale, Prompt: got.Prompt, Cached: got.Cached, Output: got.Output}
			reuse.Requests++
			if got.Err != nil {
				reuse.Failed++
				run.Failure(got.Err)
				run.Samples = append(run.Samples, s)
				return
			}
			reuse.Prompt += got.Prompt
			reuse.Cached += got.Cached
			reuse.Best += best
			switch {
			case o.Explain == nil:
			case chosen == nil:
				reuse.Unexplained++
			default:
				t := held(truth, decision.Chosen)
				reuse.Truth += t
				reuse.Matched += int(chosen.MatchedTokens)
				reuse.Anticipated += int(chosen.AnticipatedTokens)
				s.Matched, s.Possible, s.Predicted = int(chosen.MatchedTokens), t, chosen.PredictedTtft.AsDuration().Seconds()*fleet.Scale
			}
			run.Samples = append(run.Samples, s)
		})
	}
	wg.Wait()
	if reuse.Failed == len(trace) {
		return run, reuse, fmt.Errorf("all %d requests failed", len(trace))
	}
	return run, reuse, ctx.Err()
}

// held finds a worker id's entry: ids of static endpoints end in the
// endpoint's name, and in the rank.
func held(truth map[string]int, worker string) int {
	uid, _, _ := strings.Cut(worker, "/")
	return truth[uid[strings.LastIndexByte(uid, '.')+1:]]
}
