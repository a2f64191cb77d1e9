package plot

import (
	"math"
	"strings"
	"unicode/utf8"
)

// Style says how text output may look.
type Style struct {
	// ASCII keeps to 7-bit characters, for terminals and logs without Unicode.
	ASCII bool
	// Width is the number of columns to use; 0 means 80. Names are never cut,
	// so very long ones may exceed it.
	Width int
}

// Text draws the chart as horizontal bars, one line each, grouped as in
// Groups. The longest bar fills the width. Every line ends in a newline.
func (b Bars) Text(style Style) string {
	var out strings.Builder
	if b.Title != "" {
		out.WriteString(b.Title)
		if t := b.Y.title(); t != "" {
			out.WriteString(", " + t)
		}
		out.WriteByte('\n')
	}
	if b.Subtitle != "" {
		out.WriteString(b.Subtitle + "\n")
	}
	nameWidth, valueWidth := 0, 0
	var values []float64
	for _, s := range b.Series {
		nameWidth = max(nameWidth, utf8.RuneCountInString(s.Name))
		for _, v := range s.Values {
			values = append(values, v)
			valueWidth = max(valueWidth, len(Number(v)))
		}
	}
	full := style.Width
	if full <= 0 {
		full = 80
	}
	room := max(full-nameWidth-valueWidth-6, 8)
	most := 0.0
	for _, v := range values {
		if b.Y.drawable(v) {
			most = max(most, math.Abs(v))
		}
	}
	log := newScale(b.Y, values, true)
	for g, group := range b.Groups {
		if group != "" {
			out.WriteString(group + "\n")
		}
		for _, s := range b.Series {
			v := math.NaN()
			if g < len(s.Values) {
				v = s.Values[g]
			}
			part := 0.0
			switch {
			case !b.Y.drawable(v) || most == 0:
			case b.Y.Log:
				part = log.at(v)
			default:
				part = math.Abs(v) / most
			}
			out.WriteString("  " + pad(s.Name, nameWidth, false) + "  " + pad(Number(v), valueWidth, true))
			if bar := bar(part, room, style.ASCII); bar != "" {
				out.WriteString("  " + bar)
			}
			out.WriteByte('\n')
		}
	}
	return out.String()
}

// bar fills part (0..1) of room columns; with Unicode to an eighth of a column.
func bar(part float64, room int, ascii bool) string {
	if part <= 0 {
		return ""
	}
	if ascii {
		return strings.Repeat("#", max(int(math.Round(part*float64(room))), 1))
	}
	eighths := max(int(math.Round(part*float64(room)*8)), 1)
	s := strings.Repeat("█", eighths/8)
	if r := eighths % 8; r > 0 {
		s += string([]rune("▏▎▍▌▋▊▉")[r-1])
	}
	return s
}

// Table is rows of cells under a header.
type Table struct {
	Header []string
	Rows   [][]string
	// Left is the number of leading columns that hold names and are set flush
	// left; the others hold figures and are set flush right.
	Left int
}

// Text sets the table in aligned columns with a rule under the header.
func (t Table) Text(style Style) string {
	widths := t.widths()
	rule, gap := "─", "  "
	if style.ASCII {
		rule = "-"
	}
	var out strings.Builder
	line := func(cells []string) {
		var l strings.Builder
		for i, w := range widths {
			if i > 0 {
				l.WriteString(gap)
			}
			l.WriteString(pad(cell(cells, i), w, i >= t.Left))
		}
		out.WriteString(strings.TrimRight(l.String(), " ") + "\n")
	}
	if len(t.Header) > 0 {
		line(t.Header)
		total := 0
		for i, w := range widths {
			if total += w; i > 0 {
				total += len(gap)
			}
		}
		out.WriteString(strings.Repeat(rule, total) + "\n")
	}
	for _, r := range t.Rows {
		line(r)
	}
	return out.String()
}

// Markdown writes the table in GitHub's form, padded so that its source reads
// as well as its rendering.
func (t Table) Markdown() string {
	escape := func(cells []string) []string {
		out := make([]string, len(cells))
		for i, c := range cells {
			out[i] = strings.ReplaceAll(c, "|", `\|`)
		}
		return out
	}
	escaped := Table{Header: escape(t.Header), Left: t.Left}
	for _, r := range t.Rows {
		escaped.Rows = append(escaped.Rows, escape(r))
	}
	t = escaped
	widths := t.widths()
	var out strings.Builder
	line := func(cells []string) {
		out.WriteByte('|')
		for i, w := range widths {
			out.WriteString(" " + pad(cell(cells, i), w, i >= t.Left) + " |")
		}
		out.WriteByte('\n')
	}
	line(t.Header)
	out.WriteByte('|')
	for i, w := range widths {
		if i < t.Left {
			out.WriteString(strings.Repeat("-", w+2) + "|")
		} else {
			out.WriteString(strings.Repeat("-", w+1) + ":|")
		}
	}
	out.WriteByte('\n')
	for _, r := range t.Rows {
		line(r)
	}
	return out.String()
}

func (t Table) widths() []int {
	var widths []int
	for _, cells := range append([][]string{t.Header}, t.Rows...) {
		for i, c := range cells {
			if i == len(widths) {
				widths = append(widths, 3)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(c))
		}
	}
	return widths
}

func cell(cells []string, i int) string {
	if i < len(cells) {
		return cells[i]
	}
	return ""
}

func pad(s string, width int, right bool) string {
	fill := strings.Repeat(" ", max(width-utf8.RuneCountInString(s), 0))
	if right {
		return fill + s
	}
	return s + fill
}
