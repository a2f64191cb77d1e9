package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/kinference/kinference/internal/rpc"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
)

func explainCommand() *cobra.Command {
	var request, fleet string
	cmd := &cobra.Command{
		Use:   "explain REQUEST_ID | explain --request FILE --fleet FILE [--config DIR]",
		Short: "Show why a recent request went where it went, or where one would go",
		Long: `Show why a recent request went where it went: the router keeps the newest.

With --request and --fleet no router is asked: the policies of --config decide about the request that one file describes, for the
endpoints that the other describes. The exit code is 2 if the request would not be routed.

The request has the fields id, model, tenants, qos, promptTokens, maxTokens, endpoint, stream, tools, headers, claims, tags and
classified (the whole prompt was: tags that are not given are absent, else unknown). The fleet has endpoints, each with id,
workerSet or provider, models and labels (by default those of --config), ready, unfit (why it cannot take the request),
predictedTTFT, predictedE2E, cost, queuedPrompts, runningPrompts, kvCacheUsage (a share) and fresh (false: its load is not known).
Loads stand for the mean of every window.`,
		Example: `  kinfctl explain 0d9c7f1e
  kinfctl explain --request request.yaml --fleet fleet.yaml --config conf`,
		Args: cobra.MaximumNArgs(1),
	}
	out, routerURL, config := outputFlag(cmd), routerFlag(cmd), configFlag(cmd)
	cmd.Flags().StringVar(&request, "request", "", "file that describes a request")
	cmd.Flags().StringVar(&fleet, "fleet", "", "file that describes the endpoints")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		offline := request != "" || fleet != "" || *config != ""
		if offline == (len(args) == 1) || offline && (request == "" || fleet == "") {
			return usageError{errors.New("give the id of a request, or --request and --fleet")}
		}
		if offline {
			x, err := evaluateFiles(cmd.ErrOrStderr(), request, fleet, *config)
			if err != nil {
				return err
			}
			return errors.Join(out.print(cmd.OutOrStdout(), x.record(), x.print), x.err())
		}
		client := rpc.Client(cmd.Context(), *routerURL, routerv1connect.NewRouterServiceClient)
		resp, err := client.Explain(cmd.Context(), &routerv1.ExplainRequest{RequestId: args[0]})
		if connect.CodeOf(err) == connect.CodeNotFound {
			return usageError{fmt.Errorf("no decision on record for request %s: the router keeps the newest only", args[0])}
		}
		if err != nil {
			return fmt.Errorf("ask router: %w", err)
		}
		return out.print(cmd.OutOrStdout(), resp.Decision, func(w io.Writer) error { return printDecision(w, resp.Decision) })
	}
	return cmd
}

func printDecision(w io.Writer, d *routerv1.Decision) error {
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
	if d.ActualTtft != nil {
		fmt.Fprintf(w, "actual     ttft %v", d.ActualTtft.AsDuration().Round(time.Millisecond))
		if d.ActualCachedTokens != nil {
			fmt.Fprintf(w, ", %d tokens cached", *d.ActualCachedTokens)
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "worker\tpredicted\t= wait\t+ prefill\tprompt\tin cache\ton its way\tin flight\trunning\twaiting\tkv\tdropped")
	for _, c := range d.Candidates {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%.0f\t%.0f\t%.0f %%\t%s\n", c.Worker, ms(c.PredictedTtft), ms(c.PredictedWait), ms(c.PredictedPrefill),
			c.PromptTokens, c.MatchedTokens, c.AnticipatedTokens, c.InFlight, c.Running, c.Waiting, 100*c.KvUsage, c.Dropped)
	}
	return t.Flush()
}

// policyVerdict is what policies decided in words.
func policyVerdict(v *routerv1.Verdict) string {
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
