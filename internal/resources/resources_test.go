package resources_test

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
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

// load reads one sample as kinfctl would on a developer's machine.
func load(t *testing.T, o resources.Options, path string) (*resources.Catalog, resources.Problems) {
	t.Helper()
	o.Elsewhere = true
	c, problems := o.Load(path)
	for i := range problems {
		problems[i].File = filepath.Base(path)
	}
	return c, problems
}

func lines(problems resources.Problems) string {
	var b strings.Builder
	for _, p := range problems {
		b.WriteString(p.String() + "\n")
	}
	return b.String()
}

// The golden file of a good sample holds its warnings and what it compiles to.
func TestGood(t *testing.T) {
	for _, path := range samples(t, "good", 8) {
		c, problems := load(t, resources.Options{}, path)
		if c == nil {
			t.Errorf("%s: %v", path, problems)
			continue
		}
		golden(t, strings.TrimSuffix(path, ".yaml")+".golden", lines(problems)+dump(c))
	}
}

// Each bad sample has one fault; the golden file says how it is told.
func TestBad(t *testing.T) {
	kinds := map[string]int{}
	for _, path := range samples(t, "bad", 40) {
		c, problems := load(t, resources.Options{}, path)
		faults := slices.DeleteFunc(problems, func(p resources.Problem) bool { return p.Severity != resources.Error })
		if c != nil || len(faults) != 1 {
			t.Errorf("%s: want one fault: %v", path, faults)
			continue
		}
		golden(t, strings.TrimSuffix(path, ".yaml")+".golden", lines(faults))
		kind, _, _ := strings.Cut(faults[0].Resource, " ")
		kinds[kind]++
	}
	for _, kind := range []string{"GatewayBackend", "InferencePolicy", "InferencePool", "InferenceProvider", "InferenceTenant", "InferenceWorkerSet"} {
		if kinds[kind] < 5 {
			t.Errorf("%d bad samples of %s", kinds[kind], kind)
		}
	}
}

func TestManyFaults(t *testing.T) {
	_, problems := load(t, resources.Options{}, "testdata/many.yaml")
	golden(t, "testdata/many.golden", lines(problems))
}

// A few lines of YAML can stand for a billion values.
func TestBomb(t *testing.T) {
	if c, problems := load(t, resources.Options{}, "testdata/bomb.yaml"); c != nil || !strings.Contains(lines(problems), "document is too large") {
		t.Error(problems)
	}
}

func samples(t *testing.T, sort string, least int) []string {
	t.Helper()
	paths, err := filepath.Glob("testdata/" + sort + "/*." + sort + ".yaml")
	if err != nil || len(paths) < least {
		t.Fatalf("%d samples: %v", len(paths), err)
	}
	return paths
}

// What is not there is an error only on demand.
func TestStrict(t *testing.T) {
	_, problems := load(t, resources.Options{Strict: true}, "testdata/good/pools.good.yaml")
	want := []string{"gwen-worker", "search-team"}
	for _, p := range problems {
		if p.Severity == resources.Error {
			if len(want) == 0 || !strings.Contains(p.Message, want[0]) {
				t.Errorf("unexpected: %v", p)
				continue
			}
			want = want[1:]
		}
	}
	if len(want) > 0 {
		t.Errorf("not reported: %v", want)
	}
	if c, problems := load(t, resources.Options{Strict: true}, "testdata/good/document-burst-to-cloud.good.yaml"); c != nil {
		t.Errorf("a policy for providers that are not there: %v", problems)
	}
}

func TestSameNameTwice(t *testing.T) {
	_, problems := resources.Load(folder(t, "a.yaml", minimal("one"), "b.yaml", minimal("two")))
	if len(problems) != 1 || problems[0].String() != "b.yaml:3: error: InferenceWorkerSet default/s: metadata.name: is used already by the resource at a.yaml:1" {
		t.Error(problems)
	}
}

// Files and folders can be named together; each is told by its path.
func TestSeveralPaths(t *testing.T) {
	dir := folder(t, "a.yaml", minimal("one"), "b.yaml", strings.Replace(minimal("two"), "spec:", "spce:", 1))
	_, problems := resources.Options{}.Load(filepath.Join(dir, "a.yaml"), dir)
	if len(problems) == 0 || problems[0].File != filepath.Join(dir, "a.yaml") && problems[0].File != filepath.Join(dir, "b.yaml") {
		t.Error(problems)
	}
	if c, problems := (resources.Options{}).Load(filepath.Join(dir, "a.yaml")); c == nil || c.Models["one"] == nil {
		t.Error(problems)
	}
	if _, problems := (resources.Options{}).Load(filepath.Join(dir, "none.yaml")); len(problems) != 1 || !strings.Contains(problems[0].Message, "no such file") {
		t.Error(problems)
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
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	for _, s := range c.Sets {
		line("set %s ranks=%d class=%q tokenizer=%q topic=%q lastCopy=%v metrics=%s/%s selector=%v labels=%v price=%d*%s%s", s.Name, s.Ranks, s.Class,
			s.TokenizerPath, s.KVTopic, s.RemovalsLastCopy, s.MetricsPath, s.MetricsInterval, s.Selector, s.Labels, s.Accelerators, s.HourlyPrice, s.Currency)
		for _, w := range s.Workers {
			line("  worker %s name=%s url=%s events=%q replay=%q", w.UID, w.Name, w.URL, w.KVEvents, w.KVReplay)
		}
		for _, p := range s.Profiles {
			line("  profile %s upstream=%s root=%s lora=%q names=%v maxModelLen=%d", p.ID, p.UpstreamModel, p.Root, p.LoRA, p.Names, p.MaxModelLen)
		}
	}
	for _, p := range c.Providers {
		line("provider %s schema=%s timeouts=%s/%s/%s concurrency=%d", p.Name, p.Spec.Schema, p.FirstByte, p.Idle, p.Total, p.Spec.Concurrency)
		for _, m := range p.Models {
			line("  model upstream=%s names=%v priced=%v", m.UpstreamModel, m.Names, m.Price != nil)
		}
	}
	for _, p := range c.Pools {
		fmt.Fprintf(&b, "pool %s implicit=%v objectives=%d", p.Name, p.Implicit, len(p.Objectives))
		for _, m := range p.Members {
			if m.Set != nil {
				fmt.Fprintf(&b, " %s*%d", m.Set.Name, m.Weight)
			} else {
				fmt.Fprintf(&b, " provider:%s*%d", m.Provider.Name, m.Weight)
			}
		}
		line("")
	}
	for _, t := range c.Tenants {
		line("tenant %s chain=%v orphan=%v qos=%q weight=%d cache=%s limits=%d", t.Name, t.Chain(), t.Orphan, t.QoS, t.Spec.Weight, t.Spec.Cache.Scope, len(t.Spec.Limits))
	}
	for _, g := range c.Backends {
		line("backend %s pool=%v anonymous=%v hosts=%v path=%s body=%d headers=%d idle=%s total=%s qos=%s", g.Name, g.Pool != nil, g.Anonymous != nil,
			g.Spec.Hostnames, g.Spec.PathPrefix, g.Body, g.Headers, g.Idle, g.Total, g.Spec.DefaultQoS)
	}
	for _, p := range c.Policies {
		line("policy %s targets=%v dryRun=%v", p.ID(), p.Targets, p.DryRun)
	}
	for _, name := range slices.Sorted(maps.Keys(c.Models)) {
		m := c.Models[name]
		fmt.Fprintf(&b, "model %s root=%s", m.Name, m.Root)
		for _, o := range m.Offers {
			fmt.Fprintf(&b, " %s@%s", o.Profile.ID, o.Pool.Name)
		}
		for _, o := range m.External {
			fmt.Fprintf(&b, " %s:%s@%s", o.Model.Provider.Name, o.Model.UpstreamModel, o.Pool.Name)
		}
		line("")
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
	// On a developer's machine the folder of another one need not be there.
	c, problems = resources.Options{Elsewhere: true}.Load(folder(t, "a.yml", set("/models/none")))
	if c == nil || len(problems) != 1 || problems[0].Severity != resources.Warning {
		t.Errorf("elsewhere: %v", problems)
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
		case <-time.After(time.Minute):
			t.Fatal("no load within a minute")
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
	// written skips a load between the emptying of a file and its writing, which a
	// busy machine may make long.
	written := func() loaded {
		l := next()
		for l.c != nil && len(l.c.Models) == 0 {
			l = next()
		}
		return l
	}
	wantModel(t, next(), "one")

	write(t, filepath.Join(dir, "a.yaml"), minimal("two"))
	wantModel(t, written(), "two")

	// A broken file gives no catalog but says where.
	write(t, filepath.Join(dir, "a.yaml"), strings.Replace(minimal("three"), "models", "modles", 1))
	l := written()
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
