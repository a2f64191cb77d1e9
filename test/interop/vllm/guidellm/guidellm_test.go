package guidellm_test

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/bench/report"
	"github.com/kinference/kinference/test/interop/vllm/guidellm"
)

// A report that GuideLLM 0.8.1 wrote, shortened.
func TestParse(t *testing.T) {
	raw, err := os.ReadFile("testdata/report.json")
	if err != nil {
		t.Fatal(err)
	}
	got, err := guidellm.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	if got.TTFT.P50 < 0.05 || got.TTFT.P50 > 0.2 || got.E2E.P50 < got.TTFT.P50 || got.ITL.P50 <= 0 || got.RPS <= 0 {
		t.Errorf("times are not in seconds: %+v", got)
	}
	got.TTFT, got.ITL, got.E2E, got.RPS = guidellm.Dist{}, guidellm.Dist{}, guidellm.Dist{}, 0
	want := guidellm.Report{Version: "0.8.1", Completed: 5, Measured: 17, Prompt: 308 + 454 + 308 + 600 + 454, Cached: 288 + 320 + 448 + 320, Longest: 448}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestParseFaults(t *testing.T) {
	for name, text := range map[string]string{
		"no JSON":       "Traceback",
		"no benchmark":  `{"benchmarks": []}`,
		"two":           `{"benchmarks": [{}, {}]}`,
		"none measured": `{"benchmarks": [{"requests": {"successful": [{"prompt_tokens": 7}]}}]}`,
	} {
		if r, err := guidellm.Parse([]byte(text)); err == nil {
			t.Errorf("%s: got %+v, want an error", name, r)
		}
	}
	r, err := guidellm.Parse([]byte(`{"benchmarks": [{"metrics": {"time_to_first_token_ms": {"successful": {"count": 1}}},
		"requests": {"successful": [{"prompt_tokens": 7, "cached_tokens": null}], "errored": [{"info": {"error": "503"}}], "incomplete": [{}]}}]}`))
	if err != nil || r.Completed != 1 || r.Failed != 2 || r.Error != "503" || r.Prompt != 7 || r.Cached != 0 {
		t.Errorf("failed requests: %+v, %v", r, err)
	}
}

func TestCommand(t *testing.T) {
	got := guidellm.MultiTurn.Command(guidellm.Target{URL: "$URL", Model: "m", Tokenizer: "$MODELS/m", Report: "report.json"})
	want := `HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 OMP_NUM_THREADS=1 GUIDELLM__MAX_WORKER_PROCESSES=1 \
$KINFERENCE_GUIDELLM/bin/guidellm run \
  --backend "{\"extras\":{\"body\":{\"temperature\":0}},\"kind\":\"openai_http\",\"model\":\"m\",\"target\":\"$URL\",\"validate_backend\":false}" \
  --tokenizer kind=huggingface_auto,model=$MODELS/m \
  --profile kind=concurrent,streams=12,rampup_duration=4,warmup.mode=requests,warmup.value=72 \
  --constraint kind=max_requests,count=288 \
  --data kind=synthetic_text,first_prompt_tokens=300,prompt_tokens=120,output_tokens=16,turns=12 \
  --data-loader kind=pytorch,samples=24 \
  --seed kind=static,value=42 \
  --output kind=json,path=report.json \
  --disable-console-interactive`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// results are made up: two runs of random and of the default.
func results() guidellm.Results {
	run := func(l guidellm.Load, policy string, round int, hits, ttft float64) guidellm.Run {
		d := guidellm.Dist{P50: ttft, P90: 2 * ttft, P99: 4 * ttft, Mean: ttft}
		return guidellm.Run{Load: l, Policy: policy, Round: round, Queried: 288000, Hits: hits,
			Report: guidellm.Report{Version: "0.8.1", Completed: l.Requests(), Measured: 1, TTFT: d, ITL: d, E2E: d, RPS: 1, Prompt: 288000, Cached: int(hits), Longest: 1984}}
	}
	r := guidellm.Results{VLLM: "0.32.0+cpu", Machine: "a machine", Engines: 3, Engine: "vllm serve", Model: "m", LoadAverage: 0.2}
	for round := 1; round <= 2; round++ {
		for _, l := range []guidellm.Load{guidellm.SharedPrefix, guidellm.MultiTurn} {
			r.Runs = append(r.Runs, run(l, "random", round, 144000, 0.8), run(l, guidellm.Kinference, round, 259200, 0.2*float64(round)))
		}
		r.Runs = append(r.Runs, run(guidellm.OneByOne, guidellm.Direct, round, 259200, 0.04), run(guidellm.OneByOne, guidellm.Kinference, round, 259200, 0.05))
	}
	return r
}

func TestPage(t *testing.T) {
	page := string(results().Page())
	for _, want := range []string{
		"| S1v      | random     |    2 |   50.0 % |         800 | 1,600 | 3,200 |",
		"| S2v      | kinference |    2 |   90.0 % |         300 |", // between the rounds
		"at most 57.9 % of its tokens",
		"| S0v      | direct     |",
		"before anything was started was 0.2.",
		"vllm 0.32.0",
	} {
		if !strings.Contains(strings.ToLower(page), strings.ToLower(want)) {
			t.Errorf("the page lacks %q", want)
		}
	}
	if strings.Contains(page, "reliminary") {
		t.Error("a quiet machine's figures are called preliminary")
	}
	busy := results()
	busy.Preliminary = true
	if !bytes.Contains(busy.Page(), []byte("**Preliminary")) {
		t.Error("a busy machine's figures are not called preliminary")
	}
	if t.Failed() || strings.Contains(page, "%!") {
		t.Log(page)
	}
}

func TestRows(t *testing.T) {
	rows := results().Rows()
	for _, want := range []report.Row{
		{Suite: "vllm", Scenario: "S1v", Policy: "random", Metric: "hit_rate", Value: 0.5, Unit: "ratio"},
		{Suite: "vllm", Scenario: "S1v", Policy: "kinference", Metric: "ttft_p90", Value: 0.6, Unit: "s"},
		{Suite: "vllm", Scenario: "S0v", Policy: "direct", Metric: "runs", Value: 2, Unit: "runs"},
	} {
		found := false
		for _, r := range rows {
			found = found || r == want
		}
		if !found {
			t.Errorf("no row %+v", want)
		}
	}
}

func TestPlots(t *testing.T) {
	for name, svg := range results().Plots() {
		d := xml.NewDecoder(bytes.NewReader(svg))
		for {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s is not well-formed: %v", name, err)
			}
		}
		if !bytes.Contains(svg, []byte(">kinference<")) {
			t.Errorf("%s lacks a policy", name)
		}
	}
}
