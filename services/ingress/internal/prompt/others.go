package prompt

import (
	"encoding/binary"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/openai"
)

// maxHashed bounds how many prompts of a request after the first are tokenised
// and hashed, which is as many as the router looks up. Of further ones only the
// length counts, and that is estimated.
const maxHashed = 32

// Other is a prompt after the first of a request with several.
type Other struct {
	Tokens int
	Exact  bool // Tokens is a count and no estimate
	Hashes []kvhash.Hash
}

// others makes the prompts of r after the first. Token ids are what they are,
// text needs the tokenizer of m; without one it is cut as [pack] does if that is
// how the first was made, and else estimated.
func (m *model) others(r *openai.Request, root kvhash.Hash, size int, approximate bool) []Other {
	out := make([]Other, 0, min(r.Prompts-1, 4*maxHashed))
	for text, ids := range r.Others() {
		o := Other{Tokens: len(text) / approxBytes}
		few := len(out) < maxHashed
		switch {
		case ids != nil:
			o.Tokens, o.Exact = len(ids), !approximate
		case few && approximate:
			ids = packed(nil, []byte(text))
		case few && m != nil && m.cache != nil:
			ids, _ = m.cache.Encode(text, r.AddSpecial)
			o.Tokens, o.Exact = len(ids), true
		}
		if few && ids != nil {
			o.Hashes = hashed(root, ids, size)
		}
		out = append(out, o)
	}
	return out
}

// Longest is the length of the longest prompt that was counted.
func (p *Prompt) Longest() int {
	n := p.Tokens
	for i := range p.Others {
		if o := &p.Others[i]; o.Exact {
			n = max(n, o.Tokens)
		}
	}
	return n
}

// packed appends pseudo tokens of a text.
func packed(ids []uint32, text []byte) []uint32 {
	for ; len(text) >= approxBytes; text = text[approxBytes:] {
		ids = append(ids, binary.LittleEndian.Uint32(text))
	}
	if len(text) > 0 {
		var last [approxBytes]byte
		copy(last[:], text)
		ids = append(ids, binary.LittleEndian.Uint32(last[:]))
	}
	return ids
}
