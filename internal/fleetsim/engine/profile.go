package engine

// Profile describes one engine process on one accelerator: how much it can
// hold and how long a scheduler iteration takes. All times are seconds of
// simulated time. Copy a Profile before changing it.
type Profile struct {
	Name  string // what Lookup and the --profile flag call it
	Model string // the model that the constants were derived for

	BlockSize   int // tokens per cache block (page)
	Blocks      int // blocks in the pool
	StateBlocks int // blocks of recurrent state that every running sequence holds besides its tokens

	MaxBatchedTokens int // token budget of one iteration
	MaxSeqs          int // sequences that may run at the same time
	MaxModelLen      int // prompt plus output; 0: whatever the pool can hold

	// An iteration with n prefill tokens (chunk i starts at context c_i and has
	// n_i tokens) and B decoding sequences of C context tokens together takes
	//
	//	max(W, (n+B)*A) + sum(n_i*(c_i+n_i/2))*Q + Ovh + B*S + C*K
	W   float64 // reading the weights once
	A   float64 // dense compute per token
	Q   float64 // attention compute per (token, context token)
	Ovh float64 // launch and scheduling, once per iteration
	S   float64 // per decoding sequence: its recurrent state is read and written
	K   float64 // per context token of the decoding sequences: its keys and values are read

	// Overhead is what HTTP, templating and tokenisation add to a request before
	// the scheduler sees it. The engine does not add it: harnesses in virtual
	// time do, a server in wall time has its own.
	Overhead float64

	// Groups are the cache groups of a hybrid model, in the order of their
	// numbers. The first of full attention is the main group, which alone takes
	// part in hits, unless Checkpoints is set. None: one full-attention group.
	Groups []Group

	// Checkpoints makes the hits of a hybrid with recurrent state end where that
	// state was kept, as vLLM's do: at the last block boundary before the end of
	// a prompt, and where a later prompt departed from what was cached. Prefills
	// stop there, too. The published benchmarks were made without.
	Checkpoints bool
}

// main is the number of the main group.
func (p *Profile) main() int {
	for i, g := range p.Groups {
		switch g.Kind {
		case "full_attention", "mla_attention", "sink_full_attention":
			return i
		}
	}
	return 0
}

// Group is one cache group as vLLM's events name it. A group besides the main
// one only adds events: its memory is part of StateBlocks.
type Group struct {
	Kind          string // full_attention, mamba, sliding_window, ...
	SlidingWindow int    // tokens that a sliding group keeps; 0: the last block only, as a state checkpoint
}

// Gated-delta models keep a recurrent state of about 154 MB per sequence: three
// pages, one in each of three groups of 16 layers, beside the group of the 16
// full-attention layers, which vLLM numbers last.
var hybrid = []Group{{Kind: "mamba"}, {Kind: "mamba"}, {Kind: "mamba"}, {Kind: "full_attention"}}

// L40SQwen27B is a 27-billion-parameter gated-delta hybrid in FP8 on one L40S
// (48 GB, 864 GB/s, 733 TFLOPS FP8 and 362 BF16 as quoted). vLLM aligns its
// attention pages with the state pages: 784 tokens of 64 KiB. W is 27 GB at
// 85 % of the bandwidth; A is 51 GFLOP per token at 24 % of peak, fitted to the
// published benchmark; Q is 4*24*256*16 FLOP at 242 TFLOPS; S is 302 MB at
// 700 GB/s; K is 64 KiB at 650 GB/s.
var L40SQwen27B = Profile{
	Name: "l40s-qwen27b-fp8", Model: "Qwen/Qwen3.6-27B",
	BlockSize: 784, Blocks: 170, StateBlocks: 3,
	MaxBatchedTokens: 2048, MaxSeqs: 256, MaxModelLen: (170 - 3) * 784,
	W: 36.8e-3, A: 3.0e-4, Q: 1.62e-9, Ovh: 1.7e-3, S: 0.45e-3, K: 1.0e-7,
	Overhead: 30e-3,
	Groups:   hybrid,
}

// L40SPlain16 is the same compute and the same bytes of cache with vLLM's usual
// 16-token blocks and attention in every layer: no recurrent state, thus no
// state pages and no S. It isolates what the page size does.
var L40SPlain16 = Profile{
	Name: "l40s-plain16", Model: "Qwen/Qwen3-32B",
	BlockSize: 16, Blocks: 170 * 784 / 16,
	MaxBatchedTokens: 2048, MaxSeqs: 256, MaxModelLen: 131072,
	W: 36.8e-3, A: 3.0e-4, Q: 1.62e-9, Ovh: 1.7e-3, K: 1.0e-7,
	Overhead: 30e-3,
}

// H100Qwen27B is the model of L40SQwen27B on one H100 SXM (80 GB, 3350 GB/s,
// 1979 TFLOPS FP8 and 989 BF16, dense), derived and not fitted: every constant
// keeps the efficiency it has on the L40S. So W, S and K shrink by 864/3350,
// A by 733/1979 and Q by 362/989; Ovh is time of the CPU and stays. Memory:
// 79.6 GiB*0.9 less 28.5 of weights and 4 of activations leaves 39 GiB, 815
// pages of 51.4 MB. Budget and sequences are vLLM's defaults for this size.
var H100Qwen27B = Profile{
	Name: "h100-qwen27b-fp8", Model: "Qwen/Qwen3.6-27B",
	BlockSize: 784, Blocks: 815, StateBlocks: 3,
	MaxBatchedTokens: 8192, MaxSeqs: 1024, MaxModelLen: 262144,
	W: 36.8e-3 * 864 / 3350, A: 3.0e-4 * 733 / 1979, Q: 1.62e-9 * 362 / 989, Ovh: 1.7e-3,
	S: 0.45e-3 * 864 / 3350, K: 1.0e-7 * 864 / 3350,
	Overhead: 30e-3,
	Groups:   hybrid,
}

// Profiles lists the built-in profiles.
func Profiles() []Profile { return []Profile{L40SQwen27B, L40SPlain16, H100Qwen27B} }

// Lookup finds a built-in profile by its name.
func Lookup(name string) (Profile, bool) {
	for _, p := range Profiles() {
		if p.Name == name {
			return p, true
		}
	}
	return Profile{}, false
}

// MaxLen is the longest sequence, prompt and output together, that an engine
// of this profile accepts: MaxModelLen, or less where the pool is smaller.
func (p Profile) MaxLen() int {
	fits := (p.Blocks - p.StateBlocks) * p.BlockSize
	if p.MaxModelLen > 0 && p.MaxModelLen < fits {
		return p.MaxModelLen
	}
	return fits
}
