package report

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/bench/overhead"
	"github.com/kinference/kinference/internal/bench/stats"
	"github.com/kinference/kinference/internal/bench/tokenspeed"
	"github.com/kinference/kinference/internal/bench/virtual"
	"github.com/kinference/kinference/internal/bench/wall"
	"github.com/kinference/kinference/internal/plot"
)

var cells = []virtual.Cell{
	{Scenario: "S1", Policy: "random", Runs: []stats.Summary{
		{TTFT50: 6, TTFT90: 11, TTFT99: 20, TTFTMean: 7, E2E50: 20, E2E99: 40, RPS: .4, Hit: .5},
		{TTFT50: 7, TTFT90: 12, TTFT99: 22, TTFTMean: 8, E2E50: 22, E2E99: 42, RPS: .4, Hit: .5}}},
	{Scenario: "S1", Policy: "kinference", Runs: []stats.Summary{
		{TTFT50: .3, TTFT90: .4, TTFT99: .5, TTFTMean: .35, E2E50: 10, E2E99: 12, RPS: .8, Hit: .97},
		{TTFT50: .35, TTFT90: .4, TTFT99: .5, TTFTMean: .4, E2E50: 11, E2E99: 12, RPS: .8, Hit: .97}}},
}

var caps = []virtual.Capacity{
	{Scenario: "S1cap", Policy: "random", Loads: []virtual.Load{{Streams: 2, RPS: .3}, {Streams: 8, RPS: .5}}, Peak: .5},
	{Scenario: "S1cap", Policy: "kinference", Loads: []virtual.Load{{Streams: 2, RPS: .7}, {Streams: 8, RPS: 2}}, Peak: 2},
}

func TestRoutingTables(t *testing.T) {
	got := RoutingTable(cells).Text(plot.Style{ASCII: true}) + SpreadTable(cells).Text(plot.Style{ASCII: true}) + CapacityTable(caps).Text(plot.Style{ASCII: true})
	want := strings.TrimLeft(`
scenario  policy      TTFT p50 s   p90   p99  e2e p50 s   p99  requests/s   hit  TTFT p50 ×  p99 ×    e2e
---------------------------------------------------------------------------------------------------------
S1        random            6.50  11.5  21.0       21.0  41.0        0.40  50 %         1.0    1.0   +0 %
S1        kinference        0.32  0.40  0.50       10.5  12.0        0.80  97 %        20.0   42.0  -50 %
scenario  policy      TTFT p50 min  median   max  p99 min  median   max  paired TTFT mean  paired e2e p50
---------------------------------------------------------------------------------------------------------
S1        random              6.00    6.50  7.00     20.0    21.0  22.0            +0.0 %          +0.0 %
S1        kinference          0.30    0.32  0.35     0.50    0.50  0.50           -95.0 %         -50.0 %
scenario  policy         2     8  peak    ×
-------------------------------------------
S1cap     random      0.30  0.50  0.50  1.0
S1cap     kinference  0.70  2.00  2.00  4.0
`, "\n")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("tables (-want +got):\n%s", diff)
	}
}

func TestRows(t *testing.T) {
	rows := Routing(cells[1:], caps[1:])
	rows = append(rows, Tokenizer([]tokenspeed.Speed{{Tokenizer: "qwen3", Text: "english", MBs: 98.7654321}})...)
	rows = append(rows, Overhead([]overhead.Result{{Cell: overhead.Cell{Prompt: 2000, Streams: 64}, Path: "reverse_proxy", P50: 1, P99: 2, Added50: .25, Added99: .5}})...)
	rows = append(rows, Row{"routing", "S1", "random", "ttft_p50", math.NaN(), "s"})
	path := filepath.Join(t.TempDir(), "new", "bench.json")
	if err := WriteRows(path, rows); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var got []Row
	if err := json.Unmarshal(data, &got); err != nil {
		t.Fatal(err)
	}
	want := []Row{
		{"routing", "S1", "kinference", "ttft_p50", .325, "s"},
		{"routing", "S1", "kinference", "ttft_p90", .4, "s"},
		{"routing", "S1", "kinference", "ttft_p99", .5, "s"},
		{"routing", "S1", "kinference", "e2e_p50", 10.5, "s"},
		{"routing", "S1", "kinference", "e2e_p99", 12, "s"},
		{"routing", "S1", "kinference", "rps", .8, "requests/s"},
		{"routing", "S1", "kinference", "hit_rate", .97, "ratio"},
		{"routing", "S1cap", "kinference", "peak_rps", 2, "requests/s"},
		{"tokenizer", "english", "qwen3", "mb_per_s", 98.7654, "MB/s"},
		{"overhead", "2k_prompt_64_streams", "reverse_proxy", "latency_p50_ms", 1, "ms"},
		{"overhead", "2k_prompt_64_streams", "reverse_proxy", "latency_p99_ms", 2, "ms"},
		{"overhead", "2k_prompt_64_streams", "reverse_proxy", "added_latency_p50_ms", .25, "ms"},
		{"overhead", "2k_prompt_64_streams", "reverse_proxy", "added_latency_p99_ms", .5, "ms"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}
	if err := WriteRows(path, nil); err != nil {
		t.Fatal(err)
	}
	if data, _ := os.ReadFile(path); json.Unmarshal(data, &got) != nil || len(got) != 0 {
		t.Errorf("no rows give %q", data)
	}
}

func TestPlots(t *testing.T) {
	b := LatencyBars(cells, "S0", "S1")
	if len(b.Series) != 2 || b.Groups[1] != "S1 shared prefix" || !math.IsNaN(b.Series[0].Values[0]) || math.Abs(b.Series[1].Values[1]-.325) > 1e-9 {
		t.Errorf("bars %+v", b)
	}
	if l := CapacityLines(caps, "S1cap"); len(l.Series) != 2 || len(l.Series[1].Points) != 2 || !strings.Contains(l.Subtitle, "no GPU") {
		t.Errorf("lines %+v", l)
	}
}

func TestWallTables(t *testing.T) {
	s := cells[0].Runs[0]
	w := s
	w.TTFT50 = 6.6
	got := WallTable([]Pair{{"S1", "random", w, s}}, 20).Rows[0]
	if got[2] != "330" || got[5] != "+10 %" {
		t.Errorf("row %q, want 330 ms in wall time and +10 %%", got)
	}
	result := TraceResult{Policy: "kinference", Summary: s, Reuse: wall.Reuse{Requests: 1, Prompt: 1000, Cached: 300, Matched: 290, Truth: 295, Anticipated: 10, Bound: 400, BoundFine: 410}}
	if got := TraceTable([]TraceResult{result}).Rows[0]; got[6] != "30.0 %" || got[12] != "98.3 %" || got[14] != "100.0 %" {
		t.Errorf("row %q", got)
	}
	if got := len(TraceRows("mooncake", []TraceResult{result})); got != 14 {
		t.Errorf("%d rows, want 14", got)
	}
}
