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
	"github.com/kinference/kinference/internal/testenv"
)

// kubeCluster is a Kubernetes API with our definitions.
type kubeCluster struct {
	*env
	api *testenv.KubeAPI
}

func startAPI(t *testing.T) *kubeCluster {
	t.Helper()
	c := &kubeCluster{env: &env{t: t, log: &syncBuffer{}, client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}}, api: testenv.Kube(t)}
	names, err := fs.Glob(crd.Files, "*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		data, err := fs.ReadFile(crd.Files, name)
		if err != nil {
			t.Fatal(err)
		}
		c.kubectl(string(data), "apply", "--server-side", "-f", "-")
	}
	c.kubectl("", "wait", "--for=condition=Established", "--timeout=3m", "crd", "--all")
	c.kubectl("", "create", "namespace", "kinference")
	c.kubectl("", "create", "namespace", "test")
	return c
}

// startKube starts a stack beside it, without any workers yet.
func startKube(t *testing.T, scale float64) *kubeCluster {
	t.Helper()
	c := startAPI(t)
	var err error
	if c.stack, err = stack.Start(t.Context(), stack.Options{Kubeconfig: c.api.Kubeconfig, Seed: 1, TimeScale: scale, Output: c.log, DrainTimeout: 5 * time.Second}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	c.admin = c.stack.Admin(ctx)
	t.Cleanup(func() {
		c.client.CloseIdleConnections()
		cancel()
		if err := c.stack.Stop(); err != nil {
			t.Errorf("stop stack: %v", err)
		}
		if t.Failed() {
			t.Logf("log of the stack:\n%s", c.log.tail(16<<10))
		}
	})
	return c
}

func (c *kubeCluster) kubectl(stdin string, args ...string) string {
	c.t.Helper()
	out, err := c.api.Kubectl(c.t, stdin, args...)
	if err != nil {
		c.t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// status is a field of a resource of the namespace test.
func (c *kubeCluster) status(resource, path string) string {
	c.t.Helper()
	return c.kubectl("", "-n", "test", "get", resource, "-o", "jsonpath="+path)
}

const programmed = `{.status.conditions[?(@.type=="Programmed")].status}`

// Resources are applied by kubectl, say in their status what became of them, and
// change where requests go; when the Kubernetes API is away serving goes on.
func TestKubernetes(t *testing.T) {
	e := startKube(t, 50)
	kubectl, status, api := e.kubectl, e.status, e.api
	w, err := fleetsim.Start(context.Background(), fleetsim.Config{Name: "w0", Profile: engine.L40SPlain16, TimeScale: 50, Seed: 1, Model: modelName})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Kill)
	e.workers = []*fleetsim.Worker{w}
	kubectl(e.workerSet(""), "apply", "-f", "-")
	e.waitReady(1)
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
