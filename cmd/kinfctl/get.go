package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/plan"
	"github.com/kinference/kinference/internal/resources"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	"github.com/kinference/kinference/proto/gen/kinference/admin/v1/adminv1connect"
)

func getCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "get", Short: "List workers, pools, tenants or policies"}
	workers := &cobra.Command{Use: "workers", Short: "List the workers as the router sees them", Args: cobra.NoArgs}
	out, admin := outputFlag(workers), adminFlags(workers)
	set := workers.Flags().String("worker-set", "", "only those of this one, as namespace/name")
	workers.RunE = func(cmd *cobra.Command, _ []string) error {
		list, err := ask(cmd.Context(), admin, func(ctx context.Context, c adminv1connect.AdminServiceClient) (*adminv1.ListWorkersResponse, error) {
			return c.ListWorkers(ctx, &adminv1.ListWorkersRequest{WorkerSet: *set})
		})
		if err != nil {
			return err
		}
		return out.print(cmd.OutOrStdout(), list, func(w io.Writer) error { return printWorkers(w, list.GetWorkers()) })
	}
	cmd.AddCommand(workers,
		listCommand("pools", "List the pools with what they serve", poolsOf, livePools),
		listCommand("tenants", "List the tenants", tenantsOf, liveTenants),
		listCommand("policies", "List the policies in the order in which they apply", policiesOf, livePolicies))
	return cmd
}

func printWorkers(w io.Writer, list []*adminv1.WorkerStatus) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "worker\tset\tready\tqueue\trunning\tkv\tin flight\tsample\tcontext\tcache\tblocks\tlag\turl")
	for _, x := range list {
		r := rowOf(x)
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\n", x.GetWorker(), x.GetWorkerSet(), r.ready, r.queue, r.running, r.kv, x.GetInFlight(), r.sample,
			number(x.GetMaxModelLen()), r.cache, r.blocks, r.lag, x.GetUrl())
	}
	return t.Flush()
}

// row is the state of a worker in words.
type row struct {
	ready, sample, cache, blocks, lag string
	queue, running, kv                string
	meanQueue, meanRunning, meanKV    string // over 30 s
}

func rowOf(x *adminv1.WorkerStatus) row {
	r := row{"yes", "-", "unknown", "-", "-", "-", "-", "-", "-", "-", "-"}
	if !x.GetReady() {
		r.ready = x.GetReason()
	}
	if x.SampleAge != nil {
		r.sample = x.GetSampleAge().AsDuration().Round(100 * time.Millisecond).String()
	}
	if i := x.GetIndex(); i != nil {
		r.cache, r.blocks, r.lag = follows(i), fmt.Sprint(i.GetBlocks()), ms(i.GetLag())
	}
	if l := x.Load; l != nil {
		r.queue, r.running, r.kv = fmt.Sprintf("%.0f", l.Waiting), fmt.Sprintf("%.0f", l.Running), fmt.Sprintf("%.0f %%", 100*l.KvUsage)
	}
	if len(x.Means) > 0 {
		l := x.Means[0].GetLoad()
		r.meanQueue, r.meanRunning, r.meanKV = fmt.Sprintf("%.1f", l.GetWaiting()), fmt.Sprintf("%.1f", l.GetRunning()), fmt.Sprintf("%.0f %%", 100*l.GetKvUsage())
	}
	return r
}

// listCommand lists something of the catalog that a control plane runs with, or of
// the resources of a folder.
func listCommand[T any](name, short string, list func(*resources.Catalog) []T, live func(*adminv1.GetCatalogResponse) []T) *cobra.Command {
	cmd := &cobra.Command{
		Use: name, Short: short, Args: cobra.NoArgs,
		Long: short + ": of the running control plane, or with --config of a folder that nobody runs.",
	}
	out, config, admin := outputFlag(cmd), configFlag(cmd), adminFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		var rows []T
		if *config != "" {
			c, err := loadConfig(cmd.ErrOrStderr(), *config)
			if err != nil {
				return err
			}
			rows = list(c)
		} else {
			c, err := ask(cmd.Context(), admin, func(ctx context.Context, c adminv1connect.AdminServiceClient) (*adminv1.GetCatalogResponse, error) {
				return c.GetCatalog(ctx, &adminv1.GetCatalogRequest{})
			})
			if err != nil {
				return err
			}
			for _, p := range c.Problems {
				fmt.Fprintln(cmd.ErrOrStderr(), problem(p))
			}
			rows = live(c)
		}
		return out.print(cmd.OutOrStdout(), rows, func(w io.Writer) error { return printRows(w, rows) })
	}
	return cmd
}

// problem is one in a line, as kinfctl validate writes it.
func problem(p *adminv1.Problem) string {
	x := resources.Problem{File: p.File, Line: int(p.Line), Resource: p.Resource, Field: p.Field, Message: p.Message}
	if p.Error {
		x.Severity = resources.Error
	}
	return x.String()
}

func printRows[T any](w io.Writer, rows []T) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for i, r := range rows {
		header, cells := any(r).(tableRow).table()
		if i == 0 {
			fmt.Fprintln(t, strings.Join(header, "\t"))
		}
		for j := range cells {
			if cells[j] == "" {
				cells[j] = "-"
			}
		}
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	if len(rows) == 0 {
		fmt.Fprintln(t, "none")
	}
	return t.Flush()
}

// tableRow is a line of a table.
type tableRow interface {
	table() (header, cells []string)
}

type poolRow struct {
	Name     string   `json:"name"`
	Implicit bool     `json:"implicit"` // made up for a namespace without pools
	Members  []string `json:"members"`
	Workers  int      `json:"workers"`
	Ready    *int     `json:"ready,omitempty"` // nil: nobody was asked
	Models   []string `json:"models"`
	Policies []string `json:"policies"`
}

func (p poolRow) table() (header, cells []string) {
	name, workers := p.Name, fmt.Sprint(p.Workers)
	if p.Implicit {
		name += " (implicit)"
	}
	if p.Ready != nil {
		workers = fmt.Sprintf("%d of %d ready", *p.Ready, p.Workers)
	}
	return []string{"pool", "members", "workers", "models", "policies"},
		[]string{name, strings.Join(p.Members, ", "), workers, strings.Join(p.Models, ", "), strings.Join(p.Policies, ", ")}
}

func poolsOf(c *resources.Catalog) []poolRow {
	out := []poolRow{}
	for _, p := range c.Pools {
		r := poolRow{Name: p.Name, Implicit: p.Implicit, Members: []string{}, Models: plan.ModelsOf(p.Members), Policies: bases(plan.PolicyNames(p.Name, c.Policies))}
		for _, m := range p.Members {
			if m.Set != nil {
				r.Members = append(r.Members, plan.Base(m.Set.Name))
				for i := range m.Set.Workers {
					r.Workers += len(m.Set.Workers[i].Ranks)
				}
			} else {
				r.Members = append(r.Members, plan.Base(m.Provider.Name))
			}
		}
		out = append(out, r)
	}
	return out
}

func livePools(c *adminv1.GetCatalogResponse) []poolRow {
	out := []poolRow{}
	for _, p := range c.Pools {
		ready := int(p.ReadyWorkers)
		out = append(out, poolRow{
			Name: p.Name, Implicit: p.Implicit, Members: bases(append(append([]string{}, p.WorkerSets...), p.Providers...)), Workers: int(p.Workers), Ready: &ready,
			Models: list(p.Models), Policies: bases(p.Policies),
		})
	}
	return out
}

// bases are names without their namespace.
func bases(names []string) []string {
	out := make([]string, len(names))
	for i, n := range names {
		out[i] = plan.Base(n)
	}
	return out
}

// list is not nil, so that JSON has [] and not null.
func list(names []string) []string { return append([]string{}, names...) }

type tenantRow struct {
	Name       string       `json:"name"`
	Parent     string       `json:"parent,omitempty"`
	QoS        v1alpha1.QoS `json:"qos,omitempty"`
	Weight     int32        `json:"weight"`
	CostCenter string       `json:"costCenter,omitempty"`
	Limits     []string     `json:"limits"`
}

func (r tenantRow) table() (header, cells []string) {
	return []string{"tenant", "parent", "qos", "weight", "cost center", "limits"},
		[]string{r.Name, r.Parent, string(r.QoS), fmt.Sprint(r.Weight), r.CostCenter, strings.Join(r.Limits, ", ")}
}

func tenantsOf(c *resources.Catalog) []tenantRow {
	out := []tenantRow{}
	for _, t := range c.Tenants {
		r := tenantRow{Name: t.Name, QoS: t.QoS, Weight: t.Spec.Weight, CostCenter: t.Spec.CostCenter, Limits: []string{}}
		if t.Spec.ParentRef != nil {
			r.Parent = string(t.Spec.ParentRef.Name)
		}
		for _, l := range t.Spec.Limits {
			r.Limits = append(r.Limits, string(l.Name))
		}
		out = append(out, r)
	}
	return out
}

func liveTenants(c *adminv1.GetCatalogResponse) []tenantRow {
	out := []tenantRow{}
	for _, t := range c.Tenants {
		out = append(out, tenantRow{t.Name, plan.Base(t.Parent), v1alpha1.QoS(t.Qos), int32(t.Weight), t.CostCenter, list(t.Limits)})
	}
	return out
}

type policyRow struct {
	Name   string   `json:"name"`
	Pools  []string `json:"pools"` // empty: all of the namespace
	DryRun bool     `json:"dryRun"`
	Rules  []string `json:"rules"`
}

func (r policyRow) table() (header, cells []string) {
	pools, dry := "all", ""
	if len(r.Pools) > 0 {
		pools = strings.Join(r.Pools, ", ")
	}
	if r.DryRun {
		dry = "yes"
	}
	return []string{"policy", "pools", "dry run", "rules"}, []string{r.Name, pools, dry, strings.Join(r.Rules, ", ")}
}

func policiesOf(c *resources.Catalog) []policyRow {
	out := []policyRow{}
	for _, p := range c.Policies {
		out = append(out, policyRow{p.ID(), append([]string{}, p.Targets...), p.DryRun, p.Rules()})
	}
	return out
}

func livePolicies(c *adminv1.GetCatalogResponse) []policyRow {
	out := []policyRow{}
	for _, p := range c.Policies {
		r := policyRow{p.Name, list(p.Pools), p.DryRun, []string{}}
		for _, rule := range p.Rules {
			r.Rules = append(r.Rules, rule.Name)
		}
		out = append(out, r)
	}
	return out
}
