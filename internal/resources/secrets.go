package resources

import (
	"encoding/base64"
	"fmt"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	yaml "sigs.k8s.io/yaml/goyaml.v3"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/apikey"
)

// kindSecret is the kind of Secrets, of which only those with records of API keys
// are read.
const kindSecret = "Secret"

// KeySecret is a Secret with records of API keys.
type KeySecret struct {
	Namespace, Name string
	// Keys by id.
	Keys []apikey.Record
	// Faults say what is wrong with entries that are not among Keys. They hold
	// nothing of the content.
	Faults []string

	file string
	line int
}

// NewKeySecret reads the entries of a Secret.
func NewKeySecret(namespace, name string, data map[string][]byte) *KeySecret {
	s := &KeySecret{Namespace: namespace, Name: name}
	for _, id := range slices.Sorted(maps.Keys(data)) {
		r, err := apikey.Decode(id, data[id])
		switch {
		case err != nil:
			s.Faults = append(s.Faults, fmt.Sprintf("entry %q: %v", abbreviate(id), err))
		case len(s.Keys) == apikey.MaxRecords:
			s.Faults = append(s.Faults, fmt.Sprintf("holds more than %d keys: those after %q are left out", apikey.MaxRecords, s.Keys[len(s.Keys)-1].ID))
			return s
		default:
			s.Keys = append(s.Keys, r)
		}
	}
	return s
}

// secret takes a Secret of a file. Whatever is wrong with it, no value is shown.
func (p *parser) secret(file string, n *yaml.Node) {
	meta := child(n, "metadata")
	var m metav1.ObjectMeta
	m.Namespace = metav1.NamespaceDefault
	name := kindSecret
	faulty := false
	fail := func(line int, field, msg string) {
		faulty = true
		p.report(Problem{Severity: Error, File: file, Line: line, Resource: name, Field: field, Message: msg})
	}
	text := func(n *yaml.Node, at, key string, to *string) {
		switch v := child(n, key); {
		case v.Kind == 0:
		case v.Kind == yaml.ScalarNode && v.Tag == "!!str":
			*to = v.Value
		default:
			fail(v.Line, join(at, key), "must be a string")
		}
	}
	text(meta, "metadata", "name", &m.Name)
	text(meta, "metadata", "namespace", &m.Namespace)
	if m.Name == "" {
		fail(n.Line, "metadata.name", "is required")
		return
	}
	name = kindSecret + " " + m.Namespace + "/" + m.Name
	var version string
	if text(n, "", "apiVersion", &version); version != "v1" {
		fail(child(n, "apiVersion").Line, "apiVersion", "want v1")
	}
	data := map[string][]byte{}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, v := n.Content[i], n.Content[i+1]
		if seen[key.Value] {
			fail(key.Line, key.Value, "is given twice")
		}
		seen[key.Value] = true
		switch key.Value {
		case "apiVersion", "kind", "metadata", "type", "immutable":
		case "data", "stringData":
			p.entries(key.Value, v, data, fail)
		default:
			fail(key.Line, abbreviate(key.Value), "is no field of a Secret")
		}
	}
	s := NewKeySecret(m.Namespace, m.Name, data)
	for _, fault := range s.Faults {
		fail(n.Line, "", fault+". A Secret among the resources may hold records of API keys only, as kinfctl keys writes them")
	}
	if !faulty {
		s.file, s.line = file, n.Line
		p.secrets = append(p.secrets, s)
	}
}

// entries reads data or stringData.
func (p *parser) entries(field string, v *yaml.Node, data map[string][]byte, fail func(line int, field, msg string)) {
	if v.Kind != yaml.MappingNode {
		if v.Tag != "!!null" {
			fail(v.Line, field, "must be an object")
		}
		return
	}
	for i := 0; i+1 < len(v.Content); i += 2 {
		key, value := v.Content[i], v.Content[i+1]
		at := join(field, abbreviate(key.Value))
		if key.Kind != yaml.ScalarNode || value.Kind != yaml.ScalarNode || value.Tag != "!!str" {
			fail(key.Line, at, "must be a string")
			continue
		}
		if data[key.Value] != nil {
			fail(key.Line, at, "is given twice")
			continue
		}
		content := []byte(value.Value)
		if field == "data" {
			var err error
			if content, err = base64.StdEncoding.DecodeString(strings.TrimSpace(value.Value)); err != nil {
				fail(key.Line, at, "is not base64: write it under stringData")
				continue
			}
		}
		data[key.Value] = content
	}
}

// keys are those of a tenant. An id is one key's in its namespace, the one that
// claimed it first.
func (c *compiler) keys(o *object, spec *v1alpha1.InferenceTenantSpec) []apikey.Record {
	var out []apikey.Record
	for i, id := range spec.Identities {
		if id.APIKeySecretRef == nil {
			continue
		}
		field, name := index("spec.identities", i)+".apiKeySecretRef.name", string(id.APIKeySecretRef.Name)
		s := c.Keys(o.GetNamespace(), name)
		if s == nil {
			o.because(Missing, Warning, field, fmt.Sprintf("there is no Secret %q with records of API keys in namespace %q: make one with kinfctl keys create, or set the label %s: \"true\" on it",
				abbreviate(name), o.GetNamespace(), apikey.Label))
			continue
		}
		for _, fault := range s.Faults {
			o.warnf(field, "Secret %q: %s", abbreviate(name), fault)
		}
		for _, r := range s.Keys {
			at := o.GetNamespace() + " " + r.ID
			if owner := c.keyOwners[at]; owner != "" {
				o.warnf(field, "Secret %q: the key %q is left out: InferenceTenant %q has one of this id already", abbreviate(name), r.ID, owner)
				continue
			}
			c.keyOwners[at] = o.GetName()
			out = append(out, r)
		}
	}
	return out
}

// secretsOf finds Secrets among those of files.
func (p *parser) secretsOf() func(namespace, name string) *KeySecret {
	byName := make(map[[2]string]*KeySecret, len(p.secrets))
	for _, s := range p.secrets {
		at := [2]string{s.Namespace, s.Name}
		if first := byName[at]; first != nil {
			p.report(Problem{Severity: Error, Reason: Claimed, File: s.file, Line: s.line, Resource: kindSecret + " " + s.Namespace + "/" + s.Name,
				Field: "metadata.name", Message: fmt.Sprintf("is used already by the Secret at %s:%d", first.file, first.line)})
			continue
		}
		byName[at] = s
	}
	return func(namespace, name string) *KeySecret { return byName[[2]string{namespace, name}] }
}

func anyKeys(namespace, name string) *KeySecret { return &KeySecret{} }
