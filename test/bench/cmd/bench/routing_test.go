package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What was run once need not be run again for a new page, and gives the same one.
func TestRoutingPages(t *testing.T) {
	dir := t.TempDir()
	args := []string{"routing", "-scenarios", "S0s,S1", "-policies", "random,kinference", "-seeds", "1", "-docs", dir}
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
	for _, want := range []string{"no GPU was used", "| S1 ", "S1, TTFT p50 of random over ours", `"case":"`} {
		if !strings.Contains(first, want) {
			t.Errorf("the pages lack %q", want)
		}
	}
	out.Reset()
	if err := run(t.Context(), append(args, "-from", filepath.Join(dir, "routing2.json"), "-again", "kinference"), &out); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "2 runs from") {
		t.Errorf("random's two runs were not taken from the file: %s", out.String())
	}
	if page() != first {
		t.Error("pages made from earlier runs differ")
	}
}
