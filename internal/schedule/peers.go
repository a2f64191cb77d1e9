package schedule

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/kinference/kinference/internal/kvhash"
)

// Names of the policies that stand for other products in benchmarks. Each is an
// own implementation of the formula that its product publishes, with published
// defaults, on exact tokens and blocks: a product that is tuned for a fleet may
// do better. None holds requests in line.
const (
	// ConsistentHash picks by a hash of the prompt's beginning, and never looks
	// at load.
	ConsistentHash = "consistenthash"
	// BoundedHash is ConsistentHash with bounded loads.
	BoundedHash = "consistenthash-bounded"
	// LLMD adds up weighted scores as llm-d does, with the prefixes that it
	// remembers to have sent.
	LLMD = "llmd"
	// LLMDPrecise is LLMD with what the engines' events say is cached.
	LLMDPrecise = "llmd-precise"
	// Dynamo minimises the blocks to prefill and to hold.
	Dynamo = "dynamo"
	// SGLang is the cache-aware policy of SGLang's router.
	SGLang = "sglang"
)

// PeerPolicies returns the names of the policies that stand for other products.
func PeerPolicies() []string {
	return []string{ConsistentHash, BoundedHash, LLMD, LLMDPrecise, Dynamo, SGLang}
}

// newPeer returns the policy of that name, or nil.
func newPeer(name string) Policy {
	switch name {
	case ConsistentHash:
		return hashPolicy{}
	case BoundedHash:
		return hashPolicy{bounded: true}
	case LLMD:
		return &llmdPolicy{sent: map[string]*prefixes{}}
	case LLMDPrecise:
		return &llmdPolicy{}
	case Dynamo:
		return dynamoPolicy{}
	case SGLang:
		return &sglangPolicy{sent: map[string]*prefixes{}}
	}
	return nil
}

// byScore sorts order by a score, highest first, equals at random.
func byScore(order []int, rng *rand.Rand, score func(i int) float64) {
	rng.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(score(j), score(i)) })
}

// loadFactor is the bound of BoundedHash: no worker gets more than so many times
// the mean load. KubeAI's default (meanLoadFactor: 125).
const loadFactor = 1.25

// hashPolicy sends equal beginnings to equal workers. Bounded, it goes on to the
// next worker in the key's order where one has its share: consistent hashing
// with bounded loads (Mirrokni, Thorup, Zadimoghaddam, arXiv:1608.01350), as
// KubeAI's PrefixHash strategy does (v0.20, docs "Load balancing"). Rendezvous
// hashing stands for the ring: it spreads keys as evenly as a ring with
// very many points.
type hashPolicy struct{ bounded bool }

func (p hashPolicy) Name() string {
	if p.bounded {
		return BoundedHash
	}
	return ConsistentHash
}

func (p hashPolicy) Rank(order []int, r *Request, e []Estimate, _ *rand.Rand) {
	slices.SortStableFunc(order, func(i, j int) int {
		if c := cmp.Compare(beginning(r, &e[j]), beginning(r, &e[i])); c != 0 {
			return c
		}
		return strings.Compare(e[i].Worker, e[j].Worker)
	})
	if !p.bounded {
		return
	}
	total := 1 // with this request
	for _, i := range order {
		total += e[i].InFlight
	}
	limit := int(math.Ceil(loadFactor * float64(total) / float64(len(order))))
	slices.SortStableFunc(order, func(i, j int) int {
		full := func(i int) int {
			if e[i].InFlight+1 > limit {
				return 1
			}
			return 0
		}
		return full(i) - full(j)
	})
}

// hashTokens is how much of a prompt hashPolicy looks at: a system prompt and
// the first message, which is what operators hash where all prompts begin alike.
const hashTokens = 1024

// beginning is the rendezvous hash of a worker and the beginning of the prompt.
func beginning(r *Request, e *Estimate) kvhash.Hash {
	hashes, size := promptOf(e)
	if size > 0 && len(hashes) > 0 {
		// A block's hash stands for all before it too.
		hashes = hashes[min(len(hashes), (hashTokens+size-1)/size)-1:]
	}
	return TieHash(r.ID, hashes, e.Worker)
}

// Weights of llm-d's scorers: those of its guide to intelligent inference
// scheduling (v0.4, precise-prefix-cache-aware and default profiles: queue 2,
// KV-cache utilisation 2, prefix 3).
const (
	llmdQueue  = 2
	llmdKV     = 2
	llmdPrefix = 3
	// llmdBlocks is how many blocks the approximate scorer remembers of a worker
	// whose number of blocks it cannot read from its metrics (lruCapacityPerServer
	// of the Gateway API Inference Extension).
	llmdBlocks = 31250
)

// llmdPolicy takes the highest sum of weighted scores in [0,1], as the endpoint
// picker of the Gateway API Inference Extension (v1.0) and llm-d's plugins
// (llm-d-inference-scheduler v0.3) do:
//
//	queue   (most waiting - waiting) / (most waiting - least waiting), or 1
//	KV      1 - usage
//	prefix  approximate: blocks of the prompt that were sent there / all blocks;
//	        precise: cached blocks, normalised between the least and the most of
//	        those that have any
//
// Equals are picked from at random, as its max-score picker does.
type llmdPolicy struct {
	sent map[string]*prefixes // nil: precise
}

func (p *llmdPolicy) Name() string {
	if p.sent == nil {
		return LLMDPrecise
	}
	return LLMD
}

func (p *llmdPolicy) Rank(order []int, _ *Request, e []Estimate, rng *rand.Rand) {
	lo, hi := math.Inf(1), math.Inf(-1)
	least, most := math.Inf(1), math.Inf(-1)
	for _, i := range order {
		lo, hi = min(lo, e[i].Load.Waiting), max(hi, e[i].Load.Waiting)
		if m := float64(e[i].Matched); m > 0 {
			least, most = min(least, m), max(most, m)
		}
	}
	score := make([]float64, len(e))
	for _, i := range order {
		queue := 1.0
		if hi > lo {
			queue = (hi - e[i].Load.Waiting) / (hi - lo)
		}
		prefix := 0.0
		hashes, _ := promptOf(&e[i])
		switch {
		case p.sent != nil && len(hashes) > 0:
			prefix = float64(p.of(&e[i]).match(hashes)) / float64(len(hashes))
		case p.sent == nil && e[i].Matched > 0:
			prefix = 1
			if most > least {
				prefix = (float64(e[i].Matched) - least) / (most - least)
			}
		}
		score[i] = llmdQueue*queue + llmdKV*(1-e[i].Load.KVUsage) + llmdPrefix*prefix
	}
	byScore(order, rng, func(i int) float64 { return score[i] })
	if p.sent != nil {
		first := &e[order[0]]
		hashes, _ := promptOf(first)
		p.of(first).add(hashes)
	}
}

// of is what was sent to a worker, within the size of its cache.
func (p *llmdPolicy) of(e *Estimate) *prefixes {
	s := p.sent[e.Worker]
	if s == nil {
		most := llmdBlocks
		if e.c != nil && e.c.TotalBlocks > 0 {
			most = e.c.TotalBlocks
		}
		s = newPrefixes(most)
		p.sent[e.Worker] = s
	}
	return s
}

// dynamoPolicy minimises NVIDIA Dynamo's cost (v0.7, docs/router/README.md, "Cost
// calculation") with its defaults: overlap weight 1 and temperature 0.
//
//	cost = weight * prefill blocks + decode blocks
//
// Both are as they would be with the request there: tokens still to prefill on
// that worker, by block, and blocks in use on it, each shared one once.
type dynamoPolicy struct{}

const dynamoOverlapWeight = 1

func (dynamoPolicy) Name() string { return Dynamo }

func (dynamoPolicy) Rank(order []int, _ *Request, e []Estimate, rng *rand.Rand) {
	cost := make([]float64, len(e))
	var active []blocks
	for _, i := range order {
		hashes, size := promptOf(&e[i])
		prefill := float64(e[i].Tokens - e[i].Matched)
		active = append(active[:0], blocks{hashes, 1})
		if w := e[i].w; w != nil {
			for _, f := range w.waiting {
				prefill += float64(f.tokens - f.cached)
				active = append(active, f.prompt)
			}
			for _, f := range w.running {
				active = append(active, f.prompt)
			}
		}
		cost[i] = dynamoOverlapWeight*prefill/float64(max(size, 1)) + float64(distinct(active))
	}
	byScore(order, rng, func(i int) float64 { return -cost[i] })
}

// distinct counts the different blocks of several prompts.
func distinct(prompts []blocks) int {
	n := 0
	for i, p := range prompts {
		shared := 0
		for _, q := range prompts[:i] {
			shared = common(p, q, shared)
		}
		n += p.len() - shared
	}
	return n
}

// Defaults of SGLang's router (sglang-router 0.2, --help).
const (
	sglangThreshold = 0.3
	sglangAbs       = 64
	sglangRel       = 1.5
	// sglangTree bounds its tree in characters (--max-tree-size 2^26), which are
	// about sglangChars to a token.
	sglangTree  = 1 << 26
	sglangChars = 4
)

// sglangPolicy is SGLang's cache_aware policy (sglang-router 0.2,
// src/policies/cache_aware.rs, "Cache-Aware Load Balancing Router"): where loads
// differ by more than both thresholds, the least loaded worker; else the worker
// to which the longest beginning of this prompt was sent last, if that is more
// than the threshold of it; else the one that it has sent least to. It
// remembers what it sent, by blocks here, by characters there.
type sglangPolicy struct {
	sent map[string]*prefixes
	now  int
}

func (p *sglangPolicy) Name() string { return SGLang }

func (p *sglangPolicy) Rank(order []int, _ *Request, e []Estimate, rng *rand.Rand) {
	lo, hi := math.MaxInt, 0
	for _, i := range order {
		lo, hi = min(lo, e[i].InFlight), max(hi, e[i].InFlight)
	}
	best, last := 0, 0
	match, size := make([]int, len(e)), make([]int, len(e))
	to := -1
	for _, i := range order {
		hashes, _ := promptOf(&e[i])
		s := p.of(&e[i])
		match[i], size[i] = s.match(hashes), s.len()
		if m, at := match[i], s.last(hashes, match[i]); m > best || m == best && m > 0 && at > last {
			best, last, to = m, at, i
		}
	}
	share := 0.0
	if to >= 0 {
		hashes, _ := promptOf(&e[to])
		share = float64(best) / float64(len(hashes))
	}
	switch {
	case hi-lo > sglangAbs && float64(hi) > sglangRel*float64(lo):
		byScore(order, rng, func(i int) float64 { return -float64(e[i].InFlight) })
	case share > sglangThreshold:
		byScore(order, rng, func(i int) float64 {
			if i == to {
				return math.Inf(1)
			}
			return float64(match[i])
		})
	default:
		byScore(order, rng, func(i int) float64 { return -float64(size[i]) })
	}
	first := &e[order[0]]
	hashes, _ := promptOf(first)
	p.of(first).add(hashes)
}

func (p *sglangPolicy) of(e *Estimate) *prefixes {
	s := p.sent[e.Worker]
	if s == nil {
		block := 1
		if e.c != nil {
			block = max(e.c.BlockSize, 1)
		}
		s = newPrefixes(max(sglangTree/sglangChars/block, 1))
		p.sent[e.Worker] = s
	}
	s.clock = &p.now
	return s
}

// promptOf is the prompt's blocks as the candidate sees them and their size.
func promptOf(e *Estimate) ([]kvhash.Hash, int) {
	if e.c == nil {
		return nil, 0
	}
	return e.c.Hashes, e.c.BlockSize
}
