package resources

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	yaml "sigs.k8s.io/yaml/goyaml.v3"
)

// maxNodes bounds a document after its YAML aliases are expanded.
const maxNodes = 100_000

// tree turns YAML nodes into maps with string keys, lists, strings, int64,
// float64, bool and nil: what the schemas are about. It reports what no schema
// could: keys that are given twice or are no strings.
type tree struct {
	fail  func(line int, field, msg string)
	nodes int
	bad   bool
}

func (t *tree) faultf(line int, path, format string, args ...any) any {
	t.bad = true
	t.fail(line, path, fmt.Sprintf(format, args...))
	return nil
}

func (t *tree) value(n *yaml.Node, line int, path string) any {
	if t.nodes++; t.nodes > maxNodes {
		if t.nodes == maxNodes+1 {
			t.faultf(line, path, "document is too large")
		}
		return nil
	}
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	switch n.Kind {
	case yaml.MappingNode:
		return t.mapping(n, path)
	case yaml.SequenceNode:
		list := make([]any, len(n.Content))
		for i, c := range n.Content {
			list[i] = t.value(c, c.Line, index(path, i))
		}
		return list
	}
	switch n.Tag {
	case "!!null":
		return nil
	case "!!str", "!!timestamp":
		if isOldBoolean(n) {
			t.faultf(line, path, "%q is a boolean to kubectl, which reads YAML 1.1: write it in quotes", n.Value)
		}
		return n.Value
	case "!!int":
		var v int64
		if n.Decode(&v) == nil {
			return v
		}
	case "!!float":
		var v float64
		if n.Decode(&v) == nil {
			return v
		}
	case "!!bool":
		var v bool
		if n.Decode(&v) == nil {
			return v
		}
	}
	return t.faultf(line, path, "%q is no value that resources can have", abbreviate(n.Value))
}

// isOldBoolean tells whether YAML 1.1 sees a boolean where we see a string: a file
// must mean the same to everybody.
func isOldBoolean(n *yaml.Node) bool {
	const quoted = yaml.TaggedStyle | yaml.DoubleQuotedStyle | yaml.SingleQuotedStyle | yaml.LiteralStyle | yaml.FoldedStyle
	if n.Style&quoted != 0 {
		return false
	}
	switch n.Value {
	case "y", "Y", "yes", "Yes", "YES", "on", "On", "ON", "n", "N", "no", "No", "NO", "off", "Off", "OFF":
		return true
	}
	return false
}

func (t *tree) mapping(n *yaml.Node, path string) any {
	m := make(map[string]any, len(n.Content)/2)
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, val := n.Content[i], n.Content[i+1]
		if key.Kind != yaml.ScalarNode || key.Tag != "!!str" {
			t.faultf(key.Line, path, "keys must be strings (merge keys are not supported)")
			continue
		}
		if _, dup := m[key.Value]; dup {
			t.faultf(key.Line, join(path, key.Value), "is given twice (first on line %d)", child(n, key.Value).Line)
			continue
		}
		m[key.Value] = t.value(val, key.Line, join(path, key.Value))
	}
	return m
}

// lineOf returns the line of a field, or of the nearest one above it that was
// written. A nil node has no lines.
func lineOf(n *yaml.Node, field string) int {
	if n == nil {
		return 0
	}
	line := n.Line
	for field != "" {
		if n.Kind == yaml.AliasNode {
			n = n.Alias
		}
		field = strings.TrimPrefix(field, ".")
		next, rest := step(n, field)
		if next == nil {
			break
		}
		if n.Kind == yaml.SequenceNode {
			line = next.Line
		} else {
			line = keyLine(n, next)
		}
		n, field = next, rest
	}
	return line
}

// step goes down by the first element of a path. Keys may contain dots.
func step(n *yaml.Node, field string) (next *yaml.Node, rest string) {
	if n.Kind == yaml.SequenceNode {
		number, rest, ok := strings.Cut(strings.TrimPrefix(field, "["), "]")
		if i, err := strconv.Atoi(number); ok && err == nil && i >= 0 && i < len(n.Content) {
			return n.Content[i], rest
		}
		return nil, ""
	}
	for i := 0; i+1 < len(n.Content) && n.Kind == yaml.MappingNode; i += 2 {
		if after, ok := strings.CutPrefix(field, n.Content[i].Value); ok && (after == "" || after[0] == '.' || after[0] == '[') {
			return n.Content[i+1], after
		}
	}
	return nil, ""
}

func keyLine(mapping, value *yaml.Node) int {
	for i := 1; i < len(mapping.Content); i += 2 {
		if mapping.Content[i] == value {
			return mapping.Content[i-1].Line
		}
	}
	return mapping.Line
}

// child returns the value of a key of a mapping, with the line of the key. It
// returns an empty node if there is none.
func child(n *yaml.Node, key string) *yaml.Node {
	for i := 0; i+1 < len(n.Content) && n.Kind == yaml.MappingNode; i += 2 {
		if n.Content[i].Value == key {
			v := *n.Content[i+1]
			v.Line = n.Content[i].Line
			return &v
		}
	}
	return &yaml.Node{Line: n.Line}
}

// fromJSON is tree for what came over the Kubernetes API.
func fromJSON(data []byte) (any, error) {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	var v any
	if err := dec.Decode(&v); err != nil {
		return nil, err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("there is more than one value")
	}
	return numbers(v), nil
}

func numbers(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k, e := range v {
			v[k] = numbers(e)
		}
	case []any:
		for i, e := range v {
			v[i] = numbers(e)
		}
	case json.Number:
		if n, err := v.Int64(); err == nil {
			return n
		}
		f, _ := v.Float64() // out of range: infinite, which no schema allows
		return f
	}
	return v
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

func index(path string, i int) string { return path + "[" + strconv.Itoa(i) + "]" }

func abbreviate[S ~string](in S) string {
	s := string(in)
	if len(s) > 60 {
		return s[:57] + "..."
	}
	return s
}

var yamlLine = regexp.MustCompile(`^line (\d+): `)

func syntaxProblem(file string, err error) Problem {
	msg := strings.TrimPrefix(err.Error(), "yaml: ")
	pr := Problem{Severity: Error, File: file, Line: 1}
	if m := yamlLine.FindStringSubmatch(msg); m != nil {
		pr.Line, _ = strconv.Atoi(m[1])
		msg = msg[len(m[0]):]
	}
	pr.Message = "YAML: " + msg
	return pr
}
