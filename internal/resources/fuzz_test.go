package resources

import (
	"os"
	"path/filepath"
	"testing"
)

// FuzzCompile feeds the loader, seeded with all samples: it must neither fail
// nor hang, give a catalog or else say why not, and admission must agree.
func FuzzCompile(f *testing.F) {
	for _, pattern := range []string{"testdata/*.yaml", "testdata/*/*.yaml"} {
		paths, err := filepath.Glob(pattern)
		if err != nil || len(paths) == 0 {
			f.Fatal(err)
		}
		for _, p := range paths {
			data, err := os.ReadFile(p)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(data)
		}
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		o := Options{Elsewhere: true}
		c, problems := o.compileFiles([]file{{"a.yaml", content}})
		if (c == nil) != (problems.Err() != nil) {
			t.Errorf("catalog %v, problems %v", c, problems)
		}
		for _, p := range problems {
			if p.Line < 0 || p.Message == "" {
				t.Errorf("problem %+v", p)
			}
		}
		if c == nil {
			return
		}
		// What was accepted, with its defaults, is accepted again.
		p := &parser{}
		p.file(file{"a.yaml", content})
		if c, problems := o.Compile(typed(p)); c == nil {
			t.Errorf("as Kubernetes would have it: %v", problems)
		}
	})
}
