package classify

import (
	"unicode"

	"golang.org/x/text/unicode/norm"
)

// foldTable lower-cases and drops accents of the alphabets below U+0530.
var foldTable = func() (t [0x530]uint16) {
	for r := range rune(len(t)) {
		l := unicode.ToLower(r)
		if d := norm.NFD.PropertiesString(string(l)).Decomposition(); d != nil {
			l = []rune(string(d))[0]
		}
		switch l {
		case 'ø':
			l = 'o'
		case 'ł':
			l = 'l'
		case 'đ', 'ð':
			l = 'd'
		case 'ı':
			l = 'i'
		case 'ς':
			l = 'σ'
		}
		t[r] = uint16(l)
	}
	return t
}()

// fold lower-cases a rune and drops its accent; æ and ß, which become two
// letters, are left to hashRune.
func fold(r rune) rune {
	if r < rune(len(foldTable)) {
		return rune(foldTable[r])
	}
	if r >= 0x1e00 && r < 0x2000 {
		if d := norm.NFD.PropertiesString(string(r)).Decomposition(); d != nil {
			r = []rune(string(d))[0]
			if r < rune(len(foldTable)) {
				return rune(foldTable[r])
			}
		}
	}
	return unicode.ToLower(r)
}

const (
	hashSeed  = 0xcbf29ce484222325
	hashPrime = 0x100000001b3
)

func hashRune(h uint64, r rune) uint64 {
	switch r {
	case 'ß':
		return hashRune(hashRune(h, 's'), 's')
	case 'æ', 'Æ':
		return hashRune(hashRune(h, 'a'), 'e')
	}
	return (h ^ uint64(fold(r))) * hashPrime
}

// finish makes the 32 bits by which words are known.
func finish(h uint64) uint32 { return uint32(h>>32) ^ uint32(h) }

// hashWord is the hash of a folded word, as tokens carry it.
func hashWord(s string) uint32 {
	h := uint64(hashSeed)
	for _, r := range s {
		h = hashRune(h, r)
	}
	return finish(h)
}

// confusables maps letters that look like Latin ones (after Unicode's UTS 39,
// those of Greek, Cyrillic and Armenian that matter) in words of mixed script.
var confusables = map[rune]byte{
	'а': 'a', 'в': 'b', 'с': 'c', 'е': 'e', 'ё': 'e', 'һ': 'h', 'і': 'i', 'ї': 'i', 'ј': 'j', 'к': 'k', 'м': 'm', 'о': 'o', 'р': 'p', 'ԛ': 'q',
	'ѕ': 's', 'т': 't', 'ԝ': 'w', 'х': 'x', 'у': 'y', 'ӏ': 'l', 'ԁ': 'd', 'ɡ': 'g', 'ո': 'n', 'ս': 'u', 'օ': 'o', 'ց': 'g', 'հ': 'h', 'ѵ': 'v', 'ѡ': 'w',
	'А': 'A', 'В': 'B', 'С': 'C', 'Е': 'E', 'Н': 'H', 'І': 'I', 'Ј': 'J', 'К': 'K', 'М': 'M', 'О': 'O', 'Р': 'P', 'Ѕ': 'S', 'Т': 'T', 'Х': 'X', 'У': 'Y', 'Ү': 'Y', 'З': '3', 'Ӏ': 'I', 'Ԍ': 'G', 'Ԁ': 'D', 'Ԛ': 'Q', 'Ԝ': 'W', 'Ѵ': 'V',
	'α': 'a', 'β': 'b', 'γ': 'y', 'ε': 'e', 'η': 'n', 'ι': 'i', 'κ': 'k', 'ν': 'v', 'ο': 'o', 'ρ': 'p', 'σ': 'o', 'τ': 't', 'υ': 'u', 'χ': 'x', 'ω': 'w', 'ϲ': 'c', 'ϳ': 'j',
	'Α': 'A', 'Β': 'B', 'Ε': 'E', 'Ζ': 'Z', 'Η': 'H', 'Ι': 'I', 'Κ': 'K', 'Μ': 'M', 'Ν': 'N', 'Ο': 'O', 'Ρ': 'P', 'Τ': 'T', 'Υ': 'Y', 'Χ': 'X', 'Ϲ': 'C', 'Ϻ': 'M',
	'ℓ': 'l', 'ⅼ': 'l', 'ı': 'i', 'ɑ': 'a', 'ʋ': 'v', 'ƅ': 'b', 'ꓳ': 'O', 'Ꭺ': 'A', 'Ᏼ': 'B', 'Ꮯ': 'C', 'Ꭰ': 'D', 'Ꭼ': 'E',
}

// punctuation that stands for an ASCII sign.
var punctuation = map[rune]byte{
	'‐': '-', '‑': '-', '‒': '-', '–': '-', '—': '-', '―': '-', '−': '-', '﹣': '-', '⁃': '-', '﹘': '-',
	'‘': '\'', '’': '\'', '‛': '\'', 'ʼ': '\'', '´': '\'', '“': '"', '”': '"', '„': '"', '«': '"', '»': '"',
	'․': '.', '。': '.', '．': '.', '·': '.', '・': '.', '•': '.', '‧': '.', '∙': '.', '⋅': '.',
	'﹫': '@', '＠': '@', '：': ':', '，': ',', '、': ',', '⁄': '/', '∕': '/', '＿': '_',
	'\u00a0': ' ', '\u1680': ' ', '\u2000': ' ', '\u2001': ' ', '\u2002': ' ', '\u2003': ' ', '\u2004': ' ', '\u2005': ' ', '\u2006': ' ',
	'\u2007': ' ', '\u2008': ' ', '\u2009': ' ', '\u200a': ' ', '\u202f': ' ', '\u205f': ' ', '\u3000': ' ', '\u2028': '\n', '\u2029': '\n', '\u0085': '\n',
}

// invisible reports whether a rune shows nothing: zero-width and bidirectional
// marks, soft hyphens, variation selectors.
func invisible(r rune) bool {
	switch {
	case r >= 0x200b && r <= 0x200f, r >= 0x202a && r <= 0x202e, r >= 0x2060 && r <= 0x206f,
		r == 0xfeff, r == 0xad, r == 0x34f, r == 0x61c, r == 0x180e, r == 0x115f, r == 0x1160, r == 0x3164, r == 0xffa0,
		r >= 0xfe00 && r <= 0xfe0f, r >= 0xe0100 && r <= 0xe01ef:
		return true
	}
	return false
}

// plain reports whether a rune of a living script needs no look.
func plain(r rune) bool {
	switch {
	case r >= 0xc0 && r < 0x250, r >= 0x370 && r < 0x530, r >= 0x531 && r < 0x590, // Latin, Greek, Cyrillic, Armenian
		r >= 0x5d0 && r < 0x5eb, r >= 0x620 && r < 0x64b, r >= 0x904 && r < 0x93a, r >= 0x10d0 && r < 0x1100,
		r >= 0x3041 && r < 0x30fb, r >= 0x4e00 && r < 0xa000, r >= 0xac00 && r < 0xd7a4:
		return r != 'ı'
	}
	return false
}

// foldWidth turns a rune into what it stands for: full width, mathematical and
// enclosed letters, digits of any script, compatibility forms. n is 0 if it
// stands for itself.
func foldWidth(r rune, buf *[8]byte) (n int) {
	if b, ok := punctuation[r]; ok {
		buf[0] = b
		return 1
	}
	switch {
	case r >= 0xff01 && r <= 0xff5e:
		buf[0] = byte(r - 0xfee0)
		return 1
	case r >= 0xe0020 && r <= 0xe007e: // tag characters carry hidden ASCII
		buf[0] = byte(r - 0xe0000)
		return 1
	case r >= 0x1d7ce && r <= 0x1d7ff: // mathematical digits
		buf[0] = '0' + byte((r-0x1d7ce)%10)
		return 1
	case r >= 0x24b6 && r <= 0x24cf:
		buf[0] = 'A' + byte(r-0x24b6)
		return 1
	case r >= 0x24d0 && r <= 0x24e9:
		buf[0] = 'a' + byte(r-0x24d0)
		return 1
	case r >= 0x1f130 && r <= 0x1f149, r >= 0x1f150 && r <= 0x1f169, r >= 0x1f170 && r <= 0x1f189:
		buf[0] = 'A' + byte((r-0x1f130)%32)
		return 1
	case r >= 0x1f1e6 && r <= 0x1f1ff:
		buf[0] = 'A' + byte(r-0x1f1e6)
		return 1
	case r == 0x24ea || r == 0x24ff || r == 0x1f10b || r == 0x1f10c:
		buf[0] = '0'
		return 1
	case r >= 0x2776 && r <= 0x277e, r >= 0x2780 && r <= 0x2788, r >= 0x278a && r <= 0x2792:
		buf[0] = '1' + byte((r-0x2776)%10)
		return 1
	}
	if unicode.Is(unicode.Nd, r) {
		// Digits of a script stand in tens, in order.
		d := r
		for unicode.Is(unicode.Nd, d-1) && r-d < 9 {
			d--
		}
		// Runs of several tens (mathematical ones) are treated above.
		buf[0] = '0' + byte(r-d)
		return 1
	}
	if p := norm.NFKC.PropertiesString(string(r)); p.Decomposition() != nil {
		d := norm.NFKC.String(string(r))
		if len(d) <= len(buf) && d != string(r) {
			return copy(buf[:], d)
		}
	}
	return 0
}
