// Package store says what a store of limits does, and has the arithmetic that
// all stores share.
//
// The service calls a store with buckets that are checked already. There are
// two: memory, for one process, and redis, for production. Both pass the suite
// in storetest, and give the same answers to the same calls at the same time,
// number by number. A store may be used by any number of goroutines. Its calls
// are safe to repeat, and err only when it cannot be reached or is full.
package store

import (
	"context"
	"errors"
	"time"
)

// Max bounds amounts and capacities. A full bucket, its debt and one amount
// together are exact in a double, which is what Lua counts with.
const Max = 1 << 51

// MaxPeriod bounds periods of refill.
const MaxPeriod = 45 * 24 * time.Hour

// What every store does alike.
const (
	// Remembered is how long a settled request is known as settled. Who repeats
	// a call must have given up by then.
	Remembered = 10 * time.Minute
	// Longest is how long anything is kept that nobody touches.
	Longest = 400 * 24 * time.Hour
	// Sweep is how many expired reservations one call gives back at most: a
	// millisecond of Redis after a crash.
	Sweep = 64
	// LeaseDivisor: one call grants at most this part of what a bucket has left,
	// so that the shares shrink with it.
	LeaseDivisor = 8
	// LowDivisor: with less than this part of its capacity left, a bucket gives
	// no shares.
	LowDivisor = 20
)

// Errors of stores.
var (
	// ErrUnavailable says that the store cannot be asked now.
	ErrUnavailable = errors.New("store is unavailable")
	// ErrFull says that the store holds as much as it may.
	ErrFull = errors.New("store is full")
)

// Bucket is one counter as stores see it: a number that grows with charges and
// decays with time, or a set of requests in flight.
type Bucket struct {
	// Key is unique in the organisation; that of a budget names its period.
	Key string
	// Set counts requests in flight.
	Set bool
	// Capacity is what a full bucket holds, or a set.
	Capacity int64
	// Rate is what refills in Period; 0: nothing.
	Rate   int64
	Period time.Duration
	// MaxDebt is how far Commit may exceed Capacity.
	MaxDebt int64
	// MaxLeased bounds the sum of the shares that are out.
	MaxLeased int64
	// Ends is when a budget's period is over, 0 for others.
	Ends time.Time
	// Shadow never refuses.
	Shadow bool
}

// Charge is an amount of one bucket.
type Charge struct {
	Bucket
	Amount int64
}

// State of a bucket.
type State struct {
	// Used of the capacity; in debt it is more.
	Used int64
	// Credit is what has refilled of the next unit, in parts of Period
	// microseconds.
	Credit int64
	// Leased is the part of Used that holders have as shares.
	Leased int64
	// First is when the first member of a set expires, Unix microseconds; 0 for
	// buckets and empty sets.
	First int64
	// Refused says that the charge does not fit.
	Refused bool
}

// Outcome of a Reserve.
type Outcome uint8

// Outcomes. The numbers are the script's.
const (
	Refused  Outcome = 0
	Granted  Outcome = 1
	Repeated Outcome = 2 // granted before, nothing charged now
	Settled  Outcome = 3 // settled before it arrived: refused
)

// Result of a call that looks at buckets.
type Result struct {
	Outcome Outcome
	// States in the order of the charges.
	States []State
	// Now is the store's clock, Unix microseconds.
	Now int64
}

// Share is a change of a holder's share of a bucket.
type Share struct {
	Bucket
	Sequence    uint64
	Spent, Want int64
}

// Grant is what a holder holds.
type Grant struct {
	State
	Held int64
	// Synchronous says that the bucket gives no shares now.
	Synchronous bool
}

// Store counts.
type Store interface {
	// Reserve charges all or nothing, for ttl.
	Reserve(ctx context.Context, org, id string, ttl time.Duration, charges []Charge) (Result, error)
	// Commit settles; the outcome is Granted, or Settled if it was before.
	Commit(ctx context.Context, org, id string, charges []Charge) (Result, error)
	// Release gives all back; the outcome is Refused if there was nothing.
	Release(ctx context.Context, org, id string) (Result, error)
	// Extend returns the ids that it does not know.
	Extend(ctx context.Context, org string, ids []string, ttl time.Duration) ([]string, Result, error)
	// Read looks.
	Read(ctx context.Context, org string, buckets []Bucket) (Result, error)
	// Lease changes shares. The result has no states; those are in the grants.
	Lease(ctx context.Context, org, holder string, ttl time.Duration, shares []Share) ([]Grant, Result, error)
	// Holders notes that holders were heard of, and returns how many there
	// were in the last minute, over all limiters.
	Holders(ctx context.Context, heard []string) (int, error)
	Close() error
}

// HeardFor is how long a holder counts after it was heard of.
const HeardFor = time.Minute

// Need is what a bucket must have left for an amount: a charge of nothing needs
// a bucket that is not empty.
func Need(amount int64) int64 { return max(amount, 1) }

// Retention is how long an unsettled reservation of charges is remembered
// beyond its time, so that it is given back when somebody looks: as long as
// giving back makes a difference.
func Retention(now time.Time, buckets func(func(*Bucket) bool)) time.Duration {
	d := time.Minute
	for b := range buckets {
		d = max(d, b.Lifetime(now))
	}
	return d
}

// Lifetime is the longest time for which an untouched bucket matters.
func (b *Bucket) Lifetime(now time.Time) time.Duration {
	switch {
	case b.Set:
		return 0
	case !b.Ends.IsZero():
		return min(max(b.Ends.Sub(now), 0)+24*time.Hour, Longest)
	case b.Rate == 0:
		return Longest
	}
	full := float64(b.Capacity+b.MaxDebt) / float64(b.Rate) * float64(b.Period)
	if full > float64(Longest) {
		return Longest
	}
	return time.Duration(full) + time.Second
}
