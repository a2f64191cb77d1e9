package policy_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/policy"
)

func TestReads(t *testing.T) {
	when := func(cel string) string {
		return "rules: [ { name: r, matches: [ { model: m, when: '" + cel + "' } ], reject: { reason: Refused } } ]"
	}
	for name, c := range map[string]struct {
		policy string
		want   policy.Reads
	}{
		"nothing":               {when(`request.model == "a" && request.tagged("code")`), policy.Reads{}},
		"index":                 {when(`"x-b" in request.headers && request.headers["x-a"] == "1"`), policy.Reads{Headers: []string{"x-a", "x-b"}}},
		"select":                {when(`has(request.headers.team) && request.headers.team == "1"`), policy.Reads{Headers: []string{"team"}}},
		"claims":                {when(`request.claims.org.name == "a" && request.claims["groups"].exists(g, g == "x")`), policy.Reads{Claims: []string{"groups", "org"}}},
		"called so":             {when(`request.claims.headers.a == "a"`), policy.Reads{Claims: []string{"headers"}}},
		"all":                   {when(`request.headers.exists(h, h.startsWith("x-"))`), policy.Reads{OtherHeaders: true}},
		"by a name that varies": {when(`request.claims[request.model] == "a" && request.claims.b == "1"`), policy.Reads{Claims: []string{"b"}, OtherClaims: true}},
		"by another name":       {when(`[request].exists(r, r.headers.size() > 0)`), policy.Reads{OtherHeaders: true}},
		"matches and excludes": {`rules: [ { name: r, matches: [ { headers: [ { name: x-a, value: "1" } ], claims: [ { name: sub, value: a } ] } ], route: {
			exclude: [ { name: e, if: { headers: [ { name: x-b, value: "1" } ] }, drop: { backend: { type: Provider } } } ] } } ]`, policy.Reads{Headers: []string{"x-a", "x-b"}, Claims: []string{"sub"}}},
		"other model": {`rules: [ { name: r, matches: [ { model: n, headers: [ { name: x-a, value: "1" } ] } ], reject: { reason: Refused } } ]`, policy.Reads{}},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(set(compile(t, c.policy)).Reads("m"), c.want); diff != "" {
				t.Error(diff)
			}
		})
	}
}
