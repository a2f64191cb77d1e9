package limits_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/limits"
)

// Of all limits that speak of a request the strictest holds, whatever they count
// and whoever's they are; and nothing is refused that fits them all. What the
// package says is compared with sums by definition: of each limit, over the
// requests of its tenant and those below, by what it is per.
func TestStrictestLimitHolds(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	refused, granted := 0, 0
	for range 300 {
		chain := []string{"ns/leaf", "ns/middle", "ns/top"}
		all := [][]scope{{tenant}, {user}, {key}, {model}, {tenant, user}, {user, model}, {key, model}, {tenant, user, key, model}}
		var tenants []*routerv1.Tenant
		for _, name := range chain {
			m := &routerv1.Tenant{Name: name}
			for i := range r.IntN(4) {
				n := int64(r.IntN(400))
				m.Limits = append(m.Limits, minute(fmt.Sprint("l", i), []func(*routerv1.Limit){
					requests(n / 40), total(n), total(n, 1000, 500, 2000), tokens(routerv1.TokenSort_TOKEN_SORT_INPUT, n), tokens(routerv1.TokenSort_TOKEN_SORT_OUTPUT, n),
				}[r.IntN(5)], all[r.IntN(len(all))]...))
			}
			tenants = append(tenants, m)
		}
		tb := table(t, tenants)
		levels := map[string]int64{}   // by the package
		sums := map[string]float64{}   // by definition
		amount := map[string]float64{} // of the request at hand
		for range 40 {
			depth := r.IntN(3) // the caller is of the leaf, the middle or the top
			q := limits.Request{Tenants: chain[depth:], User: fmt.Sprint("u", r.IntN(3)), Key: fmt.Sprint("k", r.IntN(3)), Model: fmt.Sprint("m", r.IntN(2))}
			use := limits.Use{Input: int64(r.IntN(60)), Output: int64(r.IntN(60))}
			charges := tb.Charges(nil, &q)
			fits := true
			for i := range charges {
				l := charges[i].Limit
				fits = fits && levels[charges[i].Bucket.GetKey()]+l.Amount(&use) <= l.Bucket()
			}
			// The same by definition.
			clear(amount)
			should := true
			for _, owner := range tenants[depth:] {
				for _, l := range owner.GetLimits() {
					group := owner.GetName() + " " + l.GetName()
					for _, s := range l.GetPer() {
						switch s {
						case user:
							group += " " + q.User
						case key:
							group += " " + q.Key
						case model:
							group += " " + q.Model
						}
					}
					capacity, counts := float64(l.GetRequests()), 1.0
					if k := l.GetTokens(); k != nil {
						capacity = float64(k.GetAmount())
						switch k.GetSort() {
						case routerv1.TokenSort_TOKEN_SORT_INPUT:
							counts = float64(use.Input)
						case routerv1.TokenSort_TOKEN_SORT_OUTPUT:
							counts = float64(use.Output)
						default:
							counts = (float64(use.Input)*float64(k.GetInputMilli()) + float64(use.Output)*float64(k.GetOutputMilli())) / 1000
						}
					}
					amount[group] = counts
					should = should && sums[group]+counts <= capacity
				}
			}
			if fits != should {
				t.Fatalf("fits: %v, by definition %v; %v", fits, should, keys(charges))
			}
			if !fits {
				refused++
				continue
			}
			granted++
			for i := range charges {
				levels[charges[i].Bucket.GetKey()] += charges[i].Limit.Amount(&use)
			}
			for group, n := range amount {
				sums[group] += n
			}
		}
	}
	if refused < 1000 || granted < 1000 {
		t.Errorf("%d granted and %d refused: the test shows little", granted, refused)
	}
}

// Limits of one tenant never share a bucket, nor do two users of one limit.
func TestBucketsAreApart(t *testing.T) {
	tb := table(t, []*routerv1.Tenant{
		{Name: "ns/a", Limits: []*routerv1.Limit{minute("l", requests(1)), minute("l-user", requests(1), user), minute("m", requests(1), user, key)}},
		{Name: "ns/b", Limits: []*routerv1.Limit{minute("l", requests(1)), minute("l-user", requests(1), user), minute("m", requests(1), user, key)}},
	})
	var seen []string
	for _, q := range []limits.Request{{Tenants: []string{"ns/a"}, User: "u"}, {Tenants: []string{"ns/b"}, User: "u"}, {Tenants: []string{"ns/a"}, User: "v"}, {Tenants: []string{"ns/a"}, User: "u", Key: "v"}} {
		for _, c := range tb.Charges(nil, &q) {
			if c.Limit.Name == "l" || c.Limit.Name == "l-user" && q.Key != "" {
				continue
			}
			if k := c.Bucket.GetKey(); slices.Contains(seen, k) {
				t.Errorf("%s is used twice", k)
			} else {
				seen = append(seen, k)
			}
		}
	}
}
