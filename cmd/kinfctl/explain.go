package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	"github.com/kinference/kinference/proto/gen/kinference/admin/v1/adminv1connect"
)

func explainCommand() *cobra.Command {
	var request, fleet string
	cmd := &cobra.Command{
		Use:   "explain REQUEST_ID | explain --request FILE [--fleet FILE --config DIR]",
		Short: "Show why a recent request went where it went, or where one would go",
		Long: `Show why a recent request went where it went: the router keeps the newest.

With --request the router is asked where the request that the file describes would go now; none of its prompt is taken to be cached,
and nothing is booked.

With --fleet too no router is asked: the policies of --config decide about that request, for the endpoints that the other file
describes. The exit code is 2 if the request would not be routed.

The request has the fields id, model, tenants, qos, promptTokens, maxTokens, endpoint, stream, tools, headers, claims, tags,
classified (the whole prompt was: tags that are not given are absent, else unknown), absentTags (names, or beginnings with a star)
and unknownTags (each with tag and causes). The fleet has endpoints, each with id,
workerSet or provider, models and labels (by default those of --config), ready, unfit (why it cannot take the request),
predictedTTFT, predictedE2E, cost, queuedPrompts, runningPrompts, kvCacheUsage (a share) and fresh (false: its load is not known).
Loads stand for the mean of every window.`,
		Example: `  kinfctl explain 0d9c7f1e
  kinfctl explain --request request.yaml
  kinfctl explain --request request.yaml --fleet fleet.yaml --config conf`,
		Args: cobra.MaximumNArgs(1),
	}
	out, admin, config := outputFlag(cmd), adminFlags(cmd), configFlag(cmd)
	cmd.Flags().StringVar(&request, "request", "", "file that describes a request")
	cmd.Flags().StringVar(&fleet, "fleet", "", "file that describes the endpoints")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		whatIf := request != "" || fleet != "" || *config != ""
		if whatIf == (len(args) == 1) || whatIf && (request == "" || fleet == "" && *config != "") {
			return usageError{errors.New("give the id of a request, or --request, or --request and --fleet")}
		}
		if fleet != "" {
			x, err := evaluateFiles(cmd.ErrOrStderr(), request, fleet, *config)
			if err != nil {
				return err
			}
			return errors.Join(out.print(cmd.OutOrStdout(), x.record(), x.print), x.err())
		}
		d, err := explained(cmd.Context(), admin, request, args)
		if err != nil {
			return err
		}
		err = out.print(cmd.OutOrStdout(), d, func(w io.Writer) error { return printDecision(w, d) })
		if request != "" && d.Chosen == "" {
			err = errors.Join(err, refusedError{errors.New("the request would not be routed: " + d.GetVerdict().GetAction())})
		}
		return err
	}
	return cmd
}

// explained is the record of a request, or that of one that nobody has made.
func explained(ctx context.Context, a *admin, request string, args []string) (*adminv1.Decision, error) {
	if request != "" {
		q, err := readRequest(request)
		if err != nil {
			return nil, err
		}
		return ask(ctx, a, func(ctx context.Context, c adminv1connect.AdminServiceClient) (*adminv1.Decision, error) {
			resp, err := c.Evaluate(ctx, q)
			return resp.GetDecision(), err
		})
	}
	d, err := ask(ctx, a, func(ctx context.Context, c adminv1connect.AdminServiceClient) (*adminv1.Decision, error) {
		resp, err := c.Explain(ctx, &adminv1.ExplainRequest{RequestId: args[0]})
		return resp.GetDecision(), err
	})
	if connect.CodeOf(err) == connect.CodeNotFound {
		return nil, usageError{fmt.Errorf("no decision on record for request %s: the router keeps the newest only", args[0])}
	}
	return d, err
}

func printDecision(w io.Writer, d *adminv1.Decision) error {
	fmt.Fprintf(w, "request    %s\nmodel      %s (pool %s)\ndecided    %s by %s, catalog version %d\nchosen     %s\nreason     %s\n",
		d.RequestId, d.Model, d.Pool, time.Unix(0, d.DecidedUnixNanos).UTC().Format(time.RFC3339Nano), d.Policy, d.CatalogVersion, d.Chosen, d.Reason)
	if v := d.Verdict; v != nil {
		fmt.Fprintf(w, "policy     %s\n", policyVerdict(v))
	}
	if v := d.Shadow; v != nil {
		fmt.Fprintf(w, "dry run    %s\n", policyVerdict(v))
	}
	if d.ServedBy != "" && d.ServedBy != d.Chosen {
		fmt.Fprintf(w, "served by  %s (after failover)\n", d.ServedBy)
	}
	if d.Waited != nil {
		fmt.Fprintf(w, "waited     %s\n", waited(d))
	}
	if q := d.Request; q != nil {
		fmt.Fprintf(w, "asked      %s\n", asked(d.Tenant, q))
	}
	if list := actual(d); len(list) > 0 {
		fmt.Fprintf(w, "actual     %s\n", strings.Join(list, ", "))
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "worker\tpredicted\t= wait\t+ prefill\te2e\tcost\tprompt\tin cache\ton its way\tin flight\trunning\twaiting\tkv\tdropped")
	for _, c := range d.Candidates {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%.0f\t%.0f\t%.0f %%\t%s\n", c.Worker, ms(c.PredictedTtft), ms(c.PredictedWait), ms(c.PredictedPrefill), ms(c.PredictedE2E),
			price(c.Cost), c.PromptTokens, c.MatchedTokens, c.AnticipatedTokens, c.InFlight, c.Running, c.Waiting, 100*c.KvUsage, c.Dropped)
	}
	if n := d.OmittedCandidates + d.OmittedDropped; n > 0 {
		fmt.Fprintf(t, "and %d more\n", n)
	}
	return errors.Join(t.Flush(), printScores(w, d))
}

// waited is how long a request was in line, and why.
func waited(d *adminv1.Decision) string {
	out := ms(d.Waited)
	for _, why := range d.Held {
		out += ", last " + held(why)
	}
	if d.Ahead > 0 {
		out += fmt.Sprintf(", %d before it", d.Ahead)
	}
	return out
}

// held is in words what holds a request in line.
func held(why string) string {
	switch why {
	case "queue":
		return "for the prefills before it"
	case "pages":
		return "for room for its KV blocks"
	case "protect":
		return "because others need what it would evict"
	case "reserve":
		return "because one that waits longer is first there"
	case "defer":
		return "for an idle worker"
	case "policy":
		return "as its rule says"
	}
	return why
}

// printScores shows what the policy k2 goes by beside the predicted time; nothing for
// other policies.
func printScores(w io.Writer, d *adminv1.Decision) error {
	if !slices.ContainsFunc(d.Candidates, func(c *adminv1.Candidate) bool { return c.Score > 0 }) {
		return nil
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "worker\tscore\t= predicted\t+ delay of others\t+ evicted\tKV blocks\tfree\twanted\tholds")
	for _, c := range d.Candidates {
		if c.Score <= 0 {
			continue
		}
		score := time.Duration(c.Score / cmp.Or(d.TimeScale, 1) * float64(time.Second))
		wanted := "-" // only what is new settles by it
		if c.Settles {
			wanted = fmt.Sprint(5*c.Filled, " %")
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", c.Worker, score.Round(time.Millisecond), ms(c.PredictedTtft), ms(c.Interference), ms(c.EvictionLoss),
			number(c.PagesNeeded), number(c.PagesFree), wanted, c.Hold)
	}
	return t.Flush()
}

// asked is what policies saw of a request, in words.
func asked(tenant string, q *adminv1.RecordedRequest) string {
	out := []string{q.Endpoint, q.Qos}
	if tenant != "" {
		out = append(out, "tenant "+tenant)
	}
	out = append(out, fmt.Sprintf("%d tokens", q.PromptTokens))
	if q.MaxTokens > 0 {
		out = append(out, fmt.Sprintf("at most %d out", q.MaxTokens))
	}
	switch {
	case len(q.Tags) > 0:
		out = append(out, "tags "+strings.Join(q.Tags, " "))
	case q.Classified:
		out = append(out, "no tags")
	}
	out = append(out, unknownWords(q)...)
	return strings.Join(slices.DeleteFunc(out, func(s string) bool { return s == "" }), ", ")
}

// actual is what came of a request, in words.
func actual(d *adminv1.Decision) []string {
	var out []string
	if d.ActualTtft != nil {
		out = append(out, "ttft "+ms(d.ActualTtft))
	}
	if d.ActualE2E != nil {
		out = append(out, "e2e "+ms(d.ActualE2E))
	}
	for _, n := range []struct {
		tokens *uint32
		what   string
	}{{d.ActualPromptTokens, "tokens in"}, {d.ActualCachedTokens, "tokens cached"}, {d.ActualOutputTokens, "tokens out"}} {
		if n.tokens != nil {
			out = append(out, fmt.Sprintf("%d %s", *n.tokens, n.what))
		}
	}
	return out
}

// price is an amount of money that may be tiny.
func price(v float64) string {
	if v <= 0 {
		return "-"
	}
	return fmt.Sprintf("%.3g", v)
}

// policyVerdict is what policies decided in words.
func policyVerdict(v *adminv1.Verdict) string {
	rule := "no rule matches"
	if v.Rule != "" {
		rule = "rule " + v.Rule
	}
	out := rule + ": " + v.Action
	if v.Chosen != "" {
		out += fmt.Sprintf(" to %s (stage %d)", v.Chosen, v.Stage+1)
	}
	if len(v.Emptied) > 0 {
		out += ", after " + strings.Join(v.Emptied, ", ") + " had nothing left"
	}
	return out
}

func ms(d interface{ AsDuration() time.Duration }) string {
	return d.AsDuration().Round(time.Millisecond).String()
}
