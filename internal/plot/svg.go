package plot

import (
	"bytes"
	"fmt"
	"strings"
	"unicode/utf8"
)

// Colours of middle lightness: each one stands out from white and from a dark
// page alike, and neighbours differ in lightness as well as in hue.
var colours = []string{"#3d87d9", "#e0883a", "#3fa37c", "#c4577f", "#8d77cf", "#9b8f3f", "#4aa5b5", "#8b9099"}

// Sizes in SVG user units, which are pixels unless the viewer scales.
const (
	width      = 760
	plotHeight = 300
	left       = 64
	right      = 24
	fontSize   = 13
	charWidth  = 7.9 // generous advance of the sans-serif font at fontSize; legends are laid out with it
)

// canvas collects the elements of one SVG file.
type canvas struct {
	bytes.Buffer
	top, bottom float64 // of the plot area
}

func (c *canvas) addf(format string, args ...any) {
	fmt.Fprintf(c, format, args...)
	c.WriteByte('\n')
}

var escape = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;")

func (c *canvas) text(x, y float64, anchor, class, s string) {
	c.addf(`<text x="%s" y="%s" text-anchor="%s" class="%s">%s</text>`, px(x), px(y), anchor, class, escape.Replace(s))
}

// px rounds to a tenth of a pixel, which keeps files small and diffs quiet.
func px(v float64) string {
	s := fmt.Sprintf("%.1f", v)
	return strings.TrimSuffix(s, ".0")
}

func colour(i int) string { return colours[i%len(colours)] }

// open writes the head of the file, the titles and the legend, and fixes where
// the plot area lies.
func (c *canvas) open(title, subtitle string, names []string, sample func(i int, x, y float64)) {
	var head canvas
	y := 0.0
	if title != "" {
		y += 24
		head.text(left-40, y, "start", "t", title)
	}
	if subtitle != "" {
		y += 20
		head.text(left-40, y, "start", "s", subtitle)
	}
	y += 24
	type place struct{ x, y float64 }
	var places []place
	x := float64(left)
	for _, name := range names {
		w := 40 + charWidth*float64(utf8.RuneCountInString(name))
		if x+w > width-right && x > left {
			x, y = left, y+20
		}
		places = append(places, place{x, y})
		x += w
	}
	if len(names) == 0 {
		y -= 16
	}
	c.top = y + 18
	c.bottom = c.top + plotHeight
	height := c.bottom + 56
	c.addf(`<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%s" viewBox="0 0 %d %s" role="img" font-family="system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif" font-size="%d">`,
		width, px(height), width, px(height), fontSize)
	c.addf(`<title>%s</title>`, escape.Replace(title))
	// The base colours suit both backgrounds; a dark page only gets lighter text.
	c.addf(`<style>text{fill:#5c636b}.t{fill:#3a4048;font-size:16px;font-weight:600}.s{font-size:12px}.g{stroke:#8b9099;stroke-opacity:.28}.a{stroke:#8b9099}` +
		`@media(prefers-color-scheme:dark){text{fill:#aab1ba}.t{fill:#dfe3e8}}</style>`)
	c.Write(head.Bytes())
	for i, name := range names {
		p := places[i]
		sample(i, p.x, p.y-4.5)
		c.text(p.x+24, p.y, "start", "l", name)
	}
}

func (c *canvas) close() []byte {
	c.addf(`</svg>`)
	return c.Bytes()
}

// yAxis draws grid lines, tick labels and the title of the value axis.
func (c *canvas) yAxis(a Axis, s scale) {
	for _, v := range s.ticks {
		y := c.bottom - s.at(v)*plotHeight
		c.addf(`<line x1="%d" y1="%s" x2="%d" y2="%s" class="g"/>`, left, px(y), width-right, px(y))
		c.text(left-8, y+4.5, "end", "k", tick(v))
	}
	y := (c.top + c.bottom) / 2
	c.addf(`<text x="18" y="%s" text-anchor="middle" transform="rotate(-90 18 %s)">%s</text>`, px(y), px(y), escape.Replace(a.title()))
}

// SVG draws the chart. It needs no external font, script or style.
func (l Lines) SVG() []byte {
	var names []string
	for _, s := range l.Series {
		names = append(names, s.Name)
	}
	sx, sy := l.scales()
	c := new(canvas)
	dash := func(i int) string {
		if l.Series[i].Dashed {
			return ` stroke-dasharray="6 4"`
		}
		return ""
	}
	c.open(l.Title, l.Subtitle, names, func(i int, x, y float64) {
		c.addf(`<line x1="%s" y1="%s" x2="%s" y2="%s" stroke="%s" stroke-width="2.2"%s/>`, px(x), px(y), px(x+18), px(y), colour(i), dash(i))
		c.marker(i, x+9, y)
	})
	c.yAxis(l.Y, sy)
	span := float64(width - right - left)
	for _, v := range sx.ticks {
		x := left + sx.at(v)*span
		c.addf(`<line x1="%s" y1="%s" x2="%s" y2="%s" class="a"/>`, px(x), px(c.bottom), px(x), px(c.bottom+5))
		c.text(x, c.bottom+20, "middle", "k", tick(v))
	}
	c.addf(`<line x1="%d" y1="%s" x2="%d" y2="%s" class="a"/>`, left, px(c.bottom), width-right, px(c.bottom))
	c.text(left+span/2, c.bottom+44, "middle", "k", l.X.title())
	for i, s := range l.Series {
		points := l.places(s, sx, sy, c.bottom)
		var path strings.Builder
		for _, p := range points {
			fmt.Fprintf(&path, " %s,%s", px(p.X), px(p.Y))
		}
		if path.Len() > 0 {
			c.addf(`<polyline points="%s" fill="none" stroke="%s" stroke-width="2.2" stroke-linejoin="round"%s/>`, path.String()[1:], colour(i), dash(i))
		}
		if len(points) <= mostMarkers {
			for _, p := range points {
				c.marker(i, p.X, p.Y)
			}
		}
	}
	return c.close()
}

// mostMarkers is how many a line has: hundreds would hide it.
const mostMarkers = 40

// drawn are the points of a series that have a place on both axes.
func (l Lines) drawn(s Series) []Point {
	var out []Point
	for _, p := range s.Points {
		if l.X.drawable(p.X) && l.Y.drawable(p.Y) {
			out = append(out, p)
		}
	}
	return out
}

// scales are those of all points that are drawn.
func (l Lines) scales() (x, y scale) {
	var xs, ys []float64
	for _, s := range l.Series {
		for _, p := range l.drawn(s) {
			xs, ys = append(xs, p.X), append(ys, p.Y)
		}
	}
	return newScale(l.X, xs, false), newScale(l.Y, ys, false)
}

// places is where the points of a series are drawn in a plot area that ends at bottom.
func (l Lines) places(s Series, x, y scale, bottom float64) []Point {
	out := l.drawn(s)
	for i, p := range out {
		out[i] = Point{left + x.at(p.X)*(width-right-left), bottom - y.at(p.Y)*plotHeight}
	}
	return out
}

// marker draws the sign of series i: shape as well as colour tells lines apart.
func (c *canvas) marker(i int, x, y float64) {
	switch fill := colour(i); i % 4 {
	case 0:
		c.addf(`<circle cx="%s" cy="%s" r="4" fill="%s"/>`, px(x), px(y), fill)
	case 1:
		c.addf(`<rect x="%s" y="%s" width="7" height="7" fill="%s"/>`, px(x-3.5), px(y-3.5), fill)
	case 2:
		c.addf(`<path d="M%s %sl4.6 8h-9.2z" fill="%s"/>`, px(x), px(y-5), fill)
	default:
		c.addf(`<path d="M%s %sl4.8 4.8-4.8 4.8-4.8-4.8z" fill="%s"/>`, px(x), px(y-4.8), fill)
	}
}

// SVG draws the chart. Each bar carries its value, so no reader has to guess
// it from the axis.
func (b Bars) SVG() []byte {
	var values []float64
	var names []string
	for _, s := range b.Series {
		names = append(names, s.Name)
		values = append(values, s.Values...)
	}
	sy := newScale(b.Y, values, true)
	c := new(canvas)
	c.open(b.Title, b.Subtitle, names, func(i int, x, y float64) {
		c.addf(`<rect x="%s" y="%s" width="16" height="11" rx="2" fill="%s"/>`, px(x), px(y-5.5), colour(i))
	})
	c.yAxis(b.Y, sy)
	c.addf(`<line x1="%d" y1="%s" x2="%d" y2="%s" class="a"/>`, left, px(c.bottom), width-right, px(c.bottom))
	if len(b.Groups) == 0 || len(b.Series) == 0 {
		return c.close()
	}
	group := float64(width-right-left) / float64(len(b.Groups))
	bar := min(group*0.84/float64(len(b.Series)), 46)
	// A logarithmic axis has no zero: its bars stand on the lower edge, and
	// negative values of a linear one hang below zero.
	base := 0.0
	if !sy.log {
		base = sy.at(0)
	}
	for g, name := range b.Groups {
		mid := left + group*(float64(g)+0.5)
		c.text(mid, c.bottom+20, "middle", "k", name)
		for i, s := range b.Series {
			if g >= len(s.Values) || !b.Y.drawable(s.Values[g]) {
				continue
			}
			x := mid + bar*(float64(i)-float64(len(b.Series))/2)
			from, to := base, sy.at(s.Values[g])
			if to < from {
				from, to = to, from
			}
			top := c.bottom - to*plotHeight
			c.addf(`<rect x="%s" y="%s" width="%s" height="%s" rx="1.5" fill="%s"/>`,
				px(x+bar*0.06), px(top), px(bar*0.88), px(max((to-from)*plotHeight, 1)), colour(i))
			label := Number(s.Values[g])
			size := min(11, bar*0.9/float64(len(label))*1.75)
			if size >= 6 {
				c.addf(`<text x="%s" y="%s" text-anchor="middle" font-size="%s">%s</text>`, px(x+bar/2), px(top-4), px(size), label)
			}
		}
	}
	return c.close()
}
