package classify

import (
	"unicode"
	"unicode/utf8"
)

// What a token is made of.
const (
	tokWord   = iota // letters
	tokNumber        // ASCII digits
	tokMixed         // letters and digits
	tokSign          // one sign
)

// How the letters of a token are written.
const (
	shapeLower = iota
	shapeTitle // first letter large
	shapeUpper // all letters large, two or more
	shapeMixed
	shapeNone // no case
)

// What stands before a token.
const (
	gapNone = iota
	gapSpace
	gapLine
	gapPara
)

// token is a word, number or sign of a view. Offsets are those of the view.
type token struct {
	start, end int32
	hash       uint32 // folded
	lex        uint16 // what the word can be; see lexicon
	ctx        uint8  // what it announces; see context.go
	kind       uint8
	shape      uint8
	gap        uint8
	sign       byte   // of tokSign; 0xff if it is not ASCII
	lang       uint8  // see lexicon.langs
	group      uint16 // see groupWords
}

func (t *token) len() int { return int(t.end - t.start) }

// byteClass sorts ASCII: 0 sign, 1 letter, 2 digit, 3 space, 4 line feed.
var byteClass = func() (t [128]uint8) {
	for b := range t {
		switch {
		case b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z':
			t[b] = 1
		case b >= '0' && b <= '9':
			t[b] = 2
		case b == '\n':
			t[b] = 4
		case b <= ' ' || b == 0x7f:
			t[b] = 3
		}
	}
	return t
}()

// tokenise appends the tokens of text to dst. It also sums up the scripts.
func tokenise(dst []token, text []byte, lex *lexicon, scripts *[scriptCount]int32) []token {
	gap := uint8(gapPara)
	for i := 0; i < len(text); {
		b := text[i]
		if b < utf8.RuneSelf {
			switch byteClass[b] {
			case 3:
				if gap == gapNone {
					gap = gapSpace
				}
				i++
				continue
			case 4:
				if gap >= gapLine {
					gap = gapPara
				} else {
					gap = gapLine
				}
				i++
				continue
			case 0:
				dst = append(dst, token{start: int32(i), end: int32(i + 1), kind: tokSign, shape: shapeNone, gap: gap, sign: b, hash: uint32(b) * 0x9e3779b1})
				gap = gapNone
				i++
				continue
			}
		}
		t := token{start: int32(i), gap: gap}
		gap = gapNone
		h := uint64(hashSeed)
		upper, lower, digits, letters, other := 0, 0, 0, 0, 0
		firstUpper := false
	word:
		for i < len(text) {
			b := text[i]
			if b < utf8.RuneSelf {
				switch byteClass[b] {
				case 1:
					if b < 'a' {
						if letters == 0 {
							firstUpper = true
						}
						upper++
					} else {
						lower++
					}
					letters++
					h = (h ^ uint64(b|0x20)) * hashPrime
				case 2:
					digits++
					h = (h ^ uint64(b)) * hashPrime
				default:
					// O'Brien and don't are one word, John's is two.
					if b == '\'' && letters > 0 && i+1 < len(text) && (text[i+1] >= utf8.RuneSelf || byteClass[text[i+1]] == 1) && !possessive(text[i+1:]) {
						h = (h ^ uint64(b)) * hashPrime
						i++
						continue
					}
					break word
				}
				i++
				continue
			}
			r, n := utf8.DecodeRune(text[i:])
			s := scriptOf(r)
			if s == scriptSign {
				if i == int(t.start) {
					i += n
					t.kind, t.sign = tokSign, 0xff
				}
				break word
			}
			if s == scriptSpace {
				if i == int(t.start) {
					i += n
					t.end = -1
				}
				break word
			}
			scripts[s]++
			if !unicode.Is(unicode.M, r) || s != scriptLatin {
				switch {
				case unicode.IsUpper(r):
					if letters == 0 {
						firstUpper = true
					}
					upper++
				case unicode.IsLower(r):
					lower++
				}
				letters++
				other++
				h = hashRune(h, r)
			}
			i += n
			if s == scriptHan { // each Han character is a token of its own: no spaces tell words apart
				break word
			}
		}
		if t.end < 0 {
			gap = gapSpace
			continue
		}
		t.end = int32(i)
		t.hash = finish(h)
		scripts[scriptLatin] += int32(letters - other)
		if t.kind == tokSign {
			t.shape = shapeNone
			dst = append(dst, t)
			continue
		}
		switch {
		case digits == 0:
			t.kind = tokWord
		case letters == 0:
			t.kind = tokNumber
		default:
			t.kind = tokMixed
		}
		switch {
		case upper == 0 && lower == 0:
			t.shape = shapeNone
		case lower == 0 && upper > 1:
			t.shape = shapeUpper
		case upper == 0:
			t.shape = shapeLower
		case firstUpper && upper == 1:
			t.shape = shapeTitle
		default:
			t.shape = shapeMixed
		}
		if t.kind != tokNumber {
			e := lex.slot(t.hash)
			t.lex, t.ctx, t.lang, t.group = e.lex, e.ctx, e.lang, e.group
			if t.shape == shapeMixed || t.kind == tokMixed {
				t.ctx = max(t.ctx, innerContext(text[t.start:t.end], lex))
			}
		}
		dst = append(dst, t)
	}
	return dst
}

// possessive reports whether text begins with an s that ends its word.
func possessive(text []byte) bool {
	return text[0]|0x20 == 's' && (len(text) == 1 || text[1] < utf8.RuneSelf && byteClass[text[1]] != 1)
}

// innerContext looks up the words of a camelCase name, such as customerSsn.
func innerContext(w []byte, lex *lexicon) uint8 {
	if len(w) > 64 {
		return 0
	}
	start := 0
	for i := 1; i <= len(w); i++ {
		if i < len(w) && (w[i-1] < 'a' || w[i-1] > 'z' || w[i] >= 'a') {
			continue
		}
		if i-start >= 2 && i-start < len(w) {
			if c := lex.announces(hashWord(string(w[start:i]))); c != 0 {
				return c
			}
		}
		start = i
	}
	return 0
}

// Scripts, as far as detectors tell them apart.
const (
	scriptLatin = iota
	scriptGreek
	scriptCyrillic
	scriptArmenian
	scriptHebrew
	scriptArabic
	scriptDevanagari
	scriptGeorgian
	scriptHan
	scriptKana
	scriptHangul
	scriptThai
	scriptOther
	scriptCount
	scriptSign
	scriptSpace
)

func scriptOf(r rune) int {
	switch {
	case r < 0xc0:
		if r == 0xaa || r == 0xb5 || r == 0xba {
			return scriptLatin
		}
		if r == 0xa0 || r == 0x85 {
			return scriptSpace
		}
		return scriptSign
	case r == 0xd7 || r == 0xf7:
		return scriptSign
	case r < 0x2b0:
		return scriptLatin
	case r < 0x370: // modifiers and combining marks belong to the letter before
		return scriptLatin
	case r < 0x400:
		return scriptGreek
	case r < 0x530:
		return scriptCyrillic
	case r < 0x590:
		return scriptArmenian
	case r < 0x600:
		return scriptHebrew
	case r < 0x700, r >= 0x750 && r < 0x780, r >= 0xfb50 && r < 0xfe00, r >= 0xfe70 && r < 0xfeff:
		if r == 0x60c || r == 0x61b || r == 0x61f || r == 0x6d4 {
			return scriptSign
		}
		return scriptArabic
	case r >= 0x900 && r < 0x980:
		if r == 0x964 || r == 0x965 {
			return scriptSign
		}
		return scriptDevanagari
	case r >= 0xe00 && r < 0xe80:
		return scriptThai
	case r >= 0x10a0 && r < 0x1100:
		return scriptGeorgian
	case r >= 0x1100 && r < 0x1200, r >= 0xac00 && r < 0xd7b0, r >= 0x3130 && r < 0x3190:
		return scriptHangul
	case r >= 0x1e00 && r < 0x1f00:
		return scriptLatin
	case r >= 0x1f00 && r < 0x2000:
		return scriptGreek
	case r >= 0x2000 && r < 0x200b, r == 0x2028, r == 0x2029, r == 0x202f, r == 0x205f, r == 0x3000:
		return scriptSpace
	case r >= 0x2000 && r < 0x2e80:
		return scriptSign
	case r >= 0x3041 && r < 0x3100:
		if r == 0x30fb {
			return scriptSign
		}
		return scriptKana
	case r >= 0x2e80 && r < 0x3000, r >= 0x3400 && r < 0xa000, r >= 0xf900 && r < 0xfb00, r >= 0x20000 && r < 0x32000:
		return scriptHan
	case r >= 0x3000 && r < 0x3400, r >= 0xff00 && r < 0xff66, r >= 0x1f000 && r < 0x1fb00, r == utf8.RuneError:
		return scriptSign
	}
	if unicode.IsLetter(r) || unicode.IsMark(r) {
		return scriptOther
	}
	return scriptSign
}
