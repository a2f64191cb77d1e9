package resources_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/kinference/kinference/internal/resources"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// folder makes a folder of files given as name, content pairs.
func folder(t testing.TB, pairs ...string) string {
	t.Helper()
	dir := t.TempDir()
	for i := 0; i < len(pairs); i += 2 {
		write(t, filepath.Join(dir, pairs[i]), pairs[i+1])
	}
	return dir
}

func write(t testing.TB, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

var expectation = regexp.MustCompile(`# (ERROR|WARNING): ([^#]+)`)

// Every problem that a sample is to give is written as a comment on its line.
func TestSamples(t *testing.T) {
	paths, _ := filepath.Glob("testdata/*.yaml")
	if len(paths) < 8 {
		t.Fatalf("only %d samples", len(paths))
	}
	for _, path := range paths {
		t.Run(filepath.Base(path), func(t *testing.T) {
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			c, problems := resources.Load(folder(t, filepath.Base(path), string(data)))
			good := strings.HasSuffix(path, ".good.yaml")
			if (c != nil) != good || (problems.Err() == nil) != good {
				t.Errorf("catalog %v, problems %v", c != nil, problems)
			}
			rest := slices.Clone(problems)
			for i, line := range strings.Split(string(data), "\n") {
				for _, m := range expectation.FindAllStringSubmatch(line, -1) {
					at := slices.IndexFunc(rest, func(p resources.Problem) bool {
						return p.Line == i+1 && strings.EqualFold(p.Severity.String(), m[1]) && strings.Contains(p.String(), strings.TrimSpace(m[2]))
					})
					if at < 0 {
						t.Errorf("line %d: no problem %q", i+1, m[0])
						continue
					}
					rest = slices.Delete(rest, at, at+1)
				}
			}
			if strings.HasPrefix(filepath.Base(path), "bomb") {
				return
			}
			for _, p := range rest {
				t.Errorf("unexpected: %s", p)
			}
			if good {
				golden(t, strings.TrimSuffix(path, ".yaml")+".golden", dump(c))
			}
		})
	}
}

func golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		write(t, path, got)
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

func dump(c *resources.Catalog) string {
	var b strings.Builder
	for _, s := range c.Sets {
		fmt.Fprintf(&b, "set %s ranks=%d class=%q tokenizer=%q topic=%q lastCopy=%v metrics=%s/%s\n", s.Name, s.Ranks, s.Class,
			s.TokenizerPath, s.KVTopic, s.RemovalsLastCopy, s.MetricsPath, s.MetricsInterval)
		for _, w := range s.Workers {
			fmt.Fprintf(&b, "  worker %s name=%s url=%s events=%q replay=%q\n", w.UID, w.Name, w.URL, w.KVEvents, w.KVReplay)
		}
		for _, p := range s.Profiles {
			fmt.Fprintf(&b, "  profile %s upstream=%s root=%s lora=%q maxModelLen=%d\n", p.ID, p.UpstreamModel, p.Root, p.LoRA, p.MaxModelLen)
		}
	}
	for _, p := range c.Pools {
		fmt.Fprintf(&b, "pool %s implicit=%v", p.Name, p.Implicit)
		for _, s := range p.Sets {
			fmt.Fprintf(&b, " %s", s.Name)
		}
		b.WriteString("\n")
	}
	var names []string
	for name := range c.Models {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		m := c.Models[name]
		fmt.Fprintf(&b, "model %s root=%s", m.Name, m.Root)
		for _, o := range m.Offers {
			fmt.Fprintf(&b, " %s@%s", o.Profile.ID, o.Pool.Name)
		}
		b.WriteString("\n")
	}
	return b.String()
}

func TestTokenizerFolder(t *testing.T) {
	model := folder(t, "tokenizer.json", "{}")
	set := func(path string) string {
		return "apiVersion: kinference.buoyant.io/v1alpha1\nkind: InferenceWorkerSet\nmetadata: { name: s }\n" +
			"spec:\n  endpoints: [ { name: a, address: x } ]\n  models: [ { name: m } ]\n  tokenizer: { path: " + path + " }\n"
	}
	c, problems := resources.Load(folder(t, "a.yml", set(model)))
	if len(problems) > 0 || c.Sets[0].TokenizerPath != model {
		t.Errorf("problems %v", problems)
	}
	_, problems = resources.Load(folder(t, "a.yml", set(t.TempDir())))
	if len(problems) != 1 || problems[0].Line != 7 || !strings.Contains(problems[0].String(), "no tokenizer.json") {
		t.Errorf("problems %v", problems)
	}
}

func TestFolderFaults(t *testing.T) {
	if _, problems := resources.Load("/no/such/folder"); len(problems) != 1 || !strings.Contains(problems[0].String(), "no such file") {
		t.Errorf("missing folder: %v", problems)
	}
	dir := folder(t, "notes.txt", "not yaml: [", ".hidden.yaml", "not: [", "big.yaml", strings.Repeat("# long\n", 1<<20))
	if _, problems := resources.Load(dir); len(problems) != 1 || !strings.Contains(problems[0].String(), "larger than") {
		t.Errorf("large file: %v", problems)
	}
}

type loaded struct {
	c        *resources.Catalog
	problems resources.Problems
}

// watch follows dir and returns a function that waits for the next load.
func watch(t *testing.T, dir string) func() loaded {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	loads, done := make(chan loaded), make(chan error)
	s := resources.NewSource(dir, func(c *resources.Catalog, p resources.Problems) {
		select {
		case loads <- loaded{c, p}:
		case <-ctx.Done():
		}
	})
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return func() loaded {
		t.Helper()
		select {
		case l := <-loads:
			return l
		case <-time.After(20 * time.Second):
			t.Fatal("no load within 20 s")
		}
		panic("unreachable")
	}
}

func minimal(model string) string {
	return "apiVersion: kinference.buoyant.io/v1alpha1\nkind: InferenceWorkerSet\nmetadata: { name: s }\n" +
		"spec: { endpoints: [ { name: a, address: x } ], models: [ { name: " + model + " } ] }\n"
}

func wantModel(t *testing.T, l loaded, model string) {
	t.Helper()
	if l.c == nil || l.c.Models[model] == nil {
		t.Fatalf("catalog %+v has no model %q; problems %v", l.c, model, l.problems)
	}
}

func TestHotReload(t *testing.T) {
	dir := folder(t, "a.yaml", minimal("one"))
	next := watch(t, dir)
	wantModel(t, next(), "one")

	write(t, filepath.Join(dir, "a.yaml"), minimal("two"))
	wantModel(t, next(), "two")

	// A broken file gives no catalog but says where.
	write(t, filepath.Join(dir, "a.yaml"), strings.Replace(minimal("three"), "models", "modles", 1))
	l := next()
	if l.c != nil || len(l.problems) == 0 || l.problems[0].File != "a.yaml" || l.problems[0].Line != 4 {
		t.Errorf("catalog %v, problems %v", l.c, l.problems)
	}

	// An editor writes a new file and renames it over the old one.
	write(t, filepath.Join(dir, ".a.yaml.swp"), minimal("four"))
	if err := os.Rename(filepath.Join(dir, ".a.yaml.swp"), filepath.Join(dir, "a.yaml")); err != nil {
		t.Fatal(err)
	}
	wantModel(t, next(), "four")

	if err := os.Remove(filepath.Join(dir, "a.yaml")); err != nil {
		t.Fatal(err)
	}
	if l := next(); l.c == nil || len(l.c.Models) != 0 {
		t.Errorf("after removal: %+v %v", l.c, l.problems)
	}
}

// Kubelet mounts a ConfigMap as links through ..data, which it swaps.
func TestConfigMapMount(t *testing.T) {
	dir := t.TempDir()
	publish := func(version, model string) {
		t.Helper()
		if err := os.Mkdir(filepath.Join(dir, version), 0o755); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, version, "a.yaml"), minimal(model))
		tmp := filepath.Join(dir, "..data_tmp")
		if err := os.Symlink(version, tmp); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(tmp, filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	publish("..v1", "one")
	if err := os.Symlink("..data/a.yaml", filepath.Join(dir, "a.yaml")); err != nil {
		t.Fatal(err)
	}
	next := watch(t, dir)
	wantModel(t, next(), "one")
	publish("..v2", "two")
	wantModel(t, next(), "two")
}
