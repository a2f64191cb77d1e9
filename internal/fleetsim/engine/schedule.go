package engine

import (
	"slices"

	"github.com/kinference/kinference/internal/vllm"
)

// Begin schedules one iteration that starts at now and returns when it ends.
// ok is false if there is nothing to do. Every Begin that returns true is
// followed by End, at that time; Submit, Abort and the other methods may be
// called in between.
func (e *Engine) Begin(now float64) (end float64, ok bool) {
	if e.stepping {
		panic("engine: Begin before End")
	}
	if len(e.running) == 0 && len(e.waiting) == 0 {
		return now, false
	}
	budget := e.p.MaxBatchedTokens
	preempted := false
	clear(e.fresh)

	// Running requests first, in order of admission: one token for a decoder,
	// the next chunk for an unfinished prompt.
	for i := 0; i < len(e.running) && budget > 0; i++ {
		s := e.running[i]
		n := e.chunk(s, s.computed, min(len(s.chain.tokens)-s.computed, budget))
		need := e.blocksFor(s.computed+n) - len(s.blocks)
		for need > e.pool.free {
			// Out of blocks: the request admitted last goes back to the front of
			// the queue and will compute everything again.
			last := e.running[len(e.running)-1]
			e.running = e.running[:len(e.running)-1]
			e.preempt(last)
			preempted = true
			if last == s {
				break
			}
		}
		if need > e.pool.free || i >= len(e.running) {
			break // s itself was preempted
		}
		e.schedule(s, n)
		budget -= n
	}

	// Then waiting ones in order, while sequences, budget and blocks last. Not
	// after a preemption: there is no room.
	for !preempted && budget > 0 && len(e.waiting) > 0 && len(e.running) < e.p.MaxSeqs {
		s := e.waiting[0]
		hits, junction := e.hit(s, s.blocks[:0])
		if len(hits) > 0 {
			if _, ok := e.fresh[s.hashes[len(hits)-1]]; ok {
				break // the state is only being computed
			}
		}
		s.junction = junction
		n := e.chunk(s, len(hits)*e.p.BlockSize, min(len(s.chain.tokens)-len(hits)*e.p.BlockSize, budget))
		if n == 0 {
			break
		}
		// The whole prompt must fit, though only a chunk is computed now. Hits
		// without a user are in the free list: they count until touched.
		need := e.blocksFor(len(s.chain.tokens)) - len(hits) + e.p.StateBlocks
		for _, b := range hits {
			if e.pool.blocks[b].ref == 0 {
				need++
			}
		}
		if need > e.pool.free {
			break
		}
		e.waiting = slices.Delete(e.waiting, 0, 1)
		e.admit(now, s, hits)
		e.running = append(e.running, s)
		e.schedule(s, n)
		budget -= n
	}

	e.step = Step{Tokens: e.step.Tokens[:0], Finished: e.step.Finished[:0], Start: now}
	e.step.Time = e.time(&e.step)
	e.stepping = true
	e.stats.Steps++
	return now + e.step.Time, true
}

// time is the duration of the iteration that has been scheduled (Profile). It
// fills the step's figures.
func (e *Engine) time(st *Step) float64 {
	var prefill, decode, context int
	var attention float64
	for _, s := range e.running {
		switch {
		case s.step == 0:
		case s.step == 1 && s.r.Generated > 0:
			decode++
			context += s.computed + 1
		default:
			n := float64(s.step)
			prefill += s.step
			attention += n * (float64(s.computed) + n/2)
		}
	}
	st.PrefillTokens, st.DecodeRequests = prefill, decode
	dense := max(e.p.W, float64(prefill+decode)*e.p.A)
	t := dense + attention*e.p.Q + e.p.Ovh + float64(decode)*e.p.S + float64(context)*e.p.K
	t /= e.cfg.Speed
	e.blame(dense, prefill+decode)
	e.stats.Busy += t
	return t
}

// blame divides the iteration among its sequences: what serves all tokens alike
// by tokens, the fixed cost evenly, and what one caused goes to it alone.
func (e *Engine) blame(dense float64, tokens int) {
	members := 0
	for _, s := range e.running {
		if s.step > 0 {
			members++
		}
	}
	if members == 0 {
		return
	}
	perToken, each := dense/float64(max(tokens, 1)), e.p.Ovh/float64(members)
	for _, s := range e.running {
		switch n := float64(s.step); {
		case s.step == 0:
		case s.step == 1 && s.r.Generated > 0:
			s.r.Busy += (perToken + each + e.p.S + float64(s.computed+1)*e.p.K) / e.cfg.Speed
		default:
			s.r.Busy += (n*perToken + each + n*(float64(s.computed)+n/2)*e.p.Q) / e.cfg.Speed
		}
	}
}

func (e *Engine) blocksFor(tokens int) int {
	return (tokens + e.p.BlockSize - 1) / e.p.BlockSize
}

// hit appends the cached blocks that s can use: those before the first miss,
// and never its last token, since computing that one makes the first output.
// With Checkpoints they end where a state is; junction is how many blocks there
// would have been without, if that is more.
func (e *Engine) hit(s *sequence, dst []int32) (hits []int32, junction int) {
	for _, h := range s.hashes[:(len(s.chain.tokens)-1)/e.p.BlockSize] {
		b := e.pool.lookup(h)
		if b == none {
			break
		}
		dst = append(dst, b)
	}
	if !e.p.Checkpoints {
		return dst, 0
	}
	for all := len(dst); len(dst) > 0; dst = dst[:len(dst)-1] {
		if _, kept := e.states[s.hashes[len(dst)-1]]; kept {
			break
		}
		junction = all
	}
	return dst, junction
}

// chunk shortens the next n tokens of a prefill so that it ends where the
// recurrent state is to be kept (vLLM's _mamba_block_aligned_split).
func (e *Engine) chunk(s *sequence, start, n int) int {
	b, total := e.p.BlockSize, len(s.chain.tokens)
	prefill := max(len(s.r.Tokens), total-1)
	if !e.p.Checkpoints || start >= prefill {
		return n
	}
	end := start + n
	if aligned := end / b * b; end < prefill && (aligned > start || b <= e.p.MaxBatchedTokens) {
		end = aligned
	}
	stop := end
	for _, at := range [...]int{(start + b - 1) / b * b, (total - 1) / b * b, s.junction * b} {
		if start < at && at < stop {
			stop = at
		}
	}
	return max(stop-start, 0)
}

// admit gives s its hits and its state pages.
func (e *Engine) admit(now float64, s *sequence, hits []int32) {
	for _, b := range hits {
		e.pool.touch(b)
	}
	s.blocks = hits
	s.stored = len(hits)
	s.computed = len(hits) * e.p.BlockSize
	for range e.p.StateBlocks {
		s.state = append(s.state, e.take())
	}
	if s.admitted {
		return
	}
	s.admitted = true
	s.r.Scheduled, s.r.Cached = now, s.computed
	e.stats.PrefixQueries += uint64(len(s.chain.tokens))
	e.stats.PrefixHits += uint64(s.computed)
}

// schedule puts the next n tokens of s into the iteration: it allocates their
// blocks and caches those that will be full, so that others can hit them at
// once.
func (e *Engine) schedule(s *sequence, n int) {
	s.step = n
	for len(s.blocks) < e.blocksFor(s.computed+n) {
		s.blocks = append(s.blocks, e.take())
	}
	full := (s.computed + n) / e.p.BlockSize
	if full <= s.stored {
		return
	}
	for i := s.stored; i < full; i++ {
		e.pool.cache(s.blocks[i], s.hashes[i], s.chain, (i+1)*e.p.BlockSize)
	}
	e.stats.Stored += uint64(full - s.stored)
	e.storeSide(s, s.stored, full, func(g int) bool { return g < e.main })
	if e.cfg.OnEvents {
		e.events = append(e.events, e.stored(s, e.main, s.stored, full, s.hashes[s.stored:full:full]))
	}
	e.storeSide(s, s.stored, full, func(g int) bool { return g > e.main })
	s.stored = full
}

// take allocates a block and reports what it evicts.
func (e *Engine) take() int32 {
	i, hash, evicted := e.pool.take()
	if evicted {
		e.stats.Removed++
		if e.cfg.OnEvents && !(e.cfg.LastCopyRemovals && e.pool.lookup(hash) != none) {
			e.events = append(e.events, e.removed(e.main, []uint64{hash}))
		}
		if _, kept := e.states[hash]; kept && e.pool.lookup(hash) == none {
			delete(e.states, hash)
			for g := range max(0, len(e.p.Groups)-1) {
				if e.cfg.OnEvents {
					e.events = append(e.events, e.removed(e.group(g), []uint64{hash}))
				}
			}
		}
	}
	return i
}

// group is the number of the i-th group besides the main one.
func (e *Engine) group(i int) int {
	if i >= e.main {
		return i + 1
	}
	return i
}

func (e *Engine) preempt(s *sequence) {
	e.release(s)
	s.step = 0
	s.r.Preempted++
	e.stats.Preemptions++
	e.waiting = slices.Insert(e.waiting, 0, s)
}

// release frees all that s holds. Its blocks go tail first, so that the front
// of the free list meets the deepest blocks of a prefix first.
func (e *Engine) release(s *sequence) {
	for _, b := range s.state {
		e.pool.release(b)
	}
	for _, b := range slices.Backward(s.blocks) {
		e.pool.release(b)
	}
	e.clearSide(s)
	s.blocks, s.state = s.blocks[:0], s.state[:0]
	s.computed, s.stored = 0, 0
}

// End finishes the iteration that Begin scheduled and returns its results.
func (e *Engine) End() Step {
	if !e.stepping {
		panic("engine: End without Begin")
	}
	e.stepping = false
	st := &e.step
	end := st.Start + st.Time
	kept := e.running[:0]
	for _, s := range e.running {
		n := s.step
		s.step = 0
		s.computed += n
		if n == 0 || s.computed < len(s.chain.tokens) {
			kept = append(kept, s)
			continue
		}
		if !e.generate(s, end) {
			kept = append(kept, s)
		}
	}
	clear(e.running[len(kept):])
	e.running = kept
	st.Events, e.events = e.events, nil
	return *st
}

// generate gives s its next token and reports whether that was its last.
func (e *Engine) generate(s *sequence, now float64) (done bool) {
	r := s.r
	emit := Emit{R: r, First: r.Generated == 0}
	if r.Generated < len(r.Output) {
		emit.Token = r.Output[r.Generated]
	} else {
		emit.Token = derive(r.ID, e.cfg.Seed, r.Generated)
	}
	r.Generated++
	e.stats.GeneratedTokens++
	if emit.First {
		r.FirstToken = now
		e.stats.PromptTokens += uint64(len(r.Tokens))
		e.stats.CachedTokens += uint64(r.Cached)
	}
	reason := ""
	switch {
	case r.Output != nil && r.Generated >= len(r.Output) && len(r.Output) < r.MaxTokens:
		reason = Stop
	case r.Generated >= r.MaxTokens:
		reason = Length
	}
	emit.Last = reason != ""
	if emit.Last {
		// The last token is never computed, so it is in no block.
		r.Finished = now
		e.finish(s, reason)
		e.step.Finished = append(e.step.Finished, r)
	} else {
		s.chain.tokens = append(s.chain.tokens, emit.Token)
		e.hash(s)
	}
	e.step.Tokens = append(e.step.Tokens, emit)
	return emit.Last
}

// derive makes the i-th output token of a request without Output.
func derive(id string, seed int64, i int) uint32 {
	x := mix(uint64(seed)^mixA, uint64(i)^mixB)
	for _, c := range []byte(id) {
		x = mix(x^uint64(c)^mixB, mixA)
	}
	return uint32(mix(x, mixB) % 100_000)
}

// stored makes the BlockStored event of group g for blocks from..to of s, of
// which hashes are held.
func (e *Engine) stored(s *sequence, g, from, to int, hashes []uint64) vllm.Event {
	b := e.p.BlockSize
	ev := vllm.Event{
		Kind: vllm.BlockStored, Hashes: hashes, Tokens: s.chain.tokens[from*b : to*b : to*b], BlockSize: b,
		Medium: "GPU", LoRAID: -1, Group: g, SpecKind: "full_attention",
	}
	if from > 0 {
		ev.Parent, ev.HasParent = s.hashes[from-1], true
	}
	if s.r.LoRA != "" {
		ev.LoRAName, ev.LoRAID = s.r.LoRA, e.loraID(s.r.LoRA)
	}
	if len(e.p.Groups) > 0 {
		ev.SpecKind, ev.SlidingWindow = e.p.Groups[g].Kind, e.p.Groups[g].SlidingWindow
	}
	// One entry per hash, nil where a block has no keys.
	if len(s.keys.first) == 0 {
		if len(e.noKeys) < len(hashes) {
			e.noKeys = make([][]vllm.ExtraKey, 2*len(hashes))
		}
		ev.ExtraKeys = e.noKeys[:len(hashes):len(hashes)]
		return ev
	}
	ev.ExtraKeys = make([][]vllm.ExtraKey, len(hashes))
	for i := range ev.ExtraKeys {
		ev.ExtraKeys[i] = s.keys.others
	}
	if from == 0 && len(hashes) == to {
		ev.ExtraKeys[0] = s.keys.first
	}
	return ev
}

func (e *Engine) removed(g int, hashes []uint64) vllm.Event {
	return vllm.Event{Kind: vllm.BlockRemoved, Hashes: hashes, Medium: "GPU", LoRAID: -1, Group: g}
}

// loraID numbers the adapters from 1: those of the start, then others in order
// of first use, as vLLM does.
func (e *Engine) loraID(name string) int64 {
	id, ok := e.loras[name]
	if !ok {
		id = int64(len(e.loras) + 1)
		e.loras[name] = id
	}
	return id
}

// storeSide lets those of the groups besides the main one follow that are
// picked by their number: each holds the last block (a state checkpoint) or the
// blocks of its window, and its events name only those, whatever tokens they
// cover.
func (e *Engine) storeSide(s *sequence, from, to int, picked func(group int) bool) {
	for i := range s.side {
		g := e.group(i)
		if !picked(g) {
			continue
		}
		if e.p.Checkpoints {
			e.storeStates(s, g, from, to)
			continue
		}
		keep := 1
		if w := e.p.Groups[g].SlidingWindow; w > 0 {
			keep = e.blocksFor(w)
		}
		old := s.side[i]
		if old.to == 0 {
			old = span{from, from} // what was hit is not held here
		}
		held := span{max(old.from, to-keep), to}
		s.side[i] = held
		if !e.cfg.OnEvents {
			continue
		}
		if gone := min(held.from, old.to); gone > old.from {
			e.events = append(e.events, e.removed(g, s.hashes[old.from:gone:gone]))
		}
		first := max(from, held.from)
		e.events = append(e.events, e.stored(s, g, from, to, s.hashes[first:to:to]))
	}
}

// storeStates keeps the recurrent state at the ends of blocks where a later
// request may go on: before the last token of the prompt, and where s itself
// could not go on for lack of it. The event comes even if none is kept.
func (e *Engine) storeStates(s *sequence, g, from, to int) {
	var kept []uint64
	for i := from; i < to; i++ {
		if end := i + 1; end == (len(s.r.Tokens)-1)/e.p.BlockSize || end == s.junction {
			kept = append(kept, s.hashes[i])
			e.states[s.hashes[i]], e.fresh[s.hashes[i]] = struct{}{}, struct{}{}
		}
	}
	if e.cfg.OnEvents {
		e.events = append(e.events, e.stored(s, g, from, to, kept))
	}
}

func (e *Engine) clearSide(s *sequence) {
	for i, sp := range s.side {
		if sp.to > sp.from && e.cfg.OnEvents {
			e.events = append(e.events, e.removed(e.group(i), s.hashes[sp.from:sp.to:sp.to]))
		}
		s.side[i] = span{}
	}
}
