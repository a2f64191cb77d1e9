package classify

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
)

// Calibration turns raw scores into the levels of complexity. A deployment may
// bring its own, made from its outcomes by kinfctl classifier calibrate.
type Calibration struct {
	// Raw and Probability are knots of a rising, piecewise linear function: the
	// probability that a small model fails at a raw score.
	Raw, Probability []float32
	// Low and High bound the levels: below Low a prompt is low, from High on high.
	Low, High float32
	// Band is the half width around Low and High within which the head abstains.
	Band float32
}

// maxKnots bounds a calibration.
const maxKnots = 1024

// Validate finds faults.
func (c *Calibration) Validate() error {
	if len(c.Raw) == 0 || len(c.Raw) != len(c.Probability) || len(c.Raw) > maxKnots {
		return errors.New("calibration: want as many raw scores as probabilities, from 1 to 1024")
	}
	for i := range c.Raw {
		if i > 0 && (c.Raw[i] <= c.Raw[i-1] || c.Probability[i] < c.Probability[i-1]) {
			return errors.New("calibration: raw scores must rise, and probabilities must not fall")
		}
		if p := c.Probability[i]; p < 0 || p > 1 || math.IsNaN(float64(c.Raw[i])) {
			return errors.New("calibration: a probability is not from 0 to 1")
		}
	}
	if !(c.Low > 0 && c.Low <= c.High && c.High < 1 && c.Band >= 0 && c.Band < 0.5) {
		return errors.New("calibration: want 0 < low ≤ high < 1, and a band below 0.5")
	}
	return nil
}

func (c *Calibration) at(raw float32) float32 {
	n := len(c.Raw)
	if n == 0 {
		return sigmoid(raw)
	}
	if raw <= c.Raw[0] {
		return c.Probability[0]
	}
	for i := 1; i < n; i++ {
		if raw <= c.Raw[i] {
			t := (raw - c.Raw[i-1]) / (c.Raw[i] - c.Raw[i-1])
			return c.Probability[i-1] + t*(c.Probability[i]-c.Probability[i-1])
		}
	}
	return c.Probability[n-1]
}

// Levels of complexity.
const (
	levelLow = iota
	levelMedium
	levelHigh
	levelUnsure
)

func (c *Calibration) level(p float32) int {
	near := func(t float32) bool { return p > t-c.Band && p < t+c.Band }
	switch {
	case near(c.Low) || near(c.High):
		return levelUnsure
	case p < c.Low:
		return levelLow
	case p >= c.High:
		return levelHigh
	}
	return levelMedium
}

// shortPrompt is a last turn that says little by itself: it is judged with what
// came before.
const shortPrompt = 12

// rawComplexity is the score before calibration.
func (m *models) rawComplexity(f *features) float32 {
	return m.head(headDifficulty, f) + m.heads.Demand*m.head(headDemand, f)
}

// subScores name what makes a prompt hard, each in 0..1, after the dimensions of
// NVIDIA's task and complexity classifier.
func (m *models) subScores(f *features, turns int, bytes int) map[string]float32 {
	per := func(n int32, full float32) float32 { return min(float32(n)/full, 1) }
	words := float32(max(f.words, 1))
	return map[string]float32{
		"reasoning":   per(f.reasoning, 8),
		"constraints": per(f.constraint+f.listing, 12),
		"domain":      per(f.domain, 4),
		"creativity":  per(f.creative, 4),
		"math":        min(float32(f.math+f.numbers)/words*2, 1),
		"code":        f.code(),
		"few_shots":   per(f.shots, 6),
		"context":     min(float32(math.Log1p(float64(bytes)/512))/6, 1),
		"output":      per(f.output, 5),
		"question":    per(f.questions+f.ask, 6),
		"turns":       min(float32(turns)/10, 1),
		"difficulty":  sigmoid(m.head(headDifficulty, f)),
		"demand":      sigmoid(m.head(headDemand, f)),
	}
}

// ReadCalibration reads a file that kinfctl classifier calibrate wrote.
func ReadCalibration(path string) (*Calibration, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read calibration: %w", err)
	}
	c := new(Calibration)
	if err := json.Unmarshal(raw, c); err != nil {
		return nil, fmt.Errorf("read calibration %s: %w", path, err)
	}
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("read calibration %s: %w", path, err)
	}
	return c, nil
}
