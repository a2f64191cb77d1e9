package resources

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	yaml "sigs.k8s.io/yaml/goyaml.v3"

	"github.com/kinference/kinference/api/v1alpha1"
)

// Bounds of a folder. They keep a wrong path from filling the memory.
const (
	maxFiles     = 1000
	maxFileBytes = 4 << 20
	maxProblems  = 1000
)

// Load reads the *.yaml and *.yml files of a folder (not of its subfolders,
// nor files whose name begins with a dot) and compiles them. The catalog is
// nil when any problem is an Error. An empty folder is a good, empty catalog.
func Load(dir string) (*Catalog, Problems) {
	files, ps := read(dir)
	if ps.Err() != nil {
		return nil, ps
	}
	return compileFiles(files)
}

// file is the content of one file; name is relative to the folder.
type file struct {
	name string
	data []byte
}

func digest(files []file) [sha256.Size]byte {
	h := sha256.New()
	for _, f := range files {
		fmt.Fprintf(h, "%q %d ", f.name, len(f.data))
		h.Write(f.data)
	}
	return [sha256.Size]byte(h.Sum(nil))
}

func read(dir string) ([]file, Problems) {
	bad := func(name, format string, args ...any) Problems {
		return Problems{{Severity: Error, File: name, Message: fmt.Sprintf(format, args...)}}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, bad(dir, "read folder: %v", cause(err))
	}
	var files []file
	for _, e := range entries {
		name := e.Name()
		if ext := filepath.Ext(name); strings.HasPrefix(name, ".") || ext != ".yaml" && ext != ".yml" {
			continue
		}
		path := filepath.Join(dir, name)
		info, err := os.Stat(path) // follows the links of a mounted ConfigMap
		switch {
		case err != nil:
			return nil, bad(name, "read file: %v", cause(err))
		case info.IsDir():
			continue
		case info.Size() > maxFileBytes:
			return nil, bad(name, "file is larger than %d MiB", maxFileBytes>>20)
		case len(files) == maxFiles:
			return nil, bad(dir, "folder has more than %d files", maxFiles)
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, bad(name, "read file: %v", cause(err))
		}
		files = append(files, file{name, data})
	}
	return files, nil
}

// cause strips the path from an error of package os: problems name the file.
func cause(err error) error {
	var pe *os.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}

// object is one decoded resource with what is needed to talk about it.
type object struct {
	file            string
	line            int
	kind            string
	namespace, name string
	lines           map[string]int
	set             *v1alpha1.InferenceWorkerSet
	pool            *v1alpha1.InferencePool
	report          func(Problem)
}

func (o *object) id() string { return o.namespace + "/" + o.name }

// lineOf returns the line of a field, or of the nearest one that was written.
func (o *object) lineOf(field string) int {
	for p := field; p != ""; {
		if line, ok := o.lines[p]; ok {
			return line
		}
		i := strings.LastIndexAny(p, ".[")
		if i < 0 {
			break
		}
		p = p[:i]
	}
	return o.line
}

func (o *object) problemf(s Severity, field, format string, args ...any) {
	o.report(Problem{
		Severity: s, File: o.file, Line: o.lineOf(field), Field: field,
		Resource: o.kind + " " + o.id(), Message: fmt.Sprintf(format, args...),
	})
}

func (o *object) errorf(field, format string, args ...any) { o.problemf(Error, field, format, args...) }
func (o *object) warnf(field, format string, args ...any) {
	o.problemf(Warning, field, format, args...)
}

// parser turns files into objects.
type parser struct {
	objects  []*object
	problems Problems
	byID     map[string]*object
}

func (p *parser) report(pr Problem) {
	if len(p.problems) < maxProblems {
		p.problems = append(p.problems, pr)
	}
}

func compileFiles(files []file) (*Catalog, Problems) {
	p := &parser{byID: map[string]*object{}}
	for _, f := range files {
		p.file(f)
	}
	c := compile(p.objects)
	p.problems.sort()
	if p.problems.Err() != nil {
		return nil, p.problems
	}
	return c, p.problems
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

var yamlLine = regexp.MustCompile(`^line (\d+): `)

func syntaxProblem(file string, err error) Problem {
	msg := yamlMessage(err)
	pr := Problem{Severity: Error, File: file, Line: 1}
	if m := yamlLine.FindStringSubmatch(msg); m != nil {
		pr.Line, _ = strconv.Atoi(m[1])
		msg = msg[len(m[0]):]
	}
	pr.Message = "YAML: " + msg
	return pr
}

// laterKinds belong to the group and are not supported yet.
var laterKinds = []string{"GatewayBackend", "InferencePolicy", "InferenceProvider", "InferenceTenant"}

func (p *parser) document(file string, n *yaml.Node) {
	fail := func(line int, field, msg string) {
		p.report(Problem{Severity: Error, File: file, Line: line, Field: field, Message: msg})
	}
	if n.Kind != yaml.MappingNode {
		fail(n.Line, "", "want a resource with apiVersion and kind")
		return
	}
	version, kind := scalar(n, "apiVersion"), scalar(n, "kind")
	o := &object{file: file, line: n.Line, kind: kind.Value, report: p.report}
	switch {
	case version.Value == "":
		fail(n.Line, "apiVersion", "is required: "+v1alpha1.APIVersion)
		return
	case version.Value != v1alpha1.APIVersion:
		fail(version.Line, "apiVersion", fmt.Sprintf("unknown %q, want %s", abbreviate(version.Value), v1alpha1.APIVersion))
		return
	case kind.Value == "":
		fail(n.Line, "kind", "is required")
		return
	case slices.Contains(laterKinds, kind.Value):
		name := scalar(child(n, "metadata"), "name").Value
		p.report(Problem{Severity: Warning, File: file, Line: n.Line, Resource: kind.Value + " " + name,
			Message: "kind is not supported yet: the resource has no effect"})
		return
	case kind.Value == v1alpha1.KindInferenceWorkerSet:
		o.set = &v1alpha1.InferenceWorkerSet{}
	case kind.Value == v1alpha1.KindInferencePool:
		o.pool = &v1alpha1.InferencePool{}
	default:
		fail(kind.Line, "kind", fmt.Sprintf("unknown kind %q", abbreviate(kind.Value)))
		return
	}
	var ok bool
	if o.set != nil {
		o.lines, ok = decode(n, o.set, fail)
		o.namespace, o.name = o.set.Namespace, o.set.Name
	} else {
		o.lines, ok = decode(n, o.pool, fail)
		o.namespace, o.name = o.pool.Namespace, o.pool.Name
	}
	if !ok {
		return
	}
	if o.namespace == "" {
		o.namespace = "default"
	}
	if !o.validate() {
		return
	}
	if first := p.byID[o.kind+" "+o.id()]; first != nil {
		o.errorf("metadata.name", "is used already by the resource at %s:%d", first.file, first.line)
		return
	}
	p.byID[o.kind+" "+o.id()] = o
	p.objects = append(p.objects, o)
}

// child returns the value of a key of a mapping, or an empty node.
func child(n *yaml.Node, key string) *yaml.Node {
	for i := 0; i+1 < len(n.Content) && n.Kind == yaml.MappingNode; i += 2 {
		if n.Content[i].Value == key {
			return n.Content[i+1]
		}
	}
	return &yaml.Node{Line: n.Line}
}

func scalar(n *yaml.Node, key string) *yaml.Node {
	if v := child(n, key); v.Kind == yaml.ScalarNode {
		return v
	}
	return &yaml.Node{Line: n.Line}
}
