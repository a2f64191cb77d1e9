package report

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/kinference/kinference/internal/bench/stats"
	"github.com/kinference/kinference/internal/bench/virtual"
	"github.com/kinference/kinference/internal/plot"
)

// Results are the runs behind the routing tables, as they are kept in a file.
type Results struct {
	Origin
	Seeds []uint64 `json:"seeds"`
	Cells []Kept   `json:"cells"`
}

// Origin is what results came from.
type Origin struct {
	Command string `json:"command"`
	Go      string `json:"go"`
	Note    string `json:"note"`
	// NoTrace says that the cases of the Mooncake trace had generated requests.
	NoTrace string `json:"no_trace,omitempty"`
}

// Kept is a cell of Results. Case is the fingerprint of the case: runs of
// another one are not to be used again.
type Kept struct {
	Scenario string          `json:"scenario"`
	Policy   string          `json:"policy"`
	Case     string          `json:"case"`
	Runs     []stats.Summary `json:"runs"`
}

// Means are the figures that are published of Results.
type Means struct {
	Origin
	Cells []MeanCell `json:"cells"`
}

// MeanCell is the mean of a cell's runs, and the standard errors of its metrics.
type MeanCell struct {
	Scenario string             `json:"scenario"`
	Policy   string             `json:"policy"`
	Runs     int                `json:"runs"`
	Mean     stats.Summary      `json:"mean"`
	Errors   map[string]float64 `json:"standard_errors,omitempty"`
}

// MeansOf averages cells.
func MeansOf(o Origin, cells []virtual.Cell) Means {
	out := Means{Origin: o}
	for _, c := range cells {
		m := MeanCell{Scenario: c.Scenario, Policy: c.Policy, Runs: len(c.Runs), Mean: rounded(c.Mean())}
		if len(c.Runs) > 1 {
			m.Errors = map[string]float64{}
			for _, x := range metrics {
				m.Errors[x.name] = round(stats.StandardError(x.values(c)))
			}
		}
		out.Cells = append(out.Cells, m)
	}
	return out
}

// MarshalResults encodes results, a cell a line, with six digits; r is not changed.
func MarshalResults(r Results) ([]byte, error) {
	cells := slices.Clone(r.Cells)
	for i := range cells {
		cells[i].Runs = slices.Clone(cells[i].Runs)
		for j, run := range cells[i].Runs {
			cells[i].Runs[j] = rounded(run)
		}
	}
	r.Cells = nil
	return marshal(r, cells)
}

// MarshalMeans encodes means, a cell a line.
func MarshalMeans(m Means) ([]byte, error) {
	cells := m.Cells
	m.Cells = nil
	return marshal(m, cells)
}

// marshal encodes a head without cells and its cells, each on a line, so that files
// can be compared.
func marshal[T any](head any, cells []T) ([]byte, error) {
	data, err := json.Marshal(head)
	if err != nil {
		return nil, err
	}
	var b strings.Builder
	b.WriteString(strings.TrimSuffix(string(data), `null}`) + "[")
	for i, c := range cells {
		line, err := json.Marshal(c)
		if err != nil {
			return nil, fmt.Errorf("encode cell %d: %w", i, err)
		}
		if i > 0 {
			b.WriteString(",")
		}
		b.WriteString("\n" + string(line))
	}
	b.WriteString("\n]}\n")
	return []byte(b.String()), nil
}

// rounded keeps six digits of each figure; NaN, for which JSON has no word,
// becomes 0.
func rounded(s stats.Summary) stats.Summary {
	for _, v := range []*float64{&s.TTFT50, &s.TTFT90, &s.TTFT99, &s.TTFTMean, &s.E2E50, &s.E2E99, &s.RPS, &s.Hit,
		&s.Light50, &s.Light99, &s.Jain, &s.Off, &s.OffShare} {
		if *v = round(*v); math.IsNaN(*v) {
			*v = 0
		}
	}
	return s
}

// triple formats three of percentiles.
func triple(a, b, c float64) string {
	return plot.Number(a) + " / " + plot.Number(b) + " / " + plot.Number(c)
}

// CaseTable shows the policies of the given cases, each a row, and the median
// over the seeds of the paired difference of the mean TTFT to that of base:
// +50 % means that base needs a third less.
func CaseTable(cells []virtual.Cell, base string, cases ...string) plot.Table {
	t := plot.Table{Left: 2, Header: []string{"scenario", "policy", "TTFT p50 / p90 / p99 s", "mean s", "e2e p50 s", "requests/s", "hit", "mean against " + base}}
	light := false
	for _, c := range cells {
		light = light || slices.Contains(cases, c.Scenario) && c.Mean().Jain > 0
	}
	if light {
		t.Header = append(t.Header, "light tenants p50 / p99 s", "Jain")
	}
	for _, name := range cases {
		for _, c := range cells {
			if c.Scenario != name {
				continue
			}
			m := c.Mean()
			paired := "-"
			if b, ok := find(cells, name, base); ok && c.Policy != base {
				paired = percent(Paired(b, c, func(s stats.Summary) float64 { return s.TTFTMean }))
			}
			row := []string{name, c.Policy, triple(m.TTFT50, m.TTFT90, m.TTFT99), plot.Number(m.TTFTMean), plot.Number(m.E2E50),
				plot.Number(m.RPS), fmt.Sprintf("%.0f %%", 100*m.Hit), paired}
			if light && m.Jain > 0 {
				row = append(row, plot.Number(m.Light50)+" / "+plot.Number(m.Light99), fmt.Sprintf("%.3f", m.Jain))
			} else if light {
				row = append(row, "", "")
			}
			t.Rows = append(t.Rows, row)
		}
	}
	return t
}

func percent(v float64) string {
	if math.IsNaN(v) {
		return "-"
	}
	return fmt.Sprintf("%+.0f %%", 100*v)
}

func find(cells []virtual.Cell, scenario, policy string) (virtual.Cell, bool) {
	for _, c := range cells {
		if c.Scenario == scenario && c.Policy == policy {
			return c, true
		}
	}
	return virtual.Cell{}, false
}

// metric is one of those in which policies are compared.
type metric struct {
	name string
	of   func(stats.Summary) float64
	more bool // more is better
}

var metrics = []metric{
	{"p50", func(s stats.Summary) float64 { return s.TTFT50 }, false},
	{"mean", func(s stats.Summary) float64 { return s.TTFTMean }, false},
	{"p90", func(s stats.Summary) float64 { return s.TTFT90 }, false},
	{"p99", func(s stats.Summary) float64 { return s.TTFT99 }, false},
	{"requests/s", func(s stats.Summary) float64 { return s.RPS }, true},
}

// values are the metric of each run of a cell.
func (m metric) values(c virtual.Cell) []float64 {
	out := make([]float64, len(c.Runs))
	for i, r := range c.Runs {
		out[i] = m.of(r)
	}
	return out
}

// gap is by which share a policy is worse than another one, negative when it is
// better, and two standard errors of that share.
type gap struct{ share, noise float64 }

func (g gap) String() string {
	if math.IsNaN(g.share) || math.IsNaN(g.noise) {
		return percent(g.share)
	}
	return fmt.Sprintf("%+.0f ±%.0f %%", 100*g.share, 100*g.noise)
}

// gap compares two cells by the means of a metric. Runs of one seed are a pair: what
// is hard for both says nothing about either.
func (m metric) gap(own, other virtual.Cell) gap {
	if m.more { // of what is better, less is worse
		own, other = other, own
	}
	a, b := m.of(own.Mean()), m.of(other.Mean())
	others := m.values(other)
	rest := m.values(own)[:min(len(own.Runs), len(others))]
	for i := range rest { // what the ratio of the means leaves of each pair
		rest[i] -= a / b * others[i]
	}
	return gap{a/b - 1, 2 * stats.StandardError(rest) / b}
}

// best is the best of the rivals of a policy in a metric, by the means over the
// seeds, and by how much the policy is worse.
func best(cells []virtual.Cell, scenario, policy string, rivals []string, m metric) (who string, worse gap) {
	worse = gap{math.NaN(), math.NaN()}
	own, ok := find(cells, scenario, policy)
	if !ok {
		return "", worse
	}
	for _, r := range rivals {
		c, ok := find(cells, scenario, r)
		if !ok || r == policy {
			continue
		}
		if g := m.gap(own, c); math.IsNaN(worse.share) || g.share > worse.share {
			who, worse = r, g
		}
	}
	return who, worse
}

// GapTable shows for each case and metric by how much a policy is worse than the
// best of its rivals, and which that is; a minus means better than all.
func GapTable(cells []virtual.Cell, policy string, rivals []string, cases ...string) plot.Table {
	t := plot.Table{Left: 1, Header: []string{"scenario"}}
	for _, m := range metrics {
		t.Header = append(t.Header, m.name, "best rival")
	}
	for _, name := range cases {
		row := []string{name}
		for _, m := range metrics {
			who, worse := best(cells, name, policy, rivals, m)
			row = append(row, worse.String(), who)
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

// Losses lists in sentences where a policy is worse than the best of its rivals
// by more than a share, in bold where that is not noise.
func Losses(cells []virtual.Cell, policy string, rivals []string, share float64, cases ...string) []string {
	var out []string
	for _, name := range cases {
		for _, m := range metrics {
			who, worse := best(cells, name, policy, rivals, m)
			if !(worse.share > share) {
				continue
			}
			own, _ := find(cells, name, policy)
			other, _ := find(cells, name, who)
			unit := " s"
			if m.more {
				unit = ""
			}
			line := fmt.Sprintf("%s, %s: %s%s, %s %s%s (%s)", name, m.name, plot.Number(m.of(own.Mean())), unit, who, plot.Number(m.of(other.Mean())), unit, worse)
			if worse.share-worse.noise > share {
				line = "**" + line + "**"
			}
			out = append(out, line)
		}
	}
	return out
}

// ErrorTable shows how far predictions were from what came, for one policy.
func ErrorTable(cells []virtual.Cell, policy string, cases ...string) plot.Table {
	t := plot.Table{Left: 1, Header: []string{"scenario", "median distance ms", "median share"}}
	for _, name := range cases {
		if c, ok := find(cells, name, policy); ok {
			m := c.Mean()
			t.Rows = append(t.Rows, []string{name, fmt.Sprintf("%.0f", 1000*m.Off), fmt.Sprintf("%.1f %%", 100*m.OffShare)})
		}
	}
	return t
}

// KeptTable shows what is left of each policy's own peak at the highest load of
// a sweep.
func KeptTable(caps []virtual.Capacity) plot.Table {
	t := plot.Table{Left: 2, Header: []string{"scenario", "policy", "peak requests/s", "at the highest load", "kept"}}
	for _, c := range caps {
		last := c.Loads[len(c.Loads)-1].RPS
		t.Rows = append(t.Rows, []string{c.Scenario, c.Policy, plot.Number(c.Peak), plot.Number(last), fmt.Sprintf("%.0f %%", 100*last/c.Peak)})
	}
	return t
}

// CaseBars plots one metric of some cases and policies.
func CaseBars(cells []virtual.Cell, title, label string, of func(stats.Summary) float64, policies []string, cases ...string) plot.Bars {
	b := plot.Bars{Title: title, Subtitle: NoGPU, Groups: cases, Y: plot.Axis{Label: label, Unit: "s", Log: true}}
	for _, p := range policies {
		s := plot.BarSeries{Name: p}
		for _, name := range cases {
			v := math.NaN()
			if c, ok := find(cells, name, p); ok {
				v = of(c.Mean())
			}
			s.Values = append(s.Values, v)
		}
		b.Series = append(b.Series, s)
	}
	return b
}
