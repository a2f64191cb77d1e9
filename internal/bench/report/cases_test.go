package report

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/bench/stats"
	"github.com/kinference/kinference/internal/bench/virtual"
	"github.com/kinference/kinference/internal/plot"
)

func TestCaseTables(t *testing.T) {
	two := []virtual.Cell{
		{Scenario: "MT2", Policy: "random", Runs: []stats.Summary{{TTFT50: 40, TTFT90: 60, TTFT99: 80, TTFTMean: 42, E2E50: 60, RPS: 2, Light50: 30, Light99: 50, Jain: .9}}},
		{Scenario: "MT2", Policy: "kinference", Runs: []stats.Summary{{TTFT50: 10, TTFT90: 90, TTFT99: 100, TTFTMean: 21, E2E50: 30, RPS: 4, Light50: 1, Light99: 20, Jain: .99, Off: .2, OffShare: .5}}},
	}
	style := plot.Style{ASCII: true}
	got := CaseTable(two, "kinference", "MT2").Text(style) + GapTable(two, "kinference", []string{"random"}, "MT2").Text(style) +
		ErrorTable(two, "kinference", "MT2").Text(style) + KeptTable(caps).Text(style) + GoalTable(two, "kinference").Text(style) +
		strings.Join(Losses(two, "kinference", []string{"random"}, .03, "MT2"), "\n") + "\n"
	want := strings.TrimLeft(`
scenario  policy      TTFT p50 / p90 / p99 s  mean s  e2e p50 s  requests/s  hit  mean against kinference  light tenants p50 / p99 s   Jain
-------------------------------------------------------------------------------------------------------------------------------------------
MT2       random          40.0 / 60.0 / 80.0    42.0       60.0        2.00  0 %                   +100 %                30.0 / 50.0  0.900
MT2       kinference       10.0 / 90.0 / 100    21.0       30.0        4.00  0 %                        -                1.00 / 20.0  0.990
scenario    p50  best rival   mean  best rival    p90  best rival    p99  best rival  requests/s  best rival
------------------------------------------------------------------------------------------------------------
MT2       -75 %      random  -50 %      random  +50 %      random  +25 %      random       -50 %      random
scenario  median distance ms  median share
------------------------------------------
MT2                      200        50.0 %
scenario  policy      peak requests/s  at the highest load   kept
-----------------------------------------------------------------
S1cap     random                 0.50                 0.50  100 %
S1cap     kinference             2.00                 2.00  100 %
goal                               bound               measured     met
-----------------------------------------------------------------------
MT2, light tenants' TTFT p99       <= 15.0 s             20.0 s  **no**
MT2, median error of predictions  30 ms or 10 %  200 ms, 50.0 %  **no**
MT2, p90: 90.0 s, random 60.0 s (+50 %)
MT2, p99: 100 s, random 80.0 s (+25 %)
`, "\n")
	if diff := cmp.Diff(strings.Fields(want), strings.Fields(strings.ReplaceAll(got, "≤", "<="))); diff != "" {
		t.Errorf("tables (-want +got):\n%s\n%s", diff, got)
	}
	if n := Missed(GoalTable(two, "kinference")); n != 2 {
		t.Errorf("%d goals missed, want 2", n)
	}
}

func TestResults(t *testing.T) {
	want := Results{Origin: Origin{Command: "c", Go: "go", Note: NoGPU}, Seeds: []uint64{1, 2}, Cells: []Kept{
		{Scenario: "S1", Policy: "random", Case: "x", Runs: []stats.Summary{{TTFT50: 1.23457, RPS: 2}, {TTFT50: 3}}},
		{Scenario: "S1", Policy: "k2", Case: "x", Runs: []stats.Summary{{TTFT50: 1}}}}}
	data, err := MarshalResults(want)
	if err != nil {
		t.Fatal(err)
	}
	var got Results
	if err := json.Unmarshal(data, &got); err != nil {
		t.Fatalf("%v in\n%s", err, data)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("read back (-want +got):\n%s", diff)
	}
	if lines := strings.Count(string(data), "\n"); lines != 4 {
		t.Errorf("%d lines, want one for each cell:\n%s", lines, data)
	}
}

// A gap has the noise of pairs: what is hard for both policies says nothing.
func TestGaps(t *testing.T) {
	runs := func(v ...float64) (out []stats.Summary) {
		for _, x := range v {
			out = append(out, stats.Summary{TTFT50: x, TTFT90: 1, TTFT99: 1, TTFTMean: 1, RPS: 1 / x})
		}
		return out
	}
	cells := []virtual.Cell{
		{Scenario: "S1", Policy: "k2", Runs: runs(1.1, 2.2, 3.3)},
		{Scenario: "S1", Policy: "paired", Runs: runs(1, 2, 3)},
		{Scenario: "S2", Policy: "k2", Runs: runs(1, 2, 3.6)},
		{Scenario: "S2", Policy: "noisy", Runs: runs(2, 3, 1)},
	}
	style := plot.Style{ASCII: true}
	got := GapTable(cells, "k2", []string{"paired", "noisy"}, "S1", "S2").Text(style) + strings.Join(Losses(cells, "k2", []string{"paired", "noisy"}, .03, "S1", "S2"), "\n")
	want := `
scenario        p50  best rival     mean  best rival      p90  best rival      p99  best rival  requests/s  best rival
-----------------------------------------------------------------------------------------------------------------------
S1        +10 ±0 %       paired  +0 ±0 %      paired  +0 ±0 %      paired  +0 ±0 %      paired   +10 ±0 %      paired
S2       +10 ±125 %       noisy  +0 ±0 %       noisy  +0 ±0 %       noisy  +0 ±0 %       noisy  +3 ±125 %       noisy
**S1, p50: 2.20 s, paired 2.00 s (+10 ±0 %)**
**S1, requests/s: 0.56, paired 0.61 (+10 ±0 %)**
S2, p50: 2.20 s, noisy 2.00 s (+10 ±125 %)
S2, requests/s: 0.59, noisy 0.61 (+3 ±125 %)`
	if diff := cmp.Diff(strings.Fields(want), strings.Fields(strings.ReplaceAll(got, "+-", "±"))); diff != "" {
		t.Errorf("gaps (-want +got):\n%s\n%s", diff, got)
	}
	means := MeansOf(Origin{Command: "c"}, cells)
	data, err := MarshalMeans(means)
	if err != nil {
		t.Fatal(err)
	}
	var back Means
	if err := json.Unmarshal(data, &back); err != nil {
		t.Fatalf("%v in\n%s", err, data)
	}
	if diff := cmp.Diff(means, back); diff != "" || back.Cells[1].Runs != 3 || back.Cells[1].Mean.TTFT50 != 2 || back.Cells[1].Errors["p50"] != .57735 {
		t.Errorf("means %+v\n%s", back.Cells[1], diff)
	}
}

func TestCaseBars(t *testing.T) {
	b := CaseBars(cells, "title", "TTFT", func(s stats.Summary) float64 { return s.TTFT50 }, []string{"random", "none"}, "S1")
	if len(b.Series) != 2 || b.Series[0].Values[0] != 6.5 || b.Series[1].Values[0] == b.Series[1].Values[0] {
		t.Errorf("bars %+v", b)
	}
}
