package openai

// Unknown is a count that nobody reported. Zero is a report of none.
const Unknown = -1

// Usage counts the tokens of one request as the engine reported them; each
// may be Unknown. Prompt includes Cached, Output includes Reasoning.
type Usage struct {
	Prompt, Cached, Output, Reasoning int
}

// NoUsage is a Usage of which nothing is known.
var NoUsage = Usage{Unknown, Unknown, Unknown, Unknown}

// Merge takes in a later report of the same request. Reports are cumulative
// and may leave out what an earlier one had, so each count takes the larger.
func (u *Usage) Merge(later Usage) {
	u.Prompt = max(u.Prompt, later.Prompt)
	u.Cached = max(u.Cached, later.Cached)
	u.Output = max(u.Output, later.Output)
	u.Reasoning = max(u.Reasoning, later.Reasoning)
}

// usage reads a usage object. Members that are absent, null or no counts are
// Unknown.
func (c *Chunk) usage(v Value) Usage {
	u := NoUsage
	if v.Kind != Obj || c.inner.Parse(v.Raw, 0) != nil {
		return u
	}
	u.Prompt = count(c.inner.Get("prompt_tokens"))
	u.Output = count(c.inner.Get("completion_tokens"))
	prompt, output := c.inner.Get("prompt_tokens_details"), c.inner.Get("completion_tokens_details")
	if prompt.Kind == Obj && c.inner.Parse(prompt.Raw, 0) == nil {
		u.Cached = count(c.inner.Get("cached_tokens"))
	}
	if output.Kind == Obj && c.inner.Parse(output.Raw, 0) == nil {
		u.Reasoning = count(c.inner.Get("reasoning_tokens"))
	}
	return u
}

func count(v Value) int {
	n, ok := v.Int()
	if !ok || n < 0 || n > 1<<40 {
		return Unknown
	}
	return int(n)
}
