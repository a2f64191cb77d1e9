package limiter_test

import (
	"context"
	"flag"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/kinference/kinference/internal/limit"
	"github.com/kinference/kinference/internal/testenv"
	"github.com/kinference/kinference/proto/gen/kinference/limiter/v1/limiterv1connect"
	"github.com/kinference/kinference/services/limiter"
	"github.com/kinference/kinference/services/limiter/internal/redis"
	"github.com/kinference/kinference/services/limiter/internal/store"
)

var report = flag.String("report", "", "file that TestReport writes its figures to, as Markdown; empty: it does not measure")

// levels is what a request is charged for: organisation, tenant and user, each
// with a window of a minute and one of a day.
func levels(user int) []store.Charge {
	var out []store.Charge
	for _, key := range []string{"org/tokens", "team/tokens", fmt.Sprint("team/tokens/user=", user)} {
		for name, period := range map[string]time.Duration{"minute": time.Minute, "day": 24 * time.Hour} {
			b := store.Bucket{Key: key + "/" + name, Capacity: 1e12, Rate: 1e12, Period: period, MaxDebt: 1e12, MaxLeased: 1e11}
			out = append(out, store.Charge{Bucket: b, Amount: 1500})
		}
	}
	return out
}

// cost is what calls took.
type cost struct {
	calls    int
	cpu      time.Duration // of Redis
	wall     time.Duration
	p50, p99 time.Duration
}

func (c cost) perCore() float64 { return float64(c.calls) / c.cpu.Seconds() }

// redisCPU is what a server has used so far.
func redisCPU(t *testing.T, r *testenv.RedisServer) time.Duration {
	t.Helper()
	info, err := r.CLI("info", "cpu")
	if err != nil {
		t.Fatal(err)
	}
	var sum float64
	for line := range strings.Lines(info) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		if name == "used_cpu_user" || name == "used_cpu_sys" {
			v, err := strconv.ParseFloat(value, 64)
			if err != nil {
				t.Fatal(err)
			}
			sum += v
		}
	}
	return time.Duration(sum * float64(time.Second))
}

// measure makes n calls from some goroutines, as fast as they go.
func measure(t *testing.T, r *testenv.RedisServer, n, workers int, call func(i int) error) cost {
	t.Helper()
	var next atomic.Int64
	var wg sync.WaitGroup
	before, begin := redisCPU(t, r), time.Now()
	for range workers {
		wg.Go(func() {
			for {
				i := int(next.Add(1))
				if i > n {
					return
				}
				if err := call(i); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	return cost{calls: n, wall: time.Since(begin), cpu: redisCPU(t, r) - before}
}

// paced makes calls one after the other, with pauses, alternating between them,
// and returns how long each kind took.
func paced(t *testing.T, n int, calls ...func(i int) error) []cost {
	t.Helper()
	const workers = 4
	times := make([][]time.Duration, len(calls))
	var mu sync.Mutex
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			tick := time.NewTicker(4 * time.Millisecond)
			defer tick.Stop()
			for i := range n {
				for k, call := range calls {
					<-tick.C
					begin := time.Now()
					err := call(w*n + i)
					took := time.Since(begin)
					mu.Lock()
					times[k] = append(times[k], took)
					mu.Unlock()
					if err != nil {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	wg.Wait()
	out := make([]cost, len(calls))
	for k, d := range times {
		d = d[len(d)/10:] // connections and leases first
		slices.Sort(d)
		out[k] = cost{calls: len(d), p50: d[len(d)/2], p99: d[len(d)*99/100]}
	}
	return out
}

// TestReport measures what docs/benchmarks/limits.md says:
//
//	go test ./services/limiter -run TestReport -report docs/benchmarks/limits.md
func TestReport(t *testing.T) {
	if *report == "" {
		t.Log("not measured: -report names no file")
		return
	}
	r := testenv.Redis(t)
	ctx := context.Background()
	client := goredis.NewClient(&goredis.Options{Addr: r.Addr, PoolSize: 32})
	s := redis.New(client)
	defer s.Close()
	const n = 40_000
	incr := measure(t, r, n, 16, func(i int) error { return client.IncrBy(ctx, fmt.Sprint("incr", i%100), 1500).Err() })
	reserve := measure(t, r, n, 16, func(i int) error {
		res, err := s.Reserve(ctx, "acme", fmt.Sprint("r", i), time.Minute, levels(i%100))
		if err == nil && res.Outcome != store.Granted {
			err = fmt.Errorf("outcome %d", res.Outcome)
		}
		return err
	})
	commit := measure(t, r, n, 16, func(i int) error {
		_, err := s.Commit(ctx, "acme", fmt.Sprint("r", i), levels(i%100))
		return err
	})
	one := measure(t, r, n, 16, func(i int) error {
		_, err := s.Reserve(ctx, "acme", fmt.Sprint("one", i), time.Minute, levels(i % 100)[:1])
		return err
	})

	rpc, _ := serve(t, limiter.Config{RedisAddrs: r.Addr, RedisTimeout: 50 * time.Millisecond})
	leased, tripping := newClient(t, rpc, false), newClient(t, rpc, true)
	through := func(c *limit.Client, name string) func(i int) error {
		return func(i int) error {
			a, err := c.Reserve(ctx, limit.Request{Organisation: "ns/acme", ID: fmt.Sprint(name, i), Charges: charges()})
			if err == nil && a.Granted() {
				a.Reservation.Commit(nil)
			}
			return err
		}
	}
	lat := paced(t, 1500, func(i int) error { return client.IncrBy(ctx, "incr", 1500).Err() }, through(tripping, "trip"), through(leased, "lease"))
	write(t, *report, page(incr, one, reserve, commit, lat))
}

func newClient(t *testing.T, rpc limiterv1connect.LimiterServiceClient, no bool) *limit.Client {
	return client(t, rpc, limit.Settings{NoLeases: no})
}

// charges is levels as a client sends them.
func charges() []limit.Charge {
	var out []limit.Charge
	for _, c := range levels(1) {
		b := window(c.Key, c.Capacity, c.Period)
		b.MaxLeased = c.MaxLeased
		out = append(out, limit.Charge{Bucket: b, Amount: c.Amount, OnUnavailable: limit.Deny})
	}
	return out
}

func page(incr, one, reserve, commit cost, lat []cost) string {
	var out strings.Builder
	row := func(name string, c cost) {
		fmt.Fprintf(&out, "| %s | %.0f | %.1f | %.2f | %.0f |\n", name, c.perCore(), c.cpu.Seconds()/float64(c.calls)*1e6,
			(c.cpu.Seconds()/float64(c.calls))/(incr.cpu.Seconds()/float64(incr.calls)), float64(c.calls)/c.wall.Seconds())
	}
	fmt.Fprintf(&out, `# Limits

What limits cost, measured with Redis and the limiter on one machine with %d cores that others use, too: compare rows, not
machines. Written by

	go test ./services/limiter -run TestReport -report $PWD/docs/benchmarks/limits.md

## Redis

16 connections, %d calls of each kind, against one Redis 7 without persistence. A reservation charges three levels
(organisation, tenant, user) with two windows each: six buckets. The processor time is that which Redis itself reports, so
calls per core is what one primary does when it is alone on its core; calls per second is what went through here, with the
clients on the same cores.

| call | calls per core and second | µs of Redis | of INCRBY | calls per second here |
|---|--:|--:|--:|--:|
`, runtime.NumCPU(), incr.calls)
	row("plain `INCRBY`", incr)
	row("reservation, 1 bucket", one)
	row("reservation, 3 levels × 2 windows", reserve)
	row("its settlement", commit)
	both := cost{calls: reserve.calls, cpu: reserve.cpu + commit.cpu, wall: reserve.wall + commit.wall}
	row("both", both)
	fmt.Fprintf(&out, `
## Latency

What a request waits for its limits, at 4 × 250 calls a second, the three kinds in turn. A trip is client → limiter
→ Redis and back.

| | p50 | p99 | p99 of INCRBY |
|---|--:|--:|--:|
`)
	for i, name := range []string{"plain `INCRBY`", "reservation by a trip", "reservation from leases"} {
		fmt.Fprintf(&out, "| %s | %.3f ms | %.3f ms | %.2f |\n", name, lat[i].p50.Seconds()*1e3, lat[i].p99.Seconds()*1e3, lat[i].p99.Seconds()/lat[0].p99.Seconds())
	}
	return out.String()
}
