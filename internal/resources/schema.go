package resources

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	yaml "sigs.k8s.io/yaml/goyaml.v3"

	"github.com/kinference/kinference/api/crd"
	"github.com/kinference/kinference/internal/spelling"
)

// schema is the part of a structural schema that the definitions use. A test
// fails when they use more.
type schema struct {
	Type, Format, Title, Description string
	Pattern                          string
	Enum, Required                   []string
	Properties                       map[string]*schema
	AdditionalProperties             *schema `yaml:"additionalProperties"`
	Items                            *schema
	Default                          yaml.Node
	Minimum, Maximum                 *float64
	MinLength                        int      `yaml:"minLength"`
	MaxLength                        *int     `yaml:"maxLength"`
	MinItems                         int      `yaml:"minItems"`
	MaxItems                         *int     `yaml:"maxItems"`
	MinProperties                    int      `yaml:"minProperties"`
	MaxProperties                    *int     `yaml:"maxProperties"`
	ListType                         string   `yaml:"x-kubernetes-list-type"`
	ListKeys                         []string `yaml:"x-kubernetes-list-map-keys"`
	Rules                            []*rule  `yaml:"x-kubernetes-validations"`

	pattern *regexp.Regexp
}

// schemas hold what a resource of a kind has beside metadata, by kind. They are
// part of the program, so a fault in them is one of the program.
var schemas = sync.OnceValue(func() map[string]*schema {
	out := map[string]*schema{}
	files, err := fs.Glob(crd.Files, "*.yaml")
	if err != nil {
		panic(err)
	}
	for _, f := range files {
		data, err := fs.ReadFile(crd.Files, f)
		if err != nil {
			panic(err)
		}
		kind, s, err := parseDefinition(data)
		if err != nil {
			panic(fmt.Sprintf("%s: %v", f, err))
		}
		out[kind] = s
	}
	return out
})

// parseDefinition reads a CustomResourceDefinition.
func parseDefinition(data []byte) (kind string, s *schema, err error) {
	root, err := rootSchema(data, &kind)
	if err != nil {
		return "", nil, err
	}
	s = &schema{}
	if err := root.Decode(s); err != nil {
		return "", nil, err
	}
	if len(s.Rules) > 0 || s.Properties["spec"] == nil {
		return "", nil, errors.New("want a spec, and rules on it rather than on the resource")
	}
	for _, name := range []string{"apiVersion", "kind", "metadata", "status"} {
		delete(s.Properties, name)
	}
	return kind, s, s.prepare()
}

func rootSchema(data []byte, kind *string) (*yaml.Node, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return nil, err
	}
	spec := child(doc.Content[0], "spec")
	*kind = child(child(spec, "names"), "kind").Value
	versions := child(spec, "versions")
	if *kind == "" || len(versions.Content) != 1 {
		return nil, errors.New("want a kind and one version")
	}
	return child(child(versions.Content[0], "schema"), "openAPIV3Schema"), nil
}

// prepare compiles patterns and rules.
func (s *schema) prepare() error {
	if s == nil {
		return nil
	}
	if s.Pattern != "" {
		var err error
		if s.pattern, err = regexp.Compile(s.Pattern); err != nil {
			return err
		}
	}
	for _, r := range s.Rules {
		if err := r.compile(); err != nil {
			return fmt.Errorf("rule %q: %w", r.Rule, err)
		}
	}
	for _, p := range s.Properties {
		if err := p.prepare(); err != nil {
			return err
		}
	}
	if err := s.AdditionalProperties.prepare(); err != nil {
		return err
	}
	return s.Items.prepare()
}

// fallback is the default of an absent field; nil for none.
func (s *schema) fallback() any {
	if s.Default.IsZero() {
		return nil
	}
	return (&tree{fail: func(int, string, string) {}}).value(&s.Default, 0, "")
}

// checker holds a tree against a schema. It fills in defaults, as the
// Kubernetes API does before its checks.
type checker struct {
	fail   func(field, msg string)
	faults int
}

func (c *checker) failf(path, format string, args ...any) any {
	c.faults++
	c.fail(path, fmt.Sprintf(format, args...))
	return nil
}

// value checks v and returns it with defaults.
func (c *checker) value(v any, s *schema, path string) any {
	before := c.faults
	switch s.Type {
	case "object":
		m, ok := v.(map[string]any)
		if !ok {
			return c.wrong(v, path, "an object")
		}
		if s.AdditionalProperties != nil {
			c.entries(m, s, path)
		} else {
			c.properties(m, s, path)
		}
	case "array":
		list, ok := v.([]any)
		if !ok {
			return c.wrong(v, path, "a list")
		}
		c.list(list, s, path)
	case "string":
		text, ok := v.(string)
		if !ok {
			return c.wrong(v, path, "a string")
		}
		c.text(text, s, path)
	case "integer", "number":
		v = c.number(v, s, path)
	case "boolean":
		if _, ok := v.(bool); !ok {
			return c.wrong(v, path, "true or false")
		}
	}
	if c.faults == before { // as in the Kubernetes API, rules may rely on the schema
		for _, r := range s.Rules {
			r.check(c, v, path)
		}
	}
	return v
}

func (c *checker) properties(m map[string]any, s *schema, path string) {
	for name, v := range m {
		p := s.Properties[name]
		switch {
		case p == nil:
			c.failf(join(path, name), "unknown field %q%s", abbreviate(name), s.suggest(name))
		case v == nil:
			delete(m, name) // an absent value, as in the Kubernetes API
		default:
			m[name] = c.value(v, p, join(path, name))
		}
	}
	for name, p := range s.Properties {
		if _, given := m[name]; given {
			continue
		}
		if v := p.fallback(); v != nil {
			m[name] = c.value(v, p, join(path, name))
		} else if slices.Contains(s.Required, name) {
			c.failf(join(path, name), "is required%s", p.wanted(", want "))
		}
	}
}

// entries checks a map with free keys.
func (c *checker) entries(m map[string]any, s *schema, path string) {
	c.count(path, len(m), s.MinProperties, s.MaxProperties)
	for key, v := range m {
		m[key] = c.value(v, s.AdditionalProperties, join(path, key))
	}
}

func (c *checker) list(list []any, s *schema, path string) {
	c.count(path, len(list), s.MinItems, s.MaxItems)
	keys := make(map[string]bool, len(list))
	for i, v := range list {
		at := index(path, i)
		before := c.faults
		list[i] = c.value(v, s.Items, at)
		if c.faults > before {
			continue
		}
		var key, field string
		switch s.ListType {
		case "set":
			key, field = fmt.Sprint(v), at
		case "map":
			m := v.(map[string]any)
			for _, k := range s.ListKeys {
				key += fmt.Sprint(m[k]) + " "
			}
			field = join(at, s.ListKeys[len(s.ListKeys)-1])
		default:
			continue
		}
		if keys[key] {
			c.failf(field, "%q is given twice", abbreviate(strings.TrimSpace(key)))
		}
		keys[key] = true
	}
}

func (c *checker) count(path string, n, least int, most *int) {
	switch {
	case n < least && n == 0:
		c.failf(path, "is empty: give at least %d", least)
	case n < least:
		c.failf(path, "has %d entries, fewer than %d", n, least)
	case most != nil && n > *most:
		c.failf(path, "has %d entries, more than %d", n, *most)
	}
}

func (c *checker) text(v string, s *schema, path string) {
	switch n := utf8.RuneCountInString(v); {
	case len(s.Enum) > 0:
		if !slices.Contains(s.Enum, v) {
			c.failf(path, "%q is not one of %s%s", abbreviate(v), strings.Join(s.Enum, ", "), didYouMean(v, s.Enum))
		}
	case n < s.MinLength:
		c.failf(path, "is empty%s", s.wanted(", want "))
	case s.pattern != nil && !s.pattern.MatchString(v):
		c.failf(path, "%q is not %s", redact(v), s.wanted(""))
	case s.MaxLength != nil && n > *s.MaxLength:
		c.failf(path, "has %d characters, more than %d", n, *s.MaxLength)
	}
}

// wanted describes the form of a value, after prefix; empty if there is none.
func (s *schema) wanted(prefix string) string {
	switch {
	case len(s.Enum) > 0:
		return prefix + "one of " + strings.Join(s.Enum, ", ")
	case s.Title != "":
		return prefix + s.Title
	case s.Pattern != "":
		return prefix + "of the form " + s.Pattern
	case s.Type == "array":
		return prefix + "a list"
	case s.Type == "object" && len(s.Required) > 0:
		return prefix + "an object with " + strings.Join(s.Required, " and ")
	}
	return ""
}

func (c *checker) number(v any, s *schema, path string) any {
	var f float64
	switch n := v.(type) {
	case int64:
		f = float64(n)
		if s.Format == "int32" && int64(int32(n)) != n {
			return c.failf(path, "%d is out of range: %d at most", n, math.MaxInt32)
		}
	case float64:
		f = n
		if s.Type == "integer" || math.IsNaN(f) || math.IsInf(f, 0) {
			return c.wrong(v, path, map[string]string{"integer": "an integer", "number": "a number"}[s.Type])
		}
	default:
		return c.wrong(v, path, map[string]string{"integer": "an integer", "number": "a number"}[s.Type])
	}
	low, high := s.Minimum != nil && f < *s.Minimum, s.Maximum != nil && f > *s.Maximum
	switch {
	case (low || high) && s.Minimum != nil && s.Maximum != nil:
		c.failf(path, "%v is not between %s and %s", v, plain(*s.Minimum), plain(*s.Maximum))
	case low:
		c.failf(path, "%v is below %s", v, plain(*s.Minimum))
	case high:
		c.failf(path, "%v is above %s", v, plain(*s.Maximum))
	}
	if s.Type == "number" {
		return f
	}
	return v
}

func plain(f float64) string { return strconv.FormatFloat(f, 'f', -1, 64) }

func (c *checker) wrong(v any, path, want string) any {
	got, hint := "", ""
	switch v := v.(type) {
	case nil:
		got = "nothing"
	case map[string]any:
		got = "an object"
	case []any:
		got = "a list"
	case string:
		got = strconv.Quote(redact(v))
	default:
		got = fmt.Sprint(v)
		if want == "a string" {
			hint = "; put it in quotes"
		}
	}
	return c.failf(path, "want %s, got %s%s", want, got, hint)
}

// redact hides what stands before an @ and may be a password.
func redact(v string) string {
	if i := strings.LastIndex(v, "@"); i >= 0 {
		v = "..." + v[i:]
	}
	return abbreviate(v)
}

// suggest names the field that was probably meant.
func (s *schema) suggest(name string) string {
	known := slices.Sorted(maps.Keys(s.Properties))
	for _, parent := range known {
		if p := s.Properties[parent]; p.Type == "object" && p.Properties[name] != nil {
			return fmt.Sprintf("; it belongs under %q", parent)
		}
	}
	if hint := didYouMean(name, known); hint != "" {
		return hint
	}
	if len(known) > 0 && len(known) <= 8 {
		return "; known are " + strings.Join(known, ", ")
	}
	return ""
}

// metaSchema has the fields of metav1.ObjectMeta. Only a few are checked.
var metaSchema = sync.OnceValue(func() *schema {
	s := &schema{Type: "object", Properties: map[string]*schema{}}
	for f := range reflect.TypeFor[metav1.ObjectMeta]().Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		s.Properties[name] = &schema{}
	}
	text := &schema{Type: "string"}
	entries := &schema{Type: "object", AdditionalProperties: text}
	s.Properties["name"], s.Properties["namespace"] = text, text
	s.Properties["labels"], s.Properties["annotations"] = entries, entries
	return s
})

var (
	label     = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	subdomain = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
)

// resource checks a whole resource of a kind and fills in defaults. The status
// is not looked at: only the router writes it.
func (c *checker) resource(m map[string]any, s *schema) {
	delete(m, "status")
	meta, ok := m["metadata"].(map[string]any)
	if !ok {
		if m["metadata"] != nil {
			c.wrong(m["metadata"], "metadata", "an object")
		}
		meta = map[string]any{}
	}
	before := c.faults
	c.value(meta, metaSchema(), "metadata")
	if c.faults == before {
		c.metadata(meta)
	}
	rest := map[string]any{}
	for k, v := range m {
		if k != "apiVersion" && k != "kind" && k != "metadata" {
			rest[k] = v
		}
	}
	c.value(rest, s, "")
	if spec, ok := rest["spec"]; ok {
		m["spec"] = spec
	}
}

func (c *checker) metadata(meta map[string]any) {
	name, _ := meta["name"].(string)
	switch {
	case name == "":
		c.failf("metadata.name", "is required")
	case len(name) > 253 || !subdomain.MatchString(name):
		c.failf("metadata.name", "%q is not a name: lower-case letters, digits, dashes and dots", abbreviate(name))
	}
	if ns, given := meta["namespace"].(string); given && !label.MatchString(ns) {
		c.failf("metadata.namespace", "%q is not a namespace: lower-case letters, digits and dashes", abbreviate(ns))
	}
	labels, _ := meta["labels"].(map[string]any)
	for k, v := range labels {
		if len(validation.IsQualifiedName(k)) > 0 {
			c.failf("metadata.labels", "%q is not a label name such as app or example.com/app", abbreviate(k))
		} else if s := v.(string); len(validation.IsValidLabelValue(s)) > 0 {
			c.failf(join("metadata.labels", k), "%q is not a label value: letters, digits, dashes, dots and underscores, at most 63", abbreviate(s))
		}
	}
	annotations, _ := meta["annotations"].(map[string]any)
	for k := range annotations {
		if len(validation.IsQualifiedName(strings.ToLower(k))) > 0 {
			c.failf("metadata.annotations", "%q is not an annotation name such as note or example.com/note", abbreviate(k))
		}
	}
}

// didYouMean names the candidate that looks most like name, if any does.
func didYouMean(name string, candidates []string) string {
	if best := spelling.Nearest(name, candidates); best != "" {
		return fmt.Sprintf("; did you mean %q?", best)
	}
	return ""
}
