package store

import (
	"math"
	"math/bits"
	"time"
)

// Decay returns what is used of b at now, of what was used at then with credit,
// both in Unix microseconds. It loses no fraction: what has refilled of the next
// unit is the new credit. A clock that went back counts as one that stood still.
func (b *Bucket) Decay(used, credit, then, now int64) (u, c, t int64) {
	switch {
	case used == 0:
		return 0, 0, max(then, now)
	case now <= then:
		return used, credit, then
	case b.Rate == 0:
		return used, credit, now
	}
	period := uint64(b.Period.Microseconds())
	hi, lo := bits.Mul64(uint64(min(now-then, maxElapsed)), uint64(b.Rate))
	lo, carry := bits.Add64(lo, uint64(credit)%period, 0)
	hi += carry
	if hi >= period {
		return 0, 0, now
	}
	gain, rest := bits.Div64(hi, lo, period)
	if gain >= uint64(used) {
		return 0, 0, now
	}
	return used - int64(gain), int64(rest), now
}

// maxElapsed is some 35 years in microseconds.
const maxElapsed = 1 << 50

// Remaining of the bucket; negative in debt.
func (b *Bucket) Remaining(s State) int64 { return b.Capacity - s.Used }

// Refill is the time until n more units have refilled, rounded up; false: they
// never will.
func (b *Bucket) Refill(s State, n, now int64) (time.Duration, bool) {
	switch {
	case n <= 0:
		return 0, true
	case b.Set:
		return min(time.Duration(max(s.First-now, 0))*time.Microsecond, time.Second), b.Capacity > 0
	case !b.Ends.IsZero():
		return max(time.Duration(b.Ends.UnixMicro()-now), 0) * time.Microsecond, true
	case b.Rate == 0:
		return 0, false
	}
	period := uint64(b.Period.Microseconds())
	hi, lo := bits.Mul64(uint64(n), period)
	lo, borrow := bits.Sub64(lo, uint64(s.Credit)%period, 0)
	hi -= borrow
	if hi >= uint64(b.Rate) {
		return math.MaxInt64, true
	}
	q, rest := bits.Div64(hi, lo, uint64(b.Rate))
	if rest > 0 {
		q++
	}
	if q > math.MaxInt64/1000 {
		return math.MaxInt64, true
	}
	return time.Duration(q) * time.Microsecond, true
}

// Reset is the time until the bucket is full, its period ends or the first
// request of a set expires; false: never.
func (b *Bucket) Reset(s State, now int64) (time.Duration, bool) {
	if b.Set {
		return time.Duration(max(s.First-now, 0)) * time.Microsecond, true
	}
	if !b.Ends.IsZero() {
		return b.Refill(s, 1, now)
	}
	return b.Refill(s, s.Used, now)
}

// Wait is the time after which amount fits; false: it never will.
func (b *Bucket) Wait(s State, amount, now int64) (time.Duration, bool) {
	if Need(amount) > b.Capacity {
		return 0, false
	}
	return b.Refill(s, Need(amount)-b.Remaining(s), now)
}
