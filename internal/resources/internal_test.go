package resources

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	yaml "sigs.k8s.io/yaml/goyaml.v3"

	"github.com/kinference/kinference/api/crd"
	"github.com/kinference/kinference/api/v1alpha1"
)

// A keyword that is not understood here would make the check of files milder
// than the Kubernetes API.
func TestSchemasAreUnderstood(t *testing.T) {
	if len(schemas()) != len(kinds) {
		t.Errorf("%d definitions for %d kinds", len(schemas()), len(kinds))
	}
	for _, f := range definitions(t) {
		var kind string
		root, err := rootSchema(f.data, &kind)
		if err != nil {
			t.Fatal(err)
		}
		raw, err := yaml.Marshal(root)
		if err != nil {
			t.Fatal(err)
		}
		dec := yaml.NewDecoder(bytes.NewReader(raw))
		dec.KnownFields(true)
		if err := dec.Decode(&schema{}); err != nil {
			t.Errorf("%s: %v", f.name, err)
		}
	}
}

func definitions(t testing.TB) []file {
	t.Helper()
	names, err := fs.Glob(crd.Files, "*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var out []file
	for _, name := range names {
		data, err := fs.ReadFile(crd.Files, name)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, file{name, data})
	}
	return out
}

// Names do not collide with those of the Gateway API inference extension, whose
// InferencePool has the short name infpool.
func TestShortNames(t *testing.T) {
	seen := map[string]bool{"infpool": true, "inferencepool": true}
	for _, f := range definitions(t) {
		var doc yaml.Node
		if err := yaml.Unmarshal(f.data, &doc); err != nil {
			t.Fatal(err)
		}
		names := child(child(doc.Content[0], "spec"), "names")
		short, categories := child(names, "shortNames").Content, child(names, "categories").Content
		if len(short) != 1 || seen[short[0].Value] || len(categories) != 1 || categories[0].Value != "kinference" {
			t.Errorf("%s: short names %v", f.name, short)
			continue
		}
		seen[short[0].Value] = true
		version := child(child(doc.Content[0], "spec"), "versions").Content[0]
		if child(version, "subresources").Kind != yaml.MappingNode || len(child(version, "additionalPrinterColumns").Content) < 3 {
			t.Errorf("%s: no status or columns", f.name)
		}
	}
}

// The chart installs what the binaries check by.
func TestChartHasTheSameDefinitions(t *testing.T) {
	for _, f := range definitions(t) {
		path := filepath.Join("../../deploy/charts/kinference-crds/templates", strings.TrimPrefix(f.name, v1alpha1.Group+"_"))
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		got := strings.Replace(string(data), "    helm.sh/resource-policy: keep\n", "", 1)
		if diff := cmp.Diff(string(f.data), got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", path, diff)
		}
	}
}

// Every list, map and string has a bound, and every pattern is said in words.
func TestBounds(t *testing.T) {
	var walk func(path string, s *schema)
	walk = func(path string, s *schema) {
		if s == nil {
			return
		}
		switch {
		case s.Type == "array" && s.MaxItems == nil:
			t.Errorf("%s: no maxItems", path)
		case s.AdditionalProperties != nil && s.MaxProperties == nil:
			t.Errorf("%s: no maxProperties", path)
		case s.Type == "string" && s.MaxLength == nil && len(s.Enum) == 0:
			t.Errorf("%s: no maxLength", path)
		case s.Pattern != "" && s.Title == "":
			t.Errorf("%s: a pattern without title: messages show the expression", path)
		}
		for name, p := range s.Properties {
			walk(join(path, name), p)
		}
		walk(path+".*", s.AdditionalProperties)
		walk(path+"[]", s.Items)
	}
	for kind, s := range schemas() {
		walk(kind, s)
	}
}

// parse reads a sample into objects, without the faults that schemas find.
func parse(t testing.TB, path string) *parser {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	p := &parser{}
	p.file(file{filepath.Base(path), data})
	return p
}

func typed(p *parser) []Object {
	var out []Object
	for _, o := range p.objects {
		out = append(out, o.Object)
	}
	return out
}

// Admission refuses what the check of files refuses, in the same words, and
// nothing else.
func TestAdmissionSaysTheSame(t *testing.T) {
	bad, _ := filepath.Glob("testdata/bad/*.bad.yaml")
	compared := 0
	for _, path := range bad {
		p := parse(t, path)
		if p.problems.Err() != nil {
			continue // the Kubernetes API itself refuses it
		}
		compared++
		_, want := Options{Elsewhere: true}.compileFiles([]file{readAll(t, path)})
		objects := typed(p)
		newest := objects[len(objects)-1]
		got := ValidateObject(newest, objects[:len(objects)-1])
		if diff := cmp.Diff(messages(want), messages(got)); diff != "" {
			t.Errorf("%s (-file +admission):\n%s", path, diff)
		}
	}
	if compared < 20 {
		t.Errorf("only %d samples were compared", compared)
	}
	good, _ := filepath.Glob("testdata/good/*.good.yaml")
	for _, path := range good {
		objects := typed(parse(t, path))
		for i, o := range objects {
			others := slices.Concat(objects[:i], objects[i+1:])
			if got := ValidateObject(o, others); got.Err() != nil {
				t.Errorf("%s: %v", path, got)
			}
			// It may be applied again as it is.
			if got := ValidateObject(o, objects); got.Err() != nil {
				t.Errorf("%s: again: %v", path, got)
			}
		}
	}
}

func readAll(t testing.TB, path string) file {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return file{path, data}
}

func messages(ps Problems) []string {
	var out []string
	for _, p := range ps {
		if p.Severity == Error {
			out = append(out, fmt.Sprint(p.Resource, ": ", p.Field, ": ", p.Message))
		}
	}
	return out
}

// What comes from the Kubernetes API is checked by the schemas too: it may have
// been stored under an older definition.
func TestCompileChecksSchemas(t *testing.T) {
	set := &v1alpha1.InferenceWorkerSet{}
	set.Namespace, set.Name = "n", "s"
	set.Spec.Port = 70000
	_, problems := Options{}.Compile([]Object{set})
	var fields []string
	for _, p := range problems {
		fields = append(fields, p.Field)
	}
	if !slices.Contains(fields, "spec.models") || !slices.Contains(fields, "spec.port") {
		t.Error(problems)
	}
	for _, p := range problems {
		if p.Line != 0 || p.File != "" || strings.HasPrefix(p.String(), ":") {
			t.Errorf("place of %v", p)
		}
	}
}

// With Partial, a bad resource does not take the others with it.
func TestPartial(t *testing.T) {
	objects := typed(parse(t, "testdata/good/pools.good.yaml"))
	bad := objects[0].DeepCopyObject().(*v1alpha1.InferenceWorkerSet)
	bad.Spec.Endpoints[0].Address = "ftp://x"
	objects[0] = bad
	if c, _ := (Options{}).Compile(objects); c != nil {
		t.Error("a catalog in spite of an error")
	}
	c, problems := Options{Partial: true}.Compile(objects)
	if c == nil || problems.Err() == nil {
		t.Fatalf("catalog %v, problems %v", c, problems)
	}
	if m := c.Models["standard-model"]; m == nil || len(m.Offers) != 1 || m.Offers[0].Profile.Set.Name != "inference/glm-worker" {
		t.Errorf("standard-model: %+v", m)
	}
	for _, p := range problems {
		if strings.Contains(p.Message, `"qwen-worker"`) && !strings.Contains(p.Message, "did you mean") {
			t.Errorf("a reference to a bad resource is no dangling one: %v", p)
		}
	}
}

func TestPods(t *testing.T) {
	objects := typed(parse(t, "testdata/good/pools.good.yaml"))
	pods := func(ns string, labels map[string]string) []Pod {
		if ns == "inference" && (labels["app"] == "vllm" || labels["inference"] == "true") {
			return []Pod{{UID: "u1", Name: "vllm-0", Address: "10.0.0.9", Labels: map[string]string{"zone": "a"}}}
		}
		return nil
	}
	c, problems := Options{Pods: pods, Extension: func(string, string) *ExtensionPool { return nil }}.Compile(objects)
	if c == nil {
		t.Fatal(problems)
	}
	got := map[string][]Worker{}
	for _, s := range c.Sets {
		if s.Selector != nil {
			got[s.Name] = s.Workers
		}
	}
	zone := map[string]string{"zone": "a"}
	want := map[string][]Worker{
		"inference/pods":   {{UID: "inference.pods.u1", Name: "vllm-0", Labels: zone, Ranks: []string{"inference.pods.u1/0"}, URL: "http://10.0.0.9:8000"}},
		"inference/simple": {{UID: "inference.simple.u1", Name: "vllm-0", Labels: zone, Ranks: []string{"inference.simple.u1/0"}, URL: "http://10.0.0.9:9000"}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for _, p := range problems {
		if strings.Contains(p.Message, "Kubernetes source") {
			t.Errorf("there is one: %v", p)
		}
	}
}

// A hierarchy has a bottom, and no cycle hangs a check.
func TestDeepTenants(t *testing.T) {
	tenant := func(name, parent string) Object {
		o := &v1alpha1.InferenceTenant{}
		o.Namespace, o.Name = "n", name
		if parent != "" {
			o.Spec.ParentRef = &v1alpha1.LocalReference{Name: v1alpha1.ResourceName(parent)}
		}
		return o
	}
	objects := []Object{tenant("t1", "")}
	for i := 2; i <= 8; i++ {
		objects = append(objects, tenant(fmt.Sprint("t", i), fmt.Sprint("t", i-1)))
	}
	c, problems := Options{}.Compile(objects)
	if c == nil || len(c.Tenants) != 8 || len(c.Tenants[7].Chain()) != 8 {
		t.Fatal(problems)
	}
	if _, problems := (Options{}).Compile(append(objects, tenant("t9", "t8"))); len(messages(problems)) != 1 || !strings.Contains(messages(problems)[0], "level 9") {
		t.Error(problems)
	}
	// All limits of all levels are counted in one step.
	limited := func(name, parent string) Object {
		o := tenant(name, parent).(*v1alpha1.InferenceTenant)
		for i := range 33 {
			n := int64(i + 1)
			o.Spec.Limits = append(o.Spec.Limits,
				v1alpha1.Limit{Name: v1alpha1.EntryName(fmt.Sprint("l", i)), Per: []v1alpha1.LimitScope{v1alpha1.PerUser}, Requests: &n, Window: v1alpha1.Window(fmt.Sprint(i+1, "s"))})
		}
		return o
	}
	if _, problems := (Options{}).Compile([]Object{limited("top", ""), limited("leaf", "top")}); !slices.ContainsFunc(messages(problems), func(m string) bool { return strings.Contains(m, "gives the tenant 66 limits") }) {
		t.Error(messages(problems))
	}
	// Of a cycle the newest is at fault, and those below it are not.
	cycle := []Object{tenant("below", "a"), tenant("a", "b"), tenant("b", "c"), tenant("c", "a")}
	c, problems = Options{Partial: true}.Compile(cycle)
	if got := messages(problems); len(got) != 1 || !strings.Contains(got[0], "n/c: spec.parentRef.name: closes a cycle, c → a → b → c") {
		t.Error(got)
	}
	if len(c.Tenants) != 3 || !slices.Equal(c.Tenants[1].Chain(), []string{"b"}) || !c.Tenants[1].Orphan {
		t.Errorf("%d tenants", len(c.Tenants))
	}
}
