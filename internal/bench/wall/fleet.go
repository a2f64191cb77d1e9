// Package wall runs the benchmark's workloads in wall time: real text over
// real HTTP to simulated workers whose time passes a given factor faster than
// real hardware's, through the whole control plane or, for the baselines,
// straight to the workers as a Kubernetes Service would send it.
//
// The benchmark command and the demo use it. Results are in simulated seconds
// (wall seconds times the factor), so that they compare with virtual time. What
// the host itself spends is multiplied by the factor too: a factor that is too
// high for the machine shows as longer times. One run at a time.
package wall

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/fleetsim/model"
)

// Model is the model's name for clients.
const Model = "sim-model"

// Fleet is a set of simulated workers on loopback ports.
type Fleet struct {
	Workers []*fleetsim.Worker
	Scale   float64
}

// StartFleet starts n workers whose time passes scale times faster than real
// time, until Stop or the end of ctx.
func StartFleet(ctx context.Context, n int, profile engine.Profile, scale float64, seed int64) (*Fleet, error) {
	f := &Fleet{Scale: scale}
	for i := range n {
		w, err := fleetsim.Start(ctx, fleetsim.Config{Name: fmt.Sprint("sim-", i), Profile: profile, TimeScale: scale, Seed: seed + int64(i),
			Model: Model, KeepAlive: time.Minute})
		if err != nil {
			f.Stop()
			return nil, err
		}
		f.Workers = append(f.Workers, w)
	}
	return f, nil
}

// Stop stops all workers.
func (f *Fleet) Stop() {
	for _, w := range f.Workers {
		w.Stop()
	}
}

// URLs are the workers' base URLs.
func (f *Fleet) URLs() []string {
	var urls []string
	for _, w := range f.Workers {
		urls = append(urls, w.URL())
	}
	return urls
}

// WriteConfig writes the resources that describe the fleet to a folder, for
// the control plane to serve.
func (f *Fleet) WriteConfig(dir string) error {
	var endpoints []Endpoint
	for _, w := range f.Workers {
		endpoints = append(endpoints, Endpoint{w.Name(), w.Addr(), w.EventsAddr(0), w.ReplayAddr(0)})
	}
	// Load is sampled each 250 ms of simulated time, but not faster than the
	// resource allows.
	return WriteConfig(dir, Model, endpoints, max(time.Duration(250/f.Scale*float64(time.Millisecond)), 50*time.Millisecond))
}

// Endpoint is a worker in a resource.
type Endpoint struct{ Name, Address, Events, Replay string }

// WriteConfig writes an InferenceWorkerSet over static endpoints. Endpoints
// without an events address publish none.
func WriteConfig(dir, modelName string, endpoints []Endpoint, scrape time.Duration) error {
	tokenizer, err := model.Dir()
	if err != nil {
		return err
	}
	var b strings.Builder
	fmt.Fprintf(&b, `apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceWorkerSet
metadata: { name: sim, namespace: bench }
spec:
  models: [ { name: %q } ]
  tokenizer: { path: %q }
  accelerator: { class: l40s }
  metrics: { interval: %dms }
  endpoints:
`, modelName, tokenizer, scrape.Milliseconds())
	for _, e := range endpoints {
		fmt.Fprintf(&b, "    - { name: %q, address: %q", e.Name, e.Address)
		if e.Events != "" {
			fmt.Fprintf(&b, ", kvEvents: %q, kvReplay: %q", e.Events, e.Replay)
		}
		b.WriteString(" }\n")
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "workers.yaml"), []byte(b.String()), 0o644)
}

// TenantPath is where a tenant of WriteTenants sends to.
func TenantPath(tenant int) string {
	if tenant == 0 {
		return ""
	}
	return fmt.Sprint("/light", tenant)
}

// WriteTenants writes tenants that are told apart by path: that of the load, and
// as many light ones.
func WriteTenants(dir string, light int) error {
	var b strings.Builder
	for i := range light + 1 {
		fmt.Fprintf(&b, `---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: tenant%d, namespace: bench }
spec: {}
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: GatewayBackend
metadata: { name: backend%d, namespace: bench }
spec:
  poolRef: { name: default }
  authentication: { anonymous: { tenant: tenant%d } }
`, i, i, i)
		if i > 0 {
			fmt.Fprintf(&b, "  pathPrefix: %s\n", TenantPath(i))
		}
	}
	return os.WriteFile(filepath.Join(dir, "tenants.yaml"), []byte(b.String()), 0o644)
}

// WaitServing waits until the gateway lists the model as one that it serves,
// and answers a first request.
func WaitServing(ctx context.Context, url string, probe func(ctx context.Context) error) error {
	var last error
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/v1/models", nil)
		if err != nil {
			return err
		}
		res, err := http.DefaultClient.Do(req)
		if err == nil {
			res.Body.Close()
			if err = probe(ctx); err == nil {
				return nil
			}
		}
		last = err
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("%s does not serve: %w", url, last)
		}
	}
}
