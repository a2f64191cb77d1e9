package tokens

import (
	"slices"
	"strings"
)

// SplitPoints appends the byte offsets just behind each added token in text: the ids of text are those of the parts between the
// offsets, one after the other. text is valid UTF-8.
func (t *Tokenizer) SplitPoints(dst []int, text string) []int {
	if t.raw == nil {
		return dst
	}
	for i := 0; i < len(text); {
		_, end, token := t.raw.next(text, i)
		if token != nil {
			dst = append(dst, end)
		}
		i = end
	}
	return dst
}

// safeCut returns the first offset from or behind where text may be cut in two that encode on their own, whatever stands
// elsewhere; len(text) if there is none. It tells by the two characters around the cut:
//
//	A  a printable ASCII character | a space
//	B  a line feed | an ASCII letter or a CJK ideograph
//	C  a CJK ideograph | an ideographic comma or full stop
//
// Why the pre-tokenizer ends a token there, in every pattern of scanners: white space stands behind something else within a token
// only as the line breaks that end one (so A), a line break is never followed by a letter within one (B), nor a letter by
// punctuation other than an apostrophe (C). DeepSeek's two earlier splits only add ends. What is left of the cut is scanned as
// before: each rule stops at the cut as it does at the end of the text, and the one look-ahead, \s+(?!\S), is not reached with
// white space left of the cut but in B, where \s*[\r\n]+ has taken that. A pattern added to scanners must be held against this,
// and FuzzCut does.
//
// Why normalisation is the same: nothing in NFC moves across or composes with the character right of the cut. Why added tokens are:
// independentCuts has seen that none contains a character that the cut would lie next to, nor strips white space.
func safeCut(text string, from int) int {
	for i := max(from, 1); i < len(text); i++ {
		switch c := text[i]; {
		case c == ' ':
			if '!' <= text[i-1] && text[i-1] <= '~' {
				return i
			}
		case c < 0x80:
			if text[i-1] == '\n' && 'a' <= c|0x20 && c|0x20 <= 'z' {
				return i
			}
		case 0xE4 <= c && c <= 0xE9:
			if text[i-1] == '\n' && ideograph(text[i:]) {
				return i
			}
		case c == 0xE3 || c == 0xEF:
			if i >= 3 && ideograph(text[i-3:]) && (strings.HasPrefix(text[i:], "，") || strings.HasPrefix(text[i:], "。") || strings.HasPrefix(text[i:], "、")) {
				return i
			}
		}
	}
	return len(text)
}

// ideograph reports whether s starts with a character of U+4E00 to U+9FFF; s is valid UTF-8 from some character's start or is
// rejected by its first byte.
func ideograph(s string) bool {
	return len(s) >= 3 && (s[0] == 0xE4 && s[1] >= 0xB8 || 0xE5 <= s[0] && s[0] <= 0xE9)
}

// independentCuts reports whether safeCut holds for a tokenizer with these added tokens.
func independentCuts(added []addedToken) bool {
	return !slices.ContainsFunc(added, func(a addedToken) bool {
		return a.LStrip || a.RStrip || strings.ContainsAny(a.Content, " \n，。、")
	})
}
