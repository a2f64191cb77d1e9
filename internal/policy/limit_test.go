package policy_test

import (
	"testing"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/policy"
)

// A limit holds for the requests that its matches select, and where nobody can
// say whether they do.
func TestLimited(t *testing.T) {
	matches := [][]v1alpha1.RequestMatch{
		nil,
		{{QoS: "batch"}, {Tenant: "team"}},
		{{When: "request.claims.plan == 'free'"}},
		{{Tag: "pii-name"}},
		{{Tag: "project-falcon"}},
		{{Tag: "complexity-low"}},
		{{Headers: []v1alpha1.HeaderMatch{{Name: "X-App", Value: "a"}}}},
	}
	in := &v1alpha1.InferencePolicy{}
	in.Namespace, in.Name = "ns", "p"
	in.Spec.CustomTags = []v1alpha1.CustomTag{{Name: "project-falcon", Risk: true, Any: []v1alpha1.TagDetector{{Keywords: []string{"falcon"}}}}}
	for _, m := range matches {
		in.Spec.Limits = append(in.Spec.Limits, v1alpha1.PolicyLimit{Matches: m})
	}
	p, faults := policy.Compile(in)
	if p == nil {
		t.Fatal(faults)
	}
	if p.Limits() != len(matches) || !p.LimitsReadHeaders() {
		t.Errorf("%d limits, reads headers: %v", p.Limits(), p.LimitsReadHeaders())
	}
	for _, c := range []struct {
		name string
		r    policy.Request
		want []bool
	}{
		{"nothing is known", policy.Request{}, []bool{true, false, true, true, true, false, false}},
		{"all is known", policy.Request{Claims: map[string]any{"plan": "paid"}, Tags: policy.Tags{Complete: true}}, []bool{true, false, false, false, false, false, false}},
		{"selected", policy.Request{Tenants: []string{"team", "acme"}, Claims: map[string]any{"plan": "free"}, Tags: policy.Tags{Present: []string{"pii-name", "complexity-low"}, Complete: true}, Headers: map[string]string{"x-app": "a"}},
			[]bool{true, true, true, true, false, true, true}},
	} {
		for i, want := range c.want {
			if got := p.Limited(i, &c.r); got != want {
				t.Errorf("%s: limit %d holds: %v", c.name, i, got)
			}
		}
	}
}
