package ingress

import (
	"github.com/kinference/kinference/internal/kvhash"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/prompt"
)

func numbers(hashes []kvhash.Hash) []uint64 {
	out := make([]uint64, len(hashes))
	for i, h := range hashes {
		out[i] = uint64(h)
	}
	return out
}

// othersOf are the prompts after the first for the router.
func othersOf(p *prompt.Prompt) []*routerv1.OtherPrompt {
	out := make([]*routerv1.OtherPrompt, len(p.Others))
	for i := range p.Others {
		o := &p.Others[i]
		out[i] = &routerv1.OtherPrompt{Tokens: uint32(o.Tokens), BlockHashes: numbers(o.Hashes)}
	}
	return out
}

// counted is how many tokens all prompts of the request have by one profile, ok if
// each was counted.
func counted(p *prompt.Prompt) (tokens int, ok bool) {
	tokens, ok = p.Tokens, p.Exact()
	for i := range p.Others {
		tokens += p.Others[i].Tokens
		ok = ok && p.Others[i].Exact
	}
	return tokens, ok
}

// allTokens is how long all prompts of a request with several are; first is the
// length of the first. What was not counted is estimated so that it is rather too
// much.
func (x *exchange) allTokens(first int64) int64 {
	most, exact := int64(0), len(x.prompts) > 0
	for i := range x.prompts {
		n, ok := counted(&x.prompts[i])
		most, exact = max(most, int64(n)), exact && ok
	}
	if exact {
		return most
	}
	all, begun := first, false
	for e := range x.req.Body.Get(x.req.Route.PromptParam()).Elements() {
		if begun {
			all += int64(textTokens(e))
		}
		begun = true
	}
	return max(all, most)
}
