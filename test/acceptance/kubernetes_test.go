package acceptance

import (
	"context"
	"io/fs"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kinference/kinference/api/crd"
	"github.com/kinference/kinference/cmd/stack"
	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
)

// Resources are applied by kubectl, say in their status what became of them, and
// change where requests go; when the Kubernetes API is away serving goes on.
func TestKubernetes(t *testing.T) {
	api := testenv.Kube(t)
	kubectl := func(stdin string, args ...string) string {
		t.Helper()
		out, err := api.Kubectl(t, stdin, args...)
		if err != nil {
			t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return out
	}
	names, err := fs.Glob(crd.Files, "*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		data, err := fs.ReadFile(crd.Files, name)
		if err != nil {
			t.Fatal(err)
		}
		kubectl(string(data), "apply", "--server-side", "-f", "-")
	}
	kubectl("", "wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")
	kubectl("", "create", "namespace", "kinference")
	kubectl("", "create", "namespace", "test")

	e := &env{t: t, log: &syncBuffer{}, client: &http.Client{}}
	w, err := fleetsim.Start(context.Background(), fleetsim.Config{Name: "w0", Profile: engine.L40SPlain16, TimeScale: 50, Seed: 1, Model: modelName})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Kill)
	e.workers = []*fleetsim.Worker{w}
	if e.stack, err = stack.Start(t.Context(), stack.Options{Kubeconfig: api.Kubeconfig, Seed: 1, TimeScale: 50, Output: e.log, DrainTimeout: 5 * time.Second}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	e.router = rpc.Client(ctx, e.stack.RouterURL(), routerv1connect.NewRouterServiceClient)
	t.Cleanup(func() {
		e.client.CloseIdleConnections()
		cancel()
		if err := e.stack.Stop(); err != nil {
			t.Errorf("stop stack: %v", err)
		}
		if t.Failed() {
			t.Logf("log of the stack:\n%s", e.log.tail(16<<10))
		}
	})

	kubectl(e.workerSet(""), "apply", "-f", "-")
	e.waitReady(1)
	status := func(resource, path string) string {
		return kubectl("", "-n", "test", "get", resource, "-o", "jsonpath="+path)
	}
	programmed := `{.status.conditions[?(@.type=="Programmed")].status}`
	e.eventually("the worker set says that it is served", func() bool {
		return status("inferenceworkerset/sim", programmed) == "True" && status("inferenceworkerset/sim", "{.status.workers.ready}") == "1"
	})
	e.eventually("the block size was learned", func() bool { return status("inferenceworkerset/sim", "{.status.blockSize}") == "16" })

	kubectl(`apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePolicy
metadata: { name: closed, namespace: test }
spec: { rules: [ { name: all, reject: { reason: Closed } } ] }
`, "apply", "-f", "-")
	e.eventually("the policy is in force", func() bool { return e.chat(req{text: "x", max: 1}).status == http.StatusForbidden })
	e.eventually("the policy says so", func() bool { return status("kpol/closed", programmed) == "True" })
	kubectl("", "-n", "test", "delete", "kpol", "closed")
	e.eventually("the policy is gone", func() bool { return e.chat(req{text: "x", max: 1}).status == http.StatusOK })

	api.Stop()
	for range 20 {
		if a := e.chat(req{text: "still there?", max: 1}); a.status != http.StatusOK {
			t.Fatalf("without the Kubernetes API: %d %s", a.status, a.body)
		}
	}
	api.Start(t)
	kubectl(`apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePolicy
metadata: { name: again, namespace: test }
spec: { rules: [ { name: all, reject: { reason: Closed } } ] }
`, "apply", "-f", "-")
	e.eventually("changes are seen again", func() bool { return e.chat(req{text: "x", max: 1}).status == http.StatusForbidden })
}
