package main

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	accountingv1 "github.com/kinference/kinference/proto/gen/kinference/accounting/v1"
)

// alertWords are how urgent an objective is, in a word.
var alertWords = map[accountingv1.Alert]string{
	accountingv1.Alert_ALERT_NONE: "ok", accountingv1.Alert_ALERT_TOO_FEW: "too few", accountingv1.Alert_ALERT_TICKET: "ticket", accountingv1.Alert_ALERT_PAGE: "page",
}

func objectivesCommand() *cobra.Command {
	var f usageFlags
	cmd := &cobra.Command{
		Use:   "objectives [NAMESPACE/POOL-OR-TENANT…]",
		Short: "Show how far objectives are kept",
		Long: `Show how far the objectives of pools and tenants are kept: the share of requests that kept them, what is left
of the error budget, and how fast it burns over the longer and the shorter of two windows (1 uses it up exactly
at the end of the objective's window). Requests over a tenant's own quota and faults of clients do not count,
requests that there was no room for do.`,
		Example: "  kinfctl objectives\n  kinfctl objectives rules > kinference-objectives.yaml",
	}
	o := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		answer, err := f.client(cmd.Context()).Objectives(cmd.Context(), &accountingv1.ObjectivesRequest{Owners: args})
		if err != nil {
			return fmt.Errorf("ask accounting: %w", err)
		}
		return o.print(cmd.OutOrStdout(), answer, func(w io.Writer) error { return objectivesTable(w, answer.GetObjectives()) })
	}
	f.place(cmd)
	cmd.AddCommand(objectiveRulesCommand())
	return cmd
}

func objectiveRulesCommand() *cobra.Command {
	var f usageFlags
	cmd := &cobra.Command{
		Use:   "rules [NAMESPACE/POOL-OR-TENANT…]",
		Short: "Write recording and alert rules for Prometheus",
		Long:  "Write recording and alert rules for Prometheus, made from the objectives, to standard output.",
		RunE: func(cmd *cobra.Command, args []string) error {
			answer, err := f.client(cmd.Context()).Objectives(cmd.Context(), &accountingv1.ObjectivesRequest{Owners: args, Rules: true})
			if err != nil {
				return fmt.Errorf("ask accounting: %w", err)
			}
			_, err = io.WriteString(cmd.OutOrStdout(), answer.GetRules())
			return err
		},
	}
	f.place(cmd)
	return cmd
}

func objectivesTable(w io.Writer, list []*accountingv1.ObjectiveState) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(w, "No objectives.")
		return err
	}
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "OWNER\tOBJECTIVE\tWHAT\tTARGET\tATTAINED\tREQUESTS\tBUDGET LEFT\tBURN\tSTATE")
	for _, s := range list {
		o := s.GetObjective()
		what := o.GetIndicator()
		if d := o.GetThreshold(); d != nil {
			what += " ≤ " + d.AsDuration().String()
		}
		attained, left := "-", "-"
		if s.Attainment != nil {
			attained, left = percent(s.GetAttainment(), 3), percent(s.GetBudgetLeft(), 0)
		}
		var burns []string
		for _, b := range s.GetBurns() {
			burns = append(burns, fmt.Sprintf("%s %s/%s", window(b.GetLong()), short(b.GetLongRate()), short(b.GetShortRate())))
		}
		fmt.Fprintf(t, "%s %s\t%s\t%s\t%s %% of %s\t%s\t%d\t%s\t%s\t%s\n", strings.TrimPrefix(o.GetKind(), "Inference"), o.GetOwner(), o.GetName(), what,
			o.GetTarget(), window(o.GetWindow()), attained, s.GetTotal(), left, strings.Join(burns, " "), alertWords[s.GetAlert()])
	}
	return t.Flush()
}

// window is a duration in one unit.
func window(p *durationpb.Duration) string {
	d := p.AsDuration()
	switch {
	case d >= 48*time.Hour && d%(24*time.Hour) == 0:
		return strconv.Itoa(int(d/(24*time.Hour))) + "d"
	case d >= time.Hour && d%time.Hour == 0:
		return strconv.Itoa(int(d/time.Hour)) + "h"
	case d >= time.Minute && d%time.Minute == 0:
		return strconv.Itoa(int(d/time.Minute)) + "m"
	}
	return d.String()
}

// percent cuts and does not round: what is not kept must not look kept.
func percent(v float64, digits int) string {
	p := 1.0
	for range digits {
		p *= 10
	}
	cut := float64(int64(v*100*p+1e-9)) / p
	return strconv.FormatFloat(cut, 'f', digits, 64) + " %"
}

func short(v float64) string { return strconv.FormatFloat(v, 'g', 3, 64) }
