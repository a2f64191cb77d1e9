// Package router is the service that decides which worker serves a request.
//
// It compiles the resources into a catalog, follows the state of the workers,
// and for each request evaluates what may serve it and lets internal/schedule
// pick the worker that will answer soonest. Route returns when that worker can
// begin: until then the request waits here. Ingress calls Route and Report;
// ingress and relay follow WatchCatalog. The service keeps its ledger in
// memory only. It works without kvtracker, by load and by what it routed
// itself, and keeps the last good catalog when the resources are broken.
package router

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/schedule"
)

// Config is set by operators. The zero value of each field means its default.
type Config struct {
	// Listen is the address of the RPC port.
	Listen string
	// Listener is an open port to use instead of Listen.
	Listener net.Listener
	// ConfigDir is the folder of YAML with the resources; this or Kubernetes is
	// required.
	ConfigDir string
	// Kubernetes reads the resources from the Kubernetes API and writes their
	// status. The fields below it go with it.
	Kubernetes bool
	// Kubeconfig is a file that says how to reach the API; empty: as a Pod.
	Kubeconfig string
	// Namespaces to follow, with commas between; empty: all.
	Namespaces string
	// LeaseNamespace is that of the Leases by which replicas know each other.
	LeaseNamespace string
	// Identity of this replica, and the uid of its Pod, which may be empty.
	Identity, PodUID string
	// WebhookListen is the address of the validating webhook; empty: none.
	WebhookListen string
	// WebhookCert and WebhookKey are PEM files.
	WebhookCert, WebhookKey string
	// AdminAPIListen is the address of the admin API; empty: none. AdminAPIListener
	// is an open port to use instead.
	AdminAPIListen   string
	AdminAPIListener net.Listener
	// AdminTokens is a file of hashed tokens that the admin API lets in; empty: none.
	// In Kubernetes its users are let in, as RBAC says.
	AdminTokens string
	// AdminSecret is a token that may do all there; empty: none. The all in one
	// binary makes one.
	AdminSecret string
	// AdminAudit is the file to which the admin API appends who changed what; empty:
	// standard error.
	AdminAudit string
	// NoConsole leaves out the web page on the admin API's port.
	NoConsole bool
	// AccountingURL lists the base URLs of accounting, comma separated, of which the admin
	// API passes on usage and objectives; empty: it does not.
	AccountingURL string
	// KVTrackerURL lists the base URLs of the kvtrackers, shards and replicas alike, comma
	// separated; empty: route without it.
	KVTrackerURL string
	// NATSURL lists NATS servers over which routers tell each other what they do,
	// comma separated; empty: this one is alone, or goes by the gauges.
	NATSURL string
	// NATS is how to get into it.
	NATS bus.Access
	// MatchTimeout is how long a decision waits for kvtracker.
	MatchTimeout time.Duration
	// ProbeInterval is the time between probes of the workers while
	// kvtracker does not tell whether they are ready.
	ProbeInterval time.Duration
	// Policy is one of schedule.Policies().
	Policy string
	// Seed of the random policies.
	Seed uint64
	// TimeScale is how many times faster than real hardware the workers run;
	// only for simulated fleets.
	TimeScale float64
	// Lease is how long a request counts as in flight without any report.
	Lease time.Duration
	// MaxWaiting bounds the requests that wait for a worker, MaxWait how long one may,
	// by what is predicted and by what comes about; negative: as long as it takes.
	MaxWaiting int
	MaxWait    time.Duration
	// DecisionLog is the number of decisions that can be explained.
	DecisionLog int
}

// DefaultAdminAPI is where the admin API is found unless set otherwise.
const DefaultAdminAPI = "127.0.0.1:7107"

func (c *Config) withDefaults() Config {
	d := *c
	d.Listen = def(d.Listen, "127.0.0.1:7102")
	d.MatchTimeout = def(d.MatchTimeout, 20*time.Millisecond)
	d.ProbeInterval = def(d.ProbeInterval, 2*time.Second)
	d.Identity = def(d.Identity, identity())
	d.LeaseNamespace = def(d.LeaseNamespace, "kinference")
	d.Policy = def(d.Policy, schedule.K2)
	d.TimeScale = def(d.TimeScale, 1)
	d.Lease = def(d.Lease, 30*time.Minute)
	d.MaxWaiting = def(d.MaxWaiting, 4096)
	d.MaxWait = max(0, def(d.MaxWait, 2*time.Minute))
	d.DecisionLog = def(d.DecisionLog, 2048)
	return d
}

func def[T comparable](v, d T) T {
	var zero T
	if v == zero {
		return d
	}
	return v
}

// Flags declares the settings on fs.
func (c *Config) Flags(fs *flag.FlagSet) {
	d := (&Config{}).withDefaults()
	fs.StringVar(&c.Listen, "listen", d.Listen, "address of the RPC port")
	fs.StringVar(&c.ConfigDir, "config", "", "folder of YAML files with the resources; this or kubernetes is required")
	fs.BoolVar(&c.Kubernetes, "kubernetes", false, "read the resources from the Kubernetes API and write their status")
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "", "file that says how to reach the Kubernetes API; empty: as a Pod")
	fs.StringVar(&c.Namespaces, "namespaces", "", "namespaces to follow, with commas between; empty: all")
	fs.StringVar(&c.LeaseNamespace, "lease-namespace", d.LeaseNamespace, "namespace of the replicas' Leases")
	fs.StringVar(&c.Identity, "identity", "", "name of this replica, such as its Pod's; empty: the host's name")
	fs.StringVar(&c.PodUID, "pod-uid", "", "uid of this replica's Pod, with which its Lease goes")
	fs.StringVar(&c.WebhookListen, "webhook-listen", "", "address of the validating webhook; empty: none")
	fs.StringVar(&c.WebhookCert, "webhook-cert", "", "file with the webhook's certificate (PEM)")
	fs.StringVar(&c.WebhookKey, "webhook-key", "", "file with the webhook's key (PEM)")
	fs.StringVar(&c.AdminAPIListen, "admin-api-listen", DefaultAdminAPI, "address of the admin API, for kinfctl; empty: none")
	fs.StringVar(&c.AdminTokens, "admin-tokens", "", "file of tokens that the admin API lets in: a line for each with NAME, ROLE (read or operate) and SHA256")
	fs.StringVar(&c.AdminAudit, "admin-audit", "", "file to which the admin API appends who changed what; empty: standard error")
	fs.BoolVar(&c.NoConsole, "no-console", false, "leave out the web page on the admin API's port, /console/")
	fs.StringVar(&c.AccountingURL, "accounting-url", "", "base URLs of accounting, comma separated, whose usage and objectives the admin API passes on; empty: it does not")
	fs.StringVar(&c.KVTrackerURL, "kvtracker-url", "", "base URLs of the kvtrackers, shards and replicas alike, comma separated; empty: route by load and own knowledge")
	fs.StringVar(&c.NATSURL, "nats-url", "", "URLs of NATS over which routers tell each other what they do, comma separated; empty: they see each other in the workers' gauges only")
	c.NATS.Flags(fs)
	fs.DurationVar(&c.MatchTimeout, "match-timeout", d.MatchTimeout, "how long a decision waits for kvtracker")
	fs.DurationVar(&c.ProbeInterval, "probe-interval", d.ProbeInterval, "time between probes of the workers while kvtracker does not say that they are ready")
	fs.StringVar(&c.Policy, "policy", d.Policy, "scheduling policy: "+strings.Join(schedule.Policies(), ", "))
	fs.Uint64Var(&c.Seed, "seed", 0, "seed of the random policies")
	fs.Float64Var(&c.TimeScale, "time-scale", d.TimeScale, "how many times faster than real hardware the workers run; for simulated fleets only")
	fs.DurationVar(&c.Lease, "lease", d.Lease, "how long a request counts as in flight without any report")
	fs.IntVar(&c.MaxWaiting, "max-waiting", d.MaxWaiting, "most requests that wait for a worker in the router")
	fs.DurationVar(&c.MaxWait, "max-wait", d.MaxWait, "how long a request may wait for a worker in the router, by what is predicted and by what comes about; negative: as long as it takes")
	fs.IntVar(&c.DecisionLog, "decision-log", d.DecisionLog, "number of decisions that can be explained")
}

// Validate reports all faults of the settings.
func (c *Config) Validate() error {
	var faults []error
	switch {
	case (c.ConfigDir == "") != c.Kubernetes:
		faults = append(faults, errors.New("config: give a folder of resources, or kubernetes"))
	case !c.Kubernetes && (c.Kubeconfig != "" || c.WebhookListen != ""):
		faults = append(faults, errors.New("kubeconfig, webhook-listen: only with kubernetes"))
	case c.WebhookListen != "" && (c.WebhookCert == "" || c.WebhookKey == ""):
		faults = append(faults, errors.New("webhook-cert, webhook-key: the webhook needs both"))
	}
	if err := c.checkAdmin(); err != nil {
		faults = append(faults, err)
	}
	for name, list := range map[string]string{"kvtracker-url": c.KVTrackerURL, "accounting-url": c.AccountingURL} {
		if list == "" {
			continue
		}
		if err := rpc.CheckURLs(list); err != nil {
			faults = append(faults, fmt.Errorf("%s: %w", name, err))
		}
	}
	for name, bad := range map[string]bool{
		"match-timeout": c.MatchTimeout < 0, "probe-interval": c.ProbeInterval < 0, "time-scale": c.TimeScale < 0,
		"lease": c.Lease < 0, "max-waiting": c.MaxWaiting < 0, "decision-log": c.DecisionLog < 0,
	} {
		if bad {
			faults = append(faults, fmt.Errorf("%s: must not be negative", name))
		}
	}
	return errors.Join(faults...)
}
