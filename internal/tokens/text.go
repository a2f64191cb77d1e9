package tokens

import (
	"slices"
	"strings"
	"unicode"
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

// nfc returns s in normal form C as the reference has it, whose tables are those of Unicode 9: a combining mark that came later is
// to it a character like any other, which nothing moves past or composes with.
func nfc(s string) string {
	n := norm.NFC.QuickSpanString(s)
	if n == len(s) { // then so are all its pieces, and so it is by older tables
		return s
	}
	out := make([]byte, 0, len(s)+16)
	for i := strings.IndexFunc(s, unknownMark); i >= 0; i = strings.IndexFunc(s, unknownMark) {
		_, size := utf8.DecodeRuneInString(s[i:])
		out = append(appendNFC(out, s[:i]), s[i:i+size]...)
		s = s[i+size:]
	}
	return string(appendNFC(out, s))
}

// unknownMark reports whether r is a combining mark that Unicode got after 9.0, or composes with one (U+11935).
func unknownMark(r rune) bool { return unicode.Is(marksSinceUnicode9, r) }

// marksSinceUnicode9 was read off the reference's NFC, given each code point among marks of other classes.
var marksSinceUnicode9 = &unicode.RangeTable{
	R16: []unicode.Range16{
		{0x7FD, 0x7FD, 1}, {0x898, 0x89F, 1}, {0x8CA, 0x8D3, 1}, {0x9FE, 0x9FE, 1}, {0xC3C, 0xC3C, 1}, {0xD3B, 0xD3C, 1},
		{0xEBA, 0xEBA, 1}, {0x1715, 0x1715, 1}, {0x1ABF, 0x1ACE, 1}, {0x1DF6, 0x1DFA, 1}, {0xA82C, 0xA82C, 1},
	},
	R32: []unicode.Range32{
		{0x10D24, 0x10D27, 1}, {0x10EAB, 0x10EAC, 1}, {0x10EFD, 0x10EFF, 1}, {0x10F46, 0x10F50, 1}, {0x10F82, 0x10F85, 1},
		{0x11070, 0x11070, 1}, {0x1133B, 0x1133B, 1}, {0x1145E, 0x1145E, 1}, {0x11839, 0x1183A, 1}, {0x11935, 0x11935, 1},
		{0x1193D, 0x1193E, 1}, {0x11943, 0x11943, 1}, {0x119E0, 0x119E0, 1}, {0x11A34, 0x11A34, 1}, {0x11A47, 0x11A47, 1},
		{0x11A99, 0x11A99, 1}, {0x11D42, 0x11D42, 1}, {0x11D44, 0x11D45, 1}, {0x11D97, 0x11D97, 1}, {0x11F41, 0x11F42, 1},
		{0x16FF0, 0x16FF1, 1}, {0x1E08F, 0x1E08F, 1}, {0x1E130, 0x1E136, 1}, {0x1E2AE, 0x1E2AE, 1}, {0x1E2EC, 0x1E2EF, 1},
		{0x1E4EC, 0x1E4EF, 1},
	},
}

// maxNonStarters is where x/text starts to insert U+034F into long runs of combining marks (stream-safe format), which plain
// NFC does not.
const maxNonStarters = 30

// appendNFC appends s in normal form C. Only segments (a starter and the marks behind it) that may not be normal are looked at one
// by one: most of a text that is not normal is.
func appendNFC(out []byte, s string) []byte {
	var segment []byte
	for {
		n := norm.NFC.QuickSpanString(s)
		out = append(out, s[:n]...)
		s = s[n:]
		if s == "" {
			return out
		}
		end, runes := 0, 0
		for end < len(s) {
			p := norm.NFC.PropertiesString(s[end:])
			if end > 0 && p.BoundaryBefore() {
				break
			}
			runes += 1 + utf8.RuneCount(p.Decomposition())
			end += p.Size()
		}
		if runes > maxNonStarters-2 {
			out = append(out, nfcLong(s[:end])...)
		} else {
			segment = norm.NFC.AppendString(segment[:0], s[:end])
			out = append(out, segment...)
		}
		s = s[end:]
	}
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
