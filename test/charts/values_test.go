package charts

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// value is one that a user may set: what a "# --" comment is about.
type value struct {
	path    string
	doc     string
	typ     string // as the comment has it in parentheses, or by the default
	node    *yaml.Node
	section *section
}

// section is a map in which only known names are allowed.
type section struct {
	names  []string
	values map[string]value
	below  map[string]*section
}

var documented = regexp.MustCompile(`^# -- (?:\(([a-z ]+)\) )?(\S.*)$`)

// values reads a values.yaml. A map without a comment is a section; everything
// else must have one.
func values(t *testing.T, chart string) *section {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(folder, chart, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var root yaml.Node
	if err := yaml.Unmarshal(raw, &root); err != nil {
		t.Fatal(err)
	}
	return read(t, chart, "", root.Content[0])
}

func read(t *testing.T, chart, path string, node *yaml.Node) *section {
	t.Helper()
	s := &section{values: map[string]value{}, below: map[string]*section{}}
	for i := 0; i < len(node.Content); i += 2 {
		name, v := node.Content[i].Value, node.Content[i+1]
		lines := strings.Split(node.Content[i].HeadComment, "\n")
		doc := documented.FindStringSubmatch(lines[len(lines)-1])
		s.names = append(s.names, name)
		switch {
		case doc != nil:
			if typ := byDefault[v.Tag]; doc[1] == "" {
				doc[1] = typ
			}
			if doc[1] == "" {
				t.Errorf("%s: the type of %s%s is not known: say (string), (list), … in its comment", chart, path, name)
			}
			if !strings.HasSuffix(doc[2], ".") {
				t.Errorf("%s: the comment of %s%s does not end", chart, path, name)
			}
			s.values[name] = value{path: path + name, doc: doc[2], typ: doc[1], node: v, section: s}
		case v.Kind == yaml.MappingNode && len(v.Content) > 0:
			s.below[name] = read(t, chart, path+name+".", v)
		default:
			t.Errorf("%s: %s%s has no comment that begins with # --", chart, path, name)
		}
	}
	return s
}

var byDefault = map[string]string{"!!str": "string", "!!int": "integer", "!!bool": "boolean"}

var (
	oneOf    = regexp.MustCompile(`: ([\w-]+(?:, [\w-]+)*) or ([\w-]+)\.`)
	duration = regexp.MustCompile(`^([0-9]+(ms|s|m|h))+$`)
	quantity = regexp.MustCompile(`^[0-9]+[KMGT]i$`)
)

// schema is the JSON schema of a value. A comment that says "…: a, b or c." lists
// all that a string may be.
func (v value) schema(t *testing.T) map[string]any {
	s := map[string]any{"description": v.doc}
	switch v.typ {
	case "string":
		s["type"] = "string"
		if m := oneOf.FindStringSubmatch(v.doc); m != nil {
			s["enum"] = append(strings.Split(m[1], ", "), m[2])
			if v.node.Value == "" {
				s["enum"] = append(s["enum"].([]string), "")
			} else if !slices.Contains(s["enum"].([]string), v.node.Value) {
				t.Errorf("the default of %s is not what its comment lists: %v", v.path, s["enum"])
			}
		}
		for _, form := range []*regexp.Regexp{duration, quantity} {
			if form.MatchString(v.node.Value) {
				s["pattern"] = form.String()
			}
		}
	case "integer", "integer or null", "integer or string":
		s["type"] = strings.Split(v.typ, " or ")
		s["minimum"] = 0
	case "boolean":
		s["type"] = "boolean"
	case "list":
		s["type"] = "array"
	case "list of string":
		s["type"], s["items"] = "array", map[string]any{"type": "string"}
	case "map", "values": // values are checked by the chart that they are for
		s["type"] = "object"
	case "map of string":
		s["type"], s["additionalProperties"] = "object", map[string]any{"type": "string"}
	default:
		t.Errorf("%s has the type %q", v.path, v.typ)
	}
	return s
}

func (s *section) schema(t *testing.T) map[string]any {
	properties := map[string]any{}
	for name, v := range s.values {
		properties[name] = v.schema(t)
	}
	for name, below := range s.below {
		properties[name] = below.schema(t)
	}
	return map[string]any{"type": "object", "additionalProperties": false, "properties": properties}
}

// all are the values in the order of the file.
func (s *section) all() (out []value) {
	for _, name := range s.names {
		if v, ok := s.values[name]; ok {
			out = append(out, v)
		} else if below := s.below[name]; below != nil {
			out = append(out, below.all()...)
		}
	}
	return out
}

// Every value is documented; schemas and READMEs are what the comments say.
func TestValues(t *testing.T) {
	known := map[string]value{}
	n := 0
	for _, chart := range charts {
		s := values(t, chart)
		schema := s.schema(t)
		schema["$schema"] = "http://json-schema.org/draft-07/schema#"
		// Helm adds those of the library, which has none.
		schema["properties"].(map[string]any)["lib"] = map[string]any{"type": "object"}
		text, err := json.MarshalIndent(schema, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		golden(t, filepath.Join(folder, chart, "values.schema.json"), string(text)+"\n")
		golden(t, filepath.Join(folder, chart, "README.md"), readme(t, chart, s))
		for _, v := range s.all() {
			n++
			// What all charts have in common is the same in all: one writes it once.
			if !strings.HasPrefix(v.path, "global.") {
				continue
			}
			if first, ok := known[v.path]; ok && (first.doc != v.doc || first.typ != v.typ || nodeText(t, first.node) != nodeText(t, v.node)) {
				t.Errorf("%s: %s differs from that of another chart", chart, v.path)
			}
			known[v.path] = v
		}
	}
	t.Logf("%d values in %d charts", n, len(charts))
}

func nodeText(t *testing.T, n *yaml.Node) string {
	t.Helper()
	out, err := yaml.Marshal(n)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// readme is the reference of a chart's values.
func readme(t *testing.T, chart string, s *section) string {
	raw, err := os.ReadFile(filepath.Join(folder, chart, "Chart.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var meta struct{ Description string }
	if err := yaml.Unmarshal(raw, &meta); err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "# Chart %s\n\n%s\n\n", chart, meta.Description)
	b.WriteString("How to install and operate it: [operations.md](../../../docs/operations.md). Written by `go test ./test/charts -update` from values.yaml.\n\n")
	b.WriteString("| value | default | meaning |\n|---|---|---|\n")
	for _, v := range s.all() {
		d := compact(t, v.node)
		if d != "" {
			d = "`" + d + "`"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", v.path, d, v.doc)
	}
	return b.String()
}

func compact(t *testing.T, n *yaml.Node) string {
	var v any
	if err := n.Decode(&v); err != nil {
		t.Fatal(err)
	}
	if s, ok := v.(string); ok {
		return s
	}
	out, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// A value of a service that the umbrella's files set is one that the service has:
// its schema says so when they are rendered. Here: that each chart is a value.
func TestUmbrella(t *testing.T) {
	s := values(t, "kinference")
	got := slices.Sorted(maps.Keys(s.values))
	want := slices.Sorted(slices.Values(append(append([]string{}, services...), "nats", "redis")))
	if !slices.Equal(got, want) {
		t.Errorf("values %v, want one for each chart: %v", got, want)
	}
}
