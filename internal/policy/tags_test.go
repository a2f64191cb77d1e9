package policy_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/policy"
)

const tagRules = `{ customTags: [ { name: falcon, risk: true, any: [ { keywords: [ falcon ] } ] } ], rules: [
  { name: pii, matches: [ { tag: "pii-*" } ], reject: { reason: PII } },
  { name: secret, matches: [ { tags: { any: [ secret-detected, falcon ] } } ], reject: { reason: Secret } },
  { name: german, matches: [ { when: "request.tagged('language-de')" } ], reject: { reason: German } },
  { name: serve, matches: [ { tags: { none: [ injection ] } } ], route: { exclude: [ { name: low, if: { tag: complexity-low }, drop: { backend: { type: Provider } } } ], select: [ { type: Local } ] } },
  { name: other, matches: [ { model: other, when: "request.tags.size() > 3" } ], reject: { reason: Many } } ] }`

func TestTagsRead(t *testing.T) {
	s := set(compile(t, tagRules))
	if diff := cmp.Diff([]string{"complexity-low", "falcon", "injection", "language-de", "pii-*", "secret-detected"}, s.TagsRead("m")); diff != "" {
		t.Errorf("want -, got +:\n%s", diff)
	}
	if got := s.TagsRead("other")[0]; got != "*" {
		t.Errorf("an expression about all tags: %s", got)
	}
}

// What is known of one tag holds although others are unknown, and the other way
// round.
func TestPartlyKnown(t *testing.T) {
	s := set(compile(t, tagRules))
	unknown := func(tags ...string) (out []policy.UnknownTag) {
		for _, t := range tags {
			out = append(out, policy.UnknownTag{Tag: t, Causes: []string{"oversize"}})
		}
		return out
	}
	all := []string{"pii-*", "secret-detected", "falcon", "injection", "language-de", "complexity-low"}
	for _, c := range []struct {
		name string
		tags policy.Tags
		want string
	}{
		{"nothing is known", policy.Tags{}, "pii"},
		{"nothing, and somebody says so", policy.Tags{Unknown: unknown("*")}, "pii"},
		{"all is known", policy.Tags{Complete: true}, "serve"},
		{"all that is asked for", policy.Tags{Absent: all}, "serve"},
		{"PII alone is unknown", policy.Tags{Complete: true, Unknown: unknown("pii-phone")}, "pii"},
		{"language alone is unknown", policy.Tags{Complete: true, Unknown: unknown("language-*")}, "serve"},
		{"PII alone is known", policy.Tags{Absent: []string{"pii-*"}}, "secret"},
		{"some PII is known", policy.Tags{Absent: []string{"pii-card", "pii-email"}}, "pii"},
		{"a custom risk is unknown", policy.Tags{Absent: []string{"pii-*", "secret-detected"}, Unknown: unknown("falcon")}, "secret"},
		{"injection is unknown", policy.Tags{Complete: true, Unknown: unknown("injection")}, ""},
		{"found although not all was read", policy.Tags{Present: []string{"language-de"}, Absent: all[:4]}, "german"},
	} {
		d := s.Evaluate(&policy.Request{Model: "m", Tags: c.tags}, &policy.Fleet{})
		if d.Rule != c.want {
			t.Errorf("%s: decided by %q, want %q", c.name, d.Rule, c.want)
		}
	}
}

// BenchmarkEvaluatePartly is BenchmarkEvaluate with a prompt of which some tags are
// unknown.
func BenchmarkEvaluatePartly(b *testing.B) {
	s, r, f := world(b, 50, 64)
	r.Tags = policy.Tags{Present: []string{"language-en"}, Absent: []string{"injection", "pii-detected"}, Unknown: []policy.UnknownTag{{Tag: "complexity-*"}, {Tag: "pii-*"}}}
	b.ReportAllocs()
	for b.Loop() {
		s.Evaluate(r, f)
	}
}

func TestDoubt(t *testing.T) {
	asked := []string{"pii-*", "falcon", "injection", "code"}
	for _, c := range []struct {
		name string
		tags policy.Tags
		want []string
	}{
		{"one who says that all is known", policy.Tags{Complete: true}, nil},
		{"nothing is known anyway", policy.Tags{Absent: []string{"code"}}, nil},
		{"one who knew another policy", policy.Tags{Complete: true, Present: []string{"injection"}, Absent: []string{"pii-*"}, Unknown: []policy.UnknownTag{{Tag: "code"}}}, []string{"code", "falcon"}},
	} {
		tags := c.tags
		tags.Doubt(asked)
		var got []string
		for _, u := range tags.Unknown {
			got = append(got, u.Tag)
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s: want -, got +:\n%s", c.name, diff)
		}
	}
}
