// Package layers checks the rules of the repository that the compiler does not:
// the direction of imports, one package comment for each package, and that the
// documents say what the code does.
package layers

import (
	"encoding/json"
	"go/parser"
	"go/token"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const root = "github.com/kinference/kinference/"

// pkg is what `go list -json` tells of a package.
type pkg struct {
	ImportPath, Dir, Name                       string
	Imports, TestImports, XTestImports, GoFiles []string
}

func packages(t *testing.T) []pkg {
	t.Helper()
	out, err := exec.Command("go", "list", "-json=ImportPath,Dir,Name,Imports,TestImports,XTestImports,GoFiles", "work").Output()
	if err != nil {
		t.Fatalf("list packages: %v", err)
	}
	var all []pkg
	for dec := json.NewDecoder(strings.NewReader(string(out))); dec.More(); {
		var p pkg
		if err := dec.Decode(&p); err != nil {
			t.Fatalf("decode package list: %v", err)
		}
		all = append(all, p)
	}
	if len(all) < 20 {
		t.Fatalf("got %d packages, want the whole workspace", len(all))
	}
	return all
}

// layer is the height of an import path: a package may import its own height
// and below.
func layer(path string) int {
	switch rest := strings.TrimPrefix(path, root); {
	case strings.HasPrefix(rest, "proto/"), strings.HasPrefix(rest, "api/"), strings.HasPrefix(rest, "deploy/"):
		return 0
	case strings.HasPrefix(rest, "internal"):
		return 1
	case strings.HasPrefix(rest, "services/"):
		return 2
	case strings.HasPrefix(rest, "cmd/"):
		return 3
	default:
		return 4
	}
}

// service is the service that a path belongs to, if any.
func service(path string) string {
	rest, ok := strings.CutPrefix(path, root+"services/")
	if !ok {
		return ""
	}
	name, _, _ := strings.Cut(rest, "/")
	return name
}

func TestImportsGoOneWay(t *testing.T) {
	for _, p := range packages(t) {
		for _, imp := range append(append(p.Imports, p.TestImports...), p.XTestImports...) {
			if !strings.HasPrefix(imp, root) {
				continue
			}
			if layer(imp) > layer(p.ImportPath) {
				t.Errorf("%s imports %s, which is above it", p.ImportPath, imp)
			}
			if s, o := service(p.ImportPath), service(imp); s != "" && o != "" && s != o {
				t.Errorf("%s imports %s: a service uses another one by its proto client only", p.ImportPath, imp)
			}
		}
	}
}

// heavy must not be linked into a service, but for one: the NATS server is
// embedded by the all in one only, the router talks to Kubernetes, and nobody
// needs the client and the types of its whole API.
var heavy = map[string]string{
	"github.com/nats-io/nats-server": "", "k8s.io/client-go": "router", "k8s.io/client-go/kubernetes": "", "k8s.io/api/core": "",
}

func TestDeps(t *testing.T) {
	for _, s := range services {
		out, err := exec.Command("go", "list", "-deps", root+"services/"+s+"/cmd/"+s).Output()
		if err != nil {
			t.Fatalf("list dependencies of %s: %v", s, err)
		}
		for _, dep := range strings.Fields(string(out)) {
			for prefix, except := range heavy {
				if strings.HasPrefix(dep, prefix) && s != except {
					t.Errorf("%s links %s", s, dep)
				}
			}
			if strings.HasPrefix(dep, root+"internal/fleetsim") || strings.HasPrefix(dep, root+"internal/testenv") {
				t.Errorf("%s links %s: simulation and test code stay out of production", s, dep)
			}
		}
	}
}

func TestEachPackageHasOneComment(t *testing.T) {
	for _, p := range packages(t) {
		if strings.Contains(p.ImportPath, "/proto/gen/") || len(p.GoFiles) == 0 {
			continue
		}
		var with []string
		for _, name := range p.GoFiles {
			f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, name), nil, parser.PackageClauseOnly|parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			if f.Doc != nil && !strings.HasPrefix(f.Doc.Text(), "Code generated") {
				with = append(with, name)
			}
		}
		if len(with) != 1 {
			t.Errorf("%s: package comments in %d files %v, want one", p.ImportPath, len(with), with)
		}
	}
}
