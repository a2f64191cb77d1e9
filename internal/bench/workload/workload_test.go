package workload

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// small is a scenario that has everything: prefixes, turns, several streams.
var small = Scenario{Name: "t", Prefixes: 2, PrefixTokens: 10, FirstTokens: 4, Turns: 3, TurnTokens: 2, OutputTokens: 3, Streams: 2, Ramp: 4, Warm: 2, Count: 8}

func drain(l *Loop, order []int) []*Request {
	var out []*Request
	for i := 0; ; i++ {
		r, ok := l.Next(order[i%len(order)])
		if !ok {
			return out
		}
		out = append(out, r)
	}
}

func TestLoopIsPaired(t *testing.T) {
	a := drain(New(small, 7, nil).Loop(), []int{0, 1})
	b := drain(New(small, 7, nil).Loop(), []int{0, 1})
	if diff := cmp.Diff(a, b); diff != "" {
		t.Errorf("equal seeds differ:\n%s", diff)
	}
	if len(a) != small.Warm+small.Count {
		t.Errorf("%d requests, want %d", len(a), small.Warm+small.Count)
	}
	// Another order of completion, as another policy causes it, changes which
	// stream takes a conversation, but not what the conversation holds.
	c := drain(New(small, 7, nil).Loop(), []int{0, 1, 1})
	byTurn := map[[2]int][]uint32{}
	for _, r := range a {
		byTurn[[2]int{r.Conversation, r.Turn}] = r.Prompt
	}
	for _, r := range c {
		if want, ok := byTurn[[2]int{r.Conversation, r.Turn}]; ok && !slices.Equal(want, r.Prompt) {
			t.Errorf("conversation %d turn %d differs between orders", r.Conversation, r.Turn)
		}
	}
	if other := drain(New(small, 8, nil).Loop(), []int{0, 1}); slices.Equal(other[0].Prompt, a[0].Prompt) {
		t.Error("two seeds give the same prompt")
	}
}

func TestLoopTurns(t *testing.T) {
	l := New(small, 1, nil).Loop()
	var prev *Request
	for turn := range small.Turns {
		r, _ := l.Next(0)
		if r.Turn != turn || r.Conversation != 0 {
			t.Fatalf("got conversation %d turn %d, want 0, %d", r.Conversation, r.Turn, turn)
		}
		if got := slices.Concat(r.Parts...); !slices.Equal(got, r.Prompt) {
			t.Errorf("turn %d: parts do not join to the prompt", turn)
		}
		if prev != nil && !slices.Equal(r.Prompt[:len(prev.Prompt)+len(prev.Output)], slices.Concat(prev.Prompt, prev.Output)) {
			t.Errorf("turn %d does not start with the previous prompt and answer", turn)
		}
		prev = r
	}
	if got := len(prev.Prompt); got != small.MaxPrompt() {
		t.Errorf("last prompt has %d tokens, MaxPrompt says %d", got, small.MaxPrompt())
	}
	if r, _ := l.Next(0); r.Turn != 0 || r.Conversation != 1 {
		t.Errorf("got conversation %d turn %d after the last turn, want 1, 0", r.Conversation, r.Turn)
	}
}

func TestLoopAnswered(t *testing.T) {
	l := New(small, 1, nil).Loop()
	first, _ := l.Next(0)
	l.Answered(0, []uint32{5, 6})
	second, _ := l.Next(0)
	want := slices.Concat(first.Prompt, []uint32{5, 6})
	if !slices.Equal(second.Prompt[:len(want)], want) || !slices.Equal(slices.Concat(second.Parts...), second.Prompt) {
		t.Error("the given answer is not part of the next prompt")
	}
	l.Answered(1, []uint32{1}) // a stream that has sent nothing: ignored
}

func TestStart(t *testing.T) {
	l := New(small, 1, nil).Loop()
	a, b := l.Start(0), l.Start(1)
	if a == b || min(a, b) < 0 || max(a, b) >= small.Ramp {
		t.Errorf("streams start at %v and %v, want different times within %v s", a, b, small.Ramp)
	}
}

func TestPrefixes(t *testing.T) {
	g := New(small, 3, nil)
	seen := map[uint32]int{}
	for i := range 100 {
		seen[g.Conversation(i).Prefix[0]]++
	}
	if len(seen) != 2 {
		t.Fatalf("%d prefixes, want 2", len(seen))
	}
	for _, n := range seen {
		if n < 30 {
			t.Errorf("a prefix was picked %d times of 100, want about 50", n)
		}
	}
}

func TestMeasured(t *testing.T) {
	for _, r := range drain(New(small, 1, nil).Loop(), []int{0, 1}) {
		if r.Measured != (r.Index >= small.Warm) {
			t.Errorf("request %d: measured %v", r.Index, r.Measured)
		}
	}
}

func TestVocab(t *testing.T) {
	vocab := []uint32{3, 9}
	for _, v := range New(small, 1, vocab).Conversation(0).Turns[0].User {
		if !slices.Contains(vocab, v) {
			t.Errorf("token %d is not in the vocabulary", v)
		}
	}
}

func TestLookup(t *testing.T) {
	names := map[string]bool{}
	for _, s := range Scenarios() {
		if names[s.Name] {
			t.Errorf("two scenarios are named %s", s.Name)
		}
		names[s.Name] = true
		if got, err := Lookup(s.Name); err != nil || got != s {
			t.Errorf("Lookup(%q) = %v, %v", s.Name, got, err)
		}
	}
	if _, err := Lookup("nope"); err == nil {
		t.Error("no error for an unknown scenario")
	}
	for _, c := range []struct{ turns, warm, count int }{{1, 40, 80}, {12, 240, 240}} {
		if s := (Scenario{Turns: c.turns, Warm: 1, Count: 10}).WithStreams(20); s.Streams != 20 || s.Warm != c.warm || s.Count != c.count {
			t.Errorf("WithStreams(20) with %d turns = %+v", c.turns, s)
		}
	}
}

func TestSeedsAreApart(t *testing.T) {
	for i := range 1000 {
		if TuningSeed(i) >= HeldOutSeed(0) {
			t.Fatal("tuning seeds reach the held-out ones")
		}
	}
}
