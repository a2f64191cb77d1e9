package limit_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/limit"
	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
	"github.com/kinference/kinference/proto/gen/kinference/limiter/v1/limiterv1connect"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// limiter is a fake that counts pots: buckets without refill. The real one is
// tested with this package in services/limiter.
type limiter struct {
	limiterv1connect.LimiterServiceClient

	mu       sync.Mutex
	down     bool // answers Unavailable
	hang     bool // answers never
	used     map[string]int64
	reserved map[string]map[string]int64 // request -> bucket -> amount
	settled  map[string]bool
	held     map[string]int64
	seen     map[string]uint64
	extended int
	calls    int
}

func newLimiter() *limiter {
	return &limiter{used: map[string]int64{}, reserved: map[string]map[string]int64{}, settled: map[string]bool{}, held: map[string]int64{}, seen: map[string]uint64{}}
}

func (l *limiter) enter(ctx context.Context) error {
	l.mu.Lock()
	l.calls++
	if l.hang {
		l.mu.Unlock()
		<-ctx.Done()
		l.mu.Lock()
		return connect.NewError(connect.CodeDeadlineExceeded, ctx.Err())
	}
	if l.down {
		return connect.NewError(connect.CodeUnavailable, errors.New("down"))
	}
	return nil
}

func (l *limiter) set(down, hang bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down, l.hang = down, hang
}

func size(b *limiterv1.Bucket) int64 {
	if c := b.GetConcurrency(); c != nil {
		return c.GetLimit()
	}
	return b.GetWindow().GetBurst()
}

func (l *limiter) state(b *limiterv1.Bucket) *limiterv1.State {
	return &limiterv1.State{Key: b.GetKey(), Limit: size(b), Remaining: size(b) - l.used[b.GetKey()]}
}

func (l *limiter) Reserve(ctx context.Context, r *limiterv1.ReserveRequest) (*limiterv1.ReserveResponse, error) {
	err := l.enter(ctx)
	defer l.mu.Unlock()
	if err != nil {
		return nil, err
	}
	resp := &limiterv1.ReserveResponse{Granted: !l.settled[r.RequestId], Holders: 2}
	for i, c := range r.Charges {
		st := l.state(c.Bucket)
		if st.Remaining < max(c.Amount, 1) {
			resp.Granted, st.Refused, resp.Refused = false, true, new(uint32(i))
			resp.Reason, resp.RetryAfter = limiterv1.ReserveResponse_REASON_EXHAUSTED, durationpb.New(time.Second)
		}
		resp.States = append(resp.States, st)
	}
	if resp.Granted {
		l.reserved[r.RequestId] = map[string]int64{}
		for i, c := range r.Charges {
			l.used[c.Bucket.Key] += c.Amount
			l.reserved[r.RequestId][c.Bucket.Key] = c.Amount
			resp.States[i].Remaining -= c.Amount
		}
	}
	return resp, nil
}

func (l *limiter) settle(id string, actual map[string]int64) {
	if l.settled[id] {
		return
	}
	l.settled[id] = true
	for key, n := range l.reserved[id] {
		l.used[key] -= n
	}
	for key, n := range actual {
		l.used[key] += n
	}
}

func (l *limiter) Commit(ctx context.Context, r *limiterv1.CommitRequest) (*limiterv1.CommitResponse, error) {
	err := l.enter(ctx)
	defer l.mu.Unlock()
	if err != nil {
		return nil, err
	}
	actual := map[string]int64{}
	for _, c := range r.Charges {
		if c.Bucket.GetConcurrency() == nil {
			actual[c.Bucket.Key] = c.Amount
		}
	}
	l.settle(r.RequestId, actual)
	return &limiterv1.CommitResponse{}, nil
}

func (l *limiter) Release(ctx context.Context, r *limiterv1.ReleaseRequest) (*limiterv1.ReleaseResponse, error) {
	err := l.enter(ctx)
	defer l.mu.Unlock()
	if err != nil {
		return nil, err
	}
	l.settle(r.RequestId, nil)
	return &limiterv1.ReleaseResponse{}, nil
}

func (l *limiter) Extend(ctx context.Context, r *limiterv1.ExtendRequest) (*limiterv1.ExtendResponse, error) {
	err := l.enter(ctx)
	defer l.mu.Unlock()
	l.extended += len(r.RequestIds)
	return &limiterv1.ExtendResponse{}, err
}

func (l *limiter) Lease(ctx context.Context, r *limiterv1.LeaseRequest) (*limiterv1.LeaseResponse, error) {
	err := l.enter(ctx)
	defer l.mu.Unlock()
	if err != nil {
		return nil, err
	}
	resp := &limiterv1.LeaseResponse{}
	for _, s := range r.Shares {
		key := s.Bucket.Key
		g := &limiterv1.Grant{}
		if s.Sequence > l.seen[key] {
			l.seen[key] = s.Sequence
			over := max(s.Spent-l.held[key], 0)
			l.used[key] += over
			l.held[key] -= s.Spent - over
			left := size(s.Bucket) - l.used[key]
			change := s.Want - l.held[key]
			if g.Synchronous = left < size(s.Bucket)/20; g.Synchronous && change > 0 {
				change = 0
			}
			change = min(change, max(left/8, 0))
			l.held[key] += change
			l.used[key] += change
		}
		g.Held, g.State = l.held[key], l.state(s.Bucket)
		resp.Grants = append(resp.Grants, g)
	}
	return resp, nil
}

func (l *limiter) usedOf(key string) int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.used[key]
}

func pot(key string, n int64) *limiterv1.Bucket {
	return &limiterv1.Bucket{Key: key, Kind: &limiterv1.Bucket_Window{Window: &limiterv1.Window{Burst: &n}}}
}

func leased(key string, n int64) *limiterv1.Bucket {
	b := pot(key, n)
	b.MaxLeased = n / 5
	return b
}

func streams(key string, n int64) *limiterv1.Bucket {
	return &limiterv1.Bucket{Key: key, Kind: &limiterv1.Bucket_Concurrency{Concurrency: &limiterv1.Concurrency{Limit: n}}}
}

func start(t *testing.T, s limit.Settings) *limit.Client {
	t.Helper()
	c, err := limit.New(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func stop(t *testing.T, c *limit.Client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := c.Close(ctx); err != nil {
		t.Errorf("close: %v", err)
	}
}

func reserve(t *testing.T, c *limit.Client, id string, cs ...limit.Charge) *limit.Answer {
	t.Helper()
	a, err := c.Reserve(t.Context(), limit.Request{Organisation: "o", ID: id, Charges: cs})
	if err != nil {
		t.Fatalf("reserve %s: %v", id, err)
	}
	return a
}

func TestWhatHoldsWhileTheLimiterIsAway(t *testing.T) {
	for _, mode := range []string{"down", "hangs"} {
		t.Run(mode, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newLimiter()
				c := start(t, limit.Settings{Limiter: l})
				defer stop(t, c)
				// The limiter tells of two processes, so half of what is left is ours.
				reserve(t, c, "before", limit.Charge{Bucket: pot("local", 100), Amount: 20}).Reservation.Commit([]int64{20})
				l.set(mode == "down", mode == "hangs")
				begin := time.Now()
				if a := reserve(t, c, "deny", limit.Charge{Bucket: pot("b", 100), Amount: 1, OnUnavailable: limit.Deny}); a.Granted() || a.Reason != limit.Away || a.Refused != 0 || !a.Degraded {
					t.Errorf("deny: got %+v", a)
				}
				if took := time.Since(begin); took > 50*time.Millisecond {
					t.Errorf("took %v, want 50 ms at most", took)
				}
				allowed := reserve(t, c, "allow", limit.Charge{Bucket: pot("allow", 10), Amount: 1000, OnUnavailable: limit.Allow})
				if !allowed.Granted() || !allowed.Degraded {
					t.Errorf("allow: got %+v", allowed)
				}
				got := int64(0)
				for i := range 100 {
					a := reserve(t, c, fmt.Sprint("local", i), limit.Charge{Bucket: pot("local", 100), Amount: 1})
					if !a.Granted() {
						break
					}
					got++
				}
				if got != 40 {
					t.Errorf("local: %d granted, want half of the 80 that were left", got)
				}
				for i := range 3 {
					if a := reserve(t, c, fmt.Sprint("streams", i), limit.Charge{Bucket: streams("streams", 4), Amount: 1}); a.Granted() != (i < 2) {
						t.Errorf("stream %d of 4 over two processes: got granted %v", i, a.Granted())
					}
				}
				if a := reserve(t, c, "zero", limit.Charge{Bucket: pot("zero", 0), Amount: 1}); a.Granted() {
					t.Error("a limit of 0 passes locally")
				}
				// The breaker spares the wait.
				begin = time.Now()
				for i := range 20 {
					reserve(t, c, fmt.Sprint("open", i), limit.Charge{Bucket: pot("x", 100), Amount: 1, OnUnavailable: limit.Deny})
				}
				if took := time.Since(begin); took > 50*time.Millisecond {
					t.Errorf("20 requests while it is away took %v together, want one wait at most", took)
				}
				// What was allowed is charged when it is back.
				begin = time.Now()
				allowed.Reservation.Commit([]int64{700})
				if took := time.Since(begin); took != 0 {
					t.Errorf("commit took %v", took)
				}
				time.Sleep(10 * time.Second)
				l.set(false, false)
				time.Sleep(2 * time.Second)
				if got := l.usedOf("allow"); got != 700 {
					t.Errorf("%d charged afterwards, want 700", got)
				}
				if a := reserve(t, c, "after", limit.Charge{Bucket: pot("b", 100), Amount: 1, OnUnavailable: limit.Deny}); !a.Granted() || a.Degraded {
					t.Errorf("after: got %+v", a)
				}
			})
		})
	}
}

func TestLeaseIsSpentHereWhileTheLimiterIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLimiter()
		c := start(t, limit.Settings{Limiter: l})
		defer stop(t, c)
		b := leased("b", 100_000)
		for i := range 50 {
			reserve(t, c, fmt.Sprint(i), limit.Charge{Bucket: b, Amount: 10, OnUnavailable: limit.Deny}).Reservation.Commit([]int64{10})
			time.Sleep(10 * time.Millisecond)
		}
		l.set(true, false)
		granted := 0
		for i := range 1000 {
			a := reserve(t, c, fmt.Sprint("away", i), limit.Charge{Bucket: b, Amount: 1, OnUnavailable: limit.Deny})
			if !a.Granted() {
				break
			}
			granted++
			a.Reservation.Commit([]int64{1})
		}
		if granted == 0 || granted == 1000 {
			t.Errorf("%d granted from the lease, want some and an end", granted)
		}
		time.Sleep(5 * time.Second)
		if a := reserve(t, c, "expired", limit.Charge{Bucket: b, Amount: 1, OnUnavailable: limit.Deny}); a.Granted() {
			t.Error("granted from a lease that has expired")
		}
		l.set(false, false)
		time.Sleep(10 * time.Second)
		if got := l.usedOf("b"); got != 500+int64(granted) {
			t.Errorf("%d used, want %d", got, 500+granted)
		}
	})
}

func TestRefusalReturnsTheShareFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLimiter()
		c := start(t, limit.Settings{Limiter: l})
		defer stop(t, c)
		b := leased("b", 1000)
		for i := range 5 {
			reserve(t, c, fmt.Sprint(i), limit.Charge{Bucket: b, Amount: 1}).Reservation.Commit([]int64{1})
			synctest.Wait()
		}
		if got := l.usedOf("b"); got <= 5 {
			t.Fatalf("%d used: no share is held", got)
		}
		a := reserve(t, c, "all", limit.Charge{Bucket: b, Amount: 995})
		if !a.Granted() {
			t.Errorf("got %+v, want all that is left", a)
		}
		if a := reserve(t, c, "more", limit.Charge{Bucket: b, Amount: 1}); a.Granted() || a.Reason != limit.Exhausted || a.RetryAfter != time.Second {
			t.Errorf("got %+v, want exhausted", a)
		}
	})
}

func TestEveryEndGivesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLimiter()
		c := start(t, limit.Settings{Limiter: l, TTL: 3 * time.Second})
		defer stop(t, c)
		both := []limit.Charge{{Bucket: pot("b", 100), Amount: 60}, {Bucket: streams("s", 1), Amount: 1}}
		check := func(what string, used, running int64) {
			t.Helper()
			synctest.Wait()
			if b, s := l.usedOf("b"), l.usedOf("s"); b != used || s != running {
				t.Errorf("%s: got %d used and %d running, want %d and %d", what, b, s, used, running)
			}
		}
		// Queued or before the first byte: nothing was generated.
		a := reserve(t, c, "queued", both...)
		check("reserved", 60, 1)
		a.Reservation.Release()
		check("left the queue", 0, 0)
		a.Reservation.Release()
		a.Reservation.Commit([]int64{60, 1})
		check("twice", 0, 0)
		// Mid-stream: what was generated.
		reserve(t, c, "stream", both...).Reservation.Commit([]int64{25, 1})
		check("mid-stream", 25, 0)
		// The caller leaves while the limiter is asked.
		l.set(false, true)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(10*time.Millisecond, cancel)
		if _, err := c.Reserve(ctx, limit.Request{Organisation: "o", ID: "left", Charges: both}); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v, want canceled", err)
		}
		l.set(false, false)
		time.Sleep(time.Second)
		l.mu.Lock()
		if !l.settled["left"] {
			t.Error("a reservation without an answer is not released")
		}
		l.mu.Unlock()
		check("canceled", 25, 0)
		// A heartbeat while it runs, none afterwards.
		a = reserve(t, c, "long", both...)
		time.Sleep(5 * time.Second)
		l.mu.Lock()
		beats := l.extended
		l.mu.Unlock()
		if beats < 4 {
			t.Errorf("%d heartbeats in 5 s of a time to live of 3 s", beats)
		}
		a.Reservation.Commit(nil)
		check("as estimated", 85, 0)
		time.Sleep(5 * time.Second)
		l.mu.Lock()
		if l.extended != beats {
			t.Errorf("%d heartbeats after the end", l.extended-beats)
		}
		l.mu.Unlock()
	})
}

func TestSettlementsSpillAndComeBack(t *testing.T) {
	file := filepath.Join(t.TempDir(), "spill")
	synctest.Test(t, func(t *testing.T) {
		l := newLimiter()
		c := start(t, limit.Settings{Limiter: l, QueueLength: 3, SpillFile: file})
		var ends []*limit.Reservation
		for i := range 100 {
			ends = append(ends, reserve(t, c, fmt.Sprint(i), limit.Charge{Bucket: pot("b", 1000), Amount: 10}).Reservation)
		}
		l.set(true, false)
		for _, r := range ends {
			r.Commit([]int64{3})
		}
		if info, err := os.Stat(file); err != nil || info.Size() == 0 {
			t.Errorf("nothing was spilled: %v", err)
		}
		// The process ends while the limiter is away; the next one settles.
		stop(t, c)
		c = start(t, limit.Settings{Limiter: l, QueueLength: 3, SpillFile: file})
		l.set(false, false)
		time.Sleep(10 * time.Second)
		if got := l.usedOf("b"); got != 300 {
			t.Errorf("got %d used, want 300", got)
		}
		stop(t, c)
		if info, err := os.Stat(file); err != nil || info.Size() != 0 {
			t.Errorf("the file is not empty: %v, %v", info, err)
		}
	})
}

func TestOldSettlementsAreDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLimiter()
		c := start(t, limit.Settings{Limiter: l})
		defer stop(t, c)
		a := reserve(t, c, "a", limit.Charge{Bucket: pot("b", 1000), Amount: 10})
		l.set(false, true)
		a.Reservation.Commit([]int64{3})
		time.Sleep(6 * time.Minute)
		l.set(false, false)
		time.Sleep(time.Minute)
		if got := l.usedOf("b"); got != 10 {
			t.Errorf("got %d used: it was settled when the limiter may have forgotten the first time", got)
		}
	})
}

func TestBucketsOfSeveralOrganisations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLimiter()
		c := start(t, limit.Settings{Limiter: l})
		defer stop(t, c)
		own, shared := limit.Charge{Bucket: pot("own", 100), Amount: 10}, limit.Charge{Bucket: pot("shared", 15), Amount: 10, Organisation: "all"}
		reserve(t, c, "a", own, shared)
		a := reserve(t, c, "b", own, shared)
		if a.Granted() || a.Refused != 1 || a.Tightest != 1 {
			t.Errorf("got %+v, want the shared bucket to refuse", a)
		}
		time.Sleep(time.Second)
		if got := l.usedOf("own"); got != 10 {
			t.Errorf("%d of the own bucket used, want 10: what was reserved before the refusal is given back", got)
		}
	})
}

func TestBadRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := start(t, limit.Settings{Limiter: newLimiter()})
		defer stop(t, c)
		for name, r := range map[string]limit.Request{
			"no organisation": {ID: "a"},
			"no id":           {Organisation: "o"},
			"long id":         {Organisation: "o", ID: strings.Repeat("x", 121)},
			"no bucket":       {Organisation: "o", ID: "a", Charges: []limit.Charge{{}}},
			"negative":        {Organisation: "o", ID: "a", Charges: []limit.Charge{{Bucket: pot("b", 1), Amount: -1}}},
			"too many":        {Organisation: "o", ID: "a", Charges: make([]limit.Charge, 65)},
		} {
			if _, err := c.Reserve(t.Context(), r); err == nil {
				t.Errorf("%s: no error", name)
			}
		}
		if a := reserve(t, c, "none"); !a.Granted() || a.Tightest != -1 {
			t.Errorf("no charges: got %+v, want granted", a)
		}
	})
}
