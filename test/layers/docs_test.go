package layers

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// top is the root of the repository.
const top = "../.."

var services = []string{"ingress", "router", "kvtracker", "limiter", "classifier", "accounting"}

// documents calls fn with every Markdown file of the repository.
func documents(t *testing.T, fn func(path, text string)) {
	t.Helper()
	n := 0
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			switch d.Name() {
			case "node_modules", "bin", "out", "shared", ".git", ".cache":
				return fs.SkipDir
			}
			return nil
		}
		if filepath.Ext(path) != ".md" {
			return nil
		}
		raw, err := os.ReadFile(path)
		n++
		fn(path, string(raw))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if n < 10 {
		t.Fatalf("found %d documents, want the whole repository", n)
	}
}

// Every link from one document to a file of the repository leads somewhere.
func TestLinks(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#]+)(#[^)]*)?\)`)
	documents(t, func(path, text string) {
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(path), m[1])); err != nil {
				t.Errorf("%s links to %s, which is not there", path, m[1])
			}
		}
	})
}

// Every test that TESTING.md names exists in the package that it names.
func TestNamedTestsExist(t *testing.T) {
	raw, err := os.ReadFile(filepath.Join(top, "TESTING.md"))
	if err != nil {
		t.Fatal(err)
	}
	cell := regexp.MustCompile("`([a-z][a-z0-9/]*)`:((?: `(?:Test|Fuzz|Benchmark)[A-Za-z0-9]+`,?)+)")
	word := regexp.MustCompile("`(?:Test|Fuzz|Benchmark)[A-Za-z0-9]+`")
	found := 0
	for _, m := range cell.FindAllStringSubmatch(string(raw), -1) {
		files, err := filepath.Glob(filepath.Join(top, m[1], "*_test.go"))
		if err != nil || len(files) == 0 {
			t.Errorf("TESTING.md names package %s, which has no tests", m[1])
		}
		var code strings.Builder
		for _, f := range files {
			raw, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			code.Write(raw)
		}
		for _, name := range word.FindAllString(m[2], -1) {
			found++
			name = strings.Trim(name, "`")
			if !strings.Contains(code.String(), "func "+name+"(") {
				t.Errorf("TESTING.md names %s of %s, which is not there", name, m[1])
			}
		}
	}
	if all := len(word.FindAllString(string(raw), -1)); found != all {
		t.Errorf("TESTING.md names %d tests, %d of them as `package`: `Test`", all, found)
	}
}

// The table of settings in a service's README lists the flags that its code
// declares, and nothing else.
func TestReadmesListFlags(t *testing.T) {
	row := regexp.MustCompile("(?m)^\\| `--([a-z-]+)` \\| ")
	declare := regexp.MustCompile(`^(String|Bool|Int|Int64|Uint|Uint64|Float64|Duration)Var$`)
	for _, name := range services {
		var listed []string
		for _, m := range row.FindAllStringSubmatch(readme(t, name), -1) {
			listed = append(listed, m[1])
		}
		var declared []string
		calls(t, name, func(method string, args []ast.Expr) {
			if declare.MatchString(method) {
				declared = append(declared, firstText(args[1:]))
			}
		})
		compare(t, name, "flag", listed, declared)
	}
}

// The table of metrics in a service's README lists what its code makes, and
// nothing else. In a cell, a name that begins with a dot shares the prefix
// `kinference.<service>` of the first.
func TestReadmesListMetrics(t *testing.T) {
	cell := regexp.MustCompile("(?m)^\\| (`(?:kinference|gen_ai)\\.[^|]*) \\|")
	word := regexp.MustCompile("`([^`]+)`")
	for _, name := range services {
		var listed []string
		for _, m := range cell.FindAllStringSubmatch(readme(t, name), -1) {
			for _, w := range word.FindAllStringSubmatch(m[1], -1) {
				if strings.HasPrefix(w[1], ".") {
					w[1] = "kinference." + name + w[1]
				}
				listed = append(listed, w[1])
			}
		}
		compare(t, name, "metric", listed, instruments(t, name))
	}
}

// compare reports what is in one list only.
func compare(t *testing.T, service, what string, listed, made []string) {
	t.Helper()
	for _, m := range made {
		if !slices.Contains(listed, m) {
			t.Errorf("%s: README lacks the %s %s", service, what, m)
		}
	}
	for _, m := range listed {
		if !slices.Contains(made, m) {
			t.Errorf("%s: README lists the %s %s, which the code does not make", service, what, m)
		}
	}
}

func readme(t *testing.T, service string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(top, "services", service, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

// instruments lists the metrics that a service's code makes. A call names one
// by a literal text; or it is within a local function, which puts the literal
// as a prefix before the name that it is called with.
func instruments(t *testing.T, service string) (made []string) {
	t.Helper()
	method := regexp.MustCompile(`^(Int64|Float64)(Observable)?(Counter|UpDownCounter|Histogram|Gauge)$`)
	prefix := map[string]string{} // by local function
	for _, file := range sources(t, service) {
		ast.Inspect(file, func(n ast.Node) bool {
			assign, ok := n.(*ast.AssignStmt)
			if !ok || len(assign.Lhs) != 1 || len(assign.Rhs) != 1 {
				return true
			}
			name, isName := assign.Lhs[0].(*ast.Ident)
			fn, isFunc := assign.Rhs[0].(*ast.FuncLit)
			if isName && isFunc {
				eachCall(fn, func(called string, args []ast.Expr) {
					if method.MatchString(called) {
						prefix[name.Name] = firstText(args[:1])
					}
				})
			}
			return true
		})
	}
	calls(t, service, func(called string, args []ast.Expr) {
		if p, ok := prefix[called]; ok {
			if name := p + firstText(args); name != "" { // else another function of that name
				made = append(made, name)
			}
		} else if method.MatchString(called) {
			if _, whole := args[0].(*ast.BasicLit); whole {
				made = append(made, firstText(args[:1]))
			}
		}
	})
	return made
}

// sources parses the code of a service, without its tests.
func sources(t *testing.T, service string) (files []*ast.File) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join(top, "services", service), func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		files = append(files, file)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// calls tells fn of every call with arguments in a service's code.
func calls(t *testing.T, service string, fn func(called string, args []ast.Expr)) {
	t.Helper()
	for _, file := range sources(t, service) {
		eachCall(file, fn)
	}
}

func eachCall(n ast.Node, fn func(called string, args []ast.Expr)) {
	ast.Inspect(n, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok && len(call.Args) > 0 {
			switch f := call.Fun.(type) {
			case *ast.Ident:
				fn(f.Name, call.Args)
			case *ast.SelectorExpr:
				fn(f.Sel.Name, call.Args)
			}
		}
		return true
	})
}

// firstText is the first literal text in the arguments; empty if there is none.
func firstText(args []ast.Expr) (text string) {
	for _, a := range args {
		ast.Inspect(a, func(n ast.Node) bool {
			if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING && text == "" {
				text, _ = strconv.Unquote(lit.Value)
			}
			return text == ""
		})
		if text != "" {
			break
		}
	}
	return text
}
