package resources

import (
	"os"
	"path/filepath"
	"testing"
)

func FuzzCompile(f *testing.F) {
	paths, _ := filepath.Glob("testdata/*.yaml")
	for _, p := range paths {
		data, err := os.ReadFile(p)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		c, problems := Options{}.compileFiles([]file{{"a.yaml", content}})
		if (c == nil) != (problems.Err() != nil) {
			t.Errorf("catalog %v, problems %v", c, problems)
		}
		for _, p := range problems {
			if p.Line < 0 || p.Message == "" {
				t.Errorf("problem %+v", p)
			}
		}
	})
}
