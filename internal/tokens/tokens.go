package tokens

import (
	"slices"
	"unicode/utf8"
)

// Tokenizer encodes text and decodes ids. It is immutable but for an internal word cache and safe for concurrent use.
type Tokenizer struct {
	bpe        bpe
	scan       scanner
	nfc        bool      // the normalizer is NFC; otherwise there is none
	raw        *addedSet // added tokens that are looked for in the raw text; nil: none
	normalized *addedSet // added tokens that are looked for in normalised text between those; nil: none
	cuts       bool      // safeCut holds
	prefix     []uint32  // special tokens before and after the text, for addSpecial
	suffix     []uint32
	text       []string // bytes that an id decodes to; added tokens by their content
	special    []bool   // ids of special tokens
}

// Encode appends the token ids of text to dst. addSpecial adds the tokens that the model's post-processor puts around a text
// (BOS in most models that have one): wanted for a bare completion prompt, not for a rendered chat template.
func (t *Tokenizer) Encode(dst []uint32, text string, addSpecial bool) []uint32 {
	dst = slices.Grow(dst, len(text)/5+len(t.prefix)+len(t.suffix)) // few texts have longer tokens on average
	if addSpecial {
		dst = append(dst, t.prefix...)
	}
	dst = t.encode(dst, validUTF8(text))
	if addSpecial {
		dst = append(dst, t.suffix...)
	}
	return dst
}

// encode appends the ids of text, which is valid UTF-8.
func (t *Tokenizer) encode(dst []uint32, text string) []uint32 {
	if t.raw == nil {
		return t.encodePart(dst, text)
	}
	for i := 0; i < len(text); {
		start, end, token := t.raw.next(text, i)
		if start > i {
			dst = t.encodePart(dst, text[i:start])
		}
		if token != nil {
			dst = append(dst, token.ID)
		}
		i = end
	}
	return dst
}

// encodePart appends the ids of a part of the text between added tokens.
func (t *Tokenizer) encodePart(dst []uint32, part string) []uint32 {
	if t.nfc {
		part = nfc(part)
	}
	if t.normalized == nil {
		return t.encodeWords(dst, part)
	}
	for i := 0; i < len(part); {
		start, end, token := t.normalized.next(part, i)
		dst = t.encodeWords(dst, part[i:start])
		if token != nil {
			dst = append(dst, token.ID)
		}
		i = end
	}
	return dst
}

func (t *Tokenizer) encodeWords(dst []uint32, s string) []uint32 {
	for i := 0; i < len(s); {
		end := t.scan(s, i)
		dst = t.bpe.append(dst, s[i:end])
		i = end
	}
	return dst
}

// Size returns the number of ids: every id that Encode returns is below it.
func (t *Tokenizer) Size() int { return len(t.text) }

// Token returns the bytes that id decodes to, which need not be valid UTF-8 on their own; "" for an id that does not exist.
func (t *Tokenizer) Token(id uint32) string {
	if int(id) >= len(t.text) {
		return ""
	}
	return t.text[id]
}

// IsSpecial reports whether id is a special token (control tokens such as end of turn), which engines leave out of text answers.
func (t *Tokenizer) IsSpecial(id uint32) bool { return int(id) < len(t.special) && t.special[id] }

// Decode returns the text of ids, special tokens included; ids that do not exist are left out and bytes that are not UTF-8
// become U+FFFD.
func (t *Tokenizer) Decode(ids []uint32) string {
	n := 0
	for _, id := range ids {
		n += len(t.Token(id))
	}
	b := make([]byte, 0, n)
	for _, id := range ids {
		b = append(b, t.Token(id)...)
	}
	return validUTF8(string(b))
}

// Decoder turns a stream of ids into text piece by piece. The pieces together are what Decode returns for all ids. Its zero
// value is not usable; it is not safe for concurrent use.
type Decoder struct {
	t           *Tokenizer
	skipSpecial bool
	held        []byte // start of a character whose last bytes are still to come
}

// NewDecoder returns a Decoder at the start of a text. skipSpecial leaves out special tokens, as engines do by default.
func (t *Tokenizer) NewDecoder(skipSpecial bool) *Decoder {
	return &Decoder{t: t, skipSpecial: skipSpecial}
}

// Push returns the text that id completes: "" while a character's bytes are incomplete.
func (d *Decoder) Push(id uint32) string {
	if d.skipSpecial && d.t.IsSpecial(id) {
		return ""
	}
	b := append(d.held, d.t.Token(id)...)
	keep := incompleteTail(b)
	out := validUTF8(string(b[:len(b)-keep]))
	d.held = append(d.held[:0], b[len(b)-keep:]...)
	return out
}

// Flush returns what Push held back, as U+FFFD, and readies d for a new text.
func (d *Decoder) Flush() string {
	out := validUTF8(string(d.held))
	d.held = d.held[:0]
	return out
}

// incompleteTail returns how many bytes at the end of b may still become a character.
func incompleteTail(b []byte) int {
	for n := 1; n <= utf8.UTFMax-1 && n <= len(b); n++ {
		tail := b[len(b)-n:]
		if utf8.RuneStart(tail[0]) {
			if !utf8.FullRune(tail) {
				return n
			}
			return 0
		}
	}
	return 0
}
