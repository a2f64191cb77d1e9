package decisions

import (
	"cmp"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/policy"
	"github.com/kinference/kinference/internal/window"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
)

// Format of the records.
const Format = 1

func duration(d time.Duration) *durationpb.Duration { return durationpb.New(d) }

// Proto is the record as the admin API has it. Call it on a copy of a record that
// is in a Log.
func (r *Record) Proto() *adminv1.Decision {
	d := &adminv1.Decision{
		RequestId: r.RequestID, Model: r.Model, Tenant: r.Tenant, Pool: r.Pool, Format: Format,
		DecidedUnixNanos: r.Decided.UnixNano(), CatalogVersion: r.CatalogVersion, TimeScale: r.TimeScale,
		Policy: r.Policy, Reason: r.Reason, ServedBy: r.servedBy, Request: r.Request,
		Refused: r.Refused, Chosen: r.Chosen, Verdict: r.Verdict, Shadow: r.Shadow,
		OmittedCandidates: uint32(r.OmittedCandidates), OmittedDropped: uint32(r.OmittedDropped),
		ActualCachedTokens: known(r.cached), ActualPromptTokens: known(r.prompt), ActualOutputTokens: known(r.output),
	}
	ties := places(r.Candidates)
	for i := range r.Candidates {
		c := r.Candidates[i].proto(r.Windows)
		for n, t := range r.Thresholds {
			if slices.Contains(r.Candidates[i].Held, t) {
				c.Held = append(c.Held, uint32(n))
			}
		}
		c.Tie = ties[i]
		d.Candidates = append(d.Candidates, c)
	}
	for _, t := range r.Thresholds {
		d.Thresholds = append(d.Thresholds, &adminv1.Threshold{Metric: t.Metric.String(), Window: duration(t.Window), Above: t.Above, Until: t.Until})
	}
	if r.Waited > 0 {
		d.Waited, d.Ahead = duration(r.Waited), uint32(max(0, r.Ahead))
		if r.Held != "" {
			d.Held = []string{r.Held}
		}
	}
	if r.ttft > 0 {
		d.ActualTtft = duration(r.ttft)
	}
	if !r.ended.IsZero() {
		d.Outcome, d.ActualE2E = r.outcome.Enum(), duration(max(0, r.ended.Sub(r.Decided)))
	}
	return d
}

// places are the places by the hash that decides last, the highest first. The
// hash itself could tell the beginning of a prompt to who guesses it.
func places(list []Candidate) []uint32 {
	order := make([]int, len(list))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(list[b].Tie, list[a].Tie) })
	out := make([]uint32, len(list))
	for place, i := range order {
		out[i] = uint32(place)
	}
	return out
}

func known(n int) *uint32 {
	if n < 0 {
		return nil
	}
	v := uint32(n)
	return &v
}

func (c *Candidate) proto(windows []time.Duration) *adminv1.Candidate {
	out := &adminv1.Candidate{
		Worker: c.Worker, Profile: c.Profile, UpstreamModel: c.UpstreamModel, Unfit: c.Unfit, Dropped: c.dropped(), Labels: c.Labels, PromptTokens: uint32(c.Tokens), Index: uint32(c.Index),
	}
	if c.Predicted {
		out.MatchedTokens, out.AnticipatedTokens, out.CachedTokens = uint32(c.Matched), uint32(c.Anticipated), uint32(c.Cached)
		out.PredictedTtft, out.PredictedWait, out.PredictedPrefill, out.PredictedE2E = duration(c.TTFT), duration(c.Wait), duration(c.Prefill), duration(c.E2E)
		out.InFlight, out.Cost, out.Others, out.RecentWork, out.Work = uint32(c.InFlight), c.Cost, c.Others, c.RecentWork, c.OwnWork
		if c.Score > 0 {
			out.Score, out.Interference, out.EvictionLoss = c.Score, duration(c.Interference), duration(c.EvictionLoss)
		}
		out.PagesNeeded, out.PagesFree, out.Hold = uint32(max(0, c.Pages)), uint32(max(0, c.Free)), c.Hold
		out.Filled, out.Settles = uint32(max(0, c.Filled)), c.Settles
	}
	if c.Sampled {
		out.Running, out.Waiting, out.KvUsage, out.SampleAge = c.Running, c.Waiting, c.KVUsage, duration(c.Age)
	}
	if c.Fresh {
		out.Means = append(out.Means, mean(policy.DefaultWindow, c.Mean30s))
		for i, w := range windows[:min(len(windows), len(c.Means))] {
			out.Means = append(out.Means, mean(w, c.Means[i]))
		}
	}
	return out
}

func mean(over time.Duration, l window.Load) *adminv1.LoadMean {
	return &adminv1.LoadMean{Window: duration(over), Load: &adminv1.Load{Running: l.Running, Waiting: l.Waiting, KvUsage: l.KVUsage}}
}

// Causes of verdicts in words; the name of an exclude follows two of them.
var causes = [...]string{
	policy.Kept: "", policy.Unfit: "", policy.NotConsidered: "the rule does not consider it", policy.Excluded: "excluded by ",
	policy.TooBusy: "too busy for ", policy.NotSelected: "in no stage of the rule's select",
}

// dropped says in words why the endpoint was not chosen; empty if it is in the
// order.
func (c *Candidate) dropped() string {
	switch {
	case c.Ignored:
		return "not looked at: the request is refused"
	case c.Verdict.Cause == policy.Unfit:
		return c.Unfit
	}
	return causes[c.Verdict.Cause] + c.Verdict.Exclude
}
