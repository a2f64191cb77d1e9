package charts

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/testenv"
)

// The controllers of the API make the Pods of each value file, kwok runs them, and
// `helm upgrade --install --wait` ends once all are ready, under the restricted
// standard.
func (c *cluster) testReady(t *testing.T) {
	c.Nodes(t, "deployment-controller", "replicaset-controller", "disruption-controller", "persistentvolumeclaim-protection-controller")
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { c.schedule(ctx, t) })
	defer wg.Wait()
	defer cancel()
	for _, name := range slices.Sorted(maps.Keys(variants)) {
		t.Run(name, func(t *testing.T) {
			begun := time.Now()
			c.install(t, append(slices.Clone(variants[name]), "--wait", "--timeout", "5m")...)
			took := time.Since(begun)
			ready := strings.Fields(c.must(t, "", "get", "pods", "-n", namespace, "-o", `jsonpath={range .items[?(@.status.conditions[1].status=="True")]}{.metadata.name}{"\n"}{end}`))
			if len(ready) < len(services) {
				t.Errorf("ready: %v, want a Pod of each service", ready)
			}
			t.Logf("%d Pods ready after %v", len(ready), took.Round(100*time.Millisecond))
			c.uninstall(t)
			// Nobody collects what belonged to it.
			c.must(t, "", "delete", "replicasets,pods,persistentvolumeclaims", "--all", "-n", namespace, "--force", "--grace-period=0", "--wait=false")
			c.must(t, "", "wait", "--for=delete", "pods,persistentvolumeclaims", "--all", "-n", namespace, "--timeout=5m")
		})
	}
}

// schedule puts Pods on the node, whose engine is up. There is no other scheduler.
func (c *cluster) schedule(ctx context.Context, t *testing.T) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for n := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		_, raw, err := c.Call(http.MethodGet, "/api/v1/namespaces/"+namespace+"/pods?fieldSelector=spec.nodeName%3D", "", nil)
		var list struct {
			Items []struct{ Metadata struct{ Name string } }
		}
		if err != nil || json.Unmarshal(raw, &list) != nil {
			continue // it is asked again
		}
		for _, p := range list.Items {
			n++
			body := fmt.Sprintf(`{"apiVersion":"v1","kind":"Binding","metadata":{"name":%q,"annotations":{"kinference.test/address":"10.1.%d.%d","kinference.test/engine":"up"}},"target":{"kind":"Node","name":%q}}`,
				p.Metadata.Name, n/250, n%250+1, testenv.Node)
			if code, answer, err := c.Call(http.MethodPost, "/api/v1/namespaces/"+namespace+"/pods/"+p.Metadata.Name+"/binding", "application/json", []byte(body)); err != nil || code >= 300 && code != http.StatusNotFound && code != http.StatusConflict {
				t.Errorf("bind %s: %d %v %.200s", p.Metadata.Name, code, err, answer)
			}
		}
	}
}
