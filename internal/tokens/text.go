package tokens

import (
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// validUTF8 replaces each maximal invalid sequence by one U+FFFD, as Rust's String::from_utf8_lossy and the WHATWG decoder do.
// (strings.ToValidUTF8 would replace a run of them by one.)
func validUTF8(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	var b strings.Builder
	b.Grow(len(s) + 16)
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		if r == utf8.RuneError && n == 1 {
			b.WriteRune(utf8.RuneError)
			s = s[maximalSubpart(s):]
			continue
		}
		b.WriteString(s[:n])
		s = s[n:]
	}
	return b.String()
}

// maximalSubpart returns the length of the longest prefix of s that starts a well-formed character, at least 1; s starts with
// no valid character.
func maximalSubpart(s string) int {
	n := 1
	for n < len(s) && n < utf8.UTFMax-1 && !utf8.FullRuneInString(s[:n]) {
		if utf8.FullRuneInString(s[:n+1]) { // s[n] makes it an error
			break
		}
		n++
	}
	return n
}

// nfc returns s in Unicode normal form C.
func nfc(s string) string {
	if norm.NFC.IsNormalString(s) {
		return s
	}
	return nfcParts(s)
}

// maxNonStarters is where x/text starts to insert U+034F into long runs of combining marks (stream-safe format), which plain
// NFC does not.
const maxNonStarters = 30

// nfcParts normalises s piece by piece between starters, so that a run too long for x/text is normalised by nfcLong.
func nfcParts(s string) string {
	var b strings.Builder
	b.Grow(len(s))
	plain := 0 // s[plain:i] has no long run
	for i := 0; i < len(s); {
		// A segment: a starter and the non-starters behind it, by the decomposed form.
		end, marks := i, 0
		for end < len(s) {
			p := norm.NFC.PropertiesString(s[end:])
			if end > i && p.BoundaryBefore() {
				break
			}
			marks++
			if d := p.Decomposition(); d != nil {
				marks += utf8.RuneCount(d)
			}
			end += p.Size()
		}
		if marks > maxNonStarters-2 {
			b.WriteString(norm.NFC.String(s[plain:i]))
			b.WriteString(nfcLong(s[i:end]))
			plain = end
		}
		i = end
	}
	b.WriteString(norm.NFC.String(s[plain:]))
	return b.String()
}

// nfcLong normalises by the definition: decompose, order marks by combining class, compose with the last starter.
func nfcLong(s string) string {
	type char struct {
		r   rune
		ccc uint8
	}
	var chars []char
	for i := 0; i < len(s); {
		p := norm.NFC.PropertiesString(s[i:])
		text := s[i : i+p.Size()]
		if d := p.Decomposition(); d != nil {
			text = string(d)
		}
		for _, r := range text {
			chars = append(chars, char{r, norm.NFC.PropertiesString(string(r)).CCC()})
		}
		i += p.Size()
	}
	for i := 0; i < len(chars); {
		if chars[i].ccc == 0 {
			i++
			continue
		}
		j := i
		for j < len(chars) && chars[j].ccc != 0 {
			j++
		}
		slices.SortStableFunc(chars[i:j], func(a, b char) int { return int(a.ccc) - int(b.ccc) })
		i = j
	}
	out := chars[:0]
	starter, last := -1, uint8(0) // index in out; class of the last character behind it that stayed
	for _, c := range chars {
		if starter >= 0 && (len(out) == starter+1 || last < c.ccc) {
			if r, ok := compose(out[starter].r, c.r); ok {
				out[starter].r = r
				continue
			}
		}
		if c.ccc == 0 {
			starter = len(out)
		}
		last = c.ccc
		out = append(out, c)
	}
	var b strings.Builder
	for _, c := range out {
		b.WriteRune(c.r)
	}
	return b.String()
}

// compose returns the primary composite of a starter and a character.
func compose(a, b rune) (rune, bool) {
	pair := string([]rune{a, b})
	r, n := utf8.DecodeRuneInString(norm.NFC.String(pair))
	return r, n == len(norm.NFC.String(pair)) && utf8.RuneCountInString(pair) == 2
}
