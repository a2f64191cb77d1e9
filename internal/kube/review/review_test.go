package review_test

import (
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/kube"
	"github.com/kinference/kinference/internal/kube/review"
	"github.com/kinference/kinference/internal/testenv"
)

const rights = `
apiVersion: v1
kind: ServiceAccount
metadata: { name: reader, namespace: ops }
---
apiVersion: v1
kind: ServiceAccount
metadata: { name: nobody, namespace: ops }
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: { name: kinference-read }
rules: [ { apiGroups: [ kinference.buoyant.io ], resources: [ catalog, workers, decisions ], verbs: [ get, watch ] } ]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: { name: kinference-read }
roleRef: { apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: kinference-read }
subjects: [ { kind: ServiceAccount, namespace: ops, name: reader } ]
`

// Tokens of service accounts and their rights, as a real API server sees them.
func TestReviews(t *testing.T) {
	api := testenv.Kube(t)
	do := func(stdin string, args ...string) string {
		t.Helper()
		out, err := api.Kubectl(t, stdin, args...)
		if err != nil {
			t.Fatalf("kubectl %v: %v", args, err)
		}
		return strings.TrimSpace(out)
	}
	do("", "create", "namespace", "ops")
	do(rights, "apply", "-f", "-")
	config, err := kube.Connect(api.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	dynamic, err := kube.Client(config)
	if err != nil {
		t.Fatal(err)
	}
	c := review.New(dynamic)
	users := map[string]*review.User{}
	for _, name := range []string{"reader", "nobody"} {
		token := do("", "--namespace", "ops", "create", "token", name)
		u, err := c.Authenticate(t.Context(), token)
		if err != nil || u == nil || u.Name != "system:serviceaccount:ops:"+name || len(u.Groups) == 0 {
			t.Fatalf("%s: %v %v", name, u, err)
		}
		users[name] = u
		// One letter of the signature makes it nobody's.
		wrong := []byte(token)
		wrong[len(wrong)-10] ^= 1
		if u, err := c.Authenticate(t.Context(), string(wrong)); err != nil || u != nil {
			t.Errorf("wrong token: %v %v", u, err)
		}
	}
	for _, x := range []struct {
		user, resource, verb string
		want                 bool
	}{
		{"reader", "decisions", "get", true}, {"reader", "decisions", "watch", true}, {"reader", "workers", "get", true},
		{"reader", "keys", "create", false}, {"reader", "decisions", "delete", false}, {"nobody", "decisions", "get", false},
	} {
		ok, err := c.Allowed(t.Context(), users[x.user], x.resource, x.verb)
		if err != nil || ok != x.want {
			t.Errorf("%s may %s %s: %v %v", x.user, x.verb, x.resource, ok, err)
		}
	}
	// What was given is taken away.
	do("", "delete", "clusterrolebinding", "kinference-read")
	for range 100 {
		ok, err := c.Allowed(t.Context(), users["reader"], "decisions", "get")
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			api.Stop()
			if _, err := c.Authenticate(t.Context(), "any"); err == nil {
				t.Error("no error while the API is away")
			}
			return
		}
		do("", "get", "namespace", "ops") // lets it hear of the deletion
	}
	t.Error("rights that were taken away still hold")
}
