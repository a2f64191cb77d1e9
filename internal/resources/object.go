package resources

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	yaml "sigs.k8s.io/yaml/goyaml.v3"

	"github.com/kinference/kinference/api/v1alpha1"
)

// Object is a resource of one of the six kinds, a pointer to its type in
// api/v1alpha1.
type Object interface {
	runtime.Object
	metav1.Object
}

// kinds makes an empty resource of each kind.
var kinds = map[string]func() Object{
	v1alpha1.KindGatewayBackend:     func() Object { return &v1alpha1.GatewayBackend{} },
	v1alpha1.KindInferencePolicy:    func() Object { return &v1alpha1.InferencePolicy{} },
	v1alpha1.KindInferencePool:      func() Object { return &v1alpha1.InferencePool{} },
	v1alpha1.KindInferenceProvider:  func() Object { return &v1alpha1.InferenceProvider{} },
	v1alpha1.KindInferenceTenant:    func() Object { return &v1alpha1.InferenceTenant{} },
	v1alpha1.KindInferenceWorkerSet: func() Object { return &v1alpha1.InferenceWorkerSet{} },
}

func kindOf(o Object) string {
	switch o.(type) {
	case *v1alpha1.GatewayBackend:
		return v1alpha1.KindGatewayBackend
	case *v1alpha1.InferencePolicy:
		return v1alpha1.KindInferencePolicy
	case *v1alpha1.InferencePool:
		return v1alpha1.KindInferencePool
	case *v1alpha1.InferenceProvider:
		return v1alpha1.KindInferenceProvider
	case *v1alpha1.InferenceTenant:
		return v1alpha1.KindInferenceTenant
	case *v1alpha1.InferenceWorkerSet:
		return v1alpha1.KindInferenceWorkerSet
	}
	return ""
}

// object is a resource with what is needed to talk about it.
type object struct {
	Object
	kind string
	// file and node tell where it was written; empty for one of the
	// Kubernetes API.
	file   string
	node   *yaml.Node
	report func(Problem)
	// age is its place among all objects, the oldest first.
	age int
	// bad is set with the first error.
	bad bool
}

// id is namespace/name.
func (o *object) id() string { return o.GetNamespace() + "/" + o.GetName() }

func (o *object) problem(s Severity, field, msg string) { o.because(Faulty, s, field, msg) }

func (o *object) because(r Reason, s Severity, field, msg string) {
	o.bad = o.bad || s == Error
	o.report(Problem{
		Severity: s, Reason: r, File: o.file, Line: lineOf(o.node, field), Field: field,
		Resource: o.kind + " " + o.id(), Message: msg,
	})
}

// claimed reports what an older resource has claimed.
func (o *object) claimed(field, format string, args ...any) {
	o.because(Claimed, Error, field, fmt.Sprintf(format, args...))
}

func (o *object) errorf(field, format string, args ...any) {
	o.problem(Error, field, fmt.Sprintf(format, args...))
}

func (o *object) warnf(field, format string, args ...any) {
	o.problem(Warning, field, fmt.Sprintf(format, args...))
}

// parser turns files into objects.
type parser struct {
	objects  []*object
	secrets  []*KeySecret
	problems Problems
}

func (p *parser) report(pr Problem) {
	if len(p.problems) < maxProblems {
		p.problems = append(p.problems, pr)
	}
}

// add takes over what another parser has found.
func (p *parser) add(other *parser) {
	for _, o := range other.objects {
		o.report = p.report
	}
	p.objects = append(p.objects, other.objects...)
	p.secrets = append(p.secrets, other.secrets...)
	for _, pr := range other.problems {
		p.report(pr)
	}
}

func (p *parser) file(f file) {
	dec := yaml.NewDecoder(bytes.NewReader(f.data))
	for {
		var doc yaml.Node
		err := dec.Decode(&doc)
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			p.report(syntaxProblem(f.name, err))
			return
		}
		if len(doc.Content) == 1 && doc.Content[0].Tag != "!!null" {
			p.document(f.name, doc.Content[0])
		}
	}
}

// typed enters a resource of the Kubernetes API.
func (p *parser) typed(obj Object) {
	kind := kindOf(obj)
	fail := func(field, msg string) {
		p.report(Problem{Severity: Error, Resource: kind + " " + objectID(obj), Field: field, Message: msg})
	}
	raw, err := json.Marshal(obj)
	if err != nil {
		fail("", err.Error())
		return
	}
	root, err := fromJSON(raw)
	m, ok := root.(map[string]any)
	if err != nil || !ok {
		fail("", "is no object")
		return
	}
	m["apiVersion"], m["kind"] = v1alpha1.APIVersion, kind // clients strip them
	if o := decode(kind, m, fail); o != nil {
		p.objects = append(p.objects, &object{Object: o, kind: kind, report: p.report})
	}
}

func (p *parser) document(file string, n *yaml.Node) {
	kind, name, ok := identify(n)
	if kind == kindSecret {
		p.secret(file, n)
		return
	}
	fail := func(line int, field, msg string) {
		p.report(Problem{Severity: Error, File: file, Line: line, Resource: name, Field: field, Message: msg})
	}
	if !ok {
		fail(n.Line, "", "want a resource with apiVersion and kind")
		return
	}
	t := &tree{fail: fail}
	root, _ := t.value(n, n.Line, "").(map[string]any)
	if t.nodes > maxNodes {
		return
	}
	o := decode(kind, root, func(field, msg string) { fail(lineOf(n, field), field, msg) })
	if o == nil || t.bad {
		return
	}
	if o.GetNamespace() == "" {
		o.SetNamespace(metav1.NamespaceDefault)
	}
	p.objects = append(p.objects, &object{Object: o, kind: kind, file: file, node: n, report: p.report})
}

// identify returns the kind of a document and, as far as they are written, kind
// and name for messages.
func identify(n *yaml.Node) (kind, resource string, ok bool) {
	if n.Kind != yaml.MappingNode {
		return "", "", false
	}
	scalar := func(n *yaml.Node, key string) string {
		if v := child(n, key); v.Kind == yaml.ScalarNode && v.Tag == "!!str" {
			return abbreviate(v.Value)
		}
		return ""
	}
	kind = scalar(n, "kind")
	if kinds[kind] == nil {
		return kind, "", true
	}
	meta := child(n, "metadata")
	name, ns := scalar(meta, "name"), scalar(meta, "namespace")
	switch {
	case name == "":
		return kind, kind, true
	case ns == "":
		ns = metav1.NamespaceDefault
	}
	return kind, kind + " " + ns + "/" + name, true
}

// decode checks a resource by its schema and returns it with defaults, or nil
// after a fault.
func decode(kind string, root map[string]any, fail func(field, msg string)) Object {
	c := &checker{fail: fail}
	switch version := root["apiVersion"]; {
	case version == nil:
		c.failf("apiVersion", "is required: %s", v1alpha1.APIVersion)
	case version != v1alpha1.APIVersion:
		c.failf("apiVersion", "unknown %q, want %s", abbreviate(fmt.Sprint(version)), v1alpha1.APIVersion)
	case root["kind"] == nil:
		c.failf("kind", "is required: one of %s", strings.Join(slices.Sorted(maps.Keys(kinds)), ", "))
	case kinds[kind] == nil:
		c.failf("kind", "unknown kind %q%s", abbreviate(fmt.Sprint(root["kind"])), didYouMean(kind, slices.Collect(maps.Keys(kinds))))
	default:
		c.resource(root, schemas()[kind])
	}
	if c.faults > 0 {
		return nil
	}
	o := kinds[kind]()
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(root, o); err != nil { // a time stamp in metadata, say
		c.failf("", "%v", err)
		return nil
	}
	return o
}
