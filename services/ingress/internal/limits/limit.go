// Package limits tells what a request must be charged for, and what to tell its
// client about it.
//
// Ingress compiles the limits of the catalog into a Table once per version.
// For each request the table lists the charges: every limit of every level of
// the caller's hierarchy, and those of policies that select the request; the
// limiter takes all of them at once or none. Before the answer is there their
// amounts are estimates (Learner), afterwards the same limits are settled with
// what was used. Amounts are integers, rounded up.
//
// Nothing here does I/O or reads a clock. Tables and limits do not change and
// may be used by any number of goroutines; so may a Learner.
package limits

import (
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"time"

	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/meter"
)

// Count is what a limit counts.
type Count uint8

// The counts.
const (
	Requests     Count = iota
	Concurrency        // requests at the same time
	InputTokens        // computed ones
	CachedTokens       // those from a prefix cache
	OutputTokens
	TotalTokens // weighed
	Cost
	GPUTime
)

// Tokens reports whether tokens are counted.
func (c Count) Tokens() bool { return InputTokens <= c && c <= TotalTokens }

// MaxUnits bounds capacities and amounts: sums and products with small numbers
// stay exact in the doubles of Lua.
const MaxUnits = 1 << 50

// Limit is a compiled limit of one tenant or policy. Amounts are in units, of
// which Scale make one token, request, device second or piece of money.
type Limit struct {
	// Name of the limit. Owner is its tenant, or with Policy its policy, as
	// namespace/name.
	Name, Owner string
	Policy      bool
	Count       Count
	Capacity    int64
	Scale       int64
	// Window refills Capacity continuously; Burst is the time whose grant may be
	// used at once. 0 for Concurrency and with a Calendar.
	Window, Burst time.Duration
	// Calendar grants Capacity anew with each period; nil: by Window.
	Calendar *routerv1.Calendar
	// Currency of Cost.
	Currency      string
	OnUnavailable routerv1.OnUnavailable
	// Shadow limits count, and deny nothing.
	Shadow bool

	perTenant, perUser, perKey, perModel bool

	prefix  string            // of bucket keys
	single  *limiterv1.Bucket // the only one, if there is only one
	weights [3]int64          // units of a computed, a cached and an output token
}

// Bucket is the most that can be used at once: what Burst grants.
func (l *Limit) Bucket() int64 {
	if l.Window <= 0 || l.Burst == l.Window {
		return l.Capacity
	}
	return mulDiv(l.Capacity, int64(l.Burst), int64(l.Window), 0)
}

// Budget reports whether it is used up for so long that trying again is of no
// use: money, and what the calendar grants.
func (l *Limit) Budget() bool { return l.Calendar != nil || l.Count == Cost }

// Compile makes a Limit of one in the catalog. The error says what no admitted
// resource has.
func Compile(owner string, policy bool, in *routerv1.Limit) (*Limit, error) {
	l := &Limit{
		Name: in.GetName(), Owner: owner, Policy: policy, Scale: 1, OnUnavailable: in.GetOnUnavailable(), Shadow: in.GetShadow(),
		Window: in.GetWindow().AsDuration(), Burst: in.GetBurst().AsDuration(), Calendar: in.GetCalendar(),
	}
	if err := l.quantity(in); err != nil {
		return nil, fmt.Errorf("limit %s of %s: %w", l.Name, owner, err)
	}
	if l.Burst <= 0 {
		l.Burst = l.Window
	}
	if l.Count != Concurrency && (l.Window > 0) == (l.Calendar != nil) {
		return nil, fmt.Errorf("limit %s of %s: wants a window or a calendar", l.Name, owner)
	}
	for _, s := range in.GetPer() {
		switch s {
		case routerv1.LimitScope_LIMIT_SCOPE_USER:
			l.perUser = true
		case routerv1.LimitScope_LIMIT_SCOPE_KEY:
			l.perKey = true
		case routerv1.LimitScope_LIMIT_SCOPE_MODEL:
			l.perModel = true
		default:
			l.perTenant = true
		}
	}
	l.settle()
	return l, nil
}

// settle makes what follows from the rest.
func (l *Limit) settle() {
	l.prefix = l.Owner + "/" + l.Name
	if l.Policy {
		l.prefix = "policy:" + l.prefix
	}
	if l.Scale > 1 { // another unit is another count
		l.prefix += "/per=" + strconv.FormatInt(l.Scale, 10)
	}
	if !l.perUser && !l.perKey && !l.perModel && !(l.Policy && l.perTenant) {
		l.single = l.bucket(l.prefix)
	}
}

func (l *Limit) quantity(in *routerv1.Limit) error {
	n, finest := int64(0), int64(1)
	switch q := in.GetQuantity().(type) {
	case *routerv1.Limit_Requests:
		l.Count, n = Requests, q.Requests
	case *routerv1.Limit_Concurrency:
		l.Count, n = Concurrency, q.Concurrency
	case *routerv1.Limit_GpuSeconds:
		l.Count, n, finest = GPUTime, q.GpuSeconds, 1e6
	case *routerv1.Limit_Cost:
		// Picked so that a token at a usual price is not rounded much.
		l.Count, l.Currency = Cost, q.Cost.GetCurrency()
		l.Scale = 1e6
		l.Capacity = q.Cost.GetAmountMicros()
		if l.Capacity <= MaxUnits/1000 {
			l.Scale, l.Capacity = 1e9, l.Capacity*1000
		}
		l.Capacity = min(l.Capacity, MaxUnits)
		return l.positive()
	case *routerv1.Limit_Tokens:
		t := q.Tokens
		n = t.GetAmount()
		switch t.GetSort() {
		case routerv1.TokenSort_TOKEN_SORT_INPUT:
			l.Count = InputTokens
		case routerv1.TokenSort_TOKEN_SORT_CACHED_INPUT:
			l.Count = CachedTokens
		case routerv1.TokenSort_TOKEN_SORT_OUTPUT:
			l.Count = OutputTokens
		case routerv1.TokenSort_TOKEN_SORT_TOTAL:
			l.Count = TotalTokens
			l.weights = [3]int64{t.GetInputMilli(), t.GetCachedInputMilli(), t.GetOutputMilli()}
			for _, w := range l.weights {
				if w < 0 {
					return fmt.Errorf("weight %d is negative", w)
				}
				if w%1000 != 0 {
					finest = 1000
				}
			}
		default:
			return fmt.Errorf("counts tokens of sort %v", t.GetSort())
		}
	default:
		return fmt.Errorf("counts %T", q)
	}
	if l.Scale = finest; n > MaxUnits/finest {
		l.Scale = 1
	}
	if l.Count == TotalTokens {
		for i, w := range l.weights {
			l.weights[i] = mulDiv(w, l.Scale, 1000, 999)
		}
	}
	l.Capacity = min(n, MaxUnits/l.Scale) * l.Scale
	return l.positive()
}

func (l *Limit) positive() error {
	if l.Capacity < 0 {
		return fmt.Errorf("grants %d", l.Capacity)
	}
	return nil
}

// Use is what a request used, or may use.
type Use struct {
	// Input includes Cached.
	Input, Cached, Output int64
	// GPU is the time of one device.
	GPU time.Duration
	// Prices of what answered, or of all that may answer.
	Prices []*meter.Price
	// Estimated says that the request is still to be answered: whatever may be
	// cached counts for what is dearer.
	Estimated bool
}

// Amount is what the use counts in this limit, in units.
func (l *Limit) Amount(u *Use) int64 {
	input, cached, output := clamp(u.Input), min(clamp(u.Cached), clamp(u.Input)), clamp(u.Output)
	switch l.Count {
	case Requests, Concurrency:
		return 1
	case InputTokens:
		return input - cached
	case CachedTokens:
		if u.Estimated {
			return input
		}
		return cached
	case OutputTokens:
		return output
	case TotalTokens:
		w := l.weights
		if u.Estimated {
			w[0] = max(w[0], w[1])
		}
		return bounded(float64(input-cached)*float64(w[0])+float64(cached)*float64(w[1])+float64(output)*float64(w[2]), (input-cached)*w[0]+cached*w[1]+output*w[2])
	case GPUTime:
		return min(mulDiv(int64(max(u.GPU, 0)), l.Scale, int64(time.Second), int64(time.Second)-1), MaxUnits)
	case Cost:
		return l.cost(u)
	}
	return 0
}

// cost takes the dearest of the prices. What has no price in the limit's
// currency costs nothing: no rate between currencies is known here.
func (l *Limit) cost(u *Use) int64 {
	tokens := meter.Tokens{Input: meter.Report(clamp(u.Input)), Cached: meter.Report(min(clamp(u.Cached), clamp(u.Input))), Output: meter.Report(clamp(u.Output))}
	most := int64(0)
	for _, p := range u.Prices {
		if p == nil || p.Currency != l.Currency {
			continue
		}
		q := *p
		if u.Estimated {
			q.Input = max(q.Input, q.Cached)
		}
		total := int64(0)
		if c, ok := q.Cost(&tokens); ok {
			total = int64(c.Total())
		}
		if p.Hourly > 0 {
			total = min(total, math.MaxInt64/2) + min(mulDiv(int64(p.Hourly), int64(max(u.GPU, 0)), int64(time.Hour), 0), math.MaxInt64/2)
		}
		most = max(most, total)
	}
	const pico = 1e12
	return min(mulDiv(most, l.Scale, pico, pico-1), MaxUnits)
}

// maxTokens bounds every count of tokens.
const maxTokens = 1 << 31

func clamp(n int64) int64 { return max(0, min(n, maxTokens)) }

// bounded is exact unless about is too large.
func bounded(about float64, exact int64) int64 {
	if about > MaxUnits {
		return MaxUnits
	}
	return exact
}

// mulDiv is (a·b + add)/c, at most the largest int64; all are positive.
func mulDiv(a, b, c, add int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	lo, carry := bits.Add64(lo, uint64(add), 0)
	if hi += carry; hi >= uint64(c) {
		return math.MaxInt64
	}
	q, _ := bits.Div64(hi, lo, uint64(c))
	return int64(min(q, math.MaxInt64))
}
