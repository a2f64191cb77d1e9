package evaluate

import (
	"math"
	"math/rand/v2"
	"slices"
)

// Rate is a share with its 95 % interval.
type Rate struct {
	Hits, Of  int
	Low, High float64
}

// Value is the share; NaN of nothing.
func (r Rate) Value() float64 {
	if r.Of == 0 {
		return math.NaN()
	}
	return float64(r.Hits) / float64(r.Of)
}

// rate is a share with Wilson's interval.
func rate(hits, of int) Rate {
	r := Rate{Hits: hits, Of: of}
	if of == 0 {
		return r
	}
	const z = 1.96
	n, p := float64(of), float64(hits)/float64(of)
	mid := (p + z*z/(2*n)) / (1 + z*z/n)
	half := z / (1 + z*z/n) * math.Sqrt(p*(1-p)/n+z*z/(4*n*n))
	r.Low, r.High = max(mid-half, 0), min(mid+half, 1)
	return r
}

// example is a score and whether it is of a positive.
type example struct {
	score    float64
	positive bool
}

// auc is the area under the ROC curve, ties counted half.
func auc(list []example) float64 {
	s := slices.Clone(list)
	slices.SortFunc(s, func(a, b example) int {
		switch {
		case a.score < b.score:
			return -1
		case a.score > b.score:
			return 1
		}
		return 0
	})
	pos, neg, sum := 0, 0, 0.0
	for i := 0; i < len(s); {
		j, p := i, 0
		for j < len(s) && s[j].score == s[i].score {
			if s[j].positive {
				p++
			}
			j++
		}
		n := j - i - p
		sum += float64(p) * (float64(neg) + float64(n)/2)
		pos += p
		neg += n
		i = j
	}
	if pos == 0 || neg == 0 {
		return math.NaN()
	}
	return sum / float64(pos) / float64(neg)
}

// bootstrap is the 95 % interval of a statistic, by resampling with a fixed seed.
func bootstrap(list []example, f func([]example) float64) (low, high float64) {
	const rounds = 300
	r := rand.New(rand.NewPCG(1, 2))
	var out []float64
	sample := make([]example, len(list))
	for range rounds {
		for i := range sample {
			sample[i] = list[r.IntN(len(list))]
		}
		if v := f(sample); !math.IsNaN(v) {
			out = append(out, v)
		}
	}
	if len(out) == 0 {
		return math.NaN(), math.NaN()
	}
	slices.Sort(out)
	return out[len(out)*25/1000], out[len(out)*975/1000]
}
