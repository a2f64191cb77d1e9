package virtual

import (
	"testing"

	"github.com/kinference/kinference/internal/bench/stats"
)

// A fleet may be far faster than the prior of its class: a small model, an accelerator
// that nobody has named. Requests are held by predictions, so these must get there, or
// the line would keep the fleet idle that it is to protect.
func TestFleetFasterThanPrior(t *testing.T) {
	sc := scenario(t, "S0s").WithStreams(64)
	sc.OutputTokens, sc.Warm, sc.Count = 1, 600, 1200
	measure := func(policy string) stats.Summary {
		run, err := Run(sc, Options{Policy: policy, Seed: 1003, Speeds: []float64{40, 40, 40}})
		if err != nil {
			t.Fatal(err)
		}
		return run.Summarise()
	}
	k2, least := measure(Kinference), measure("leastrequests")
	t.Logf("TTFT %.3f/%.3f s and %.1f requests/s, by counts %.3f/%.3f and %.1f", k2.TTFT50, k2.TTFT99, k2.RPS, least.TTFT50, least.TTFT99, least.RPS)
	if k2.RPS < .97*least.RPS || k2.TTFT50 > 1.1*least.TTFT50 {
		t.Errorf("K2 holds a fast fleet back")
	}
}
