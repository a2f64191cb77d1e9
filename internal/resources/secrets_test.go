package resources_test

import (
	"encoding/base64"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/apikey"
	"github.com/kinference/kinference/internal/resources"
)

const team = `
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: team, namespace: a }
spec: { identities: [ { apiKeySecretRef: { name: keys } } ] }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: GatewayBackend
metadata: { name: public, namespace: a }
spec: { poolRef: { name: default } }
---
`

func record(t *testing.T, user string) (key, id, text string) {
	t.Helper()
	key, id = apikey.New()
	r := apikey.Record{ID: id, SHA256: apikey.Hash(key), User: user}
	return key, id, string(r.Encode())
}

// Tenants get the keys of the Secrets that they name, of both forms of entries.
func TestKeys(t *testing.T) {
	_, one, plain := record(t, "alice")
	_, two, coded := record(t, "")
	dir := folder(t, "team.yaml", team, "keys.yaml", `
apiVersion: v1
kind: Secret
metadata: { name: keys, namespace: a, labels: { kinference.buoyant.io/api-keys: "true" } }
type: Opaque
stringData: { `+one+`: '`+plain+`' }
data: { `+two+`: `+base64.StdEncoding.EncodeToString([]byte(coded))+` }
---
apiVersion: v1
kind: Secret
metadata: { name: keys }
`)
	c, problems := resources.Load(dir)
	if c == nil {
		t.Fatal(problems)
	}
	if len(c.Tenants) != 1 || len(c.Tenants[0].Keys) != 2 || !c.Guarded {
		t.Fatalf("guarded %v, tenants %+v, problems %v", c.Guarded, c.Tenants, problems)
	}
	for _, k := range c.Tenants[0].Keys {
		if k.ID == one && k.User != "alice" || k.ID != one && k.ID != two {
			t.Errorf("key %+v", k)
		}
	}
	for _, p := range problems {
		if strings.Contains(p.String(), "Secret") {
			t.Error(p)
		}
	}
}

// Of a Secret that is wrong no value is shown, whatever is wrong.
func TestBadSecrets(t *testing.T) {
	key, id, text := record(t, "")
	const head = "apiVersion: v1\nkind: Secret\nmetadata: { name: keys, namespace: a }\n"
	for name, c := range map[string]struct{ yaml, want string }{
		"a password":     {head + "stringData: { password: hunter2 }", `entry "password": the name is not the id`},
		"the key itself": {head + "stringData: { " + id + ": " + key + " }", "is no record of a key"},
		"not base64":     {head + "data: { " + id + ": '" + key + "' }", "is not base64"},
		"a number":       {head + "stringData: { " + id + ": 1234567 }", "must be a string"},
		"other field":    {head + "spec: { key: " + key + " }", "is no field of a Secret"},
		"twice":          {head + "stringData: { " + id + ": '" + text + "', " + id + ": '" + text + "' }", "is given twice"},
		"same name":      {head + "---\n" + head, "is used already by the Secret at"},
		"version":        {strings.Replace(head, "v1", "v2", 1), "want v1"},
		"no name":        {"apiVersion: v1\nkind: Secret\n", "metadata.name: is required"},
		"list":           {head + "data: [ a ]", "must be an object"},
	} {
		got, problems := resources.Load(folder(t, "a.yaml", team+c.yaml))
		if got != nil || !strings.Contains(lines(problems), c.want) {
			t.Errorf("%s: want %q, got %v", name, c.want, problems)
		}
		for _, secret := range []string{key, "hunter2", "1234567"} {
			if strings.Contains(lines(problems), secret) {
				t.Errorf("%s: a value is shown: %v", name, problems)
			}
		}
	}
}

// A Secret that is not there is said, and the tenant is there all the same; of
// two keys with one id the first tenant has it.
func TestMissingAndDoubleKeys(t *testing.T) {
	c, problems := resources.Load(folder(t, "a.yaml", team))
	if c == nil || !strings.Contains(lines(problems), `there is no Secret "keys" with records of API keys in namespace "a"`) {
		t.Errorf("catalog %v, problems %v", c, problems)
	}
	_, id, text := record(t, "")
	c, problems = resources.Load(folder(t, "a.yaml", team+`
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: other, namespace: a }
spec: { identities: [ { apiKeySecretRef: { name: more } } ] }
---
apiVersion: v1
kind: Secret
metadata: { name: keys, namespace: a }
stringData: { `+id+`: '`+text+`' }
---
apiVersion: v1
kind: Secret
metadata: { name: more, namespace: a }
stringData: { `+id+`: '`+text+`' }
`))
	if c == nil || len(c.Tenants) != 2 || len(c.Tenants[0].Keys) != 0 || len(c.Tenants[1].Keys) != 1 || !strings.Contains(lines(problems), "is left out") {
		t.Errorf("catalog %+v, problems %v", c, problems)
	}
}

// An identity of a sort that no backend takes is said to be of no use.
func TestWaysIn(t *testing.T) {
	const more = `
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: other, namespace: a }
spec:
  identities:
    - serviceAccount: { namespace: b, name: c }
    - claim: { issuer: https://idp.example.com, name: org, value: x }
`
	c, problems := resources.Load(folder(t, "a.yaml", team+more))
	if c == nil {
		t.Fatal(problems)
	}
	text := lines(problems)
	for _, want := range []string{
		"spec.identities[0]: lets nobody in: no GatewayBackend of the namespace has authentication.serviceAccounts",
		`spec.identities[1]: lets nobody in: no GatewayBackend of the namespace has this issuer with tenantClaim "org" in authentication.jwt`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%s\nis not in\n%s", want, text)
		}
	}
	if strings.Contains(text, "authentication.apiKeys") {
		t.Errorf("keys are taken:\n%s", text)
	}
}
