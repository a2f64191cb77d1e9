// Package limit reserves and settles limits at the limiter service on behalf of
// requests. Ingress is its user: Reserve before a request is sent on, Commit or
// Release of the Reservation at its end.
//
// A Client spends from leases where it holds any: shares of buckets that were
// charged when they were taken, so that most requests need no trip. What holders
// admit together beyond a limit is at most the sum of the leases that were out
// when they died, bounded for each bucket by its max_leased. The other charges
// of the same request are reserved at the limiter, all in one call.
//
// Nothing waits for long: a trip takes at most Settings.Timeout, a breaker
// spares requests the wait while the limiter is away, and OnUnavailable of each
// charge tells what then holds. The end of a request never waits at all: it is
// queued, sent again until it is answered, and written to a file when too much
// waits.
//
// A Client may be used by any number of goroutines.
package limit

import (
	"context"
	"time"

	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
	"github.com/kinference/kinference/proto/gen/kinference/limiter/v1/limiterv1connect"
)

// Unavailable tells what holds for a charge while the limiter cannot be asked.
type Unavailable uint8

// What can hold. The zero value is the default of the resources.
const (
	// Local enforces the limit here, divided by the number of ingress processes.
	// What was used before counts as not used.
	Local Unavailable = iota
	// Allow lets it pass. What was used is charged when the limiter is back.
	Allow
	// Deny refuses.
	Deny
)

// Charge is an amount of one bucket.
type Charge struct {
	// Bucket is the complete specification. It is not changed, and must not be
	// while the request lasts.
	Bucket *limiterv1.Bucket
	// Amount is an estimate, at least 0; 1 for concurrency.
	Amount        int64
	OnUnavailable Unavailable
	// Organisation of the bucket, if not that of the request: a bucket that
	// organisations share. Charges of one organisation are atomic together; of
	// several they are reserved one after the other and given back on refusal.
	Organisation string
}

// Request is what Reserve takes.
type Request struct {
	// Organisation is the root of the caller's tenants, as namespace/name.
	Organisation string
	// ID is unique for the reservation.
	ID string
	// Charges, at most 64, each with a bucket of its own. None: always granted.
	Charges []Charge
}

// Reason of a refusal.
type Reason uint8

// Reasons.
const (
	None Reason = iota
	// Exhausted: no room now.
	Exhausted
	// Never: it does not fit however long one waits.
	Never
	// Away: the limiter cannot be asked and a charge says Deny.
	Away
)

// Answer is the decision on a request.
type Answer struct {
	// Reservation is nil when refused, else to be ended by Commit or Release.
	Reservation *Reservation
	Reason      Reason
	// Refused is the index of the charge that refused, Tightest that of the
	// bucket with the smallest share left, -1 for none.
	Refused, Tightest int
	// RetryAfter is when the refused charges would fit; 0: unknown or never.
	RetryAfter time.Duration
	// States of the buckets by charge. An entry is nil if its bucket could not
	// be asked. Of a bucket that is spent from a lease it is a little old.
	States []*limiterv1.State
	// Degraded says that some charge was decided without the limiter.
	Degraded bool
}

// Granted reports whether the request may go on.
func (a *Answer) Granted() bool { return a.Reservation != nil }

// Settings of a Client. Zero values take the defaults.
type Settings struct {
	Limiter limiterv1connect.LimiterServiceClient
	// Holder names this process; default a random name.
	Holder string
	// Timeout of a trip that a request waits for; default 50 ms.
	Timeout time.Duration
	// TTL is how long a reservation outlives this process; default 30 s. Running
	// ones are extended.
	TTL time.Duration
	// LeaseTTL is how long a lease outlives it; default 3 s.
	LeaseTTL time.Duration
	// NoLeases makes every request take the trip.
	NoLeases bool
	// Replicas is the number of ingress processes to divide by with Local until
	// the limiter has told it; default 1.
	Replicas int
	// QueueLength is how many settlements wait in memory; default 10,000. What
	// is more goes to SpillFile, up to SpillBytes (default 64 MiB); without a
	// file it is dropped and counted.
	QueueLength int
	SpillFile   string
	SpillBytes  int64
}

var _ = context.Background
