package schedule

import "github.com/kinference/kinference/internal/kvhash"

// blocks are the full blocks of a prompt: hashes has those of every stride-th
// block, beginning with block stride-1. Strides are powers of two; that of
// prompts routed here is 1, other routers tell fewer hashes.
type blocks struct {
	hashes []kvhash.Hash
	stride int
}

func (b blocks) len() int { return len(b.hashes) * b.stride }

// common returns the length of the common prefix of two chains in blocks, or
// known when that is more. As hashes are chained, one equal hash means that all
// before it are equal: the search is binary, and one comparison turns away a
// chain that shares no more than known blocks.
func common(a, b blocks, known int) int {
	if len(a.hashes) == 0 || len(b.hashes) == 0 {
		return known
	}
	step := max(a.stride, b.stride)
	i, j := step/a.stride, step/b.stride
	n, lo := min(len(a.hashes)/i, len(b.hashes)/j), known/step
	if lo >= n || a.hashes[(lo+1)*i-1] != b.hashes[(lo+1)*j-1] {
		return known
	}
	hi := n
	for lo++; lo < hi; {
		mid := (lo + hi + 1) / 2
		if a.hashes[mid*i-1] == b.hashes[mid*j-1] {
			lo = mid
		} else {
			hi = mid - 1
		}
	}
	return max(known, lo*step)
}

// overlap is the number of leading blocks of p that some request on its way to
// the worker, or just finished there, has in common; at least known.
func (w *worker) overlap(p blocks, known int, recent bool) int {
	for e := range w.flight() {
		known = common(e.prompt, p, known)
	}
	if recent {
		for i := range w.recent {
			known = common(w.recent[i].prompt, p, known)
		}
	}
	return known
}

// thin keeps at most most hashes of a chain, at equal distances.
func thin(hashes []kvhash.Hash, most int) blocks {
	stride := 1
	for len(hashes)/stride > most {
		stride *= 2
	}
	if stride == 1 {
		return blocks{hashes, 1}
	}
	out := make([]kvhash.Hash, 0, len(hashes)/stride)
	for i := stride - 1; i < len(hashes); i += stride {
		out = append(out, hashes[i])
	}
	return blocks{out, stride}
}
