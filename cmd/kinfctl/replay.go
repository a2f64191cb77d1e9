package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/policy"
	"github.com/kinference/kinference/internal/resources"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

func replayCommand() *cobra.Command {
	var decisions string
	cmd := &cobra.Command{
		Use:   "replay --config DIR --decisions FILE",
		Short: "Show how recorded decisions would change under other policies",
		Long: `Show how recorded decisions would change under the policies of a folder: how many, from where to where, and the predicted time to
first token before and after. The file holds records as kinfctl explain -o json prints them, one after the other.

A record does not hold everything that policies look at, and the report says how that is made up for. Each request is taken by
itself: what other requests would have changed is not followed.`,
		Args: cobra.NoArgs,
	}
	out, config := outputFlag(cmd), configFlag(cmd)
	cmd.Flags().StringVar(&decisions, "decisions", "", "file of records")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if *config == "" || decisions == "" {
			return usageError{errors.New("give --config and --decisions")}
		}
		catalog, err := loadConfig(cmd.ErrOrStderr(), *config)
		if err != nil {
			return err
		}
		f, err := os.Open(decisions)
		if err != nil {
			return usageError{err}
		}
		defer f.Close()
		report, err := replay(catalog, f)
		if err != nil {
			return fmt.Errorf("read %s: %w", decisions, err)
		}
		return out.print(cmd.OutOrStdout(), report, report.print)
	}
	return cmd
}

// replayReport tells what would change.
type replayReport struct {
	Decisions int `json:"decisions"`
	// Changed of them would do something else, or go to another endpoint.
	Changed int `json:"changed"`
	// Unknown asked for models that no pool serves now; they are no part of the
	// above.
	Unknown int `json:"unknown"`
	// Compared decisions have a prediction before and after; means in seconds.
	Compared   int       `json:"compared"`
	TTFTBefore float64   `json:"predictedSecondsBefore"`
	TTFTAfter  float64   `json:"predictedSecondsAfter"`
	Changes    []*change `json:"changes"`
	Lacks      []string  `json:"lacks"`
}

// change gathers decisions that change in the same way. From and To are worker
// sets, providers or what is done instead.
type change struct {
	From       string  `json:"from"`
	To         string  `json:"to"`
	Decisions  int     `json:"decisions"`
	Compared   int     `json:"compared"`
	TTFTBefore float64 `json:"predictedSecondsBefore"`
	TTFTAfter  float64 `json:"predictedSecondsAfter"`
}

// lacks counts what records do not hold.
type lacks struct{ tags, headers, unmeasured, providers, gone int }

func (l *lacks) text() []string {
	out := []string{"QoS, tokens of the answer, claims and endpoint of requests: taken as the tenant's or interactive, no limit, none and ChatCompletions",
		"means of loads: what was measured at the decision stands for them", "E2E time and cost: equal for all"}
	say := func(n int, what string) {
		if n > 0 {
			out = append(out, fmt.Sprintf("%s in %d decisions", what, n))
		}
	}
	say(l.tags, "tags, which rules read: taken as unknown")
	say(l.headers, "headers, which rules read: taken as absent")
	say(l.unmeasured, "load and prediction of workers that a rule dropped: taken as busy and slowest")
	say(l.providers, "the prediction for providers: taken as slower than any worker's")
	say(l.gone, "worker sets and providers that the pool does not have now: left out")
	return out
}

// replay evaluates the policies for each record.
func replay(c *resources.Catalog, in io.Reader) (*replayReport, error) {
	out := &replayReport{Changes: []*change{}}
	plans, changes, l := map[string]*plan{}, map[[2]string]*change{}, lacks{}
	dec := json.NewDecoder(in)
	for n := 1; ; n++ {
		var raw json.RawMessage
		err := dec.Decode(&raw)
		if errors.Is(err, io.EOF) {
			break
		}
		d := &routerv1.Decision{}
		if err == nil {
			err = protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(raw, d)
		}
		if err != nil {
			return nil, fmt.Errorf("record %d: %w", n, err)
		}
		p, ok := plans[d.Model]
		if !ok {
			p, _ = newPlan(c, d.Model) // nil: no pool serves it
			plans[d.Model] = p
		}
		if p == nil {
			out.Unknown++
			continue
		}
		before, after := again(p, d, &l)
		out.add(changes, before, after)
	}
	out.Changes = slices.SortedFunc(maps.Values(changes), func(a, b *change) int {
		return cmp.Or(b.Decisions-a.Decisions, strings.Compare(a.From, b.From), strings.Compare(a.To, b.To))
	})
	for _, x := range out.Changes {
		x.TTFTBefore, x.TTFTAfter = mean(x.TTFTBefore, x.Compared), mean(x.TTFTAfter, x.Compared)
	}
	out.TTFTBefore, out.TTFTAfter = mean(out.TTFTBefore, out.Compared), mean(out.TTFTAfter, out.Compared)
	out.Lacks = l.text()
	return out, nil
}

func mean(sum float64, n int) float64 {
	if n == 0 {
		return 0
	}
	return sum / float64(n)
}

// outcome is a decision, before or after.
type outcome struct {
	// what was done: an endpoint's id, or an action.
	what string
	// where: the worker set or provider, or the action.
	where string
	// ttft is unpredicted when it is not known.
	ttft time.Duration
}

// unpredicted is slower than any prediction.
const unpredicted = time.Duration(math.MaxInt64)

func (r *replayReport) add(changes map[[2]string]*change, before, after outcome) {
	r.Decisions++
	compared := before.ttft != unpredicted && after.ttft != unpredicted
	if compared {
		r.Compared++
		r.TTFTBefore += before.ttft.Seconds()
		r.TTFTAfter += after.ttft.Seconds()
	}
	if before.what == after.what {
		return
	}
	r.Changed++
	key := [2]string{before.where, after.where}
	x := changes[key]
	if x == nil {
		x = &change{From: key[0], To: key[1]}
		changes[key] = x
	}
	x.Decisions++
	if compared {
		x.Compared++
		x.TTFTBefore += before.ttft.Seconds()
		x.TTFTAfter += after.ttft.Seconds()
	}
}

// again decides about a recorded request anew.
func again(p *plan, d *routerv1.Decision, l *lacks) (before, after outcome) {
	r := &policy.Request{ID: d.RequestId, Model: d.Model, Endpoint: v1alpha1.EndpointChatCompletions}
	if d.Tenant != "" {
		r.Tenants = []string{base(d.Tenant)}
	}
	p.tenant(r)
	list := recorded(p, d, l)
	for _, c := range d.Candidates {
		r.PromptTokens = max(r.PromptTokens, int(c.PromptTokens))
	}
	if p.policies.ReadsTags(d.Model) {
		l.tags++
	}
	if p.policies.ReadsHeaders(d.Model) {
		l.headers++
	}
	f := fleetOf(list)
	f.Rank = func(order []int) { rank(order, f, d.Chosen) }
	v := p.policies.Evaluate(r, f)

	before = outcome{what: d.Chosen, where: d.Chosen, ttft: unpredicted}
	if d.Chosen == "" {
		action := policy.Unavailable.String()
		if d.Verdict != nil {
			action = d.Verdict.Action
		}
		before.what, before.where = action, action
	}
	// The first by this id: a worker may stand there again, under a profile that
	// was dropped.
	if i := slices.IndexFunc(d.Candidates, func(c *routerv1.Candidate) bool { return c.Worker == d.Chosen }); i >= 0 {
		before.where, before.ttft = setOf(d.Candidates[i]), ttftOf(d.Candidates[i])
	}
	after = outcome{what: v.Action.String(), where: v.Action.String(), ttft: unpredicted}
	if v.Action == policy.Route {
		c := &list[v.Order[0]]
		after = outcome{what: c.ID, where: c.backend.name, ttft: c.TTFT}
		if c.backend.profile == "" {
			after.where = "provider " + c.backend.name
		}
	}
	return before, after
}

// setOf is the worker set of a candidate as namespace/name; the id of a provider.
func setOf(c *routerv1.Candidate) string {
	parts := strings.SplitN(c.Profile, "/", 3)
	if len(parts) < 3 {
		return c.Worker
	}
	return parts[0] + "/" + parts[1]
}

func ttftOf(c *routerv1.Candidate) time.Duration {
	if c.PredictedTtft == nil {
		return unpredicted
	}
	return c.PredictedTtft.AsDuration()
}

// recorded are the candidates of a record, as the pool has them now, and those
// providers of the pool that no record holds because nothing was against them.
func recorded(p *plan, d *routerv1.Decision, l *lacks) []candidate {
	var out []candidate
	unmeasured, gone, unpredictable := 0, 0, 0
	seen := map[string]bool{}
	for _, c := range d.Candidates {
		provider := strings.HasPrefix(c.Worker, "provider ")
		at := slices.IndexFunc(p.backends, func(b backend) bool {
			if provider {
				return "provider "+b.name == c.Worker && b.profile == "" && p.reaches(b.Backend)
			}
			return b.profile == c.Profile && b.profile != ""
		})
		seen[c.Worker] = true
		if at < 0 {
			gone++
			continue
		}
		b := p.backends[at]
		e := candidate{backend: b, Endpoint: policy.Endpoint{Backend: b.Backend, ID: c.Worker, TTFT: ttftOf(c), Unfit: unfit(c.Dropped)}}
		switch {
		case provider:
			if c.PredictedTtft == nil {
				unpredictable++
			}
		case c.PredictedTtft == nil && e.Unfit == "":
			unmeasured++
		case c.SampleAge != nil:
			e.Load = &load{queued: c.Waiting, running: c.Running, usage: c.KvUsage}
		}
		out = append(out, e)
	}
	for _, b := range p.backends {
		if id := "provider " + b.name; b.profile == "" && !seen[id] && p.reaches(b.Backend) {
			seen[id] = true
			unpredictable++
			out = append(out, candidate{backend: b, Endpoint: policy.Endpoint{Backend: b.Backend, ID: id, TTFT: unpredicted}})
		}
	}
	count(&l.unmeasured, unmeasured)
	count(&l.gone, gone)
	count(&l.providers, unpredictable)
	return out
}

// count counts a decision if it has any of something.
func count(decisions *int, n int) {
	if n > 0 {
		*decisions++
	}
}

// unfit is why an endpoint could not serve; empty if only a rule was against it.
func unfit(dropped string) string {
	for _, c := range causes {
		if c != "" && strings.HasPrefix(dropped, c) {
			return ""
		}
	}
	return dropped
}

// Predictions closer together than this are equal (docs/decisions/0004).
const (
	tieShare = 0.02
	tieLeast = 5 * time.Millisecond
)

// rank sorts by predicted TTFT; among those that are equal to the best, what was
// chosen stays first: the scheduler knew why.
func rank(order []int, f *policy.Fleet, chosen string) {
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(f.Endpoints[a].TTFT, f.Endpoints[b].TTFT) })
	best := f.Endpoints[order[0]].TTFT
	margin := max(tieLeast, time.Duration(tieShare*float64(best)))
	at := slices.IndexFunc(order, func(i int) bool { return f.Endpoints[i].ID == chosen })
	if at > 0 && f.Endpoints[order[at]].TTFT-best <= margin {
		was := order[at]
		copy(order[1:at+1], order[:at])
		order[0] = was
	}
}

func (r *replayReport) print(w io.Writer) error {
	fmt.Fprintf(w, "decisions  %d\nchanged    %d", r.Decisions, r.Changed)
	if r.Decisions > 0 {
		fmt.Fprintf(w, " (%.1f %%)", 100*float64(r.Changed)/float64(r.Decisions))
	}
	fmt.Fprintln(w)
	if r.Unknown > 0 {
		fmt.Fprintf(w, "left out   %d: no pool serves their model\n", r.Unknown)
	}
	fmt.Fprintf(w, "predicted  %s\n\n", compared(r.Compared, r.TTFTBefore, r.TTFTAfter))
	if len(r.Changes) > 0 {
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintln(t, "from\tto\tdecisions\tpredicted ttft")
		for _, c := range r.Changes {
			fmt.Fprintf(t, "%s\t%s\t%d\t%s\n", c.From, c.To, c.Decisions, compared(c.Compared, c.TTFTBefore, c.TTFTAfter))
		}
		if err := t.Flush(); err != nil {
			return err
		}
		fmt.Fprintln(w)
	}
	_, err := fmt.Fprintf(w, "not in the records:\n  %s\n", strings.Join(r.Lacks, "\n  "))
	return err
}

func compared(n int, before, after float64) string {
	if n == 0 {
		return "not known on both sides"
	}
	d := func(s float64) string {
		return time.Duration(s * float64(time.Second)).Round(time.Millisecond).String()
	}
	return fmt.Sprintf("%s, then %s (mean of %d)", d(before), d(after), n)
}
