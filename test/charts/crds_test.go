package charts

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// baseline is what the definitions promised when they were last released. A release
// writes it anew (KINFERENCE_BASELINE=1); a change that this test refuses is a new
// version of the resource.
const baseline = "testdata/crds.baseline.json"

// field is what a definition says of one place in a resource.
type field struct {
	Type     string   `json:"type,omitempty"`
	Required []string `json:"required,omitempty"`
	Enum     []string `json:"enum,omitempty"`
	Pattern  string   `json:"pattern,omitempty"`
	// Bounds that a value may not leave; nil: none.
	Most  *float64 `json:"most,omitempty"`
	Least *float64 `json:"least,omitempty"`
}

// schema is the part of OpenAPI that counts here.
type schema struct {
	Type       string
	Required   []string
	Enum       []any
	Pattern    string
	Properties map[string]schema
	Items      *schema
	Additional *schema `yaml:"additionalProperties"`

	Maximum       *float64 `yaml:"maximum"`
	MaxLength     *float64 `yaml:"maxLength"`
	MaxItems      *float64 `yaml:"maxItems"`
	MaxProperties *float64 `yaml:"maxProperties"`
	Minimum       *float64 `yaml:"minimum"`
	MinLength     *float64 `yaml:"minLength"`
	MinItems      *float64 `yaml:"minItems"`
	MinProperties *float64 `yaml:"minProperties"`
}

func (s *schema) UnmarshalYAML(n *yaml.Node) error {
	if n.Kind != yaml.MappingNode {
		return nil // additionalProperties: true
	}
	type plain schema // without this method
	var raw plain
	if err := n.Decode(&raw); err != nil {
		return err
	}
	*s = schema(raw)
	return nil
}

func (s *schema) fields(at string, out map[string]field) {
	f := field{Type: s.Type, Required: slices.Sorted(slices.Values(s.Required)), Pattern: s.Pattern}
	for _, v := range s.Enum {
		f.Enum = append(f.Enum, fmt.Sprint(v))
	}
	slices.Sort(f.Enum)
	for _, v := range []*float64{s.Maximum, s.MaxLength, s.MaxItems, s.MaxProperties} {
		if v != nil {
			f.Most = v
		}
	}
	for _, v := range []*float64{s.Minimum, s.MinLength, s.MinItems, s.MinProperties} {
		if v != nil {
			f.Least = v
		}
	}
	out[at] = f
	for name, p := range s.Properties {
		p.fields(at+"."+name, out)
	}
	if s.Items != nil {
		s.Items.fields(at+"[]", out)
	}
	if s.Additional != nil {
		s.Additional.fields(at+"{}", out)
	}
}

// promised are the fields of all definitions below a folder, by kind/version.place.
func promised(t *testing.T, pattern string) map[string]field {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]field{}
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var crd struct {
			Spec struct {
				Names    struct{ Kind string }
				Versions []struct {
					Name   string
					Served bool
					Schema struct {
						OpenAPI schema `yaml:"openAPIV3Schema"`
					}
				}
			}
		}
		if err := yaml.Unmarshal(raw, &crd); err != nil {
			t.Fatal(file, err)
		}
		for _, v := range crd.Spec.Versions {
			if v.Served {
				v.Schema.OpenAPI.fields(crd.Spec.Names.Kind+"/"+v.Name, out)
			}
		}
	}
	return out
}

// broken lists what a resource that was good before may run into, sorted.
func broken(before, now map[string]field) (out []string) {
	for at, b := range before {
		n, ok := now[at]
		if !ok {
			out = append(out, at+" is gone")
			continue
		}
		add := func(bad bool, what string, was, is any) {
			if bad {
				out = append(out, fmt.Sprintf("%s: %s was %v, is %v", at, what, was, is))
			}
		}
		add(n.Type != b.Type, "type", b.Type, n.Type)
		add(n.Pattern != b.Pattern && n.Pattern != "", "pattern", b.Pattern, n.Pattern)
		add(n.Most != nil && (b.Most == nil || *n.Most < *b.Most), "most", show(b.Most), show(n.Most))
		add(n.Least != nil && (b.Least == nil || *n.Least > *b.Least), "least", show(b.Least), show(n.Least))
		add(len(n.Enum) > 0 && (len(b.Enum) == 0 || !covers(n.Enum, b.Enum)), "values", b.Enum, n.Enum)
		// Status is ours: who writes it knows what it needs.
		add(!covers(b.Required, n.Required) && !strings.Contains(at, ".status"), "required", b.Required, n.Required)
	}
	slices.Sort(out)
	return out
}

func show(v *float64) string {
	if v == nil {
		return "none"
	}
	return fmt.Sprint(*v)
}

func covers(all, some []string) bool {
	return !slices.ContainsFunc(some, func(s string) bool { return !slices.Contains(all, s) })
}

// A resource that the last release took is one that this one takes.
func TestDefinitionsStayCompatible(t *testing.T) {
	now := promised(t, folder+"/kinference-crds/templates/*.yaml")
	if os.Getenv("KINFERENCE_BASELINE") == "1" {
		text, err := json.MarshalIndent(now, "", " ")
		if err == nil {
			err = os.WriteFile(baseline, append(text, '\n'), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	raw, err := os.ReadFile(baseline)
	if err != nil {
		t.Fatal(err)
	}
	var before map[string]field
	if err := json.Unmarshal(raw, &before); err != nil || len(before) < 200 {
		t.Fatal(len(before), err)
	}
	for _, b := range broken(before, now) {
		t.Error(b)
	}
	t.Logf("%d fields, %d of them promised", len(now), len(before))
}

func TestBroken(t *testing.T) {
	ten, five := 10.0, 5.0
	before := map[string]field{"K/v1": {Type: "object", Required: []string{"a"}}, "K/v1.a": {Type: "string", Enum: []string{"x", "y"}, Most: &ten}, "K/v1.b": {Type: "string"}}
	for _, tc := range []struct {
		name   string
		change func(map[string]field)
		want   string
	}{
		{"nothing", func(map[string]field) {}, ""},
		{"a new field", func(m map[string]field) { m["K/v1.c"] = field{Type: "string"} }, ""},
		{"one more value", func(m map[string]field) {
			m["K/v1.a"] = field{Type: "string", Enum: []string{"x", "y", "z"}, Most: &ten}
		}, ""},
		{"no bound any more", func(m map[string]field) { m["K/v1.a"] = field{Type: "string", Enum: []string{"x", "y"}} }, ""},
		{"not needed any more", func(m map[string]field) { m["K/v1"] = field{Type: "object"} }, ""},
		{"a field less", func(m map[string]field) { delete(m, "K/v1.b") }, "K/v1.b is gone"},
		{"another type", func(m map[string]field) { m["K/v1.b"] = field{Type: "integer"} }, "type was string, is integer"},
		{"a value less", func(m map[string]field) { m["K/v1.a"] = field{Type: "string", Enum: []string{"x"}, Most: &ten} }, "values was [x y], is [x]"},
		{"values at all", func(m map[string]field) { m["K/v1.b"] = field{Type: "string", Enum: []string{"x"}} }, "values was [], is [x]"},
		{"shorter", func(m map[string]field) { m["K/v1.a"] = field{Type: "string", Enum: []string{"x", "y"}, Most: &five} }, "most was 10, is 5"},
		{"a least", func(m map[string]field) { m["K/v1.b"] = field{Type: "string", Least: &five} }, "least was none, is 5"},
		{"a pattern", func(m map[string]field) { m["K/v1.b"] = field{Type: "string", Pattern: "^a"} }, "pattern"},
		{"needed now", func(m map[string]field) { m["K/v1"] = field{Type: "object", Required: []string{"a", "b"}} }, "required was [a], is [a b]"},
	} {
		now := maps.Clone(before)
		tc.change(now)
		got := strings.Join(broken(before, now), "; ")
		if (got == "") != (tc.want == "") || !strings.Contains(got, tc.want) {
			t.Errorf("%s: got %q, want %q", tc.name, got, tc.want)
		}
	}
}
