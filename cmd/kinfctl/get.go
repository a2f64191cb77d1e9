package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/internal/rpc"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
)

// askTimeout bounds how long a router that does not answer is waited for.
const askTimeout = 5 * time.Second

func getCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "get", Short: "List workers, pools, tenants or policies"}
	workers := &cobra.Command{Use: "workers", Short: "List the workers as the router sees them", Args: cobra.NoArgs}
	out, routerURL := outputFlag(workers), routerFlag(workers)
	workers.RunE = func(cmd *cobra.Command, _ []string) error {
		s, err := askStatus(cmd.Context(), *routerURL)
		if err != nil {
			return err
		}
		return out.print(cmd.OutOrStdout(), &routerv1.StatusResponse{Workers: s.GetWorkers()}, func(w io.Writer) error { return printWorkers(w, s.GetWorkers()) })
	}
	cmd.AddCommand(workers,
		listCommand("pools", "List the pools of a folder with what they serve", poolsOf),
		listCommand("tenants", "List the tenants of a folder", tenantsOf),
		listCommand("policies", "List the policies of a folder in the order in which they apply", policiesOf))
	return cmd
}

// askStatus asks a router for the state of the fleet.
func askStatus(ctx context.Context, routerURL string) (*routerv1.StatusResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	s, err := rpc.Client(ctx, routerURL, routerv1connect.NewRouterServiceClient).Status(ctx, &routerv1.StatusRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask router: %w", err)
	}
	return s, nil
}

func printWorkers(w io.Writer, list []*routerv1.WorkerStatus) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "worker\tset\tready\tsample\tcontext\tcache\tblocks\tlag\turl")
	for _, x := range list {
		r := rowOf(x)
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", x.GetWorker(), x.GetWorkerSet(), r.ready, r.sample, number(x.GetMaxModelLen()), r.cache, r.blocks, r.lag, x.GetUrl())
	}
	return t.Flush()
}

// row is the state of a worker in words.
type row struct{ ready, sample, cache, blocks, lag string }

func rowOf(x *routerv1.WorkerStatus) row {
	r := row{"yes", "-", "unknown", "-", "-"}
	if !x.GetReady() {
		r.ready = x.GetReason()
	}
	if x.SampleAge != nil {
		r.sample = x.GetSampleAge().AsDuration().Round(100 * time.Millisecond).String()
	}
	if i := x.GetIndex(); i != nil {
		r.cache, r.blocks, r.lag = follows(i), fmt.Sprint(i.GetBlocks()), ms(i.GetLag())
	}
	return r
}

// listCommand lists something of the resources of a folder.
func listCommand[T any](name, short string, list func(*resources.Catalog) []T) *cobra.Command {
	cmd := &cobra.Command{Use: name + " --config DIR", Short: short, Args: cobra.NoArgs}
	out, config := outputFlag(cmd), configFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if *config == "" {
			return usageError{fmt.Errorf("%s are read from files: give their folder with --config", name)}
		}
		c, err := loadConfig(cmd.ErrOrStderr(), *config)
		if err != nil {
			return err
		}
		rows := list(c)
		return out.print(cmd.OutOrStdout(), rows, func(w io.Writer) error { return printRows(w, rows) })
	}
	return cmd
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
	Models   []string `json:"models"`
}

func (p poolRow) table() (header, cells []string) {
	name := p.Name
	if p.Implicit {
		name += " (implicit)"
	}
	return []string{"pool", "members", "workers", "models"}, []string{name, strings.Join(p.Members, ", "), fmt.Sprint(p.Workers), strings.Join(p.Models, ", ")}
}

func poolsOf(c *resources.Catalog) []poolRow {
	out := []poolRow{}
	for _, p := range c.Pools {
		r := poolRow{Name: p.Name, Implicit: p.Implicit, Members: []string{}, Models: []string{}}
		for _, m := range p.Members {
			if m.Set != nil {
				r.Members = append(r.Members, base(m.Set.Name))
				r.Workers += len(m.Set.Workers)
			} else {
				r.Members = append(r.Members, base(m.Provider.Name))
			}
		}
		for _, b := range backendsOf(p.Members) {
			r.Models = append(r.Models, b.Models...)
		}
		slices.Sort(r.Models)
		r.Models = slices.Compact(r.Models)
		out = append(out, r)
	}
	return out
}

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
