package resources

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"strings"

	yaml "sigs.k8s.io/yaml/goyaml.v3"
)

// maxNodes bounds a document after its YAML aliases are expanded.
const maxNodes = 100_000

// decoder checks a YAML document against a Go type, field by field, and keeps
// the line of each. The json package alone could tell neither line nor
// duplicate, and would match fields without regard to case.
type decoder struct {
	lines map[string]int
	fail  func(line int, field, msg string)
	bad   bool
	nodes int
}

// decode fills out, a pointer to a struct, from n. It reports every fault
// through fail and returns the line of each field by path; ok is false when
// there was a fault.
func decode(n *yaml.Node, out any, fail func(line int, field, msg string)) (lines map[string]int, ok bool) {
	d := &decoder{lines: map[string]int{}, fail: fail}
	v := d.value(n, n.Line, reflect.TypeOf(out).Elem(), "")
	if d.bad {
		return d.lines, false
	}
	raw, err := json.Marshal(v)
	if err == nil {
		err = json.Unmarshal(raw, out)
	}
	if err != nil {
		d.faultf(n.Line, "", "%v", err)
	}
	return d.lines, !d.bad
}

func (d *decoder) faultf(line int, path, format string, args ...any) any {
	d.bad = true
	d.fail(line, path, fmt.Sprintf(format, args...))
	return nil
}

var unmarshaler = reflect.TypeFor[json.Unmarshaler]()

// value checks n against t and returns it as plain maps, slices and scalars.
// line is that of its key, which is where a reader looks for a field.
func (d *decoder) value(n *yaml.Node, line int, t reflect.Type, path string) any {
	if d.nodes++; d.nodes > maxNodes {
		if d.nodes == maxNodes+1 {
			d.faultf(line, path, "document is too large")
		}
		return nil
	}
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	d.lines[path] = line
	if n.Kind == yaml.ScalarNode && n.Tag == "!!null" {
		return nil // an absent value, as in Kubernetes
	}
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if reflect.PointerTo(t).Implements(unmarshaler) {
		var v any
		if err := n.Decode(&v); err != nil {
			return d.faultf(line, path, "%s", yamlMessage(err))
		}
		return v
	}
	switch t.Kind() {
	case reflect.Struct:
		return d.mapping(n, line, path, "an object", func(key *yaml.Node) (reflect.Type, bool) {
			f, ok := fields(t)[key.Value]
			if !ok {
				d.faultf(key.Line, path, "unknown field %q%s", key.Value, suggest(key.Value, t))
			}
			return f, ok
		})
	case reflect.Map:
		return d.mapping(n, line, path, "a map", func(*yaml.Node) (reflect.Type, bool) { return t.Elem(), true })
	case reflect.Slice:
		if n.Kind != yaml.SequenceNode {
			return d.wrong(n, line, path, "a list")
		}
		list := make([]any, 0, len(n.Content))
		for i, c := range n.Content {
			list = append(list, d.value(c, c.Line, t.Elem(), path+"["+strconv.Itoa(i)+"]"))
		}
		return list
	case reflect.String:
		if n.Kind != yaml.ScalarNode || n.Tag != "!!str" && n.Tag != "!!timestamp" {
			return d.wrong(n, line, path, "a string")
		}
		return n.Value
	case reflect.Bool:
		var v bool
		if n.Kind != yaml.ScalarNode || n.Decode(&v) != nil {
			return d.wrong(n, line, path, "true or false")
		}
		return v
	case reflect.Int, reflect.Int32, reflect.Int64:
		var v int64
		if n.Kind != yaml.ScalarNode || n.Tag != "!!int" || n.Decode(&v) != nil {
			return d.wrong(n, line, path, "an integer")
		}
		if reflect.Zero(t).OverflowInt(v) {
			return d.faultf(line, path, "%d is out of range", v)
		}
		return v
	case reflect.Interface:
		var v any
		if err := n.Decode(&v); err != nil {
			return d.faultf(line, path, "%s", yamlMessage(err))
		}
		return v
	}
	return d.faultf(line, path, "fields of Go type %s are not supported", t)
}

// mapping checks the entries of a mapping node; typeOf tells the type of a
// key's value and reports unknown keys.
func (d *decoder) mapping(n *yaml.Node, line int, path, want string, typeOf func(key *yaml.Node) (reflect.Type, bool)) any {
	if n.Kind != yaml.MappingNode {
		return d.wrong(n, line, path, want)
	}
	m := make(map[string]any, len(n.Content)/2)
	seen := make(map[string]int, len(n.Content)/2)
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, val := n.Content[i], n.Content[i+1]
		if key.Kind != yaml.ScalarNode || key.Tag != "!!str" {
			d.faultf(key.Line, path, "keys must be strings (merge keys are not supported)")
			continue
		}
		if first, dup := seen[key.Value]; dup {
			d.faultf(key.Line, join(path, key.Value), "is given twice (first on line %d)", first)
			continue
		}
		seen[key.Value] = key.Line
		if t, ok := typeOf(key); ok {
			m[key.Value] = d.value(val, key.Line, t, join(path, key.Value))
		}
	}
	return m
}

func (d *decoder) wrong(n *yaml.Node, line int, path, want string) any {
	got := map[yaml.Kind]string{yaml.MappingNode: "an object", yaml.SequenceNode: "a list"}[n.Kind]
	hint := ""
	if got == "" {
		got = strconv.Quote(abbreviate(n.Value))
		if want == "a string" {
			hint = "; put it in quotes"
		}
	}
	return d.faultf(line, path, "want %s, got %s%s", want, got, hint)
}

func abbreviate[S ~string](in S) string {
	s := string(in)
	if len(s) > 60 {
		return s[:57] + "..."
	}
	return s
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// fields returns the types of a struct's fields by JSON name.
func fields(t reflect.Type) map[string]reflect.Type {
	m := map[string]reflect.Type{}
	for i := range t.NumField() {
		f := t.Field(i)
		name, opts, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case name == "-" || !f.IsExported():
		case f.Anonymous && (opts == "inline" || name == ""):
			for k, v := range fields(f.Type) {
				m[k] = v
			}
		case name != "":
			m[name] = f.Type
		}
	}
	return m
}

// suggest names the field that was probably meant.
func suggest(name string, t reflect.Type) string {
	for f := range fields(t) {
		if f != name && (strings.EqualFold(f, name) || strings.EqualFold(f, name+"s") || strings.EqualFold(f+"s", name)) {
			return fmt.Sprintf("; did you mean %q?", f)
		}
	}
	return ""
}

// yamlMessage strips what our own messages say already.
func yamlMessage(err error) string {
	return strings.TrimPrefix(err.Error(), "yaml: ")
}
