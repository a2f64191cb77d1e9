package resources

import (
	"flag"
	"fmt"
	"go/ast"
	goparser "go/parser"
	"go/token"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	yaml "sigs.k8s.io/yaml/goyaml.v3"
)

const reference = "../../docs/reference/resources.md"

// The reference is written from the definitions, and so from the Go types:
//
//	go test ./internal/resources -run Reference -update
func TestReference(t *testing.T) {
	var b strings.Builder
	b.WriteString(`# Resources

All resources are of the group ` + "`kinference.buoyant.io/v1alpha1`" + ` and namespaced. They refer to others of their own namespace only.
This page is written from the types in [api/v1alpha1](../../api/v1alpha1); do not edit it. Complete examples:
[everything.good.yaml](../../internal/resources/testdata/good/everything.good.yaml). Wrong ones, each with what is said about it:
[testdata/bad](../../internal/resources/testdata/bad).

Check files with ` + "`kinfctl validate DIR|FILE...`" + `; with ` + "`--strict`" + `, references to what is not there are errors too. The Kubernetes API
and its admission webhook say the same.

`)
	var sections strings.Builder
	for _, f := range definitions(t) {
		var doc yaml.Node
		if err := yaml.Unmarshal(f.data, &doc); err != nil {
			t.Fatal(err)
		}
		var kind string
		root, err := rootSchema(f.data, &kind)
		if err != nil {
			t.Fatal(err)
		}
		var s schema
		if err := root.Decode(&s); err != nil {
			t.Fatal(err)
		}
		names := child(child(doc.Content[0], "spec"), "names")
		short := child(names, "shortNames").Content[0].Value
		fmt.Fprintf(&b, "* [%s](#%s) (`kubectl get %s`): %s\n", kind, strings.ToLower(kind), short, firstSentence(s.Description))
		fmt.Fprintf(&sections, "\n## %s\n\n%s Short name `%s`, category `kinference`.\n\n", kind, prose(s.Description), short)
		for _, part := range []string{"spec", "status"} {
			p := s.Properties[part]
			fmt.Fprintf(&sections, "### %s %s\n\n", kind, part)
			for _, r := range p.Rules {
				fmt.Fprintf(&sections, "* %s\n", ruleText(r))
			}
			if len(p.Rules) > 0 {
				sections.WriteString("\n")
			}
			sections.WriteString("| field | type | default | meaning |\n|---|---|---|---|\n")
			rows(&sections, p, "")
			sections.WriteString("\n")
		}
	}
	b.WriteString(strings.TrimRight(sections.String(), "\n") + "\n\n## Conditions\n\n")
	conditions(t, &b)
	if flag.Lookup("update").Value.String() == "true" {
		if err := os.WriteFile(reference, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(reference)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), b.String()); diff != "" {
		t.Errorf("run with -update (-is +should be):\n%s", diff)
	}
}

// rows writes a line for each field below an object.
func rows(b *strings.Builder, s *schema, path string) {
	for _, name := range slices.Sorted(maps.Keys(s.Properties)) {
		p := s.Properties[name]
		at := join(path, name)
		fmt.Fprintf(b, "| `%s` | %s | %s | %s |\n", at, typeText(p), defaultText(s, name, p), meaning(p))
		item := p
		if p.Items != nil {
			item, at = p.Items, at+"[]"
		}
		if name != "conditions" {
			rows(b, item, at)
		}
	}
}

func typeText(s *schema) string {
	switch {
	case s.Type == "array":
		return "list of " + typeText(s.Items)
	case s.AdditionalProperties != nil:
		return "map of " + typeText(s.AdditionalProperties)
	}
	return s.Type
}

func defaultText(parent *schema, name string, s *schema) string {
	switch {
	case slices.Contains(parent.Required, name):
		return "**required**"
	case s.Default.IsZero():
		return ""
	}
	out, err := yaml.Marshal(&s.Default)
	if err != nil {
		return err.Error()
	}
	text := strings.Join(strings.Fields(string(out)), " ")
	return "`" + strings.Trim(strings.TrimPrefix(text, "- "), "'\"") + "`"
}

// meaning is the description with what bounds the values.
func meaning(s *schema) string {
	parts := []string{prose(s.Description)}
	value := s
	if s.Items != nil {
		value = s.Items
		for _, r := range s.Rules {
			parts = append(parts, "Refused otherwise: "+ruleText(r)+".")
		}
	}
	if s.AdditionalProperties != nil {
		value = s.AdditionalProperties
	}
	switch {
	case len(value.Enum) > 0:
		parts = append(parts, "One of `"+strings.Join(value.Enum, "`, `")+"`.")
	case value.Title != "":
		parts = append(parts, "Want "+value.Title+".")
	case value.Minimum != nil && value.Maximum != nil:
		parts = append(parts, plain(*value.Minimum)+" to "+plain(*value.Maximum)+".")
	case value.Minimum != nil:
		parts = append(parts, plain(*value.Minimum)+" at least.")
	}
	if value.MaxLength != nil && *value.MaxLength > 63 {
		each := "At most "
		if value != s {
			each = "Each at most "
		}
		parts = append(parts, each+strconv.Itoa(*value.MaxLength)+" characters.")
	}
	if s.MaxItems != nil {
		parts = append(parts, "At most "+strconv.Itoa(*s.MaxItems)+" entries.")
	}
	if s.MaxProperties != nil {
		parts = append(parts, "At most "+strconv.Itoa(*s.MaxProperties)+" entries.")
	}
	for _, r := range value.Rules {
		parts = append(parts, "Refused otherwise: "+ruleText(r)+".")
	}
	return strings.NewReplacer("|", `\|`, "*", `\*`, "<", "&lt;").Replace(strings.TrimSpace(strings.Join(slices.Compact(parts), " ")))
}

func ruleText(r *rule) string {
	if r.FieldPath != "" {
		return "`" + strings.TrimPrefix(r.FieldPath, ".") + "` " + r.Message
	}
	return r.Message
}

func prose(s string) string { return strings.Join(strings.Fields(s), " ") }

func firstSentence(s string) string {
	s = prose(s)
	if i := strings.Index(s, ". "); i > 0 {
		s = s[:i+1]
	}
	return s
}

// conditions writes what the constants say.
func conditions(t *testing.T, b *strings.Builder) {
	t.Helper()
	f, err := goparser.ParseFile(token.NewFileSet(), "../../api/v1alpha1/conditions.go", nil, goparser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	ast.Inspect(f, func(n ast.Node) bool {
		v, ok := n.(*ast.ValueSpec)
		if !ok || !strings.HasPrefix(v.Names[0].Name, "Condition") {
			return true
		}
		found++
		text := v.Doc.Text()
		name := strings.TrimPrefix(v.Names[0].Name, "Condition")
		_, rest, _ := strings.Cut(text, name)
		fmt.Fprintf(b, "* **%s**%s\n", name, prose(rest))
		return true
	})
	if found < 4 {
		t.Errorf("%d conditions", found)
	}
}
