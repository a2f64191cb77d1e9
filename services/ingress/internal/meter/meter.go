// Package meter holds what ingress measured of one request.
//
// The request path fills one Record, and when the request is over those who
// settle read it: limits, the usage event, metrics. A Record belongs to its
// request's goroutine until then; it has no lock. Nothing here fails: what is
// not known says so.
package meter

import (
	"time"
)

// Source tells where a count came from.
type Source uint8

// The sources. The zero value is Unknown.
const (
	Unknown   Source = iota // nobody knows; N is 0 and means nothing
	Reported                // by the backend; an explicit 0 is a count
	Estimated               // by us, because the backend never said
	Least                   // by the backend of a stream that was cut off: it may have gone on for a moment
)

// Count is a number of tokens.
type Count struct {
	N      int64
	Source Source
}

// Known reports whether there is a count at all.
func (c Count) Known() bool { return c.Source != Unknown }

// Or is c if it is known, else an estimate of n; n below 0 is none.
func (c Count) Or(n int64) Count {
	if c.Known() || n < 0 {
		return c
	}
	return Count{n, Estimated}
}

// Cut is c of a stream that ended before the backend's last word.
func (c Count) Cut() Count {
	if c.Source == Reported {
		c.Source = Least
	}
	return c
}

// Report makes a reported count; n below 0 is Unknown.
func Report(n int64) Count {
	if n < 0 {
		return Count{}
	}
	return Count{n, Reported}
}

// Tokens are the tokens of a request: Input includes Cached, Output includes
// Reasoning.
type Tokens struct {
	Input, Cached, Output, Reasoning Count
}

// Uncached is the input that was not cached. While only the input is known it
// is all of it, since an engine that tells no cached tokens mostly had none.
func (t *Tokens) Uncached() Count {
	if !t.Input.Known() {
		return Count{}
	}
	source := t.Input.Source
	if t.Cached.Source == Estimated {
		source = Estimated
	}
	return Count{max(t.Input.N-t.Cached.N, 0), source}
}

// Outcome tells how a request ended. The values are those of the metrics.
type Outcome string

// The outcomes.
const (
	OK       Outcome = "ok"
	Canceled Outcome = "canceled" // the client left
	Failed   Outcome = "failed"   // we or the backend
	Refused  Outcome = "refused"  // answered 4xx
)

// Record is what was measured of one request. Times are zero if the thing did
// not happen.
type Record struct {
	// ID is ours (UUIDv7) and unique for ever. RequestID is the one that the
	// client sees, may have chosen and may repeat.
	ID, RequestID string

	// Received is when the last byte of the request was in, Sent when it went to
	// the backend that answered, FirstContent when the first event with content came from there,
	// FirstWritten when the client had it, LastContent when the last one came,
	// Ended when all was over.
	Received, Sent, FirstContent, FirstWritten, LastContent, Ended time.Time
	// Queued is how long the router let it wait.
	Queued time.Duration
	// MaxGap is the longest time between two events with content.
	MaxGap time.Duration
	// Chunks counts the events with content.
	Chunks int

	// Tenants are namespace/name, nearest first; empty: the gateway is open.
	Tenants                 []string
	User, KeyID, CostCenter string
	QoS                     string

	Route  string // path of the public API
	Stream bool
	// Model as asked for, if the catalog has it, and as the backend knows it.
	Model, ServedModel              string
	Pool, WorkerSet, Provider, Rule string
	Worker                          string // <uid>/<rank>
	Tags                            []string
	Attempts                        int
	// Overload says that it was refused because there was no room for it.
	Overload bool
	// Hedge says that this is of an endpoint that was given up because another one
	// had content first, and not of a request.
	Hedge bool
	// Routed says that the router booked the request: it may have caused work.
	Routed bool

	Status  int
	Outcome Outcome
	Tokens  Tokens
	// Price is what the tokens cost; nil: unknown.
	Price *Price
}

// Tenant is the nearest tenant, empty if the gateway is open.
func (r *Record) Tenant() string {
	if len(r.Tenants) == 0 {
		return ""
	}
	return r.Tenants[0]
}

// TTFT is the time from the last byte in to the first content out; false if
// there was none. An answer in one piece has none either.
func (r *Record) TTFT() (time.Duration, bool) {
	if r.FirstContent.IsZero() || r.FirstWritten.IsZero() {
		return 0, false
	}
	return r.FirstWritten.Sub(r.Received), true
}

// E2E is the time from the last byte in to the end.
func (r *Record) E2E() time.Duration { return r.Ended.Sub(r.Received) }

// TPOT is the time per output token after the first in seconds, false if there
// was no second one: (time of the last content − TTFT) / (output − 1).
func (r *Record) TPOT() (float64, bool) {
	n := max(r.Tokens.Output.N, int64(r.Chunks))
	if n < 2 || r.FirstContent.IsZero() {
		return 0, false
	}
	return r.LastContent.Sub(r.FirstContent).Seconds() / float64(n-1), true
}

// ITL is the mean time between two events with content in seconds, false if
// there were no two.
func (r *Record) ITL() (float64, bool) {
	if r.Chunks < 2 || r.FirstContent.IsZero() {
		return 0, false
	}
	return r.LastContent.Sub(r.FirstContent).Seconds() / float64(r.Chunks-1), true
}
