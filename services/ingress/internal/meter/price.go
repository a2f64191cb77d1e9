package meter

import (
	"math"
	"math/bits"
	"strconv"
	"strings"
)

// Amount is money in units of 10⁻¹² of its currency, so that a token at a price
// per million with six decimals costs a whole number. It saturates.
type Amount int64

// Price is what a backend's tokens or time cost. All amounts are of one
// currency.
type Price struct {
	// Currency is an ISO 4217 code.
	Currency string
	// Version names these prices for ever: resource and digest.
	Version string
	// Tokens says that the prices per million tokens below hold.
	Tokens bool
	// Input, Cached and Output are for a million tokens each.
	Input, Cached, Output Amount
	// Hourly is for an hour of all devices of one worker.
	Hourly Amount
}

// Cost are the parts of a request's price.
type Cost struct {
	Input, Cached, Output, GPU Amount
}

// Total is the sum of the parts.
func (c *Cost) Total() Amount { return c.Input.plus(c.Cached).plus(c.Output).plus(c.GPU) }

// Cost of tokens; false if these prices have none for tokens, or the counts
// are not known.
func (p *Price) Cost(t *Tokens) (Cost, bool) {
	if p == nil || !p.Tokens || !t.Input.Known() && !t.Output.Known() {
		return Cost{}, false
	}
	return Cost{
		Input:  perMillion(p.Input, t.Uncached().N),
		Cached: perMillion(p.Cached, min(t.Cached.N, t.Input.N)),
		Output: perMillion(p.Output, t.Output.N),
	}, true
}

func (a Amount) plus(b Amount) Amount {
	if s := a + b; s >= a && b >= 0 {
		return s
	}
	return math.MaxInt64
}

// perMillion is price·n/10⁶, rounded half up.
func perMillion(price Amount, n int64) Amount { return scale(price, n, 1_000_000) }

// scale is a·n/d, rounded half up; all are positive. It saturates.
func scale(a Amount, n, d int64) Amount {
	if a <= 0 || n <= 0 {
		return 0
	}
	hi, lo := bits.Mul64(uint64(a), uint64(n))
	lo, carry := bits.Add64(lo, uint64(d)/2, 0)
	hi += carry
	if hi >= uint64(d) {
		return math.MaxInt64
	}
	q, _ := bits.Div64(hi, lo, uint64(d))
	return Amount(min(q, math.MaxInt64))
}

const decimals = 12

// ParseAmount reads a decimal such as 1.10. Digits beyond the twelfth decimal
// and numbers that do not fit are refused.
func ParseAmount(s string) (Amount, bool) {
	whole, fraction, _ := strings.Cut(s, ".")
	if whole == "" || len(fraction) > decimals {
		return 0, false
	}
	n, err := strconv.ParseUint(whole+fraction+strings.Repeat("0", decimals-len(fraction)), 10, 63)
	return Amount(n), err == nil
}

// String is the decimal without trailing zeros.
func (a Amount) String() string { return string(a.Append(nil)) }

// Append appends String.
func (a Amount) Append(dst []byte) []byte {
	if a < 0 {
		dst = append(dst, '-')
		a = max(-a, 0)
	}
	const unit = 1_000_000_000_000
	dst = strconv.AppendInt(dst, int64(a/unit), 10)
	if a %= unit; a == 0 {
		return dst
	}
	digits := strconv.FormatInt(int64(a)+unit, 10)[1:]
	return append(append(dst, '.'), strings.TrimRight(digits, "0")...)
}
