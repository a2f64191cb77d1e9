package plot

import (
	"bytes"
	_ "embed"
	"image"
	"image/color"
	"image/png"
	"math"
	"strconv"
	"strings"
)

// PNG draws the chart as SVG does, for viewers without SVG: on white, and with letters
// of one size. Characters beyond ASCII are drawn as a box.
func (l Lines) PNG() []byte {
	sx, sy := l.scales()
	head := 28 + 20*float64(len(l.Series)+1)
	r := newRaster(width, head+plotHeight+56)
	r.text(left-40, 18, 0, 2, inkDark, l.Title)
	r.text(left-40, 38, 0, 1, ink, l.Subtitle)
	for i, s := range l.Series {
		y := 58 + 20*float64(i)
		r.path([]Point{{left, y}, {left + 18, y}}, hex(colour(i)), s.Dashed)
		r.marker(i, Point{left + 9, y})
		r.text(left+24, y, 0, 1, ink, s.Name)
	}
	bottom := head + plotHeight
	for _, v := range sy.ticks {
		y := bottom - sy.at(v)*plotHeight
		r.line(Point{left, y}, Point{width - right, y}, .5, gridColour)
		r.text(left-8, y, 1, 1, ink, tick(v))
	}
	span := float64(width - right - left)
	for _, v := range sx.ticks {
		x := left + sx.at(v)*span
		r.line(Point{x, bottom}, Point{x, bottom + 5}, .5, axisColour)
		r.text(x, bottom+16, .5, 1, ink, tick(v))
	}
	r.line(Point{left, bottom}, Point{width - right, bottom}, .5, axisColour)
	r.text(left+span/2, bottom+40, .5, 1, ink, l.X.title())
	r.upwards(18, head+plotHeight/2, ink, l.Y.title())
	for i, s := range l.Series {
		path := l.places(s, sx, sy, bottom)
		r.path(path, hex(colour(i)), s.Dashed)
		if len(path) <= mostMarkers {
			for _, p := range path {
				r.marker(i, p)
			}
		}
	}
	return r.encode()
}

var (
	ink        = hex("#5c636b")
	inkDark    = hex("#3a4048")
	gridColour = hex("#dcdee0")
	axisColour = hex("#8b9099")
)

// hex reads a colour such as #3d87d9.
func hex(s string) color.RGBA {
	n, _ := strconv.ParseUint(strings.TrimPrefix(s, "#"), 16, 32) // ours
	return color.RGBA{uint8(n >> 16), uint8(n >> 8), uint8(n), 255}
}

// pixels of the picture to one of SVG's units.
const pixels = 2

// raster is a picture that is drawn on, in SVG's units.
type raster struct{ *image.RGBA }

func newRaster(w, h float64) raster {
	r := raster{image.NewRGBA(image.Rect(0, 0, int(w*pixels), int(h*pixels)))}
	for i := range r.Pix {
		r.Pix[i] = 255
	}
	return r
}

func (r raster) encode() []byte {
	var b bytes.Buffer
	if err := png.Encode(&b, r); err != nil {
		panic(err) // of a picture that is too large, which ours is not, or a writer that fails
	}
	return b.Bytes()
}

// cover paints what is inside of a shape: a pixel as much of it as the distance of its
// middle from the edge says. distance is below 0 inside.
func (r raster) cover(from, to Point, c color.RGBA, distance func(Point) float64) {
	for y := int((from.Y - 1) * pixels); y <= int((to.Y+1)*pixels); y++ {
		for x := int((from.X - 1) * pixels); x <= int((to.X+1)*pixels); x++ {
			d := distance(Point{(float64(x) + .5) / pixels, (float64(y) + .5) / pixels}) * pixels
			if a := min(max(.5-d, 0), 1); a > 0 && image.Pt(x, y).In(r.Rect) {
				under := r.RGBAAt(x, y)
				mix := func(over, under uint8) uint8 { return uint8(math.Round(a*float64(over) + (1-a)*float64(under))) }
				r.SetRGBA(x, y, color.RGBA{mix(c.R, under.R), mix(c.G, under.G), mix(c.B, under.B), 255})
			}
		}
	}
}

// line draws a line that is twice half wide.
func (r raster) line(a, b Point, half float64, c color.RGBA) {
	from, to := Point{min(a.X, b.X), min(a.Y, b.Y)}, Point{max(a.X, b.X), max(a.Y, b.Y)}
	dx, dy := b.X-a.X, b.Y-a.Y
	r.cover(from, to, c, func(p Point) float64 {
		t := min(max(((p.X-a.X)*dx+(p.Y-a.Y)*dy)/max(dx*dx+dy*dy, 1e-9), 0), 1)
		return math.Hypot(p.X-a.X-t*dx, p.Y-a.Y-t*dy) - half
	})
}

// path draws lines from point to point, with gaps if it is dashed.
func (r raster) path(points []Point, c color.RGBA, dashed bool) {
	const dash, gap = 6, 4
	at := 0.0 // length so far
	for i := 1; i < len(points); i++ {
		a, b := points[i-1], points[i]
		length := math.Hypot(b.X-a.X, b.Y-a.Y)
		if !dashed {
			r.line(a, b, 1.1, c)
			continue
		}
		on := func(d float64) Point { return Point{a.X + (b.X-a.X)*d/length, a.Y + (b.Y-a.Y)*d/length} }
		for d := 0.0; d < length; {
			phase := math.Mod(at+d, dash+gap)
			next := min(d+dash+gap-phase, length)
			if phase < dash {
				if next = min(d+dash-phase, length); next > d {
					r.line(on(d), on(next), 1.1, c)
				}
			}
			d = max(next, d+1e-6)
		}
		at += length
	}
}

// marker draws the sign of series i.
func (r raster) marker(i int, at Point) {
	const size = 4.2
	r.cover(Point{at.X - size, at.Y - size}, Point{at.X + size, at.Y + size}, hex(colour(i)), func(p Point) float64 {
		x, y := p.X-at.X, p.Y-at.Y
		switch i % 4 {
		case 0:
			return math.Hypot(x, y) - 4
		case 1:
			return max(math.Abs(x), math.Abs(y)) - 3.5
		case 2: // a triangle
			return max(y-3, math.Abs(x)*.867-y*.5-2.5)
		default:
			return (math.Abs(x)+math.Abs(y))*.707 - 3.3
		}
	})
}

// font has the printable characters of ASCII in rows of 16, each of 5 by 8 dots, the
// last row of which is below the line.
//
//go:embed font.txt
var font string

var fontRows = strings.Split(font, "\n")

const (
	glyphWidth, glyphHeight = 5, 8
	advance                 = glyphWidth + 1
)

// dot reports whether a character has ink at a place.
func dot(c rune, x, y int) bool {
	if c < ' ' || c > '~' {
		return x == 0 || y == 0 || x == glyphWidth-1 || y == glyphHeight-2
	}
	i := int(c - ' ')
	line := fontRows[i/16*glyphHeight+y]
	at := i%16*advance + x
	return at < len(line) && line[at] == '#'
}

// each calls f for the dots of a text.
func each(s string, f func(x, y int)) {
	at := 0
	for _, c := range s {
		for y := range glyphHeight {
			for x := range glyphWidth {
				if dot(c, x, y) {
					f(at+x, y)
				}
			}
		}
		at += advance
	}
}

// text writes at a height, size times as large as the smallest; anchor is the part of
// the text that is left of x.
func (r raster) text(x, y, anchor float64, size int, c color.RGBA, s string) {
	unit := letter * float64(size)
	x -= anchor * unit * float64(advance*len([]rune(s)))
	each(s, func(dx, dy int) {
		r.fill(x+float64(dx)*unit, y+(float64(dy)-3.5)*unit, unit, c)
	})
}

// upwards writes from below to above, with its middle at a place.
func (r raster) upwards(x, y float64, c color.RGBA, s string) {
	y += letter * float64(advance*len([]rune(s))) / 2
	each(s, func(dx, dy int) {
		r.fill(x+(float64(dy)-3.5)*letter, y-float64(dx+1)*letter, letter, c)
	})
}

// letter is the size of a dot of a letter.
const letter = 1.0

func (r raster) fill(x, y, size float64, c color.RGBA) {
	for py := int(math.Round(y * pixels)); py < int(math.Round((y+size)*pixels)); py++ {
		for px := int(math.Round(x * pixels)); px < int(math.Round((x+size)*pixels)); px++ {
			if image.Pt(px, py).In(r.Rect) {
				r.SetRGBA(px, py, c)
			}
		}
	}
}
