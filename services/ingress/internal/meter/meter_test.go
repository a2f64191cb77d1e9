package meter

import (
	"math"
	"testing"
	"time"
)

func TestAmount(t *testing.T) {
	for _, s := range []string{"0", "1", "15.01", "0.000000000001", "9223372.036854775807"} {
		if a, ok := ParseAmount(s); !ok || a.String() != s {
			t.Errorf("%s: got %s, %v", s, a, ok)
		}
	}
	for _, s := range []string{"", ".5", "-1", "+1", "1e3", "1.2.3", "0x1", " 1", "1.0000000000001", "9223372.036854775808", "999999999999"} {
		if a, ok := ParseAmount(s); ok {
			t.Errorf("%q was taken for %s", s, a)
		}
	}
	if got := Amount(-1_500_000_000_000).String(); got != "-1.5" {
		t.Errorf("got %s", got)
	}
}

// Costs are exact: tokens times the price of a million, in whole units of 10⁻¹².
func TestCost(t *testing.T) {
	price := func(s string) Amount {
		a, ok := ParseAmount(s)
		if !ok {
			t.Fatal(s)
		}
		return a
	}
	p := &Price{Tokens: true, Input: price("3"), Cached: price("0.3"), Output: price("15.000001")}
	for _, tt := range []struct {
		tokens Tokens
		want   string
	}{
		{Tokens{Input: Report(1_000_000), Cached: Report(1_000_000), Output: Report(0)}, "0.3"},
		{Tokens{Input: Report(1), Output: Report(1)}, "0.000018000001"},
		{Tokens{Input: Report(10), Cached: Report(4), Output: Report(2)}, "0.000049200002"},
		{Tokens{Input: Report(3), Cached: Report(9), Output: Report(0)}, "0.0000009"}, // never below nothing
		{Tokens{Output: Report(1_000_000)}, "15.000001"},
		{Tokens{Input: Report(1<<32 - 1), Output: Report(1<<32 - 1)}, "77309.415604967295"},
	} {
		c, ok := p.Cost(&tt.tokens)
		if got := c.Total().String(); !ok || got != tt.want {
			t.Errorf("%+v: got %s, want %s", tt.tokens, got, tt.want)
		}
	}
	if _, ok := p.Cost(&Tokens{}); ok {
		t.Error("unknown tokens have a cost")
	}
	if _, ok := (*Price)(nil).Cost(&Tokens{Input: Report(1)}); ok {
		t.Error("no price has a cost")
	}
	dear := &Price{Tokens: true, Input: math.MaxInt64, Output: math.MaxInt64}
	if c, _ := dear.Cost(&Tokens{Input: Report(1 << 40), Output: Report(1 << 40)}); c.Total() != math.MaxInt64 {
		t.Errorf("too much is %d", c.Total())
	}
	if got := scale(1, 1, 2); got != 1 { // half up
		t.Errorf("got %d", got)
	}
}

func TestTimes(t *testing.T) {
	at := func(ms int) time.Time { return time.UnixMilli(1_000_000 + int64(ms)) }
	r := Record{Received: at(0), Sent: at(5), FirstContent: at(100), FirstWritten: at(110), LastContent: at(500), Ended: at(510), Chunks: 5, Tokens: Tokens{Output: Report(11)}}
	if d, ok := r.TTFT(); !ok || d != 110*time.Millisecond {
		t.Errorf("TTFT %v", d)
	}
	if v, ok := r.TPOT(); !ok || v != 0.04 {
		t.Errorf("TPOT %v", v)
	}
	if v, ok := r.ITL(); !ok || v != 0.1 {
		t.Errorf("ITL %v", v)
	}
	if r.E2E() != 510*time.Millisecond {
		t.Errorf("E2E %v", r.E2E())
	}
	for name, r := range map[string]Record{"nothing": {}, "one token": {FirstContent: at(1), LastContent: at(1), Chunks: 1, Tokens: Tokens{Output: Report(1)}}} {
		if _, ok := r.TPOT(); ok {
			t.Errorf("%s has a TPOT", name)
		}
		if _, ok := r.ITL(); ok {
			t.Errorf("%s has an ITL", name)
		}
	}
}

func TestCounts(t *testing.T) {
	if c := Report(0); !c.Known() || c.Or(5) != c {
		t.Error("an explicit zero is unknown")
	}
	if c := Report(-1).Or(-1); c.Known() {
		t.Error("nothing became a count")
	}
	if c := (Count{}).Or(5); c != (Count{5, Estimated}) {
		t.Errorf("got %v", c)
	}
	if Report(3).Cut() != (Count{3, Least}) || (Count{3, Estimated}).Cut() != (Count{3, Estimated}) || !Report(0).Cut().Known() {
		t.Error("a count that was cut off")
	}
	u := Tokens{Input: Report(10), Cached: Count{4, Estimated}}
	if got := u.Uncached(); got != (Count{6, Estimated}) {
		t.Errorf("got %v", got)
	}
}

func TestNewID(t *testing.T) {
	seen := map[string]bool{}
	before := NewID()
	for range 1000 {
		id := NewID()
		if len(id) != 36 || id[14] != '7' || seen[id] || id[:8] < before[:8] {
			t.Fatalf("got %s", id)
		}
		seen[id] = true
	}
}
