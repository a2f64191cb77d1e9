package plot

import (
	"bytes"
	"image/png"
	"math"
	"strings"
	"testing"
)

// A picture has the chart's lines in the colours of their series, its letters, and is
// the same each time.
func TestPNG(t *testing.T) {
	raw := sweep.PNG()
	if !bytes.Equal(raw, sweep.PNG()) {
		t.Error("equal charts give different pictures")
	}
	picture, err := png.Decode(bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	size := picture.Bounds()
	if size.Dx() != pixels*width || size.Dy() < pixels*plotHeight {
		t.Errorf("it is %v large", size)
	}
	dots := map[[3]uint32]int{}
	for y := range size.Dy() {
		for x := range size.Dx() {
			r, g, b, _ := picture.At(x, y).RGBA()
			dots[[3]uint32{r >> 8, g >> 8, b >> 8}]++
		}
	}
	for i, s := range sweep.Series {
		c := hex(colour(i))
		if n := dots[[3]uint32{uint32(c.R), uint32(c.G), uint32(c.B)}]; n < 500 {
			t.Errorf("%s has %d dots", s.Name, n)
		}
	}
	if n := dots[[3]uint32{uint32(inkDark.R), uint32(inkDark.G), uint32(inkDark.B)}]; n < 500 {
		t.Errorf("the title has %d dots", n)
	}
}

// Each character has a shape of its own, and what cannot be drawn is left out.
func TestPNGOddities(t *testing.T) {
	seen := map[string]rune{}
	for c := ' '; c <= '~'; c++ {
		var b strings.Builder
		for y := range glyphHeight {
			for x := range glyphWidth {
				if dot(c, x, y) {
					b.WriteByte(byte('a' + y*glyphWidth + x))
				}
			}
		}
		if other, twice := seen[b.String()]; twice {
			t.Errorf("%q looks like %q", c, other)
		}
		seen[b.String()] = c
	}
	for _, l := range []Lines{
		{}, {Title: strings.Repeat("much too long ", 30) + "≤"},
		{X: Axis{Log: true}, Series: []Series{{Name: "a", Dashed: true, Points: []Point{{0, 1}, {math.NaN(), 2}, {1, math.Inf(1)}, {1, 1}, {1, 1}}}}},
	} {
		if _, err := png.Decode(bytes.NewReader(l.PNG())); err != nil {
			t.Error(err)
		}
	}
}
