package plot

import (
	"bytes"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// golden compares got with a committed file.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s differs (-want +got); -update rewrites it:\n%s", name, diff)
	}
}

var sweep = Lines{
	Title:    "Throughput by load, shared prefix",
	Subtitle: "3 simulated workers (L40S model), 64 output tokens; no GPU was used",
	X:        Axis{Label: "concurrent streams", Log: true},
	Y:        Axis{Label: "throughput", Unit: "requests/s"},
	Series: []Series{
		{Name: "random", Points: []Point{{2, .18}, {4, .24}, {8, .29}, {16, .34}, {32, .38}, {64, .41}, {96, .40}}},
		{Name: "connection", Points: []Point{{2, .2}, {4, .28}, {8, .36}, {16, .41}, {32, .45}, {64, .48}, {96, .49}}},
		{Name: "kinference", Points: []Point{{2, .6}, {4, 1.1}, {8, 1.7}, {16, 2.2}, {32, 2.6}, {64, 2.7}, {96, 2.5}}},
		{Name: "bound", Points: []Point{{2, 2.9}, {96, 2.9}}, Dashed: true},
	},
}

var latency = Bars{
	Title:    "Time to first token, median",
	Subtitle: "3 simulated workers; no GPU was used",
	Groups:   []string{"S0 control", "S1 shared prefix", "S2 multi-turn"},
	Y:        Axis{Label: "TTFT p50", Unit: "s"},
	Series: []BarSeries{
		{"random", []float64{6.64, 6.48, 1.54}},
		{"connection", []float64{7.11, 5.29, .63}},
		{"round robin", []float64{6.59, 5.05, .98}},
		{"least requests", []float64{6.59, 6.3, math.NaN()}},
		{"predicted TTFT", []float64{6.57, .3, .62}},
		{"kinference", []float64{6.57, .3, .62}},
	},
}

func TestSVG(t *testing.T) {
	one := latency
	one.Y.Log = true
	empty := Lines{Title: `"a" < b & c`}
	for name, svg := range map[string][]byte{
		"lines.svg": sweep.SVG(), "bars.svg": latency.SVG(), "bars_log.svg": one.SVG(), "empty.svg": empty.SVG(), "nobars.svg": Bars{}.SVG(),
	} {
		t.Run(name, func(t *testing.T) {
			golden(t, name, svg)
			d := xml.NewDecoder(bytes.NewReader(svg))
			for {
				if _, err := d.Token(); errors.Is(err, io.EOF) {
					break
				} else if err != nil {
					t.Fatalf("not well-formed: %v", err)
				}
			}
		})
	}
}

func TestBarsText(t *testing.T) {
	golden(t, "bars.txt", []byte(latency.Text(Style{Width: 72})))
	golden(t, "bars_ascii.txt", []byte(latency.Text(Style{Width: 60, ASCII: true})))
	one := latency
	one.Y.Log = true
	golden(t, "bars_log.txt", []byte(one.Text(Style{})))
}

func TestTable(t *testing.T) {
	table := Table{
		Left:   2,
		Header: []string{"scenario", "policy", "TTFT p50", "rps"},
		Rows:   [][]string{{"S1 | shared", "random", "6.48", "0.38"}, {"S1 | shared", "kinference", "0.30", "0.71"}, {"S2", "naïve", "12"}},
	}
	golden(t, "table.txt", []byte(table.Text(Style{})))
	golden(t, "table_ascii.txt", []byte(table.Text(Style{ASCII: true})))
	golden(t, "table.md", []byte(table.Markdown()))
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0.00", .3: "0.30", .0304: "0.030", .00051: "0.00051", 6.478: "6.48", 9.996: "10.0", 20.34: "20.3", 99.96: "100",
		145.4: "145", 12031: "12,031", -1234567: "-1,234,567", math.Inf(1): "+Inf", math.Inf(-1): "-Inf",
	} {
		if got := Number(v); got != want {
			t.Errorf("Number(%v) = %q, want %q", v, got, want)
		}
	}
	if got := Number(math.NaN()); got != "-" {
		t.Errorf("Number(NaN) = %q, want -", got)
	}
}

func TestScale(t *testing.T) {
	for _, c := range []struct {
		name   string
		axis   Axis
		values []float64
		zero   bool
		want   []float64
	}{
		{"linear from zero", Axis{}, []float64{.3, 6.9}, true, []float64{0, 2, 4, 6, 8}},
		{"linear apart from zero", Axis{}, []float64{101, 104}, false, []float64{101, 102, 103, 104}},
		{"one value", Axis{}, []float64{3}, false, []float64{2.4, 2.6, 2.8, 3, 3.2, 3.4, 3.6}},
		{"negative", Axis{}, []float64{-3, 2}, true, []float64{-3, -2, -1, 0, 1, 2}},
		{"log", Axis{Log: true}, []float64{2, 96}, false, []float64{2, 5, 10, 20, 50, 100}},
		{"log without values ≤ 0", Axis{Log: true}, []float64{0, -1, .2, 9}, false, []float64{.2, .5, 1, 2, 5, 10}},
		{"wide log", Axis{Log: true}, []float64{1, 1e6}, false, []float64{1, 10, 100, 1000, 1e4, 1e5, 1e6}},
		{"nothing", Axis{}, nil, false, []float64{0, .2, .4, .6, .8, 1}},
		{"nothing, log", Axis{Log: true}, nil, false, []float64{.1, .2, .5, 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newScale(c.axis, c.values, c.zero)
			near := cmp.Comparer(func(a, b float64) bool { return math.Abs(a-b) < 1e-9 })
			if diff := cmp.Diff(c.want, s.ticks, near); diff != "" {
				t.Errorf("ticks (-want +got):\n%s", diff)
			}
			for _, v := range c.values {
				if p := s.at(v); c.axis.drawable(v) && (p < 0 || p > 1 || math.IsNaN(p)) {
					t.Errorf("at(%v) = %v, want within 0..1", v, p)
				}
			}
		})
	}
}
