// Package engine simulates one vLLM engine core, iteration by iteration: a
// paged prefix cache with vLLM's allocation, eviction and hit rules, a
// scheduler with chunked prefill and preemption by recompute, and the time
// that each iteration takes on a given accelerator (Profile).
//
// It has no clock, no goroutines and no I/O: the caller says when an iteration
// starts, is told when it ends, and collects what it produced. The same code
// therefore runs in virtual time (test/bench) and in wall time (fleetsim's
// servers). An Engine is not safe for concurrent use. All times are seconds of
// simulated time, from any origin.
package engine

import (
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/kinference/kinference/internal/vllm"
)

// Errors of Submit.
var (
	ErrTooLong   = errors.New("prompt does not fit the engine's context")
	ErrDuplicate = errors.New("a request with this ID is in flight")
	ErrEmpty     = errors.New("prompt is empty")
)

// Reasons why a request finished, as vLLM spells them.
const (
	Stop   = "stop"   // it generated all of Output
	Length = "length" // it generated MaxTokens or reached the context length
	Abort  = "abort"
)

// Config says what engine to simulate. The zero Config is not usable: Profile
// must be set.
type Config struct {
	Profile Profile
	Speed   float64 // relative to the profile; 0: 1
	Seed    int64   // of the block hash and of derived outputs

	// Hash makes the block hash; it is called by New and by every Restart with
	// a new seed. Nil: RandomHasher.
	Hash func(seed uint64) Hasher

	// Tagged hashes extra keys with their source, as vLLM 0.31 and later do.
	Tagged bool

	// LoRAs are the adapters that the engine was started with. They have the
	// integer ids 1, 2, …; further ones are numbered as they come.
	LoRAs []string

	// LastCopyRemovals makes BlockRemoved name a block only when its last
	// physical copy goes (vLLM PR 55092); otherwise every copy is announced.
	LastCopyRemovals bool

	// OnEvents makes Steps carry cache events. Without it they cost nothing.
	OnEvents bool
}

// Request is one generation. The caller fills the first part and owns the
// slices, which must not change while the request is in flight; the engine
// fills the second part.
type Request struct {
	ID         string
	Tokens     []uint32
	MaxTokens  int // at least 1; lowered to what the context length leaves
	LoRA, Salt string
	Output     []uint32 // what it generates, then it stops; nil: MaxTokens tokens derived from ID and seed
	Tag        any      // the caller's own

	Arrived    float64 // when it was submitted
	Scheduled  float64 // when an iteration first took it in
	FirstToken float64 // when the iteration ended that made its first token
	Finished   float64 // when the last one did
	Cached     int     // prompt tokens found in the cache at first admission
	Generated  int
	Preempted  int
	Busy       float64 // engine time that it caused: its parts of the iterations that it was in
	Reason     string  // "" while in flight

	seq *sequence
}

// sequence is a request's state in the scheduler.
type sequence struct {
	r      *Request
	chain  *chain // prompt and generated tokens
	keys   keys   // extra keys, as in events
	hashed keys   // the same, as they are hashed

	hashes []uint64 // of every full block of chain.tokens
	last   Digest   // behind the last of hashes

	blocks   []int32 // physical, in order
	state    []int32 // pages of recurrent state
	computed int     // tokens whose keys and values are in blocks
	stored   int     // blocks that are cached, hit or stored by it
	step     int     // tokens in the iteration under way; 0: not scheduled
	admitted bool    // was running before
	side     []span  // blocks that the groups besides the main one hold
	junction int     // blocks that it shares with others, without a state at their end
}

type span struct{ from, to int }

// keys are the extra keys of a sequence's first block and of the others.
type keys struct{ first, others []vllm.ExtraKey }

// extraKeys returns the extra keys of a sequence, as in events and as they are
// hashed.
func (e *Engine) extraKeys(lora, salt string) (events, hashed keys) {
	if lora != "" {
		events.others = []vllm.ExtraKey{{Text: lora}}
	}
	events.first = events.others
	if salt != "" {
		events.first = append(slices.Clip(events.others), vllm.ExtraKey{Text: salt})
	}
	hashed = events
	if e.cfg.Tagged {
		path := AdapterPath(lora)
		hashed = keys{vllm.Tagged(events.first, lora, path), vllm.Tagged(events.others, lora, path)}
	}
	return events, hashed
}

// AdapterPath is the folder of an adapter on the disks that engines do not have.
func AdapterPath(name string) string { return "/adapters/" + name }

// Emit is one generated token.
type Emit struct {
	R           *Request
	Token       uint32
	First, Last bool
}

// Step is what one iteration produced. Tokens and Finished are valid until the
// next End; Events stay valid.
type Step struct {
	Tokens   []Emit
	Finished []*Request // in Tokens with Last as well
	Events   []vllm.Event

	Start, Time    float64
	PrefillTokens  int // tokens of unfinished prompts computed
	DecodeRequests int // sequences that only generated
}

// Stats are the scheduler's gauges and its counters since New or Restart.
type Stats struct {
	Running, Waiting int
	KVUsage          float64 // blocks in use over all blocks; cached blocks without user do not count
	FreeBlocks       int
	CachedBlocks     int // physical blocks with a hash, in use or not

	PrefixQueries, PrefixHits uint64 // tokens, at first admission
	PromptTokens              uint64 // of requests that made their first token
	CachedTokens              uint64 // of PromptTokens, those found in the cache
	GeneratedTokens           uint64
	Preemptions               uint64
	Steps, Stored, Removed    uint64
	Busy                      float64 // seconds of all iterations
	Stopped, Lengthed         uint64  // finished requests by reason
	Aborted                   uint64
}

// Engine is one engine core. Use New.
type Engine struct {
	cfg  Config
	p    Profile
	pool *pool

	hasher   Hasher
	restarts uint64
	main     int                 // the number of the main group
	states   map[uint64]struct{} // blocks at whose end the recurrent state is kept (Profile.Checkpoints)
	fresh    map[uint64]struct{} // those of the iteration under way
	running  []*sequence
	waiting  []*sequence
	byID     map[string]*sequence
	loras    map[string]int64

	stepping bool
	step     Step
	events   []vllm.Event // of the iteration under way, or since the last one
	noKeys   [][]vllm.ExtraKey
	stats    Stats
}

// New returns an idle engine with an empty cache. It panics if the profile
// cannot hold a single token, which is a mistake in the program.
func New(cfg Config) *Engine {
	p := cfg.Profile
	if p.BlockSize < 1 || p.MaxLen() < 2 || p.MaxBatchedTokens < 1 || p.MaxSeqs < 1 {
		panic(fmt.Sprintf("engine: unusable profile %q", p.Name))
	}
	if cfg.Speed <= 0 {
		cfg.Speed = 1
	}
	if cfg.Hash == nil {
		cfg.Hash = RandomHasher
	}
	e := &Engine{cfg: cfg, p: p, pool: newPool(p.Blocks), main: p.main()}
	e.start()
	return e
}

func (e *Engine) start() {
	e.hasher = e.cfg.Hash(mix(uint64(e.cfg.Seed)^mixA, mixB+e.restarts))
	e.running, e.waiting, e.events = nil, nil, nil
	e.byID = make(map[string]*sequence)
	e.loras = make(map[string]int64)
	for _, name := range e.cfg.LoRAs {
		e.loraID(name)
	}
	e.states, e.fresh = make(map[uint64]struct{}), make(map[uint64]struct{})
	e.stepping = false
	e.stats = Stats{}
}

// Profile is the profile that the engine simulates.
func (e *Engine) Profile() Profile { return e.p }

// SetSpeed changes the engine's speed relative to its profile, from the next
// iteration on.
func (e *Engine) SetSpeed(speed float64) {
	if speed > 0 {
		e.cfg.Speed = speed
	}
}

// Submit queues r, which arrives at now. It returns ErrTooLong if the prompt
// leaves no room for a token, ErrDuplicate if the ID is in flight, ErrEmpty
// for a prompt without tokens. r must not be in use.
func (e *Engine) Submit(now float64, r *Request) error {
	switch n := len(r.Tokens); {
	case n == 0:
		return ErrEmpty
	case n >= e.p.MaxLen():
		return ErrTooLong
	}
	if _, ok := e.byID[r.ID]; ok {
		return ErrDuplicate
	}
	r.MaxTokens = max(1, min(r.MaxTokens, e.p.MaxLen()-len(r.Tokens)))
	r.Arrived, r.Reason = now, ""
	r.Scheduled, r.FirstToken, r.Finished = 0, 0, 0
	r.Cached, r.Generated, r.Preempted, r.Busy = 0, 0, 0, 0
	s := &sequence{r: r, last: e.hasher.Root()}
	s.keys, s.hashed = e.extraKeys(r.LoRA, r.Salt)
	// Room for a typical output, so that growing seldom copies the prompt again.
	s.chain = &chain{lora: r.LoRA, salt: r.Salt, tokens: make([]uint32, len(r.Tokens), len(r.Tokens)+min(r.MaxTokens, 1024))}
	copy(s.chain.tokens, r.Tokens)
	s.hashes = make([]uint64, 0, len(r.Tokens)/e.p.BlockSize+1)
	s.side = make([]span, max(0, len(e.p.Groups)-1))
	e.hash(s)
	r.seq = s
	e.byID[r.ID] = s
	e.waiting = append(e.waiting, s)
	return nil
}

// hash extends s's hashes over the blocks that are full by now.
func (e *Engine) hash(s *sequence) {
	b := e.p.BlockSize
	for i := len(s.hashes); (i+1)*b <= len(s.chain.tokens); i++ {
		extra := s.hashed.others
		if i == 0 {
			extra = s.hashed.first
		}
		s.last = e.hasher.Next(s.last, s.chain.tokens[i*b:(i+1)*b], extra)
		s.hashes = append(s.hashes, s.last.Wire())
	}
}

// Abort ends a request at once: its blocks are free, and stay cached, before
// it returns. It reports whether the request was in flight. The Step of an
// iteration under way will not mention it.
func (e *Engine) Abort(id string) bool {
	s, ok := e.byID[id]
	if !ok {
		return false
	}
	e.running = drop(e.running, s)
	e.waiting = drop(e.waiting, s)
	e.finish(s, Abort)
	return true
}

func drop(list []*sequence, s *sequence) []*sequence {
	if i := slices.Index(list, s); i >= 0 {
		return slices.Delete(list, i, i+1)
	}
	return list
}

func (e *Engine) finish(s *sequence, reason string) {
	e.release(s)
	s.step = 0
	s.r.Reason, s.r.seq = reason, nil
	delete(e.byID, s.r.ID)
	switch reason {
	case Stop:
		e.stats.Stopped++
	case Length:
		e.stats.Lengthed++
	case Abort:
		e.stats.Aborted++
	}
}

// ResetPrefixCache empties the cache, and reports false without doing so if
// any block is in use. The AllBlocksCleared event comes with the next
// iteration, however late that is: as in vLLM, an idle engine publishes nothing.
func (e *Engine) ResetPrefixCache() bool {
	if e.pool.free != e.pool.size() {
		return false
	}
	e.pool.reset()
	clear(e.states)
	clear(e.fresh)
	if e.cfg.OnEvents {
		e.events = append(e.events, vllm.Event{Kind: vllm.AllBlocksCleared, LoRAID: -1, Group: -1})
	}
	return true
}

// PreemptAll sends every running request back to the queue, to be computed
// again, so that ResetPrefixCache succeeds (vLLM's reset_running_requests).
func (e *Engine) PreemptAll() {
	for len(e.running) > 0 {
		last := e.running[len(e.running)-1]
		e.running = e.running[:len(e.running)-1]
		e.preempt(last)
	}
}

// Restart makes the engine a new process: empty cache, new hash seed, counters
// at zero, no event. It returns the requests that were in flight and are lost,
// with Reason Abort.
func (e *Engine) Restart() []*Request {
	var lost []*Request
	for _, s := range slices.Concat(e.running, e.waiting) {
		s.r.Reason, s.r.seq = Abort, nil
		lost = append(lost, s.r)
	}
	e.restarts++
	e.pool.reset()
	e.start()
	return lost
}

// Stats returns the gauges and counters as they are now.
func (e *Engine) Stats() Stats {
	st := e.stats
	st.Running, st.Waiting = len(e.running), len(e.waiting)
	st.FreeBlocks = e.pool.free
	st.KVUsage = 1 - float64(e.pool.free)/float64(e.pool.size())
	st.CachedBlocks = e.pool.cached
	return st
}

// InFlight tells how many requests run or wait.
func (e *Engine) InFlight() int { return len(e.byID) }

// Lookup tells how many of the tokens of a prompt a request would find in the
// cache if it were admitted now. Nothing changes.
func (e *Engine) Lookup(tokens []uint32, lora, salt string) int {
	s := &sequence{chain: &chain{tokens: tokens}, last: e.hasher.Root()}
	s.keys, s.hashed = e.extraKeys(lora, salt)
	e.hash(s)
	hits, _ := e.hit(s, nil)
	return len(hits) * e.p.BlockSize
}

// CachedBlock is one entry of the true cache.
type CachedBlock struct {
	Group      int    // the main group's: a physical block; else an entry of a side group
	Block      int    // physical block, -1 for side groups
	Hash       uint64 // as in events
	Tokens     []uint32
	LoRA, Salt string
}

// Cached yields the true contents of the cache: every physical block of the
// main group that has a hash (so equal blocks come once per copy), then the
// entries of the other groups (none with Checkpoints). Tokens are all tokens from the start of the
// sequence to the end of the block, not to be modified. The engine must not be
// used meanwhile.
func (e *Engine) Cached() iter.Seq[CachedBlock] {
	return func(yield func(CachedBlock) bool) {
		for i, b := range e.pool.cachedBlocks() {
			c := CachedBlock{Group: e.main, Block: int(i), Hash: b.hash, Tokens: b.chain.tokens[:b.end], LoRA: b.chain.lora, Salt: b.chain.salt}
			if !yield(c) {
				return
			}
		}
		for _, s := range e.running {
			for g, sp := range s.side {
				for i := sp.from; i < sp.to; i++ {
					c := CachedBlock{Group: e.group(g), Block: -1, Hash: s.hashes[i], Tokens: s.chain.tokens[:(i+1)*e.p.BlockSize], LoRA: s.chain.lora, Salt: s.chain.salt}
					if !yield(c) {
						return
					}
				}
			}
		}
	}
}

// Warm caches the full blocks of tokens as if a request had computed them, in no
// time and without an event: a benchmark's bound for what caches can give. It
// stops where no block is free.
func (e *Engine) Warm(tokens []uint32) {
	s := &sequence{chain: &chain{tokens: tokens}, last: e.hasher.Root()}
	e.hash(s)
	for i, h := range s.hashes {
		if e.pool.lookup(h) != none {
			continue
		}
		if e.pool.free == 0 {
			return
		}
		b, _, _ := e.pool.take()
		e.pool.cache(b, h, s.chain, (i+1)*e.p.BlockSize)
		e.pool.release(b)
	}
}
