package schedule

import "math/rand/v2"

type k2Policy struct{}

func (k2Policy) Name() string { return K2 }

func (k2Policy) Rank(order []int, r *Request, e []Estimate, rng *rand.Rand) {
	predictedTTFTPolicy{}.Rank(order, r, e, rng)
}
