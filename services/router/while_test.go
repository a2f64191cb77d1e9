package router_test

import (
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/router"
)

// What happens to the resources while requests wait, or are just being decided.

// routed is how a Route in the background ended.
type routed struct {
	resp *routerv1.RouteResponse
	err  error
}

func (w *world) routing(r *routerv1.RouteRequest) <-chan routed {
	out := make(chan routed, 1)
	go func() {
		resp, err := w.client.Route(w.t.Context(), r)
		out <- routed{resp, err}
	}()
	return out
}

func (w *world) ended(out <-chan routed) routed {
	w.t.Helper()
	select {
	case r := <-out:
		return r
	case <-time.After(patience):
		w.t.Fatal("it still waits")
	}
	return routed{}
}

func (w *world) queued(n uint32) {
	w.t.Helper()
	eventually(w.t, "they wait", func() bool {
		s, err := w.admin.Status(w.t.Context(), &adminv1.StatusRequest{})
		if err != nil {
			w.t.Fatal(err)
		}
		return s.Queued == n
	})
}

// ruled waits for a catalog with a rule of a name.
func (w *world) ruled(name string) {
	w.t.Helper()
	eventually(w.t, "the rule is in the catalog", func() bool {
		c, err := w.admin.GetCatalog(w.t.Context(), &adminv1.GetCatalogRequest{})
		if err != nil {
			w.t.Fatal(err)
		}
		return len(c.Policies) == 1 && c.Policies[0].Rules[0].Name == name
	})
}

func rules(list string) string {
	return "apiVersion: kinference.buoyant.io/v1alpha1\nkind: InferencePolicy\nmetadata: { name: p, namespace: demo }\nspec:\n  rules:\n    - " + list + "\n"
}

// Who waits is served by a worker that joins, and is refused when a rule that comes
// meanwhile does so.
func TestCatalogChangesWhileWaiting(t *testing.T) {
	down, up := newEngine(t), newEngine(t)
	down.set(503)
	w := start(t, router.Config{}, down)
	w.write("policy.yaml", rules("{ name: waits, route: { onEmpty: Queue, queue: { timeout: 5m } } }"))
	w.ruled("waits")
	first := w.routing(request("1"))
	w.queued(1)
	w.write("sim.yaml", sim(down, up))
	if r := w.ended(first); r.err != nil || workers(r.resp.Endpoints)[0] != "demo.sim.b/0" {
		t.Errorf("a worker joined: %v, %v", r.resp, r.err)
	}
	up.set(503)
	w.until("m not ready", func(c *routerv1.Catalog) bool { return !modelReady("m")(c) })
	second := w.routing(request("2"))
	w.queued(1)
	w.write("policy.yaml", rules("{ name: closed, reject: { reason: Closed } }"))
	if r := w.ended(second); connect.CodeOf(r.err) != connect.CodePermissionDenied {
		t.Errorf("a rule forbids it: %v, %v", r.resp, r.err)
	}
	w.write("policy.yaml", rules("{ name: waits, route: { onEmpty: Queue, queue: { timeout: 5m } } }"))
	w.ruled("waits")
	third := w.routing(request("3"))
	w.queued(1)
	w.write("sim.yaml", strings.Replace(sim(down), "name: m,", "name: m2,", 1))
	if r := w.ended(third); connect.CodeOf(r.err) != connect.CodeNotFound {
		t.Errorf("its model is no more: %v, %v", r.resp, r.err)
	}
}
