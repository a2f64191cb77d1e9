package virtual

import (
	"testing"

	"github.com/kinference/kinference/internal/bench/workload"
)

// Every case runs to the end; the peers and the other objectives take turns.
func TestCases(t *testing.T) {
	in := map[string]bool{}
	for _, g := range Groups() {
		for _, name := range g.Cases {
			if _, err := LookupCase(name); err != nil || in[name] {
				t.Errorf("case %q of section %q: error %v, twice %v", name, g.Title, err, in[name])
			}
			in[name] = true
		}
	}
	turns := append([]string{K2TTFT, K2Throughput}, Peers...)
	for i, c := range Cases() {
		if !in[c.Name] {
			t.Errorf("%s is in no section", c.Name)
		}
		if c.Mooncake != nil {
			c.Mooncake = &Mooncake{12, 1}
		}
		c.Scenario.Warm, c.Scenario.Count = 4, 16
		c.Scenario.Streams = min(c.Scenario.Streams, 6)
		for _, policy := range []string{Kinference, Oracle, turns[i%len(turns)]} {
			run, err := c.Run(policy, 3)
			if err != nil {
				t.Fatalf("%s %s: %v", c.Name, policy, err)
			}
			want := 20
			if c.Mooncake != nil {
				want = 12
			}
			load := 0
			for _, s := range run.Samples {
				if s.Tenant == 0 {
					load++
				}
				if s.TTFT <= 0 || s.E2E < s.TTFT || s.Cached >= s.Prompt || s.Alone < 0 {
					t.Errorf("%s %s: sample %+v", c.Name, policy, s)
				}
			}
			if load != want {
				t.Errorf("%s %s: %d requests ended, want %d", c.Name, policy, load, want)
			}
		}
	}
	if _, err := LookupCase("S99"); err == nil {
		t.Error("no error for an unknown case")
	}
}

func TestFingerprint(t *testing.T) {
	c, err := LookupCase("MC")
	if err != nil {
		t.Fatal(err)
	}
	again, _ := LookupCase("MC")
	other := again
	other.Mooncake = &Mooncake{900, 7}
	if c.Fingerprint() != again.Fingerprint() || c.Fingerprint() == other.Fingerprint() {
		t.Error("a fingerprint must follow what the case is")
	}
}

// The oracle's workers hold everything, so that only what is new is computed.
func TestOracle(t *testing.T) {
	c, err := LookupCase("S1")
	if err != nil {
		t.Fatal(err)
	}
	run, err := c.Run(Oracle, workload.TuningSeed(0))
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range run.Samples {
		if want := c.Scenario.PrefixTokens / 784 * 784; s.Cached < want {
			t.Fatalf("request %d: %d tokens cached, want at least %d", s.Index, s.Cached, want)
		}
	}
}

// A wiped cache and wrong predictions must show, or the rows that are about them
// mean nothing.
func TestFaultsShow(t *testing.T) {
	hits := func(name string) (hit, off float64) {
		c, err := LookupCase(name)
		if err != nil {
			t.Fatal(err)
		}
		c.Scenario.Warm, c.Scenario.Count = 60, 120
		run, err := c.Run(Kinference, workload.TuningSeed(0))
		if err != nil {
			t.Fatal(err)
		}
		s := run.Summarise()
		return s.Hit, s.OffShare
	}
	hit, _ := hits("S1m")
	wiped, _ := hits("S1m wipe")
	_, off := hits("S2m")
	_, wrong := hits("S2m err")
	if wiped >= hit || wrong < 2*off {
		t.Errorf("hits %.3f, with a wiped cache %.3f; predictions off by %.3f, with errors by %.3f", hit, wiped, off, wrong)
	}
}
