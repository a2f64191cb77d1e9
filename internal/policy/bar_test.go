package policy_test

import (
	"testing"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/policy"
)

// What would have kept a request from a provider keeps it from there later too,
// once its tags are other ones: an exclude of the rule that decided, and a rule
// before it. A rule that let the next one go on has had its say.
func TestBars(t *testing.T) {
	rules := func(first string) *policy.Set {
		return policy.NewSet("pool", []*policy.Policy{compile(t, `
rules:
- name: secrets
  matches: [ { tag: "secret-*" } ]
  `+first+`
- name: serve
  route:
    exclude:
    - { name: pii, if: { tag: pii-detected }, drop: { backend: { type: Provider } } }
    - { name: batch, if: { tag: batchy, qos: batch }, drop: { backend: { type: Provider } } }
    - { name: local, if: { tag: remote-only }, drop: { backend: { type: Local } } }
`)})
	}
	cloud := policy.Endpoint{Backend: &policy.Backend{Type: v1alpha1.BackendProvider, Name: "cloud", Models: []string{"m"}}, ID: "provider ns/cloud"}
	worker := policy.Endpoint{Backend: &policy.Backend{Type: v1alpha1.BackendLocal, Name: "set", Models: []string{"m"}}, ID: "w/0"}
	clean := policy.Tags{Complete: true}
	for _, test := range []struct {
		name, first string
		endpoint    *policy.Endpoint
		tags        policy.Tags
		want        bool
	}{
		{"clean", "reject: { reason: Secret, message: no }", &cloud, clean, false},
		{"PII", "reject: { reason: Secret, message: no }", &cloud, policy.Tags{Complete: true, Present: []string{"pii-detected"}}, true},
		{"unknown", "reject: { reason: Secret, message: no }", &cloud, policy.Tags{}, true},
		{"secret", "reject: { reason: Secret, message: no }", &cloud, policy.Tags{Complete: true, Present: []string{"secret-key"}}, true},
		{"another tag", "reject: { reason: Secret, message: no }", &cloud, policy.Tags{Complete: true, Present: []string{"language-de", "batchy", "remote-only"}}, false},
		{"worker", "reject: { reason: Secret, message: no }", &worker, policy.Tags{Complete: true, Present: []string{"pii-detected"}}, false},
	} {
		s := rules(test.first)
		r := &policy.Request{Model: "m", QoS: v1alpha1.QoSInteractive, Tags: clean}
		d := s.Evaluate(r, &policy.Fleet{Endpoints: []policy.Endpoint{*test.endpoint}})
		if d.Action != policy.Route || d.Rule != "serve" {
			t.Fatalf("%s: %+v", test.name, d)
		}
		got := false
		for _, b := range s.Bars(r, &d, test.endpoint) {
			got = got || b.Holds(test.tags)
		}
		if got != test.want {
			t.Errorf("%s: barred %v, want %v", test.name, got, test.want)
		}
	}
}
