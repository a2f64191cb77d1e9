// Package workload defines the benchmark's scenarios: who sends which prompt
// when, and what the model answers.
//
// Virtual-time runs, wall-clock runs and the demo take their requests from
// here, so that they measure the same thing. Everything is derived from a
// seed: equal seeds give every policy the same prompts, the same answers and,
// in open loops, the same arrivals (paired runs). The closed-loop semantics
// are those of GuideLLM's concurrent profile with synthetic text: a stream
// sends its next request as soon as the previous one has ended, the shared
// prefix is picked at random per conversation, and the next turn of a
// conversation goes out at once, before any new conversation, with the
// generated answer in its prompt.
//
// Open loops (Scenario.Rate, and the light tenants beside a flood) are Poisson
// processes whose times are drawn from the same seed.
//
// A Generator is safe for concurrent use; a Loop and an Arrivals belong to one
// goroutine.
package workload

import (
	"math"
	"math/rand/v2"
	"slices"
	"sync"
)

// Scenario describes a closed-loop load. All lengths are in tokens.
type Scenario struct {
	// Name is short and stable: it names rows of results.
	Name  string
	Title string
	// Prefixes is the number of shared prefixes, each PrefixTokens long; each
	// conversation starts with one of them, picked at random. 0: none.
	Prefixes, PrefixTokens int
	// FirstTokens is what a conversation's first prompt holds after its prefix;
	// every later turn of Turns adds the answer and TurnTokens.
	FirstTokens, Turns, TurnTokens int
	// OutputTokens is the length of each answer.
	OutputTokens int
	// Streams is the number of requests in flight at any time.
	Streams int
	// Ramp is the time in seconds within which the streams start, each at a
	// random moment: GuideLLM's --rampup. Streams that start together, with
	// prompts and answers of one length, would stay in lockstep for ever, which
	// flatters round robin and hurts everyone's tail.
	Ramp float64
	// Warm requests fill caches first and are not measured; Count are.
	Warm, Count int

	// PrefixSpread makes the prefixes' lengths differ from PrefixTokens by up to
	// this share of it.
	PrefixSpread float64
	// Zipf is the exponent of the prefixes' popularity; 0: all alike.
	Zipf float64
	// LongShare of the conversations have no shared prefix and a prompt of
	// LongTokens.
	LongShare  float64
	LongTokens int
	// Sigma draws the length of each answer from a lognormal distribution with
	// this deviation of the logarithm and the mean OutputTokens; 0: all equal.
	Sigma float64
	// Rate makes the load an open one: conversations of one turn arrive as a
	// Poisson process at so many a second. Streams and Ramp do not matter then.
	Rate float64
	// Victims tenants with a prefix of their own send one-turn requests beside
	// the streams, each as a Poisson process of VictimRate a second.
	Victims    int
	VictimRate float64
}

// WithStreams is s at another load. More streams need more requests: until the
// queues are full, and until every stream has ended a conversation, since
// early turns are short and would look like a faster fleet.
func (s Scenario) WithStreams(streams int) Scenario {
	s.Streams = streams
	s.Warm = max(s.Warm, streams*max(2, s.Turns))
	s.Count = max(s.Count, streams*max(4, s.Turns))
	return s
}

// MaxPrompt is the length of the scenario's longest prompt where all answers
// are of one length.
func (s Scenario) MaxPrompt() int {
	return s.PrefixTokens + s.FirstTokens + (s.Turns-1)*(s.TurnTokens+s.OutputTokens)
}

// TuningSeed and HeldOutSeed keep two ranges apart: figures are published from
// held-out seeds, which no parameter of a policy was ever chosen with.
func TuningSeed(i int) uint64 { return 1000 + uint64(i) }

// HeldOutSeed is the i-th seed of published runs.
func HeldOutSeed(i int) uint64 { return 70001 + 13*uint64(i) }

// Turn is one exchange of a conversation.
type Turn struct {
	// User is what this turn adds to the prompt.
	User []uint32
	// Output is what the model will answer.
	Output []uint32
}

// Conversation is a sequence of turns behind a shared prefix.
type Conversation struct {
	// Prefix is shared with other conversations: not to be modified.
	Prefix []uint32
	Turns  []Turn
}

// Generator makes a scenario's conversations.
type Generator struct {
	Scenario Scenario
	seed     uint64
	vocab    []uint32
	// popularity is the running sum of the prefixes' shares; nil: all alike.
	popularity []float64

	mu       sync.Mutex
	prefixes [][]uint32
}

// New returns the scenario's content for one seed. Token ids are drawn from
// vocab, or, when it is nil, from a range that every large model has.
func New(s Scenario, seed uint64, vocab []uint32) *Generator {
	g := &Generator{Scenario: s, seed: seed, vocab: vocab, prefixes: make([][]uint32, s.Prefixes+s.Victims)}
	if s.Zipf > 0 {
		sum := 0.0
		for i := range s.Prefixes {
			sum += math.Pow(float64(i+1), -s.Zipf)
			g.popularity = append(g.popularity, sum)
		}
	}
	return g
}

// Kinds of random streams of one seed, so that drawing more of one does not
// move another.
const (
	streamPrefix = iota + 1
	streamConversation
	streamStart
	streamArrival
	streamVictim
)

func (g *Generator) rand(kind, index int) *rand.Rand {
	return rand.New(rand.NewPCG(g.seed, uint64(kind)<<56^uint64(index)))
}

func (g *Generator) tokens(r *rand.Rand, n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		if g.vocab != nil {
			out[i] = g.vocab[r.IntN(len(g.vocab))]
		} else {
			out[i] = 1000 + r.Uint32N(100000)
		}
	}
	return out
}

// Conversation is the i-th conversation of this seed, whatever was asked for
// before.
func (g *Generator) Conversation(i int) Conversation {
	sc := g.Scenario
	r := g.rand(streamConversation, i)
	var c Conversation
	first := sc.FirstTokens
	switch {
	case sc.LongShare > 0 && r.Float64() < sc.LongShare:
		first = sc.LongTokens
	case sc.Prefixes > 0:
		c.Prefix = g.Prefix(g.pick(r))
	}
	for turn := range max(sc.Turns, 1) {
		n := first
		if turn > 0 {
			n = sc.TurnTokens
		}
		out := g.outputTokens(r)
		c.Turns = append(c.Turns, Turn{User: g.tokens(r, n), Output: g.tokens(r, out)})
	}
	return c
}

// pick draws a shared prefix by popularity.
func (g *Generator) pick(r *rand.Rand) int {
	if g.popularity == nil {
		return r.IntN(g.Scenario.Prefixes)
	}
	i, _ := slices.BinarySearch(g.popularity, r.Float64()*g.popularity[len(g.popularity)-1])
	return min(i, g.Scenario.Prefixes-1)
}

// maxOutput bounds drawn answers, in means.
const maxOutput = 8

func (g *Generator) outputTokens(r *rand.Rand) int {
	mean, sigma := float64(g.Scenario.OutputTokens), g.Scenario.Sigma
	if sigma == 0 {
		return g.Scenario.OutputTokens
	}
	n := math.Round(mean * math.Exp(sigma*r.NormFloat64()-sigma*sigma/2))
	return int(min(max(n, 1), maxOutput*mean))
}

// Prefix is the i-th shared prefix, or beyond Prefixes that of a light tenant. It
// must not be modified.
func (g *Generator) Prefix(i int) []uint32 {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.prefixes[i] == nil {
		r, n := g.rand(streamPrefix, i), g.Scenario.PrefixTokens
		if spread := g.Scenario.PrefixSpread; spread > 0 {
			n = int(float64(n) * (1 + spread*(2*r.Float64()-1)))
		}
		g.prefixes[i] = g.tokens(r, n)
	}
	return g.prefixes[i]
}

// Request is one request of a closed loop.
type Request struct {
	// Index counts requests in the order in which they are sent, from 0.
	Index  int
	Stream int
	// Conversation and Turn say where the request belongs.
	Conversation, Turn int
	// Tenant is 0 for those who make the load, else a victim's number from 1.
	Tenant int
	// Prefix, user turns and answers so far, in prompt order: user texts at even
	// places (the first one includes the shared prefix), answers at odd ones.
	Parts [][]uint32
	// Prompt is Parts joined. Neither may be modified.
	Prompt []uint32
	// Output is the answer that the model will give.
	Output []uint32
	// Measured tells whether the request counts: not one of the warm-up.
	Measured bool
}

// Loop hands out the requests of a closed loop.
type Loop struct {
	gen     *Generator
	next    int // index of the next request
	started int // conversations taken so far
	streams []stream
}

// stream is where one stream stands in its conversation.
type stream struct {
	conversation Conversation
	index        int
	turn         int // next turn to send
	parts        [][]uint32
	prompt       []uint32
}

// Loop starts the scenario from its first request.
func (g *Generator) Loop() *Loop {
	return &Loop{gen: g, streams: make([]stream, max(g.Scenario.Streams, 1))}
}

// Start is when a stream sends its first request, in seconds.
func (l *Loop) Start(streamIndex int) float64 {
	return l.gen.rand(streamStart, streamIndex).Float64() * l.gen.Scenario.Ramp
}

// Next is the request that a stream sends now: the next turn of its
// conversation if it has one, else the first of a new conversation. It reports
// false when the scenario's requests are spent.
func (l *Loop) Next(streamIndex int) (*Request, bool) {
	sc := l.gen.Scenario
	if l.next >= sc.Warm+sc.Count {
		return nil, false
	}
	s := &l.streams[streamIndex]
	if s.turn == len(s.conversation.Turns) {
		*s = stream{conversation: l.gen.Conversation(l.started), index: l.started}
		l.started++
		s.prompt = append(make([]uint32, 0, sc.MaxPrompt()+sc.OutputTokens), s.conversation.Prefix...)
	}
	turn := s.conversation.Turns[s.turn]
	s.prompt = append(s.prompt, turn.User...)
	// Requests share the conversation's memory, each up to its own length: what
	// is appended later lies behind it.
	prompt := slices.Clip(s.prompt)
	if s.turn == 0 {
		s.parts = append(s.parts, prompt)
	} else {
		s.parts = append(s.parts, turn.User)
	}
	r := &Request{
		Index: l.next, Stream: streamIndex, Conversation: s.index, Turn: s.turn,
		Parts: slices.Clone(s.parts), Prompt: prompt, Output: turn.Output,
		Measured: l.next >= sc.Warm,
	}
	l.next++
	s.turn++
	// What follows in this conversation has the planned answer in its prompt,
	// unless Answered tells another one.
	s.parts = append(s.parts, turn.Output)
	s.prompt = append(s.prompt, turn.Output...)
	return r, true
}

// Answered replaces the planned answer to the stream's last request in the
// prompts of the turns that follow: over a real connection the model says what
// it likes.
func (l *Loop) Answered(streamIndex int, output []uint32) {
	s := &l.streams[streamIndex]
	if len(s.parts) == 0 {
		return
	}
	last := len(s.parts) - 1
	s.prompt = append(s.prompt[:len(s.prompt)-len(s.parts[last])], output...)
	s.parts[last] = slices.Clone(output)
}
