package router

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sync/errgroup"

	"github.com/kinference/kinference/internal/kube"
	"github.com/kinference/kinference/internal/kube/review"
	"github.com/kinference/kinference/internal/plan"
	"github.com/kinference/kinference/internal/policy"
	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/internal/rpc"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	"github.com/kinference/kinference/services/router/internal/access"
	"github.com/kinference/kinference/services/router/internal/admin"
)

// maxProblems bounds the problems that the admin API tells.
const maxProblems = 256

// serveAdmin serves the admin API, where a port is set for it.
func (s *server) serveAdmin(ctx context.Context, g *errgroup.Group) error {
	if s.AdminAPIListen == "" && s.AdminAPIListener == nil {
		return nil
	}
	l, err := rpc.Listen(s.AdminAPIListener, s.AdminAPIListen)
	if err != nil {
		return fmt.Errorf("admin API: %w", err)
	}
	audit := os.Stderr
	if s.AdminAudit != "" {
		if audit, err = os.OpenFile(s.AdminAudit, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600); err != nil {
			return errors.Join(fmt.Errorf("open the audit log: %w", err), l.Close())
		}
	}
	sources, err := s.sources(ctx, g)
	if err != nil {
		return errors.Join(err, l.Close())
	}
	if len(sources) == 0 {
		s.log.Warn("the admin API lets nobody in: there are no admin tokens and no Kubernetes to ask", "addr", l.Addr().String())
	}
	settings := admin.Settings{Router: view{s}, Keys: view{s}, Decisions: s.decisions, Access: sources, Audit: admin.NewAudit(audit), Refused: s.metrics.adminRefused,
		AccountingURL: s.AccountingURL, Console: !s.NoConsole}
	if !loopback(l.Addr().String()) && rpc.TLS(ctx) == nil {
		s.log.Warn("other hosts may reach the admin API, and tokens are shown to it in clear: put it behind TLS or a mesh", "addr", l.Addr().String())
	}
	g.Go(func() error {
		s.log.Info("admin API open", "addr", l.Addr().String())
		err := admin.Serve(ctx, l, settings)
		if audit != os.Stderr {
			err = errors.Join(err, audit.Close())
		}
		return err
	})
	return nil
}

// sources are what knows tokens.
func (s *server) sources(ctx context.Context, g *errgroup.Group) (access.Sources, error) {
	var out access.Sources
	if s.AdminSecret != "" {
		out = append(out, access.Secret(s.AdminSecret))
	}
	if s.AdminTokens != "" {
		tokens, err := access.NewTokens(s.AdminTokens, s.log)
		if err != nil {
			return nil, fmt.Errorf("admin-tokens: %w", err)
		}
		g.Go(func() error { return tokens.Run(ctx) })
		out = append(out, tokens)
	}
	if s.Kubernetes {
		config, err := kube.Connect(s.Kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("find the Kubernetes API: %w", err)
		}
		client, err := kube.Client(config)
		if err != nil {
			return nil, fmt.Errorf("make a client of the Kubernetes API: %w", err)
		}
		out = append(out, access.NewKubernetes(review.New(client)))
	}
	return out, nil
}

// checkAdmin reports what is wrong with the settings of the admin API: other hosts
// must not reach a port that nobody guards.
func (c *Config) checkAdmin() error {
	if c.AdminTokens != "" || c.AdminSecret != "" || c.Kubernetes {
		return nil
	}
	addr := c.AdminAPIListen
	if c.AdminAPIListener != nil {
		addr = c.AdminAPIListener.Addr().String()
	}
	if addr == "" || loopback(addr) {
		return nil
	}
	return errors.New("admin-api-listen: an address that other hosts reach needs admin-tokens, or kubernetes")
}

func loopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// view is the router as the admin API sees it.
type view struct{ s *server }

var _ admin.Router = view{}

// Status implements admin.Router.
func (v view) Status() *adminv1.StatusResponse { return v.s.status() }

// Evaluate implements admin.Router.
func (v view) Evaluate(ctx context.Context, r *adminv1.EvaluateRequest) (*adminv1.Decision, error) {
	return v.s.evaluated(ctx, r)
}

// InspectIndex implements admin.Router.
func (v view) InspectIndex(ctx context.Context, r *adminv1.InspectIndexRequest) (*adminv1.InspectIndexResponse, error) {
	return v.s.inspectIndex(ctx, r)
}

// Catalog implements admin.Router.
func (v view) Catalog() *adminv1.GetCatalogResponse {
	out := &adminv1.GetCatalogResponse{}
	v.s.mu.Lock()
	problems := v.s.problems
	v.s.mu.Unlock()
	for _, p := range problems[:min(len(problems), maxProblems)] {
		out.Problems = append(out.Problems, &adminv1.Problem{File: p.File, Line: uint32(max(0, p.Line)), Resource: p.Resource, Field: p.Field, Message: p.Message, Error: p.Severity == resources.Error})
	}
	version, _ := v.s.catalog.Current()
	if version == nil {
		return out
	}
	out.Version = version.Number
	c := version.Resources
	all, ready := map[string]uint32{}, map[string]uint32{}
	now := v.s.now()
	for _, set := range c.Sets {
		w := &adminv1.WorkerSet{Name: set.Name, Accelerator: set.Class}
		for _, p := range set.Profiles {
			w.Models = append(w.Models, p.Names...)
		}
		for i := range set.Workers {
			for _, id := range set.Workers[i].Ranks {
				all[set.Name]++
				if v.s.fleet.Lookup(now, set.Workers[i].UID, id).Ready && !set.Workers[i].NotReady {
					ready[set.Name]++
				}
			}
		}
		w.Workers, w.ReadyWorkers = all[set.Name], ready[set.Name]
		out.WorkerSets = append(out.WorkerSets, w)
	}
	for _, p := range c.Providers {
		x := &adminv1.Provider{Name: p.Name, Schema: string(p.Spec.Schema), Concurrency: uint32(p.Spec.Concurrency)}
		for _, m := range p.Models {
			x.Models = append(x.Models, m.Names...)
		}
		out.Providers = append(out.Providers, x)
	}
	for _, p := range c.Pools {
		out.Pools = append(out.Pools, poolOf(p, c.Policies, all, ready))
	}
	for _, p := range c.Policies {
		x := &adminv1.Policy{Name: p.ID(), DryRun: p.DryRun, Pools: p.Targets}
		for _, name := range p.Rules() {
			rule := &adminv1.Rule{Name: name, Action: policy.Route.String()}
			if p.Rejects(name) {
				rule.Action = policy.Reject.String()
			}
			x.Rules = append(x.Rules, rule)
		}
		out.Policies = append(out.Policies, x)
	}
	for _, t := range c.Tenants {
		x := &adminv1.Tenant{Name: t.Name, Qos: string(t.QoS), Weight: uint32(max(0, t.Spec.Weight)), CostCenter: t.Spec.CostCenter}
		if t.Parent != nil {
			x.Parent = t.Parent.Name
		}
		for _, l := range t.Spec.Limits {
			x.Limits = append(x.Limits, string(l.Name))
		}
		out.Tenants = append(out.Tenants, x)
	}
	for _, b := range c.Backends {
		x := &adminv1.Backend{Name: b.Name}
		if b.Pool != nil {
			x.Pool = b.Pool.Name
		}
		out.Backends = append(out.Backends, x)
	}
	return out
}

func poolOf(p *resources.Pool, policies []*policy.Policy, all, ready map[string]uint32) *adminv1.Pool {
	out := &adminv1.Pool{Name: p.Name, Implicit: p.Implicit, Models: plan.ModelsOf(p.Members), Policies: plan.PolicyNames(p.Name, policies)}
	for _, m := range p.Members {
		if m.Set != nil {
			out.WorkerSets = append(out.WorkerSets, m.Set.Name)
			out.Workers += all[m.Set.Name]
			out.ReadyWorkers += ready[m.Set.Name]
		} else {
			out.Providers = append(out.Providers, m.Provider.Name)
		}
	}
	return out
}
