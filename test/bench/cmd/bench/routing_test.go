package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/bench/workload"
)

// What was run once need not be run again for a new page, and gives the same one.
func TestRoutingPages(t *testing.T) {
	dir := t.TempDir()
	args := []string{"routing", "-scenarios", "S0s,S1", "-policies", "random,kinference", "-seeds", "1", "-docs", dir, "-runs", filepath.Join(dir, "runs.json"), "-again", "kinference"}
	var out strings.Builder
	if err := run(t.Context(), args, &out); err != nil {
		t.Fatal(err)
	}
	page := func() string {
		var all strings.Builder
		for _, name := range []string{"routing2.md", "routing2.json", "routing2_mean.svg", "routing2_p99.svg"} {
			data, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil {
				t.Fatal(err)
			}
			all.Write(data)
		}
		return all.String()
	}
	first := page()
	for _, want := range []string{"no GPU was used", "| S1 ", "S1, TTFT p50 of random over ours", `"runs":1,"mean":`} {
		if !strings.Contains(first, want) {
			t.Errorf("the pages lack %q", want)
		}
	}
	out.Reset()
	if err := run(t.Context(), args, &out); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "2 runs from") {
		t.Errorf("random's two runs were not taken from the file: %s", out.String())
	}
	if page() != first {
		t.Error("pages made from earlier runs differ")
	}
}

// Where the trace is missing, the output, the page and the data say so, and only what
// was made without it is used again.
func TestRoutingWithoutTrace(t *testing.T) {
	t.Setenv(workload.DataEnv, t.TempDir())
	dir := t.TempDir()
	results := filepath.Join(dir, "runs.json")
	args := []string{"routing", "-scenarios", "MC", "-policies", "random", "-seeds", "1", "-docs", dir, "-runs", results}
	for _, used := range []string{"", "1 runs from", "0 runs from"} {
		var out strings.Builder
		if err := run(t.Context(), args, &out); err != nil {
			t.Fatal(err)
		}
		page, err := os.ReadFile(filepath.Join(dir, "routing2.md"))
		if err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(results)
		if err != nil {
			t.Fatal(err)
		}
		means, err := os.ReadFile(filepath.Join(dir, "routing2.json"))
		if err != nil {
			t.Fatal(err)
		}
		const notice = "GENERATED DATA, NOT THE MOONCAKE TRACE"
		for what, text := range map[string]string{"output": out.String(), "page": string(page), "runs": string(data), "means": string(means)} {
			if !strings.Contains(text, notice) {
				t.Errorf("the %s does not tell that the trace is missing", what)
			}
		}
		if !strings.Contains(out.String(), used) {
			t.Errorf("want %q: %s", used, out.String())
		}
		if used != "" { // as if the runs were of the trace
			data = []byte(strings.Replace(string(data), notice, "", 1))
			if err := os.WriteFile(results, data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
}
