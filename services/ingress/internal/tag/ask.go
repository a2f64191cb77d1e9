package tag

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"connectrpc.com/connect"

	classifierv1 "github.com/kinference/kinference/proto/gen/kinference/classifier/v1"
)

// Client is the part of the classifier's client that is needed.
type Client interface {
	Classify(context.Context, *classifierv1.ClassifyRequest) (*classifierv1.ClassifyResponse, error)
}

// Causes of unknown tags that come from here, beside the classifier's own.
const (
	causeTimeout     = "timeout"        // no answer in time
	causeBusy        = "busy"           // too many calls of ours were under way
	causeOverloaded  = "overloaded"     // the classifier refused it until the time was over
	causeBreaker     = "breaker_open"   // the classifier did not answer others just before
	causeUnavailable = "unavailable"    // it could not be reached, or failed
	causeGarbled     = "garbled"        // its answer makes no sense
	causeCanceled    = "canceled"       // the client left
	causeOversize    = "oversize"       // not all of the prompt was sent
	causeOther       = "other"          // a code that we do not know
	causeUnread      = "not_looked_for" // no detector looked for it
)

// perKB is added to the time for each KB of text: some three times what the
// classifier takes on a machine of its own.
const perKB = 200 * time.Microsecond

// Settings of an Asker.
type Settings struct {
	Client Client
	// Timeout of a short prompt; longer ones get more.
	Timeout time.Duration
	// Concurrency is how many calls are under way at most; others wait their time.
	Concurrency int
	// Done is called after each Ask with what came of it (whole, partial or a
	// cause) and how long it took. Nil: not.
	Done func(outcome string, took time.Duration)
}

// Asker asks the classifier. It is safe for concurrent use.
type Asker struct {
	set     Settings
	slots   chan struct{}
	breaker breaker
}

// New returns an Asker.
func New(set Settings) *Asker {
	return &Asker{set: set, slots: make(chan struct{}, max(set.Concurrency, 1))}
}

// State of the circuit breaker.
func (a *Asker) State() State { return a.breaker.state(time.Now()) }

// Ask classifies a prompt for policies that read some tags, named or by their
// beginning with a star. It returns by its deadline at the latest.
func (a *Asker) Ask(ctx context.Context, p *Prompt, namespace string, read []string) Result {
	start := time.Now()
	resp, cause := a.call(ctx, p, namespace)
	var r Result
	if cause == "" {
		r = resolve(resp, p, read)
	} else {
		r = Unclassified(cause)
	}
	if a.set.Done != nil {
		a.set.Done(r.Outcome, time.Since(start))
	}
	return r
}

func (a *Asker) call(ctx context.Context, p *Prompt, namespace string) (resp *classifierv1.ClassifyResponse, cause string) {
	if !a.breaker.allow(time.Now()) {
		return nil, causeBreaker
	}
	result := neither
	defer func() { a.breaker.done(time.Now(), result) }()
	inner, cancel := context.WithTimeout(ctx, a.set.Timeout+time.Duration(p.Bytes>>10)*perKB)
	defer cancel()
	select {
	case a.slots <- struct{}{}:
		defer func() { <-a.slots }()
		if inner.Err() != nil && ctx.Err() == nil {
			return nil, causeBusy
		}
	case <-inner.Done():
		if ctx.Err() != nil {
			return nil, causeCanceled
		}
		return nil, causeBusy
	}
	req := &classifierv1.ClassifyRequest{Parts: p.Parts, Options: &classifierv1.Options{Namespace: namespace, OmitReasons: true}}
	refused := false
	for delay := time.Millisecond; ; delay = min(2*delay, 16*time.Millisecond) {
		resp, err := a.set.Client.Classify(inner, req)
		if err == nil {
			if !sensible(resp, p) {
				result = failed
				return nil, causeGarbled
			}
			result = worked
			return resp, ""
		}
		switch code := connect.CodeOf(err); {
		case ctx.Err() != nil:
			return nil, causeCanceled
		case inner.Err() != nil && refused:
			result = worked
			return nil, causeOverloaded
		case inner.Err() != nil || code == connect.CodeDeadlineExceeded || errors.Is(err, context.DeadlineExceeded):
			result = failed
			return nil, causeTimeout
		case code == connect.CodeResourceExhausted:
			// It reads as many prompts at once as it has CPUs and queues none: a
			// moment later there may be room. It lives, so the breaker stays closed.
			refused = true
		case code == connect.CodeUnavailable:
			result = failed
			return nil, causeUnavailable
		default:
			result = failed
			return nil, causeGarbled
		}
		wait := time.NewTimer(delay/2 + rand.N(delay))
		select {
		case <-wait.C:
		case <-inner.Done():
			wait.Stop()
			if ctx.Err() != nil {
				return nil, causeCanceled
			}
			result = worked
			return nil, causeOverloaded
		}
	}
}
