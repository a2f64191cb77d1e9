// Package charts tests deploy/charts as users meet them: through helm, against a
// real Kubernetes API that enforces the restricted Pod security standard, and
// with the flags of the real binaries. With -update it writes what follows from
// the values.yaml files (schemas, READMEs) and the golden renders.
package charts

import (
	"bytes"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"

	"github.com/kinference/kinference/internal/testenv"
)

const (
	top    = "../.."
	folder = top + "/deploy/charts"
)

var update = flag.Bool("update", false, "rewrite schemas, READMEs and golden files")

// The charts, the umbrella last: it contains the others.
var (
	services = []string{"ingress", "router", "kvtracker", "relay", "limiter", "classifier", "accounting"}
	charts   = append(append([]string{}, services...), "nats", "redis", "kinference")
	// variants are the value files that are shown to work.
	variants = map[string][]string{
		"default": nil, "dev": {"-f", "values-dev.yaml"}, "ha": {"-f", "values-ha.yaml"}, "tls": {"--set", "global.tls.enabled=true,global.tls.certManager.issuer=kinference"},
	}
)

// helm runs helm beside a copy of the charts whose dependencies are in place.
type helm struct {
	path, dir string
	env       []string
}

func newHelm(t *testing.T) *helm {
	t.Helper()
	h := &helm{path: testenv.Helm(t), dir: filepath.Join(t.TempDir(), "charts")}
	if err := os.CopyFS(h.dir, os.DirFS(folder)); err != nil {
		t.Fatal(err)
	}
	home := t.TempDir() // nothing of the user's counts
	h.env = append(os.Environ(), "HOME="+home, "XDG_CACHE_HOME="+home, "XDG_CONFIG_HOME="+home, "XDG_DATA_HOME="+home, "HELM_NAMESPACE=")
	for _, chart := range charts {
		// What lies there from a build by hand is not of the sources.
		if err := os.RemoveAll(filepath.Join(h.dir, chart, "charts")); err != nil {
			t.Fatal(err)
		}
		if out, err := h.run(t, "dependency", "update", "--skip-refresh", filepath.Join("..", chart)); err != nil {
			t.Fatalf("helm dependency update %s: %v\n%s", chart, err, out)
		}
	}
	return h
}

// run runs helm in the umbrella's folder and returns what it wrote.
func (h *helm) run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), h.path, args...)
	cmd.Dir, cmd.Env = filepath.Join(h.dir, "kinference"), h.env
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	return string(out) + stderr.String(), err
}

func (h *helm) render(t *testing.T, args ...string) string {
	t.Helper()
	out, err := h.run(t, append([]string{"template", "kinference", ".", "-n", "kinference", "--api-versions", "monitoring.coreos.com/v1"}, args...)...)
	if err != nil {
		t.Fatalf("helm template %v: %v\n%s", args, err, out)
	}
	return out
}

// object is one of a render.
type object struct {
	Kind     string
	Metadata struct {
		Name, Namespace string
		Labels          map[string]string
	}
	Spec struct {
		Template *struct {
			Metadata map[string]any
			Spec     map[string]any
		}
	}
	Rules []map[string]any
}

func objects(t *testing.T, render string) (out []object) {
	t.Helper()
	d := yaml.NewDecoder(strings.NewReader(render))
	for {
		var o object
		if err := d.Decode(&o); err != nil {
			if err.Error() == "EOF" {
				return out
			}
			t.Fatal(err)
		}
		if o.Kind != "" {
			out = append(out, o)
		}
	}
}

// workloads are the Deployments and StatefulSets by the name of their service.
func workloads(t *testing.T, render string) map[string]object {
	t.Helper()
	out := map[string]object{}
	for _, o := range objects(t, render) {
		if o.Kind == "Deployment" || o.Kind == "StatefulSet" {
			out[o.Metadata.Labels["app.kubernetes.io/name"]] = o
		}
	}
	return out
}

// golden compares a file with what it should hold, or writes it.
func golden(t *testing.T, path, want string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(string(got), want); diff != "" {
		t.Errorf("%s is not up to date, run with -update (-is +should):\n%s", path, diff)
	}
}

// What scripts/kube.sh builds is what the tests look for.
func TestHelmVersion(t *testing.T) {
	module, err := os.ReadFile(top + "/tools/helm/go.mod")
	if err != nil || !strings.Contains(string(module), "helm.sh/helm/v4 "+testenv.HelmVersion) {
		t.Errorf("tools/helm/go.mod has not helm %s: %v", testenv.HelmVersion, err)
	}
}

func TestRender(t *testing.T) {
	if *update {
		TestValues(t) // the schemas decide what renders
	}
	h := newHelm(t)
	for name, args := range variants {
		golden(t, "testdata/"+name+".yaml", h.render(t, args...))
	}
	if out, err := h.run(t, "lint", "--strict", "."); err != nil {
		t.Errorf("helm lint: %v\n%s", err, out)
	}
}

// Each service is an installation of its own, too.
func TestServiceAlone(t *testing.T) {
	h := newHelm(t)
	for _, chart := range services {
		out, err := h.run(t, "template", "alone", filepath.Join("..", chart))
		if err != nil {
			t.Errorf("%s: %v\n%s", chart, err, out)
			continue
		}
		if _, ok := workloads(t, out)[chart]; !ok {
			t.Errorf("%s has no workload", chart)
		}
	}
}

// What cannot work is refused with a message that says what to do.
func TestRefused(t *testing.T) {
	h := newHelm(t)
	for _, tc := range []struct{ set, want string }{
		// Misspelt names and wrong values, by the schemas.
		{"ingres.replicas=3", "ingres"},
		{"ingress.replcas=3", "replcas"},
		{"ingress.replicas=three", "replicas"},
		{"ingress.replicas=-1", "replicas"},
		{"ingress.usage.persistence.enable=true", "enable"},
		{"ingress.global.nats.uri=x", "uri"},
		{"global.nats.uri=nats://nats:4222", "uri"},
		{"global.image.pullPolicy=Sometimes", "pullPolicy"},
		{"router.policy=fastest", "policy"},
		{"router.admin.enbled=true", "enbled"},
		{"kvtracker.snapshotInterval=often", "snapshotInterval"},
		{"relay.replicas=2", "replicas"}, // there is one
		{"limiter.redis.mode=clustr", "mode"},
		{"accounting.ledger.size=large", "size"},
		{"global.tls.enable=true", "enable"},
		{"global.tls.certManager.kind=Issuers", "kind"},
		{"ingress.autoscaling.keda.treshold=3", "treshold"},
		{"global.redis.embed=true", "embed"},
		{"classifier.logLevel=loud", "logLevel"},
		// Combinations, by the templates.
		{"limiter.replicas=2", "limiter.redis.addrs is needed"},
		{"limiter.autoscaling.enabled=true", "limiter.redis.addrs is needed"},
		{"limiter.autoscaling.keda.enabled=true", "limiter.redis.addrs is needed"},
		{"ingress.autoscaling.keda.enabled=true", "autoscaling.keda.prometheus is needed"},
		{"accounting.replicas=2", "accounting.ledger.postgres.secret is needed"},
		{"global.nats.url=", "global.nats.url or global.nats.urlSecret.name is needed"},
		{"router.keys.namespaces={tenants}", "router.keys.namespaces is of no use without router.namespaces"},
		{"router.webhook.enabled=true,router.webhook.caBundle=Cg==", "webhook.certSecret is needed"},
		{"router.webhook.enabled=true,router.webhook.certSecret=cert", "router.webhook.caBundle or router.webhook.certManager is needed"},
		// Lists whose entries lack what bounds them.
		{"ingress.providers.fromAPI[0].namespace=tenants", "a Role without names is for all Secrets"},
		{"ingress.providers.fromAPI[0].names={claude}", "needs namespace and names"},
		{"ingress.providers.fromAPI[0].namespace=a,ingress.providers.fromAPI[0].names={x},ingress.providers.fromAPI[1].namespace=a,ingress.providers.fromAPI[1].names={y}", "into one"},
		{"workers.networkPolicy=true,workers.sets[0].namespace=a,workers.sets[0].ports={8000}", "without labels is for all Pods"},
		{"workers.networkPolicy=true,workers.sets[0].namespace=a,workers.sets[0].labels.app=vllm", "without ports for all ports"},
	} {
		out, err := h.run(t, "template", "kinference", ".", "--set", tc.set)
		if err == nil || !strings.Contains(out, tc.want) {
			t.Errorf("--set %s: %v, want a refusal that names %q\n%.300s", tc.set, err, tc.want, out)
		}
	}
}
