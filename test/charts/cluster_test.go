package charts

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"

	"github.com/kinference/kinference/internal/testenv"
)

const namespace = "kinference"

// A cluster with what an installation needs: the definitions, PodMonitors and a
// namespace that enforces the restricted Pod security standard.
type cluster struct {
	*testenv.KubeAPI
	*helm
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{helm: newHelm(t), KubeAPI: testenv.Kube(t)}
	c.env = append(c.env, "KUBECONFIG="+c.Kubeconfig)
	if out, err := c.run(t, "upgrade", "--install", "kinference-crds", filepath.Join("..", "kinference-crds")); err != nil {
		t.Fatalf("install the definitions: %v\n%s", err, out)
	}
	c.must(t, "", "apply", "--server-side", "-f", "testdata/operators.yaml")
	c.must(t, `
apiVersion: v1
kind: Namespace
metadata: { name: `+namespace+`, labels: { pod-security.kubernetes.io/enforce: restricted } }
---
apiVersion: v1
kind: Namespace
metadata: { name: tenants }
`, "create", "-f", "-")
	c.must(t, "", "wait", "--for=condition=Established", "--timeout=5m", "crd/podmonitors.monitoring.coreos.com", "crd/certificates.cert-manager.io", "crd/issuers.cert-manager.io", "crd/scaledobjects.keda.sh", "crd/inferencepools.kinference.buoyant.io")
	return c
}

func (c *cluster) must(t *testing.T, stdin string, args ...string) string {
	t.Helper()
	out, err := c.Kubectl(t, stdin, args...)
	if err != nil {
		t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

func (c *cluster) install(t *testing.T, args ...string) {
	t.Helper()
	if out, err := c.run(t, append([]string{"upgrade", "--install", "kinference", ".", "-n", namespace}, args...)...); err != nil {
		t.Fatalf("helm upgrade --install %v: %v\n%s", args, err, out)
	}
}

// uninstall ends the release, and nothing of it may stay.
func (c *cluster) uninstall(t *testing.T) {
	t.Helper()
	if out, err := c.run(t, "uninstall", "kinference", "-n", namespace); err != nil {
		t.Fatalf("helm uninstall: %v\n%s", err, out)
	}
	kinds := "deployments,statefulsets,services,serviceaccounts,poddisruptionbudgets,horizontalpodautoscalers,networkpolicies,podmonitors,certificates,scaledobjects," +
		"roles,rolebindings,clusterroles,clusterrolebindings,validatingwebhookconfigurations"
	if out := c.must(t, "", "get", kinds, "-A", "-l", "app.kubernetes.io/part-of=kinference", "-o", "name", "--ignore-not-found"); out != "" {
		t.Errorf("it stays behind:\n%s", out)
	}
}

// everything is on that the value files leave off.
var everything = []string{
	"-f", "values-ha.yaml", "--set", "global.linkerd.enabled=true,router.webhook.enabled=true,router.webhook.certSecret=cert,router.webhook.caBundle=Cg==",
	"--set", "ingress.providers.secrets={openai,bedrock},ingress.providers.privateNetworks={10.0.0.0/8},ingress.tokenizers.source.persistentVolumeClaim.claimName=models",
	"--set", "classifier.customTags=tags,limiter.redis.tls.clientCertificate=true,router.namespaces={kinference,tenants},router.keys.namespaces={tenants}",
	"--set", "workers.networkPolicy=true,workers.sets[0].namespace=tenants,workers.sets[0].labels.app=vllm,workers.sets[0].ports={8000},workers.sets[0].eventPorts={5557,5558}",
	"--set", "global.tls.enabled=true,global.tls.certManager.issuer=kinference,global.nats.clientSecret=nats-client,global.nats.credsSecret.name=nats-creds",
	"--set", "ingress.autoscaling.keda.enabled=true,ingress.autoscaling.keda.prometheus=http://prometheus.monitoring:9090",
	"--set", "classifier.autoscaling.keda.enabled=true,classifier.autoscaling.keda.prometheus=http://prometheus.monitoring:9090",
	"--set", "ingress.providers.fromAPI[0].namespace=tenants,ingress.providers.fromAPI[0].names={claude}",
	"--set", "ingress.mesh.identityHeader=l5d-client-id,global.image.pullSecrets={registry}",
}

// One cluster for all, because it takes seconds to start.
func TestCluster(t *testing.T) {
	// Building takes longest; testRun says if it failed.
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = built()
	}()
	t.Cleanup(func() { <-done })
	c := newCluster(t)
	t.Run("Install", c.testInstall)
	t.Run("Rights", c.testRights)
	t.Run("Documents", c.testDocuments)
	t.Run("Run", c.testRun)
	t.Run("Ready", c.testReady)
}

// All value files install, upgrade into each other where nothing is lost by it,
// and go without a trace. The API knows every field, and each Pod passes the
// restricted standard, which refuses another one.
func (c *cluster) testInstall(t *testing.T) {
	if out, err := c.Kubectl(t, pod(t, "bad", map[string]any{"containers": []any{map[string]any{"name": "c", "image": "i"}}}), "create", "--dry-run=server", "-f", "-"); err == nil ||
		!strings.Contains(out, "violates PodSecurity") {
		t.Fatalf("an unconfined Pod: %v, want a refusal; this test would show nothing\n%s", err, out)
	}
	all := maps.Clone(variants)
	all["everything"] = everything
	for _, name := range slices.Sorted(maps.Keys(all)) {
		t.Run(name, func(t *testing.T) {
			render := c.render(t, all[name]...)
			c.must(t, render, "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-")
			found := workloads(t, render)
			var pods []string
			for _, service := range slices.Sorted(maps.Keys(found)) {
				pods = append(pods, pod(t, service, found[service].Spec.Template.Spec))
			}
			if len(pods) < len(services) {
				t.Errorf("%d workloads, want %v at least", len(pods), services)
			}
			if out := c.must(t, strings.Join(pods, "---\n"), "create", "--dry-run=server", "-f", "-"); strings.Contains(out, "Warning") {
				t.Error(out)
			}
			c.install(t, all[name]...)
			if out, err := c.run(t, "get", "manifest", "kinference", "-n", namespace); err != nil || strings.Count(out, "kind: ServiceAccount\n") < len(services) {
				t.Errorf("%v: the release has not all\n%.500s", err, out)
			}
			// Again with another setting: what changes can be changed.
			c.install(t, append(slices.Clone(all[name]), "--set", "router.replicas=3,global.image.tag=0.1.1")...)
			c.uninstall(t)
		})
	}
}

// pod is the Pod that a workload would make, with a volume in place of a claim's.
func pod(t *testing.T, name string, spec map[string]any) string {
	t.Helper()
	spec = maps.Clone(spec)
	volumes, _ := spec["volumes"].([]any)
	names := map[string]bool{}
	for _, v := range volumes {
		names[v.(map[string]any)["name"].(string)] = true
	}
	for _, container := range spec["containers"].([]any) {
		mounts, _ := container.(map[string]any)["volumeMounts"].([]any)
		for _, m := range mounts {
			if claim := m.(map[string]any)["name"].(string); !names[claim] {
				names[claim] = true
				volumes = append(volumes, map[string]any{"name": claim, "persistentVolumeClaim": map[string]any{"claimName": claim}})
			}
		}
	}
	spec["volumes"] = volumes
	out, err := yaml.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Pod", "spec": spec,
		// The controller of a StatefulSet sets this label, which kvtracker reads.
		"metadata": map[string]any{"name": name, "namespace": namespace, "labels": map[string]string{"apps.kubernetes.io/pod-index": "0"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// rule is what RBAC gives: verb group/resource [name].
type rules map[string]bool

// rights are all that a ServiceAccount may do in a namespace, by the API.
func (c *cluster) rights(t *testing.T, account, in string) rules {
	t.Helper()
	body := fmt.Sprintf(`{"apiVersion":"authorization.k8s.io/v1","kind":"SelfSubjectRulesReview","spec":{"namespace":%q}}`, in)
	out := c.must(t, body, "create", "--validate=false", "-f", "-", "-o", "json", "--as=system:serviceaccount:"+namespace+":"+account,
		"--as-group=system:serviceaccounts", "--as-group=system:authenticated")
	var review struct {
		Status struct {
			Incomplete    bool
			ResourceRules []policyRule
		}
	}
	if err := json.Unmarshal([]byte(out), &review); err != nil {
		t.Fatal(err, out)
	}
	if review.Status.Incomplete {
		t.Errorf("the API does not know all rights of %s", account)
	}
	return flatten(review.Status.ResourceRules)
}

type policyRule struct{ Verbs, APIGroups, Resources, ResourceNames []string }

func flatten(list []policyRule) rules {
	out := rules{}
	for _, r := range list {
		for _, verb := range r.Verbs {
			for _, group := range r.APIGroups {
				for _, resource := range r.Resources {
					for _, name := range append(r.ResourceNames, "")[:max(1, len(r.ResourceNames))] {
						out[strings.TrimSpace(fmt.Sprintf("%s %s/%s %s", verb, group, resource, name))] = true
					}
				}
			}
		}
	}
	return out
}

func (r rules) without(others rules) rules {
	out := maps.Clone(r)
	for k := range others {
		delete(out, k)
	}
	return out
}

// The router may do what the tests of internal/kube run under, and nothing else;
// the other services may do nothing.
func (c *cluster) testRights(t *testing.T) {
	nobody := c.rights(t, "nobody", namespace)
	cluster, keys, tokens, own := tested(t)
	everywhere := union(cluster, tokens)
	// The API goes by a change of rights a moment after it has taken it.
	check := func(account, in string, want rules) {
		t.Helper()
		deadline, tick := time.After(2*time.Minute), time.NewTicker(100*time.Millisecond)
		defer tick.Stop()
		for {
			diff := cmp.Diff(want, c.rights(t, account, in).without(nobody))
			if diff == "" {
				return
			}
			select {
			case <-tick.C:
			case <-deadline:
				t.Errorf("rights of %s in %s (-want +got):\n%s", account, in, diff)
				return
			}
		}
	}
	c.install(t)
	check("kinference-router", namespace, union(everywhere, own))
	check("kinference-router", "tenants", everywhere)
	check("kinference-router", "kube-system", everywhere)
	for _, service := range services {
		if service != "router" {
			check("kinference-"+service, namespace, rules{})
			check("kinference-"+service, "tenants", rules{})
		}
	}
	c.matrix(t)

	c.install(t, "--set", "router.keys.allNamespaces=true")
	check("kinference-router", "kube-system", union(everywhere, keys))
	// Following some namespaces only.
	c.install(t, "--set", "router.namespaces={kinference,tenants},router.keys.namespaces={tenants}")
	check("kinference-router", namespace, union(everywhere, own))
	check("kinference-router", "tenants", union(everywhere, keys))
	check("kinference-router", "kube-system", tokens)
	c.install(t, "--set", "router.keys.enabled=false,router.namespaces={tenants}")
	check("kinference-router", "tenants", everywhere)
	c.uninstall(t)
	check("kinference-router", namespace, rules{})
	// Ingress reads Secrets of providers by name, where it is told to.
	c.install(t, "--set", "ingress.providers.fromAPI[0].namespace=tenants,ingress.providers.fromAPI[0].names={claude}")
	check("kinference-ingress", "tenants", rules{"get /secrets claude": true})
	check("kinference-ingress", namespace, rules{})
	c.uninstall(t)
}

// The resources in install.md and operations.md are ones that the API takes.
func (c *cluster) testDocuments(t *testing.T) {
	var raw []byte
	for _, name := range []string{"install", "operations"} {
		text, err := os.ReadFile(top + "/docs/" + name + ".md")
		if err != nil {
			t.Fatal(err)
		}
		raw = append(raw, text...)
	}
	n := 0
	for _, block := range regexp.MustCompile("(?ms)^( *)```yaml\n(.*?)^ *```").FindAllStringSubmatch(string(raw), -1) {
		text := strings.ReplaceAll("\n"+block[2], "\n"+block[1], "\n")
		c.must(t, text, "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-")
		n++
	}
	if n < 2 {
		t.Error("install.md and operations.md show no resources")
	}
}

// matrix asks for single rights, as the API would when a call comes.
func (c *cluster) matrix(t *testing.T) {
	t.Helper()
	for _, ask := range []struct {
		verb, group, resource, sub, name, in string
		router                               bool
	}{
		{verb: "watch", group: "kinference.buoyant.io", resource: "inferencepools", in: "tenants", router: true},
		{verb: "patch", group: "kinference.buoyant.io", resource: "inferencepools", sub: "status", in: "tenants", router: true},
		{verb: "patch", group: "kinference.buoyant.io", resource: "inferencepools", in: "tenants"},
		{verb: "list", resource: "pods", in: "tenants", router: true},
		{verb: "create", resource: "pods", in: "tenants"},
		{verb: "create", resource: "pods", sub: "exec", in: namespace},
		{verb: "get", resource: "pods", sub: "log", in: namespace},
		{verb: "list", resource: "secrets", in: "tenants"},
		{verb: "create", resource: "secrets", in: "tenants"},
		{verb: "delete", resource: "secrets", in: "tenants"},
		{verb: "create", group: "coordination.k8s.io", resource: "leases", in: namespace, router: true},
		{verb: "create", group: "coordination.k8s.io", resource: "leases", in: "tenants"},
		{verb: "update", group: "coordination.k8s.io", resource: "leases", name: "kinference-router", in: namespace, router: true},
		{verb: "update", group: "coordination.k8s.io", resource: "leases", name: "another", in: namespace},
		{verb: "create", group: "authentication.k8s.io", resource: "tokenreviews", router: true},
		{verb: "create", group: "authorization.k8s.io", resource: "subjectaccessreviews", router: true},
		{verb: "get", resource: "configmaps", in: namespace},
		{verb: "list", resource: "nodes"},
		{verb: "create", resource: "serviceaccounts", sub: "token", in: namespace},
		{verb: "impersonate", resource: "users"},
		{verb: "escalate", group: "rbac.authorization.k8s.io", resource: "clusterroles"},
	} {
		for _, service := range services {
			body, err := json.Marshal(map[string]any{
				"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
				"spec": map[string]any{
					"user":   "system:serviceaccount:" + namespace + ":kinference-" + service,
					"groups": []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"},
					"resourceAttributes": map[string]string{
						"verb": ask.verb, "group": ask.group, "resource": ask.resource, "subresource": ask.sub, "name": ask.name, "namespace": ask.in,
					},
				},
			})
			if err != nil {
				t.Fatal(err)
			}
			code, answer, err := c.Call(http.MethodPost, "/apis/authorization.k8s.io/v1/subjectaccessreviews", "application/json", body)
			var review struct{ Status struct{ Allowed bool } }
			if err != nil || code != http.StatusCreated || json.Unmarshal(answer, &review) != nil {
				t.Fatalf("%d %v %s", code, err, answer)
			}
			if want := ask.router && service == "router"; review.Status.Allowed != want {
				t.Errorf("%s may %s %s/%s %s %s in %q: %v, want %v", service, ask.verb, ask.group, ask.resource, ask.sub, ask.name, ask.in, review.Status.Allowed, want)
			}
		}
	}
}

func union(all ...rules) rules {
	out := rules{}
	for _, r := range all {
		maps.Copy(out, r)
	}
	return out
}

// tested are the rights under which the tests of internal/kube run.
func tested(t *testing.T) (cluster, keys, tokens, own rules) {
	t.Helper()
	raw, err := os.ReadFile(top + "/internal/kube/testdata/rbac.yaml")
	if err != nil {
		t.Fatal(err)
	}
	by := map[string]rules{}
	for _, o := range objects(t, string(raw)) {
		if len(o.Rules) == 0 {
			continue
		}
		var list []policyRule
		text, err := json.Marshal(o.Rules)
		if err == nil {
			err = json.Unmarshal(text, &list)
		}
		if err != nil {
			t.Fatal(err)
		}
		by[o.Kind+" "+o.Metadata.Name] = flatten(list)
	}
	return by["ClusterRole kinference-router"], by["ClusterRole kinference-router-keys"], by["ClusterRole kinference-router-tokens"], by["Role kinference-router"]
}
