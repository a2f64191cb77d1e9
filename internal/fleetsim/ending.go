package fleetsim

import (
	"slices"
	"strings"
)

// ending is how an answer ends if not by itself or at its limit.
type ending struct {
	reason any // stop_reason: the stop string or the id of the stop token; nil: neither
	text   int // bytes of the whole text that are shown; -1: all
	hold   int // last bytes of a stream's text that wait for the next token
}

// ending cuts the tokens of an answer where a stop string or stop token ends
// it. As in vLLM the end of a stream's text is held back while it may turn out
// to be the beginning of a stop string.
func (j *job) ending(t *text, out []uint32) ([]uint32, ending) {
	e := ending{text: -1}
	if len(j.stops) == 0 && len(j.req.StopTokenIDs) == 0 {
		return out, e
	}
	if !j.req.IncludeStop {
		for _, s := range j.stops {
			e.hold = max(e.hold, len(s)-1)
		}
	}
	var b strings.Builder
	from := 0 // stop strings must end behind the tokens that min_tokens asks for
	for i, id := range out {
		before := b.Len()
		b.WriteString(t.token(id))
		if i < j.req.MinTokens {
			from = b.Len()
			continue
		}
		if slices.Contains(j.req.StopTokenIDs, int64(id)) {
			e.reason, e.text = id, before
			return out[:i+1], e
		}
		for _, s := range j.stops {
			start := max(0, max(before, from)-len(s)+1)
			at := strings.Index(b.String()[start:], s)
			if at < 0 {
				continue
			}
			e.reason, e.text = s, start+at
			if j.req.IncludeStop {
				e.text += len(s)
			}
			return out[:i+1], e
		}
	}
	return out, e
}
