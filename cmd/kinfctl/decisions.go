package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
)

func decisionsCommand() *cobra.Command {
	var r adminv1.WatchDecisionsRequest
	var follow bool
	cmd := &cobra.Command{
		Use:   "decisions",
		Short: "List recent decisions, or follow new ones",
		Long: `List recent decisions, oldest first, or with --follow new ones as they are made. All filters that are given must hold. With -o json each
is a line, as kinfctl replay reads them: with --finished it holds what came of the request too.`,
		Example: `  kinfctl decisions --model glm-5.3 --action saturated
  kinfctl decisions --follow --shadow-differs
  kinfctl decisions --finished --recent 2048 -o json > decisions.jsonl`,
		Args: cobra.NoArgs,
	}
	out, admin := outputFlag(cmd), adminFlags(cmd)
	f := cmd.Flags()
	f.BoolVarP(&follow, "follow", "f", false, "go on with new ones, until interrupted")
	f.Uint32Var(&r.Recent, "recent", 20, "most of those that are kept to begin with")
	f.StringVar(&r.Model, "model", "", "model as clients ask for it")
	f.StringVar(&r.Tenant, "tenant", "", "tenant of the caller, or one above it")
	f.StringVar(&r.Policy, "policy", "", "policy that decided, as name or namespace/name")
	f.StringVar(&r.Rule, "rule", "", "name of the rule that decided")
	f.StringVar(&r.Worker, "worker", "", `worker id or uid, or "provider NAMESPACE/NAME"`)
	f.StringVar(&r.Backend, "backend", "", "worker set or provider as namespace/name")
	f.StringVar(&r.Action, "action", "", "what was done: route, reject, saturated, unavailable or queue")
	f.BoolVar(&r.ShadowDiffers, "shadow-differs", false, "only where policies on dry run would have decided otherwise")
	f.BoolVar(&r.Finished, "finished", false, "only requests that are over, with what came of them")
	complete(cmd, "action", "route", "reject", "saturated", "unavailable", "queue")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		client, err := admin.client(cmd.Context())
		if err != nil {
			return err
		}
		r.OnlyRecent = !follow
		stream, err := client.WatchDecisions(cmd.Context(), &r)
		if err != nil {
			return admin.failed(err)
		}
		defer stream.Close()
		w := cmd.OutOrStdout()
		for stream.Receive() {
			m := stream.Msg()
			if m.Missed > 0 {
				fmt.Fprintf(cmd.ErrOrStderr(), "missed %d decisions: they come faster than they are read\n", m.Missed)
			}
			if err := out.print(w, m.Decision, func(w io.Writer) error { return printLine(w, m.Decision) }); err != nil {
				return err
			}
			if *out == "yaml" {
				fmt.Fprintln(w, "---")
			}
		}
		if err := stream.Err(); err != nil && cmd.Context().Err() == nil {
			return admin.failed(err)
		}
		return nil
	}
	return cmd
}

// printLine is a decision in one line: lines are of different length, since the next
// one is not known yet.
func printLine(w io.Writer, d *adminv1.Decision) error {
	rule := ""
	if r := d.GetVerdict().GetRule(); r != "" {
		rule = " by " + r
	}
	what := d.Chosen
	if what == "" {
		what = d.GetVerdict().GetAction()
	}
	var notes []string
	if d.Tenant != "" {
		notes = append(notes, d.Tenant)
	}
	for _, c := range d.Candidates {
		if c.Worker == d.Chosen && c.Dropped == "" && c.PredictedTtft != nil {
			notes = append(notes, "predicted "+ms(c.PredictedTtft))
			break
		}
	}
	if d.Waited != nil {
		notes = append(notes, "waited "+ms(d.Waited))
	}
	if d.ActualTtft != nil {
		notes = append(notes, "took "+ms(d.ActualTtft))
	}
	if d.ServedBy != d.Chosen {
		notes = append(notes, "served by "+d.ServedBy)
	}
	if s, v := d.Shadow, d.Verdict; s != nil && (s.Action != v.GetAction() || s.Chosen != v.GetChosen()) {
		notes = append(notes, "dry run: "+policyVerdict(s))
	}
	_, err := fmt.Fprintf(w, "%s  %s  %s → %s%s  %s\n", time.Unix(0, d.DecidedUnixNanos).UTC().Format("15:04:05.000"), d.RequestId, d.Model, what, rule, strings.Join(notes, ", "))
	return errors.Join(err)
}
