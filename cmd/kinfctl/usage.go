package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/rpc"
	accountingv1 "github.com/kinference/kinference/proto/gen/kinference/accounting/v1"
	"github.com/kinference/kinference/proto/gen/kinference/accounting/v1/accountingv1connect"
)

// groups are what usage can be shown by, as words.
var groups = map[string]accountingv1.Group{
	"tenant": accountingv1.Group_GROUP_TENANT, "organisation": accountingv1.Group_GROUP_ORGANISATION, "costcenter": accountingv1.Group_GROUP_COST_CENTER,
	"model": accountingv1.Group_GROUP_MODEL, "backend": accountingv1.Group_GROUP_BACKEND, "endpoint": accountingv1.Group_GROUP_ENDPOINT,
	"price": accountingv1.Group_GROUP_PRICE_VERSION,
}

// steps are the times that a row can cover, as words.
var steps = map[string]accountingv1.Step{
	"hour": accountingv1.Step_STEP_HOUR, "day": accountingv1.Step_STEP_DAY, "month": accountingv1.Step_STEP_MONTH,
}

// usageFlags select usage.
type usageFlags struct {
	accounting, from, to           string
	since                          time.Duration
	tenants, organisations, models []string
}

func (f *usageFlags) register(cmd *cobra.Command) {
	f.place(cmd)
	fs := cmd.Flags()
	fs.DurationVar(&f.since, "since", 24*time.Hour, "how far back, in whole hours, if there is no --from")
	fs.StringVar(&f.from, "from", "", "from when on: 2026-11-30, or with time as 2026-11-30T08:00:00Z")
	fs.StringVar(&f.to, "to", "", "until when; empty: now")
	fs.StringSliceVar(&f.tenants, "tenant", nil, "tenants as namespace/name; - for an open gateway")
	fs.StringSliceVar(&f.organisations, "organisation", nil, "organisations as namespace/name")
	fs.StringSliceVar(&f.models, "model", nil, "models as clients ask for them")
}

// place declares where accounting is.
func (f *usageFlags) place(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.accounting, "accounting", "", "base URL of accounting; empty: $"+envAccounting+", or "+defaultAccounting)
	secureFlags(cmd)
}

const (
	envAccounting     = "KINFERENCE_ACCOUNTING"
	defaultAccounting = "http://127.0.0.1:7106"
)

func (f *usageFlags) client(ctx context.Context) accountingv1connect.AccountingServiceClient {
	url := cmp.Or(f.accounting, os.Getenv(envAccounting), defaultAccounting)
	return rpc.Client(ctx, strings.TrimRight(url, "/"), accountingv1connect.NewAccountingServiceClient)
}

func (f *usageFlags) filter(now time.Time) (*accountingv1.Filter, error) {
	out := &accountingv1.Filter{Tenants: f.tenants, Organisations: f.organisations, Models: f.models}
	from, to := now.Add(-f.since), now
	var err error
	if f.from != "" {
		if from, err = parseTime(f.from); err != nil {
			return nil, err
		}
	}
	if f.to != "" {
		if to, err = parseTime(f.to); err != nil {
			return nil, err
		}
	}
	if !from.Before(to) {
		return nil, usageError{errors.New("the time ends before it begins")}
	}
	out.From, out.To = timestamppb.New(from), timestamppb.New(to)
	return out, nil
}

func parseTime(s string) (time.Time, error) {
	for _, layout := range []string{time.DateOnly, time.RFC3339, "2006-01-02T15:04", "2006-01-02 15:04"} {
		if t, err := time.ParseInLocation(layout, s, time.UTC); err == nil {
			return t.UTC(), nil
		}
	}
	return time.Time{}, usageError{fmt.Errorf("time %q: want 2026-11-30 or 2026-11-30T08:00:00Z", s)}
}

func usageCommand() *cobra.Command {
	var f usageFlags
	var by []string
	var step, form string
	var workers bool
	cmd := &cobra.Command{
		Use:   "usage",
		Short: "Show what tenants used and what it cost",
		Long:  "Show what tenants used and what it cost, from the ledger of accounting. Times are UTC; a request counts in the hour in which it ended.",
		Example: `  kinfctl usage --since 720h --by tenant,model
  kinfctl usage --from 2026-11-01 --to 2026-12-01 --step day --tenant team-a/support -o csv
  kinfctl usage --since 720h --workers`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			filter, err := f.filter(time.Now())
			if err != nil {
				return err
			}
			request := &accountingv1.QueryUsageRequest{Filter: filter, Workers: workers}
			for _, word := range by {
				g, ok := groups[word]
				if !ok {
					return usageError{fmt.Errorf("by %q is unknown: want %s", word, strings.Join(words(groups), ", "))}
				}
				request.GroupBy = append(request.GroupBy, g)
			}
			if step != "" {
				s, ok := steps[step]
				if !ok {
					return usageError{fmt.Errorf("step %q is unknown: want hour, day or month", step)}
				}
				request.Step = s
			}
			if !slices.Contains([]string{"table", "csv", "json", "yaml"}, form) {
				return usageError{fmt.Errorf("output %q is unknown: want table, json, yaml or csv", form)}
			}
			answer, err := f.client(cmd.Context()).QueryUsage(cmd.Context(), request)
			if err != nil {
				return fmt.Errorf("ask accounting: %w", err)
			}
			if lag := answer.GetLag(); lag > 0 {
				fmt.Fprintf(cmd.ErrOrStderr(), "%d requests are on their way to the ledger and not in here yet.\n", lag)
			}
			table := usageTable(request, answer)
			if workers && form != "json" && form != "yaml" {
				table = workersTable(answer.GetWorkers(), step != "")
			}
			if form == "csv" {
				return writeCSV(cmd.OutOrStdout(), table)
			}
			return output(form).print(cmd.OutOrStdout(), answer, func(w io.Writer) error { return writeTable(w, table) })
		},
	}
	f.register(cmd)
	cmd.Flags().StringSliceVar(&by, "by", []string{"tenant", "model"}, "what has a row of its own: "+strings.Join(words(groups), ", "))
	cmd.Flags().StringVar(&step, "step", "", "time that a row covers: hour, day or month; empty: all of it")
	cmd.Flags().StringVarP(&form, "output", "o", "table", "table, json, yaml or csv")
	cmd.Flags().BoolVar(&workers, "workers", false, "show what the time of workers went to, and what it cost: used by requests, busy with what no request explains, idle")
	complete(cmd, "by", words(groups)...)
	complete(cmd, "step", "hour", "day", "month")
	complete(cmd, "output", "table", "json", "yaml", "csv")
	cmd.AddCommand(usageExportCommand())
	return cmd
}

func words[V any](m map[string]V) []string {
	var out []string
	for w := range m {
		out = append(out, w)
	}
	slices.Sort(out)
	return out
}

// usageTable has a line of names, and one for each row.
func usageTable(r *accountingv1.QueryUsageRequest, answer *accountingv1.QueryUsageResponse) [][]string {
	var head []string
	if r.GetStep() != 0 {
		head = append(head, "start")
	}
	for _, g := range r.GetGroupBy() {
		for word, value := range groups {
			if value == g {
				head = append(head, word)
			}
		}
	}
	out := [][]string{append(head, "requests", "failed", "canceled", "input", "cached", "output", "reasoning", "estimated", "unmetered", "gpu s", "cost", "currency")}
	for _, row := range answer.GetRows() {
		var line []string
		if r.GetStep() != 0 {
			line = append(line, row.GetStart().AsTime().Format("2006-01-02T15:04Z"))
		}
		for _, g := range r.GetGroupBy() {
			line = append(line, map[accountingv1.Group]string{
				accountingv1.Group_GROUP_TENANT: cmp.Or(row.GetTenant(), "-"), accountingv1.Group_GROUP_ORGANISATION: cmp.Or(row.GetOrganisation(), "-"),
				accountingv1.Group_GROUP_COST_CENTER: row.GetCostCenter(), accountingv1.Group_GROUP_MODEL: row.GetModel(), accountingv1.Group_GROUP_BACKEND: row.GetBackend(),
				accountingv1.Group_GROUP_ENDPOINT: row.GetEndpoint(), accountingv1.Group_GROUP_PRICE_VERSION: row.GetPriceVersion(),
			}[g])
		}
		s := row.GetSums()
		for _, n := range []uint64{s.GetRequests(), s.GetFailed(), s.GetCanceled(), s.GetInput(), s.GetCachedInput(), s.GetOutput(), s.GetReasoning(), s.GetEstimated(), s.GetUnmetered()} {
			line = append(line, strconv.FormatUint(n, 10))
		}
		out = append(out, append(line, wholeSeconds(s.GetGpuSeconds()), s.GetCost(), s.GetCurrency()))
	}
	return out
}

// wholeSeconds has a digit behind the point.
func wholeSeconds(v float64) string { return strconv.FormatFloat(v, 'f', 1, 64) }

// workersTable tells what the time of workers went to.
func workersTable(list []*accountingv1.WorkerTime, step bool) [][]string {
	head := []string{"workers", "used s", "other s", "idle s", "used cost", "other cost", "idle cost", "currency", "hourly price"}
	if step {
		head = append([]string{"start"}, head...)
	}
	out := [][]string{head}
	for _, w := range list {
		line := []string{w.GetWorkerSet(), wholeSeconds(w.GetUsedSeconds()), wholeSeconds(w.GetOtherSeconds()), wholeSeconds(w.GetIdleSeconds()),
			w.GetUsedCost(), w.GetOtherCost(), w.GetIdleCost(), w.GetCurrency(), w.GetHourlyPrice()}
		if step {
			line = append([]string{w.GetStart().AsTime().Format("2006-01-02T15:04Z")}, line...)
		}
		out = append(out, line)
	}
	return out
}

func writeTable(w io.Writer, table [][]string) error {
	if len(table) == 1 {
		_, err := fmt.Fprintln(w, "No usage.")
		return err
	}
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	for i, line := range table {
		for j, cell := range line {
			if i == 0 {
				cell = strings.ToUpper(cell)
			} else if cell == "" {
				cell = "-"
			}
			if j > 0 {
				fmt.Fprint(t, "\t")
			}
			fmt.Fprint(t, cell)
		}
		fmt.Fprintln(t)
	}
	return t.Flush()
}

func writeCSV(w io.Writer, table [][]string) error {
	c := csv.NewWriter(w)
	if err := c.WriteAll(table); err != nil {
		return fmt.Errorf("write CSV: %w", err)
	}
	return nil
}

func usageExportCommand() *cobra.Command {
	var f usageFlags
	var format, account, currency string
	cmd := &cobra.Command{
		Use:   "export",
		Short: "Write usage for other systems",
		Long: `Write usage for other systems to standard output.

focus: a row for each tenant, model, backend, meter, price and hour, with the columns of the FinOps FOCUS
specification 1.2, as CSV. Ask for whole hours that are over. Time of workers that no tenant used (idle, or busy with
what no request explains) has rows without a sub account, if all tenants and models are asked for.
events: the usage events themselves, as CloudEvents in JSON, one a line.`,
		Example: `  kinfctl usage export --format focus --from 2026-11-01 --to 2026-12-01 > november.csv`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			filter, err := f.filter(time.Now())
			if err != nil {
				return err
			}
			client := f.client(cmd.Context())
			w := bufio.NewWriter(cmd.OutOrStdout())
			switch format {
			case "focus":
				err = exportFocus(cmd.Context(), w, client, filter, account, currency)
			case "events":
				var stream interface {
					Receive() bool
					Msg() *accountingv1.ExportUsageResponse
					Err() error
					Close() error
				}
				if stream, err = client.ExportUsage(cmd.Context(), &accountingv1.ExportUsageRequest{Filter: filter}); err != nil {
					return fmt.Errorf("ask accounting: %w", err)
				}
				defer stream.Close()
				for stream.Receive() {
					for _, u := range stream.Msg().GetUsage() {
						if _, err := w.Write(append(bus.EncodeUsage(nil, u), '\n')); err != nil {
							return err
						}
					}
				}
				err = stream.Err()
			default:
				return usageError{fmt.Errorf("format %q is unknown: want focus or events", format)}
			}
			if err != nil {
				return fmt.Errorf("export usage: %w", err)
			}
			return w.Flush()
		},
	}
	f.register(cmd)
	cmd.Flags().StringVar(&format, "format", "focus", "focus or events")
	cmd.Flags().StringVar(&account, "billing-account", "kinference", "BillingAccountId and -Name of FOCUS")
	cmd.Flags().StringVar(&currency, "currency", "USD", "BillingCurrency of usage that has no price")
	complete(cmd, "format", "focus", "events")
	return cmd
}
