package limiter_test

import (
	"context"
	"flag"
	"fmt"
	"os"
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
	const n = 5000
	kinds := []struct {
		name string
		call func(id string, user int) error
	}{
		{"plain `INCRBY`", func(_ string, user int) error { return client.IncrBy(ctx, fmt.Sprint("incr", user), 1500).Err() }},
		{"reservation, 1 bucket", func(id string, user int) error {
			_, err := s.Reserve(ctx, "acme", "one"+id, time.Minute, levels(user)[:1])
			return err
		}},
		{"reservation, 3 levels × 2 windows", func(id string, user int) error {
			res, err := s.Reserve(ctx, "acme", id, time.Minute, levels(user))
			if err == nil && res.Outcome != store.Granted {
				err = fmt.Errorf("outcome %d", res.Outcome)
			}
			return err
		}},
		{"its settlement", func(id string, user int) error {
			_, err := s.Commit(ctx, "acme", id, levels(user))
			return err
		}},
	}
	// Rounds, so that what else the machine does hits all kinds alike; the median
	// of each is told.
	const rounds = 9
	costs := make([][]cost, len(kinds))
	for round := range rounds {
		for k := range kinds {
			costs[k] = append(costs[k], measure(t, r, n, 16, func(i int) error { return kinds[k].call(fmt.Sprint(round, "/", i), i%100) }))
		}
	}
	var rows []string
	var base float64
	for k := range kinds {
		cpu, wall := median(costs[k], func(c cost) float64 { return c.cpu.Seconds() / n }), median(costs[k], func(c cost) float64 { return c.wall.Seconds() / n })
		if k == 0 {
			base = cpu
		}
		rows = append(rows, fmt.Sprintf("| %s | %.0f | %.1f | %.1f | %.0f |", kinds[k].name, 1/cpu, cpu*1e6, cpu/base, 1/wall))
	}

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
	write(t, *report, page(rows, rounds*n, lat))
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

func median(cs []cost, f func(cost) float64) float64 {
	var vs []float64
	for _, c := range cs {
		vs = append(vs, f(c))
	}
	slices.Sort(vs)
	return vs[len(vs)/2]
}

func page(rows []string, calls int, lat []cost) string {
	var out strings.Builder
	fmt.Fprintf(&out, `# Limits

What limits cost, measured with Redis and the limiter on one machine with %d cores that others used, too (load average
%s): compare rows, not machines. Written by

	go test ./services/limiter -run TestReport -report $PWD/docs/benchmarks/limits.md

## Redis

16 connections, %d calls of each kind in rounds, medians of the rounds, against one Redis 7 without persistence. A
reservation charges three levels (organisation, tenant, user) with two windows each: six buckets. The processor time is
that which Redis itself reports, so calls per core is what one primary does when it has its core for itself; calls per
second is what went through here, with the clients on the same cores.

| call | calls per core and second | µs of Redis | × INCRBY | calls per second here |
|---|--:|--:|--:|--:|
%s
`, runtime.NumCPU(), loadAverage(), calls, strings.Join(rows, "\n"))
	fmt.Fprintf(&out, `
## Latency

What a request waits for its limits, at 4 × 250 calls a second, the three kinds in turn. A trip is client → limiter
→ Redis and back: two more changes of process than INCRBY, each of which waits for a core where others work, too. That is
what its p99 shows; leases do without.

| | p50 | p99 | p99 × INCRBY |
|---|--:|--:|--:|
`)
	for i, name := range []string{"plain `INCRBY`", "reservation by a trip", "reservation from leases"} {
		fmt.Fprintf(&out, "| %s | %.3f ms | %.3f ms | %.2f |\n", name, lat[i].p50.Seconds()*1e3, lat[i].p99.Seconds()*1e3, lat[i].p99.Seconds()/lat[0].p99.Seconds())
	}
	return out.String()
}

func loadAverage() string {
	data, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	first, _, _ := strings.Cut(string(data), " ")
	return first
}
