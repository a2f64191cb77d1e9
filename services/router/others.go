package router

import (
	"slices"

	"github.com/kinference/kinference/internal/kvhash"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

const (
	// maxOthers bounds how many prompts beside the first are looked up; further
	// ones are work like any other.
	maxOthers = 32
	// maxQueries is what kvtracker answers at once.
	maxQueries = 64
)

// other is one more prompt of a request with several. The engine runs each by
// itself: what a worker holds of one is that much less to compute, and the
// context must hold the longest one, not all.
type other struct {
	tokens int
	hashes []kvhash.Hash
}

func hashesOf(in []uint64) []kvhash.Hash {
	out := make([]kvhash.Hash, len(in))
	for i, h := range in {
		out[i] = kvhash.Hash(h)
	}
	return out
}

func othersOf(p *routerv1.Prompt) []other {
	if len(p.Others) == 0 {
		return nil
	}
	out := make([]other, len(p.Others))
	for i, o := range p.Others {
		if out[i].tokens = int(o.Tokens); i < maxOthers && p.BlockSize > 0 {
			out[i].hashes = hashesOf(o.BlockHashes)
		}
	}
	return out
}

// all is the length of all prompts.
func (p *prompt) all() int {
	n := int(p.Tokens)
	for i := range p.others {
		n += p.others[i].tokens
	}
	return n
}

// hashed reports whether there is anything to look for in caches.
func (p *prompt) hashed() bool {
	return len(p.hashes) > 0 || slices.ContainsFunc(p.others, func(o other) bool { return len(o.hashes) > 0 })
}

// longestOf is the length of the longest prompt for a profile, found as by
// tokensOf.
func longestOf(prompts map[string]*prompt, profile string) int {
	longest := func(p *prompt) int {
		n := int(p.Tokens)
		for i := range p.others {
			n = max(n, p.others[i].tokens)
		}
		return n
	}
	if p := prompts[profile]; p != nil {
		return longest(p)
	}
	most := 0
	for _, p := range prompts {
		most = max(most, longest(p))
	}
	return most
}

// otherQueries appends the questions about the others of all prompts, and tells the
// place of each.
func otherQueries(queries []*kvtrackerv1.Query, prompts []*prompt) (all []*kvtrackerv1.Query, places map[*other]int) {
	for n, p := range prompts {
		set := queries[n].WorkerSet
		for i := range p.others {
			if o := &p.others[i]; len(o.hashes) > 0 && len(queries) < maxQueries {
				if places == nil {
					places = map[*other]int{}
				}
				places[o] = len(queries)
				queries = append(queries, &kvtrackerv1.Query{WorkerSet: set, BlockSize: p.BlockSize, BlockHashes: p.Others[i].BlockHashes})
			}
		}
	}
	return queries, places
}

// takeOthers enters the answers to otherQueries; nil results count as no hits.
func (s *server) takeOthers(f *found, prompts []*prompt, places map[*other]int, results []*kvtrackerv1.MatchResult) {
	for _, p := range prompts {
		for i := range p.others {
			o := &p.others[i]
			if at, asked := places[o]; asked {
				for _, m := range results[at].GetMatches() {
					f.holds(p, o, m.Worker, int(m.GpuTokens))
				}
			}
		}
	}
}

// recallOthers enters what the router remembers of workers.
func (s *server) recallOthers(f *found, p *prompt) {
	for i := range p.others {
		o := &p.others[i]
		s.affinity.Match(s.now(), o.hashes, func(worker string, blocks int) { f.holds(p, o, worker, blocks*int(p.BlockSize)) })
	}
}

// holds notes that a worker holds leading tokens of another prompt. Engines
// compute at least the last token, and use whole blocks only.
func (f *found) holds(p *prompt, o *other, worker string, tokens int) {
	most := max(o.tokens-1, 0)
	f.others[holding{p.Profile, worker}] += min(tokens, most-most%int(p.BlockSize))
}
