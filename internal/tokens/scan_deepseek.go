package tokens

import "unicode/utf8"

// scanDeepSeek scans DeepSeek V3's three splits in one pass. The first two cut numbers and Chinese/Japanese runs out of the
// text, the third works inside each piece as if the piece were the whole text: a piece ends where kind changes.
func scanDeepSeek(s string, i int) int {
	p := deepSeekPiece{s: s}
	var c class
	var n int
	c, n, p.cjk = p.at(i)
	if c&number != 0 {
		return digits(s, i, 3)
	}
	if b := s[i]; b < utf8.RuneSelf && c&punct != 0 {
		end := i + 1
		for end < len(s) && ('a' <= s[end]|0x20 && s[end]|0x20 <= 'z') {
			end++
		}
		if end > i+1 {
			return end
		}
	}
	if c&(newline|letter|punct) == 0 {
		if end := p.run(i+n, letter|mark); end > i+n {
			return end
		}
	}
	if c&(letter|mark) != 0 {
		return p.run(i, letter|mark)
	}
	from := i
	if s[i] == ' ' {
		from++
	}
	if end := p.run(from, punct); end > from {
		return p.run(end, newline)
	}
	if c&space != 0 {
		return p.whitespace(i)
	}
	return p.gap(i + n)
}

// deepSeekPiece reads the piece of s that has the given kind.
type deepSeekPiece struct {
	s   string
	cjk bool
}

// at returns class, length and kind of the character at s[i].
func (p *deepSeekPiece) at(i int) (c class, n int, cjk bool) {
	if b := p.s[i]; b < utf8.RuneSelf {
		return asciiClass[b], 1, false
	}
	r, n := utf8.DecodeRuneInString(p.s[i:])
	c = runeClass.pages[runeClass.index[r>>8]][r&255]
	return c, n, 0x4E00 <= r && r <= 0x9FA5 || 0x3040 <= r && r <= 0x30FF
}

// next is at, with ok false at the end of the piece.
func (p *deepSeekPiece) next(i int) (c class, n int, ok bool) {
	if i >= len(p.s) {
		return 0, 0, false
	}
	c, n, cjk := p.at(i)
	return c, n, cjk == p.cjk && c&number == 0
}

func (p *deepSeekPiece) run(i int, want class) int {
	for {
		c, n, ok := p.next(i)
		if !ok || c&want == 0 {
			return i
		}
		i += n
	}
}

// whitespace is the function of that name within the piece.
func (p *deepSeekPiece) whitespace(i int) int {
	end, last, lastBreak := i, i, -1
	for {
		c, n, ok := p.next(end)
		if !ok || c&space == 0 {
			switch {
			case lastBreak >= 0:
				return lastBreak
			case !ok || last == i:
				return end
			default:
				return last
			}
		}
		last = end
		end += n
		if c&newline != 0 {
			lastBreak = end
		}
	}
}

// gap returns the end of the characters that no alternative matches (controls, unassigned), one of which ends at i. The last
// one before a word leads that word.
func (p *deepSeekPiece) gap(i int) int {
	for {
		c, n, ok := p.next(i)
		if !ok || c&(letter|mark|punct|space) != 0 {
			return i
		}
		if after, _, ok := p.next(i + n); ok && after&(letter|mark) != 0 {
			return i
		}
		i += n
	}
}
