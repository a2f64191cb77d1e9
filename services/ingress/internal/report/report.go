// Package report tells the router how requests went on, without ever making a
// request wait for it.
//
// Reports go into a bounded queue and leave in batches, in order: the first
// one at once, those that arrive during a call together with the next. Each goes to
// the router that the request was routed by, as long as that one answers. While
// the router is away they are kept and sent later; when the queue is full the
// oldest are dropped and counted, because the router forgets old requests by
// itself. All methods are safe for concurrent use.
package report

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/rpc"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

const (
	// maxQueued holds 20 seconds of reports at 800 requests a second.
	maxQueued = 1 << 15
	maxBatch  = 512
	callLimit = 2 * time.Second
	// flushLimit bounds how long a stop waits for the last reports.
	flushLimit = time.Second
)

// Client is the part of the router's client that the queue needs.
type Client interface {
	Report(context.Context, *routerv1.ReportRequest) (*routerv1.ReportResponse, error)
}

// Queue holds reports on their way to the router.
type Queue struct {
	client Client
	drop   func(n int)

	mu      sync.Mutex
	entries []entry
	sent    uint64        // entries that left the queue, ever
	wake    chan struct{} // has a token when there is work
	moved   chan struct{} // closed and replaced when sent grows
}

type entry struct {
	to     *rpc.Place
	report *routerv1.Report
	after  func()
}

// New makes a Queue. drop is called with the number of reports that were
// given up; nil ignores them.
func New(client Client, drop func(n int)) *Queue {
	if drop == nil {
		drop = func(int) {}
	}
	return &Queue{client: client, drop: drop, wake: make(chan struct{}, 1), moved: make(chan struct{})}
}

// Moved reports that the request goes to another worker. Here and below, to is the router
// that it was routed by; nil: whichever is in use.
func (q *Queue) Moved(to *rpc.Place, id, worker, reason string) {
	q.add(to, &routerv1.Report{RequestId: id, Event: &routerv1.Report_Moved{Moved: &routerv1.Moved{Worker: worker, Reason: reason}}}, nil)
}

// FirstToken reports the time from sending to the first token.
func (q *Queue) FirstToken(to *rpc.Place, id string, ttft time.Duration) {
	q.add(to, &routerv1.Report{RequestId: id, Event: &routerv1.Report_FirstToken{FirstToken: &routerv1.FirstToken{Ttft: durationpb.New(ttft)}}}, nil)
}

// Done reports the end of the request. after is called once the report has
// left the queue, so that until then nobody else uses the id.
func (q *Queue) Done(to *rpc.Place, id string, outcome routerv1.Outcome, u openai.Usage, after func()) {
	q.add(to, &routerv1.Report{RequestId: id, Event: &routerv1.Report_Done{Done: &routerv1.Done{
		Outcome: outcome, PromptTokens: known(u.Prompt), CachedTokens: known(u.Cached), OutputTokens: known(u.Output),
	}}}, after)
}

func known(n int) *uint32 {
	if n == openai.Unknown {
		return nil
	}
	u := uint32(n)
	return &u
}

func (q *Queue) add(to *rpc.Place, r *routerv1.Report, after func()) {
	q.mu.Lock()
	q.entries = append(q.entries, entry{to, r, after})
	var lost []entry
	if n := len(q.entries) - maxQueued; n > 0 {
		lost = q.take(n)
	}
	q.mu.Unlock()
	q.gone(lost, true)
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// take removes the n oldest entries. The lock is held.
func (q *Queue) take(n int) []entry {
	taken := q.entries[:n:n]
	q.entries = q.entries[n:]
	q.sent += uint64(n)
	close(q.moved)
	q.moved = make(chan struct{})
	return taken
}

func (q *Queue) gone(entries []entry, lost bool) {
	for _, e := range entries {
		if e.after != nil {
			e.after()
		}
	}
	if lost && len(entries) > 0 {
		q.drop(len(entries))
	}
}

// Flush waits until all reports that are queued now have left, or ctx is done.
func (q *Queue) Flush(ctx context.Context) error {
	q.mu.Lock()
	want := q.sent + uint64(len(q.entries))
	for q.sent < want {
		moved := q.moved
		q.mu.Unlock()
		select {
		case <-moved:
		case <-ctx.Done():
			return ctx.Err()
		}
		q.mu.Lock()
	}
	q.mu.Unlock()
	return nil
}

// Run sends reports until ctx is done, then what is left for a short while.
func (q *Queue) Run(ctx context.Context) {
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-q.wake:
			q.drain(ctx)
		}
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushLimit)
	defer cancel()
	q.drain(last)
	q.mu.Lock()
	left := q.take(len(q.entries))
	q.mu.Unlock()
	q.gone(left, true)
}

// drain sends until the queue is empty or ctx is done, but at least once.
func (q *Queue) drain(ctx context.Context) {
	const least, most = 50 * time.Millisecond, 2 * time.Second
	delay := least
	var batch []*routerv1.Report
	for first := true; first || ctx.Err() == nil; first = false {
		q.mu.Lock()
		if len(q.entries) == 0 {
			q.mu.Unlock()
			return
		}
		to := q.entries[0].to
		batch = batch[:0]
		for _, e := range q.entries[:min(len(q.entries), maxBatch)] {
			if !e.to.Same(to) {
				break
			}
			batch = append(batch, e.report)
		}
		n, from := len(batch), q.sent
		q.mu.Unlock()
		// A stop lets a call finish: cut off, its reports would go out twice.
		call, cancel := context.WithTimeout(context.WithoutCancel(ctx), callLimit)
		_, err := q.client.Report(rpc.At(call, to), &routerv1.ReportRequest{Reports: batch})
		cancel()
		if err != nil && retryable(err) {
			select {
			case <-ctx.Done():
			case <-time.After(delay/2 + rand.N(delay)):
			}
			delay = min(2*delay, most)
			continue
		}
		delay = least
		q.mu.Lock()
		// A full queue may have dropped some of the batch meanwhile.
		taken := q.take(max(0, n-int(q.sent-from)))
		q.mu.Unlock()
		q.gone(taken, err != nil)
	}
}

func retryable(err error) bool {
	switch connect.CodeOf(err) {
	case connect.CodeInvalidArgument, connect.CodeUnimplemented, connect.CodeNotFound, connect.CodePermissionDenied, connect.CodeUnauthenticated:
		return false
	}
	return true
}
