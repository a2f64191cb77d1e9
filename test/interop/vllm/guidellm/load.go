// Package guidellm measures the control plane in front of real vLLM engines
// with GuideLLM as the load generator, and writes docs/benchmarks/vllm.md.
//
// `make bench-vllm` runs it; without KINFERENCE_GUIDELLM, a Python environment
// with GuideLLM, its benchmark is skipped and says so. Loads, reports and the
// page are pure; runs are for one goroutine. A run that fails fails the test,
// and nothing is written.
package guidellm

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Load is what GuideLLM sends.
type Load struct {
	Name, Title string
	// Data are the arguments of GuideLLM's synthetic text.
	Data string
	// Streams send at the same time, each its next request when the previous
	// answer has ended; they start within RampUp seconds.
	Streams, RampUp int
	// Prefixes is the number of shared prefixes, one of which starts each prompt;
	// 0: nothing is shared.
	Prefixes int
	// Conversations of Turns requests each are made before the run begins.
	Conversations, Turns int
	// WarmUp is the number of first requests that latencies leave out.
	WarmUp int
}

// Requests is the number of requests of a run.
func (l Load) Requests() int { return l.Conversations * l.Turns }

// The published scenarios S1 and S2 (docs/benchmarks/README.md) at a tenth of
// their lengths, on engines with a tenth of their cache.
var (
	SharedPrefix = Load{Name: "S1v", Title: "shared prefix", Data: "prompt_tokens=30,output_tokens=21,prefix_count=12,prefix_tokens=2000",
		Streams: 8, RampUp: 4, Prefixes: 12, Conversations: 96, Turns: 1, WarmUp: 24}
	MultiTurn = Load{Name: "S2v", Title: "multi-turn", Data: "first_prompt_tokens=300,prompt_tokens=120,output_tokens=16,turns=12",
		Streams: 12, RampUp: 4, Conversations: 24, Turns: 12, WarmUp: 72}
	// OneByOne shows what the way through the gateway adds: one stream, one engine.
	OneByOne = Load{Name: "S0v", Title: "one stream", Data: "prompt_tokens=100,output_tokens=8,prefix_count=1,prefix_tokens=400",
		Streams: 1, Prefixes: 1, Conversations: 60, Turns: 1, WarmUp: 10}
)

// Seed of all data and of GuideLLM.
const Seed = 42

// Target is where a run sends its load and what it needs for that.
type Target struct {
	URL   string // of the OpenAI API, without /v1
	Model string
	// Tokenizer is the model's folder; GuideLLM counts tokens with it.
	Tokenizer string
	// Report is the path of the JSON report.
	Report string
}

// Args are the arguments of guidellm.
func (l Load) Args(t Target) []string {
	// Greedy, so that every policy's answers are the same.
	backend, err := json.Marshal(map[string]any{"kind": "openai_http", "target": t.URL, "model": t.Model, "validate_backend": false,
		"extras": map[string]any{"body": map[string]any{"temperature": 0}}})
	if err != nil {
		panic(err) // strings always encode
	}
	return []string{"run",
		"--backend", string(backend),
		"--tokenizer", "kind=huggingface_auto,model=" + t.Tokenizer,
		"--profile", fmt.Sprintf("kind=concurrent,streams=%d,rampup_duration=%d,warmup.mode=requests,warmup.value=%d", l.Streams, l.RampUp, l.WarmUp),
		"--constraint", "kind=max_requests,count=" + strconv.Itoa(l.Requests()),
		"--data", "kind=synthetic_text," + l.Data,
		"--data-loader", "kind=pytorch,samples=" + strconv.Itoa(l.Conversations),
		"--seed", "kind=static,value=" + strconv.Itoa(Seed),
		"--output", "kind=json,path=" + t.Report,
		"--disable-console-interactive",
	}
}

// variables of guidellm's process: nothing is fetched, one process sends.
var variables = []string{"HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1", "OMP_NUM_THREADS=1", "GUIDELLM__MAX_WORKER_PROCESSES=1"}

// runTime is the most that one run may take.
const runTime = 10 * time.Minute

// Run runs guidellm of a virtual environment and reads its report. The error
// holds the end of what it printed.
func (l Load) Run(ctx context.Context, venv string, t Target) (Report, error) {
	ctx, cancel := context.WithTimeout(ctx, runTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(venv, "bin", "guidellm"), l.Args(t)...)
	cmd.Env = append(os.Environ(), variables...)
	cmd.Dir = filepath.Dir(t.Report)
	// A group of its own: guidellm starts processes that send and make data.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 10 * time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		return Report{}, fmt.Errorf("guidellm %s: %w: …%s", l.Name, err, out[max(0, len(out)-4000):])
	}
	raw, err := os.ReadFile(t.Report)
	if err != nil {
		return Report{}, fmt.Errorf("read guidellm's report: %w", err)
	}
	r, err := Parse(raw)
	if err != nil {
		return Report{}, fmt.Errorf("guidellm %s: %w", l.Name, err)
	}
	if r.Completed != l.Requests() || r.Failed > 0 {
		return Report{}, fmt.Errorf("guidellm %s: %d of %d requests completed, %d failed: %s", l.Name, r.Completed, l.Requests(), r.Failed, r.Error)
	}
	return r, nil
}

// Command is the command line as a reader would type it, an option a line.
func (l Load) Command(t Target) string {
	var b strings.Builder
	b.WriteString(strings.Join(variables, " ") + " \\\n$KINFERENCE_GUIDELLM/bin/guidellm run")
	args := l.Args(t)[1:]
	for i := 0; i < len(args); i++ {
		b.WriteString(" \\\n  " + args[i])
		if i+1 < len(args) && !strings.HasPrefix(args[i+1], "--") {
			i++
			b.WriteString(" " + quote(args[i]))
		}
	}
	return b.String()
}

// quote keeps the shell from reading JSON, but lets it expand variables.
func quote(s string) string {
	if !strings.ContainsAny(s, `{}"`) {
		return s
	}
	return `"` + strings.ReplaceAll(s, `"`, `\"`) + `"`
}
