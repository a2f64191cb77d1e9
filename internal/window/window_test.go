package window_test

import (
	"math"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/window"
)

func TestWindow(t *testing.T) {
	start := time.Unix(1_700_000_000, 123)
	at := func(s float64) time.Time { return start.Add(time.Duration(s * float64(time.Second))) }
	type sample struct{ at, running float64 }
	every := func(step, from, to, running float64) (out []sample) {
		for t := from; t < to; t += step {
			out = append(out, sample{t, running})
		}
		return out
	}
	join := func(parts ...[]sample) (out []sample) {
		for _, p := range parts {
			out = append(out, p...)
		}
		return out
	}
	tests := []struct {
		name    string
		samples []sample
		want    float64
	}{
		{"one", []sample{{0, 7}}, 7},
		{"weighted by time", []sample{{0, 10}, {0.25, 0}, {1, 0}}, 2.5},
		{"steady", every(.25, 0, 60, 4), 4},
		{"half and half", join(every(.25, 0, 15, 10), every(.25, 15, 30.1, 0)), 5},
		{"only the last 30 s", join(every(.25, 0, 60, 100), every(.25, 60, 90.6, 1)), 1},
		{"ten times as many samples", join(every(.025, 0, 15, 10), every(.025, 15, 30.01, 0)), 5},
		{"a hole does not count", []sample{{0, 10}, {20, 0}, {22, 0}}, 5},
		{"after a long hole", []sample{{0, 10}, {1000, 3}}, 3},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := window.New(30*time.Second, 2*time.Second)
			for _, s := range tt.samples {
				w.Add(at(s.at), window.Load{Running: s.running})
			}
			// Half a second of 30 is the resolution.
			if got := w.Mean(30 * time.Second).Running; math.Abs(got-tt.want) > max(tt.want*.02, .01) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

// A long window gives the means of shorter times, too.
func TestShorterMean(t *testing.T) {
	w, start := window.New(10*time.Minute, 2*time.Second), time.Unix(1_700_000_000, 0)
	for s := range 600 {
		w.Add(start.Add(time.Duration(s)*time.Second), window.Load{Waiting: float64(s / 540)}) // 1 in the last minute
	}
	for over, want := range map[time.Duration]float64{time.Second: 1, 30 * time.Second: 1, 2 * time.Minute: .5, 10 * time.Minute: .1, time.Hour: .1} {
		if got := w.Mean(over).Waiting; math.Abs(got-want) > .02 {
			t.Errorf("mean of %v is %v, want %v", over, got, want)
		}
	}
	if l, at := w.Last(); l.Waiting != 1 || !at.Equal(start.Add(599*time.Second)) {
		t.Errorf("last %v at %v", l, at)
	}
}
