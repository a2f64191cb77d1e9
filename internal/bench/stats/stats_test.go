package stats

import (
	"errors"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestQuantile(t *testing.T) {
	v := []float64{1, 2, 3, 4, 5}
	for q, want := range map[float64]float64{0: 1, .5: 3, .9: 4.6, 1: 5, .125: 1.5} {
		if got := Quantile(v, q); math.Abs(got-want) > 1e-12 {
			t.Errorf("Quantile(%v) = %v, want %v", q, got, want)
		}
	}
	if !math.IsNaN(Quantile(nil, .5)) || !math.IsNaN(Mean(nil)) || !math.IsNaN(Median(nil)) {
		t.Error("nothing must give NaN")
	}
	if got := StandardError([]float64{1, 2, 3}); math.Abs(got-1/math.Sqrt(3)) > 1e-12 || !math.IsNaN(StandardError([]float64{1})) {
		t.Errorf("StandardError = %v, want 1/√3, and NaN of one value", got)
	}
	unsorted := []float64{3, 1, 2}
	if got := Median(unsorted); got != 2 || unsorted[0] != 3 {
		t.Errorf("Median = %v, input now %v", got, unsorted)
	}
}

func TestSummarise(t *testing.T) {
	// One request per second is sent and takes two seconds; the first two warm up.
	var r Run
	for i := range 12 {
		r.Samples = append(r.Samples, Sample{Index: i, Measured: i >= 2, Sent: float64(i), TTFT: .5, E2E: 2, Prompt: 100, Cached: 25})
	}
	r.Samples[5].Failed = true
	r.Failure(errors.New("busy"))
	r.Failure(errors.New("later"))
	got := r.Summarise()
	want := Summary{TTFT50: .5, TTFT90: .5, TTFT99: .5, TTFTMean: .5, E2E50: 2, E2E99: 2, RPS: .9, Hit: .25, Requests: 10, Failed: 1, FirstError: "busy"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Summarise (-want +got):\n%s", diff)
	}
	if got := (Run{}).Summarise(); got.Requests != 0 || got.RPS != 0 || !math.IsNaN(got.TTFT50) {
		t.Errorf("empty run: %+v", got)
	}
	light := Run{Samples: []Sample{
		{Measured: true, TTFT: 2, E2E: 8, Alone: 4, Predicted: 3},
		{Measured: true, TTFT: 1, E2E: 4, Alone: 1, Predicted: 1.5, Tenant: 1},
		{Measured: true, TTFT: 3, E2E: 6, Alone: 1.5, Predicted: 3, Tenant: 2},
	}}.Summarise()
	// The tenants' shares are 1/2, 1/4 and 1/4.
	if light.Light50 != 2 || light.Off != .5 || light.OffShare != .5 || math.Abs(light.Jain-1/(3*.375)) > 1e-12 {
		t.Errorf("light tenants: %+v", light)
	}
	avg := Average([]Summary{{TTFT50: 1, RPS: 2, Requests: 3}, {TTFT50: 3, RPS: 4, Requests: 5, Failed: 1}})
	if avg.TTFT50 != 2 || avg.RPS != 3 || avg.Requests != 8 || avg.Failed != 1 {
		t.Errorf("Average = %+v", avg)
	}
}
