package limiter_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/limit"
	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
	"github.com/kinference/kinference/proto/gen/kinference/limiter/v1/limiterv1connect"
	"github.com/kinference/kinference/services/limiter"
)

// client returns a client of the limiter that closes with the test.
func client(t testing.TB, c limiterv1connect.LimiterServiceClient, s limit.Settings) *limit.Client {
	t.Helper()
	s.Limiter = c
	out, err := limit.New(context.Background(), s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeClient(t, out) })
	return out
}

func closeClient(t testing.TB, c *limit.Client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := c.Close(ctx); err != nil {
		t.Errorf("close: %v", err)
	}
}

// until polls, for what happens behind a request's back.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline, tick := time.After(time.Minute), time.NewTicker(5*time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("after a minute: no %s", what)
		}
	}
}

// pot never refills; a fifth of it may be leased.
func pot(key string, size int64) *limiterv1.Bucket {
	return &limiterv1.Bucket{Key: key, MaxLeased: size / 5, Kind: &limiterv1.Bucket_Window{Window: &limiterv1.Window{Burst: &size}}}
}

func remaining(t testing.TB, c limiterv1connect.LimiterServiceClient, b *limiterv1.Bucket) *limiterv1.State {
	t.Helper()
	var r *limiterv1.ReadResponse
	until(t, "answer of a busy store", func() (ok bool) {
		var err error
		r, err = c.Read(t.Context(), &limiterv1.ReadRequest{Organisation: "ns/acme", Buckets: []*limiterv1.Bucket{b}})
		if err != nil && connect.CodeOf(err) != connect.CodeUnavailable {
			t.Fatalf("read: %v", err)
		}
		return err == nil
	})
	return r.States[0]
}

func TestFiveConcurrentRequestsOnAHundred(t *testing.T) {
	t.Parallel()
	for _, leases := range []bool{false, true} {
		t.Run(fmt.Sprintf("leases=%v", leases), func(t *testing.T) {
			rpc, _ := serve(t, limiter.Config{})
			c := client(t, rpc, limit.Settings{NoLeases: !leases, Timeout: 10 * time.Second})
			var used atomic.Int64
			var wg sync.WaitGroup
			b := window("team", 100, time.Minute)
			b.MaxLeased = 20
			for i, n := range []int64{58, 80, 175, 175, 175} {
				wg.Go(func() {
					a, err := c.Reserve(t.Context(), limit.Request{Organisation: "ns/acme", ID: fmt.Sprint(i), Charges: []limit.Charge{{Bucket: b, Amount: n}}})
					if err != nil {
						t.Error(err)
						return
					}
					if n > 100 && a.Reason != limit.Never {
						t.Errorf("%d tokens: got reason %v, want never", n, a.Reason)
					}
					if a.Granted() {
						used.Add(n)
						a.Reservation.Commit([]int64{n})
					}
				})
			}
			wg.Wait()
			if u := used.Load(); u != 58 && u != 80 {
				t.Errorf("%d tokens through a limit of 100, want one request that fits", u)
			}
		})
	}
}

func TestLeasesSpareTripsAndReturn(t *testing.T) {
	t.Parallel()
	rpc, _ := serve(t, limiter.Config{})
	counted := &counting{LimiterServiceClient: rpc}
	c := client(t, counted, limit.Settings{LeaseTTL: time.Second, Timeout: 10 * time.Second})
	org, team := pot("org", 1_000_000), pot("team", 500_000)
	total := int64(0)
	for i := range 3000 {
		a, err := c.Reserve(t.Context(), limit.Request{Organisation: "ns/acme", ID: fmt.Sprint(i), Charges: []limit.Charge{{Bucket: org, Amount: 50}, {Bucket: team, Amount: 50}}})
		if err != nil || !a.Granted() {
			t.Fatalf("request %d: got %+v, %v", i, a, err)
		}
		a.Reservation.Commit([]int64{int64(i % 60), int64(i % 60)})
		total += int64(i % 60)
	}
	if n := counted.reserves.Load(); n > 600 {
		t.Errorf("%d of 3000 requests took the trip, want few", n)
	}
	t.Logf("3000 requests: %d reservations at the limiter, %d changes of leases", counted.reserves.Load(), counted.leases.Load())
	until(t, "truth at the limiter after idling", func() bool {
		o, m := remaining(t, rpc, org), remaining(t, rpc, team)
		return o.Leased == 0 && m.Leased == 0 && o.Remaining == 1_000_000-total && m.Remaining == 500_000-total
	})
}

type counting struct {
	limiterv1connect.LimiterServiceClient
	reserves, leases atomic.Int64
}

func (c *counting) Reserve(ctx context.Context, r *limiterv1.ReserveRequest) (*limiterv1.ReserveResponse, error) {
	c.reserves.Add(1)
	return c.LimiterServiceClient.Reserve(ctx, r)
}

func (c *counting) Lease(ctx context.Context, r *limiterv1.LeaseRequest) (*limiterv1.LeaseResponse, error) {
	c.leases.Add(1)
	return c.LimiterServiceClient.Lease(ctx, r)
}

// The bound of leases, at its worst: holders take all the shares there are,
// spend them to the last, die before they say so, and the limit is used up
// afterwards.
func TestDeadHoldersExceedByTheirSharesAtMost(t *testing.T) {
	t.Parallel()
	rpc, _ := serve(t, limiter.Config{})
	b := pot("b", 10_000)
	b.MaxLeased = 1000
	spent := int64(0)
	for holder := range 20 {
		r, err := rpc.Lease(t.Context(), &limiterv1.LeaseRequest{Organisation: "ns/acme", Holder: fmt.Sprint("holder", holder), Ttl: durationpb.New(5 * time.Second),
			Shares: []*limiterv1.Share{{Bucket: b, Sequence: 1, Want: 300}}})
		if err != nil {
			t.Fatal(err)
		}
		spent += r.Grants[0].Held
	}
	if spent != b.MaxLeased {
		t.Errorf("20 holders hold %d together, want the %d that may be leased", spent, b.MaxLeased)
	}
	if got := remaining(t, rpc, b); got.Remaining != 9000 || got.Leased != 1000 {
		t.Errorf("got %v, want all shares charged", got)
	}
	until(t, "end of the dead holders' shares", func() bool { return remaining(t, rpc, b).Remaining == 10_000 })
	for i := range 100 {
		if r := reserve(t, rpc, fmt.Sprint(i), &limiterv1.Charge{Bucket: b, Amount: 100}); !r.Granted {
			t.Fatalf("request %d of 100: refused", i)
		}
		spent += 100
	}
	if r := reserve(t, rpc, "more", &limiterv1.Charge{Bucket: b, Amount: 1}); r.Granted || spent != 11_000 {
		t.Errorf("%d spent of 10000 and more to come, want 10000 and the shares of 1000", spent)
	}
}
