package guidellm_test

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/bench/report"
	"github.com/kinference/kinference/internal/vllm"
	"github.com/kinference/kinference/test/interop/vllm/guidellm"
	"github.com/kinference/kinference/test/interop/vllm/rig"
)

var (
	rounds = flag.Int("rounds", 1, "how often each policy runs")
	others = flag.Int("others", 0, "in how many of the rounds roundrobin, leastrequests and the single stream run too")
	docs   = flag.String("docs", "", "folder of the page and its plots; empty: none are written")
	out    = flag.String("out", "", "folder of vllm-bench.json; empty: it is not written")
	only   = flag.String("only", "", "scenarios to run, by comma; empty: all")
)

// model is slow enough to make a miss cost what it costs on a real engine:
// many times what HTTP and decoding do.
const model = "qwen-wide"

// blocks of an engine's cache: 13,312 tokens and the null block.
const blocks = 417

// maxLoad is the load average below which the machine is ours.
const maxLoad = 2

// TestBench measures; it judges only that every request is answered and that
// engines and clients agree on what was cached.
func TestBench(t *testing.T) {
	venv := os.Getenv("KINFERENCE_GUIDELLM")
	if venv == "" {
		t.Skip("NOT MEASURED: run make bench-vllm")
	}
	env := rig.Require(t)
	o := rig.Options{Model: model, Blocks: blocks, BufferSteps: 500}
	busy := loadAverage()
	if busy > maxLoad {
		t.Logf("the machine is busy (load average %.1f): the page will say that its figures are preliminary", busy)
	}
	b := &bench{env: env, venv: venv, engines: rig.Start(t, env, o, o, o)}
	b.results = guidellm.Results{VLLM: env.Version(t), Machine: machine(), Engines: len(b.engines), Engine: command(env, b.engines[0]), Model: model,
		LoadAverage: busy, Preliminary: busy > maxLoad}
	for _, e := range b.engines {
		b.ask(t, e, strings.Repeat("warm ", 2000)) // the first long prompt pays for what the engine sets up late
	}
	for round := 1; round <= *rounds; round++ {
		for _, load := range []guidellm.Load{guidellm.SharedPrefix, guidellm.MultiTurn} {
			b.run(t, load, "random", "random", round)
			if round <= *others {
				b.run(t, load, "roundrobin", "roundrobin", round)
				b.run(t, load, "leastrequests", "leastrequests", round)
			}
			b.run(t, load, guidellm.Kinference, "", round)
		}
		if round <= *others {
			b.run(t, guidellm.OneByOne, guidellm.Direct, "", round)
			b.run(t, guidellm.OneByOne, guidellm.Kinference, "", round)
		}
	}
	if t.Failed() {
		t.Fatal("nothing is written")
	}
	b.write(t)
}

type bench struct {
	env     rig.Env
	venv    string
	engines []*rig.Engine
	results guidellm.Results
}

// run measures a load under a policy of the router; name is the policy's on
// the page.
func (b *bench) run(t *testing.T, load guidellm.Load, name, policy string, round int) {
	if *only != "" && !strings.Contains(","+*only+",", ","+load.Name+",") {
		return
	}
	t.Run(fmt.Sprintf("%s/%s/%d", load.Name, name, round), func(t *testing.T) {
		engines := b.engines
		if load.Streams == 1 {
			engines = engines[:1]
		}
		for _, e := range engines {
			e.ResetPrefixCache()
			b.ask(t, e, "Hello") // an idle engine tells of the reset with its next request only
		}
		url := engines[0].URL()
		if name != guidellm.Direct {
			front := rig.NewFront(t, b.env, rig.FrontOptions{Policy: policy}, engines...)
			front.Eventually("the index knows that the caches are empty", func() bool { return trackedBlocks(t, front) == 0 })
			url = front.URL()
		}
		before := b.counters(t, engines)
		r, err := load.Run(t.Context(), b.venv, guidellm.Target{URL: url, Model: model, Tokenizer: b.env.Model(model), Report: filepath.Join(t.TempDir(), "report.json")})
		if err != nil {
			t.Fatal(err)
		}
		after := b.counters(t, engines)
		run := guidellm.Run{Load: load, Policy: name, Round: round, Report: r, Queried: after.PrefixQueries - before.PrefixQueries,
			Hits: after.PrefixHits - before.PrefixHits, Preemptions: after.Preemptions - before.Preemptions}
		if int(run.Queried) != r.Prompt || int(run.Hits) != r.Cached {
			t.Errorf("engines looked up %.0f tokens and found %.0f, clients were told %d and %d", run.Queried, run.Hits, r.Prompt, r.Cached)
		}
		t.Logf("hit %.1f %%, TTFT p50 %.0f ms, p90 %.0f ms, p99 %.0f ms, ITL %.0f ms, e2e p50 %.0f ms, %.2f requests/s, %.0f preemptions",
			100*run.HitRate(), 1e3*r.TTFT.P50, 1e3*r.TTFT.P90, 1e3*r.TTFT.P99, 1e3*r.ITL.P50, 1e3*r.E2E.P50, r.RPS, run.Preemptions)
		b.results.Runs = append(b.results.Runs, run)
	})
}

// ask sends one short request to the engine itself.
func (b *bench) ask(t *testing.T, e *rig.Engine, prompt string) {
	t.Helper()
	body, err := json.Marshal(map[string]any{"model": model, "prompt": prompt, "max_tokens": 1})
	if err != nil {
		t.Fatal(err)
	}
	if status, answer, err := e.Post("/v1/completions", body); err != nil || status != http.StatusOK {
		t.Fatalf("ask %s: status %d %v %.200s", e.Name, status, err, answer)
	}
}

// counters are the sums over the engines.
func (b *bench) counters(t *testing.T, engines []*rig.Engine) (sum vllm.Metrics) {
	t.Helper()
	for _, e := range engines {
		_, page, err := e.Get("/metrics")
		if err != nil {
			t.Fatal(err)
		}
		ranks, err := vllm.ParseMetrics(page)
		if err != nil {
			t.Fatalf("metrics of %s: %v", e.Name, err)
		}
		for _, m := range ranks {
			sum.PrefixQueries += m.PrefixQueries
			sum.PrefixHits += m.PrefixHits
			sum.Preemptions += m.Preemptions
		}
	}
	return sum
}

// trackedBlocks is the number of blocks in the control plane's index; -1 where
// it does not say yet.
func trackedBlocks(t *testing.T, f *rig.Front) float64 {
	t.Helper()
	resp, err := http.Get(f.AdminURL() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	sum := -1.0
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		if name, value, ok := strings.Cut(lines.Text(), "} "); ok && strings.HasPrefix(name, "kinference_kvtracker_blocks{") {
			n, err := strconv.ParseFloat(value, 64)
			if err != nil {
				t.Fatal(err)
			}
			sum = max(sum, 0) + n
		}
	}
	return sum
}

func (b *bench) write(t *testing.T) {
	if *out != "" {
		if err := report.WriteRows(filepath.Join(*out, "vllm-bench.json"), b.results.Rows()); err != nil {
			t.Fatal(err)
		}
	}
	if *docs != "" {
		if err := report.Write(filepath.Join(*docs, "vllm.md"), b.results.Page()); err != nil {
			t.Fatal(err)
		}
		for name, svg := range b.results.Plots() {
			if err := report.Write(filepath.Join(*docs, name), svg); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// command is the engine's command line without this machine's paths and ports.
func command(env rig.Env, e *rig.Engine) string {
	s := strings.ReplaceAll(e.Command(), env.Models, "$KINFERENCE_VLLM_MODELS")
	s = strings.ReplaceAll(s, env.Venv, "$KINFERENCE_VLLM")
	s = regexp.MustCompile(`--port \d+`).ReplaceAllString(s, "--port $$PORT")
	s = regexp.MustCompile(`("endpoint":"tcp://\*:)\d+`).ReplaceAllString(s, "${1}5557")
	s = regexp.MustCompile(`("replay_endpoint":"tcp://\*:)\d+`).ReplaceAllString(s, "${1}5558")
	return strings.ReplaceAll(strings.ReplaceAll(s, " $KINFERENCE_VLLM/bin", " \\\n$KINFERENCE_VLLM/bin"), " --", " \\\n  --")
}

// machine says what everything ran on.
func machine() string {
	s := fmt.Sprintf("%s, %d cores", strings.Replace(runtime.Version(), "go", "go ", 1), runtime.NumCPU())
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return s
	}
	if m := regexp.MustCompile(`(?m)^model name\s*: (.*)$`).FindSubmatch(info); m != nil {
		s += " of " + string(m[1])
	}
	return s
}

// loadAverage is the machine's over the last minute; 0 where it is unknown.
func loadAverage() float64 {
	raw, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(raw), " ")
	v, _ := strconv.ParseFloat(first, 64)
	return v
}
