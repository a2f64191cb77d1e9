// Package plot draws line and bar charts as SVG, PNG and terminal text, and
// aligned tables as text and Markdown.
//
// The benchmarks and the demo use it to show what they measured. Everything is
// a pure function of its input: equal values give equal bytes, so that
// committed plots change only when the figures do. There is no I/O and no
// state; all methods are safe for concurrent use. Values that cannot be drawn
// (NaN, infinities, zero on a logarithmic axis) are left out, never fatal.
package plot

import (
	"math"
	"strconv"
	"strings"
)

// Axis describes one axis of a chart.
type Axis struct {
	// Label names the quantity; Unit, when set, follows it in brackets.
	Label, Unit string
	// Log spaces the axis by powers of ten. Values ≤ 0 are then left out.
	Log bool
}

// Point is one measured value.
type Point struct{ X, Y float64 }

// Series is one named line of a Lines chart.
type Series struct {
	Name   string
	Points []Point // drawn in the order given
	// Dashed sets a bound or reference apart from what was measured.
	Dashed bool
}

// Lines is a line chart.
type Lines struct {
	Title, Subtitle string
	X, Y            Axis
	Series          []Series
}

// BarSeries holds one value for each group of a Bars chart.
type BarSeries struct {
	Name   string
	Values []float64
}

// Bars is a grouped bar chart: one group for each entry of Groups, in it one
// bar for each series.
type Bars struct {
	Title, Subtitle string
	Groups          []string
	Y               Axis // the axis of the values
	Series          []BarSeries
}

// Number formats v with about three significant digits, the way that tables
// and bars show it: "0.30", "6.48", "20.3", "145", "12,031".
func Number(v float64) string {
	switch a := math.Abs(v); {
	case math.IsNaN(v):
		return "-"
	case math.IsInf(v, 0):
		return strings.TrimSuffix(strconv.FormatFloat(v, 'f', 0, 64), "nf") + "nf"
	case a >= 1000:
		return grouped(strconv.FormatFloat(v, 'f', 0, 64))
	case a >= 99.95:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case a >= 9.995:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case a >= 0.1 || a == 0:
		return strconv.FormatFloat(v, 'f', 2, 64)
	case a >= 0.01:
		return strconv.FormatFloat(v, 'f', 3, 64)
	default:
		return strconv.FormatFloat(v, 'g', 2, 64)
	}
}

// grouped puts commas between thousands.
func grouped(digits string) string {
	sign := ""
	if strings.HasPrefix(digits, "-") {
		sign, digits = "-", digits[1:]
	}
	var b strings.Builder
	for i, d := range digits {
		if i > 0 && (len(digits)-i)%3 == 0 {
			b.WriteByte(',')
		}
		b.WriteRune(d)
	}
	return sign + b.String()
}

// drawable tells whether v has a place on the axis.
func (a Axis) drawable(v float64) bool {
	return !math.IsNaN(v) && !math.IsInf(v, 0) && (!a.Log || v > 0)
}

// title is the axis label with its unit.
func (a Axis) title() string {
	switch {
	case a.Unit == "":
		return a.Label
	case a.Label == "":
		return a.Unit
	}
	return a.Label + " (" + a.Unit + ")"
}

// scale maps values of one axis to 0..1.
type scale struct {
	lo, hi float64
	log    bool
	ticks  []float64
}

// at is the place of v on the axis: 0 at its start, 1 at its end, clamped.
func (s scale) at(v float64) float64 {
	lo, hi := s.lo, s.hi
	if s.log {
		v, lo, hi = math.Log10(v), math.Log10(lo), math.Log10(hi)
	}
	return min(max((v-lo)/(hi-lo), 0), 1)
}

// newScale covers values with round ticks. fromZero starts a linear axis at 0,
// which bars need, because their length is what the eye compares.
func newScale(a Axis, values []float64, fromZero bool) scale {
	lo, hi := math.Inf(1), math.Inf(-1)
	for _, v := range values {
		if a.drawable(v) {
			lo, hi = min(lo, v), max(hi, v)
		}
	}
	if lo > hi { // nothing to draw
		lo, hi = 0, 1
		if a.Log {
			lo, hi = 0.1, 1
		}
	}
	if a.Log {
		if fromZero {
			lo /= 4 // there is no zero to stand on, but the shortest bar must be seen
		}
		return logScale(lo, hi)
	}
	if fromZero || lo > 0 && lo < hi/2 {
		lo, hi = min(lo, 0), max(hi, 0)
	}
	if lo == hi {
		lo, hi = lo-0.5, hi+0.5
	}
	return linearScale(lo, hi)
}

func linearScale(lo, hi float64) scale {
	// Steps of 1, 2 or 5 times a power of ten, about five of them.
	raw := (hi - lo) / 5
	power := math.Pow(10, math.Floor(math.Log10(raw)))
	step := 10 * power
	for _, m := range []float64{1, 2, 5} {
		if raw <= m*power*1.0001 {
			step = m * power
			break
		}
	}
	first, last := math.Floor(lo/step+1e-9), math.Ceil(hi/step-1e-9)
	s := scale{lo: first * step, hi: last * step}
	for i := first; i <= last; i++ {
		s.ticks = append(s.ticks, i*step)
	}
	return s
}

func logScale(lo, hi float64) scale {
	first, last := math.Floor(math.Log10(lo)+1e-9), math.Ceil(math.Log10(hi)-1e-9)
	if last <= first {
		last = first + 1
	}
	s := scale{log: true, lo: math.Pow(10, first), hi: math.Pow(10, last)}
	// A narrow range gets ticks inside the decades too, and does not waste
	// half of the plot on a decade of which it uses a corner.
	if last-first <= 3 {
		steps := []float64{1, 2, 5}
		start, end := s.lo, s.hi
		for d := first; d < last; d++ {
			for _, m := range steps {
				v := m * math.Pow(10, d)
				if v <= lo*1.0001 {
					start = v
				}
				if v >= hi*0.9999 && v < end {
					end = v
				}
			}
		}
		s.lo, s.hi = start, end
		if s.hi <= s.lo {
			s.hi = s.lo * 10
		}
		for d := first; d <= last; d++ {
			for _, m := range steps {
				v := m * math.Pow(10, d)
				if v >= s.lo*0.9999 && v <= s.hi*1.0001 {
					s.ticks = append(s.ticks, v)
				}
			}
		}
		return s
	}
	stride := math.Ceil((last - first) / 6)
	for d := first; d <= last; d += stride {
		s.ticks = append(s.ticks, math.Pow(10, d))
	}
	return s
}

// tick formats an axis value: as short as possible, but never rounded.
func tick(v float64) string {
	if a := math.Abs(v); a >= 10000 && math.Mod(v, 1000) == 0 {
		return grouped(strconv.FormatFloat(v/1000, 'f', -1, 64)) + "k"
	}
	return strconv.FormatFloat(math.Round(v*1e9)/1e9, 'f', -1, 64)
}
