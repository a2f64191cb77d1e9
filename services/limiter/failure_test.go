package limiter_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/limit"
	"github.com/kinference/kinference/internal/testenv"
	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
	"github.com/kinference/kinference/proto/gen/kinference/limiter/v1/limiterv1connect"
	"github.com/kinference/kinference/services/limiter"
)

// load is requests of one kind that run until it is stopped.
type load struct {
	bucket    *limiterv1.Bucket
	policy    limit.Unavailable
	granted   atomic.Int64
	degraded  atomic.Int64
	refused   atomic.Int64
	committed atomic.Int64

	mu    sync.Mutex
	waits []time.Duration
	stop  chan struct{}
	done  sync.WaitGroup
}

var loads atomic.Int64

// run starts n requesters; each reserves 7, uses 5, and has a permit.
func (l *load) run(t *testing.T, c *limit.Client, n int) {
	l.stop = make(chan struct{})
	run := loads.Add(1)
	for i := range n {
		l.done.Go(func() {
			for j := 0; ; j++ {
				select {
				case <-l.stop:
					return
				default:
				}
				begin := time.Now()
				a, err := c.Reserve(context.Background(), limit.Request{Organisation: "ns/acme", ID: fmt.Sprint(run, "/", i, "/", j), Charges: []limit.Charge{
					{Bucket: l.bucket, Amount: 7, OnUnavailable: l.policy},
					{Bucket: concurrency(l.bucket.Key+" streams", 100), Amount: 1, OnUnavailable: l.policy},
				}})
				took := time.Since(begin)
				if err != nil {
					t.Errorf("reserve: %v", err)
					return
				}
				l.mu.Lock()
				l.waits = append(l.waits, took)
				l.mu.Unlock()
				if a.Degraded {
					l.degraded.Add(1)
				}
				if !a.Granted() {
					l.refused.Add(1)
					// The pace of clients that come back.
					select {
					case <-time.After(5 * time.Millisecond):
					case <-l.stop:
					}
					continue
				}
				l.granted.Add(1)
				l.committed.Add(5)
				a.Reservation.Commit([]int64{5, 1})
				if a.Degraded {
					select {
					case <-time.After(5 * time.Millisecond):
					case <-l.stop:
					}
				}
			}
		})
	}
}

func (l *load) end() {
	close(l.stop)
	l.done.Wait()
}

// timeout of a trip in these tests, slack what a busy machine may add to it.
const timeout, slack = 100 * time.Millisecond, 900 * time.Millisecond

// waited shows how long requests waited. That none waits for a Redis that is away is
// checked by the phases, which would not end.
func (l *load) waited(t *testing.T, what string) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	slices.Sort(l.waits)
	n := len(l.waits)
	t.Logf("%s: %d requests, %d granted, %d refused, %d degraded; waited p50 %v, p99 %v, at most %v", what, n, l.granted.Load(), l.refused.Load(), l.degraded.Load(),
		l.waits[n/2].Round(time.Microsecond), l.waits[n*99/100].Round(time.Microsecond), l.waits[n-1].Round(time.Microsecond))
	if m := l.waits[n-1]; m > timeout+slack {
		t.Logf("SLOW: %s: a request waited %v, want %v at most (and %v for a busy machine)", what, m, timeout, slack)
	}
}

// phase waits until so many more requests ended.
func (l *load) phase(t *testing.T, what string, count *atomic.Int64, n int64) {
	t.Helper()
	from := count.Load()
	until(t, what, func() bool { return count.Load() >= from+n })
}

// three loads with one policy each, over one limiter.
func three(t *testing.T, rpc limiterv1connect.LimiterServiceClient) (deny, allow, local *load, end func()) {
	deny = &load{bucket: pot("deny", 1<<40), policy: limit.Deny}
	allow = &load{bucket: pot("allow", 1<<40), policy: limit.Allow}
	local = &load{bucket: window("local", 100, 24*time.Hour), policy: limit.Local}
	all := []*load{deny, allow, local}
	for _, l := range all {
		l.bucket.MaxLeased = 0
		l.run(t, client(t, rpc, limit.Settings{Timeout: timeout}), 4)
	}
	return deny, allow, local, sync.OnceFunc(func() {
		for _, l := range all {
			l.end()
		}
	})
}

func TestRedisStopsUnderLoad(t *testing.T) {
	for _, mode := range []string{"killed", "paused"} {
		t.Run(mode, func(t *testing.T) {
			r := testenv.Redis(t)
			rpc, _ := serve(t, limiter.Config{RedisAddrs: r.Addr, RedisTimeout: 50 * time.Millisecond})
			deny, allow, local, end := three(t, rpc)
			defer end()
			deny.phase(t, "load", &deny.granted, 100)
			local.phase(t, "end of the local budget", &local.refused, 20)
			if mode == "killed" {
				r.Stop()
			} else {
				r.Pause()
			}
			deny.phase(t, "degraded requests", &deny.degraded, 20)
			granted, before := deny.granted.Load(), local.granted.Load()
			deny.phase(t, "refusals", &deny.refused, 100)
			allow.phase(t, "requests that are allowed", &allow.degraded, 100)
			local.phase(t, "decisions by the local limit", &local.degraded, 100)
			if n := deny.granted.Load() - granted; n > 0 {
				t.Errorf("%d granted while Redis is %s, want none with Deny", n, mode)
			}
			if n := local.granted.Load() - before; n > 100/7 {
				t.Errorf("%d granted while Redis is %s, want what a limit of 100 allows", n, mode)
			}
			if mode == "killed" {
				r.Start(t)
			} else {
				r.Resume()
			}
			deny.phase(t, "requests after the outage", &deny.granted, 100)
			end()
			for what, l := range map[string]*load{"deny": deny, "allow": allow, "local": local} {
				l.waited(t, what)
			}
			// Everything is settled, once. A server that was killed has forgotten
			// what was settled before.
			for _, l := range []*load{deny, allow} {
				want := l.committed.Load()
				if mode == "paused" {
					until(t, "every settlement", func() bool { return 1<<40-remaining(t, rpc, l.bucket).Remaining == want })
				}
				until(t, "end of all permits", func() bool {
					return remaining(t, rpc, concurrency(l.bucket.Key+" streams", 100)).Remaining == 100
				})
				if got := 1<<40 - remaining(t, rpc, l.bucket).Remaining; got > want {
					t.Errorf("%d charged of %d used: something is charged twice", got, want)
				}
			}
		})
	}
}

func TestClusterFailsOverUnderLoad(t *testing.T) {
	for _, mode := range []string{"asked", "killed"} {
		t.Run(mode, func(t *testing.T) {
			g := testenv.RedisCluster(t, 1)
			rpc, _ := serve(t, limiter.Config{RedisAddrs: g.Nodes[0].Addr + "," + g.Nodes[1].Addr + "," + g.Nodes[2].Addr, RedisMode: limiter.ModeCluster, RedisTimeout: 50 * time.Millisecond})
			deny, allow, local, end := three(t, rpc)
			defer end()
			deny.phase(t, "load", &deny.granted, 100)
			primary, replica := g.Owner(t, "kinference:{ns/acme}:x")
			if replica == nil {
				t.Fatal("the primary has no replica")
			}
			if mode == "asked" {
				// A busy server gives a failover up after five seconds.
				var asked time.Time
				until(t, "new primary", func() bool {
					if time.Since(asked) > 6*time.Second {
						asked = time.Now()
						if out, err := replica.CLI("cluster", "failover"); err != nil {
							t.Fatalf("failover: %v %s", err, out)
						}
					}
					now, _ := g.Owner(t, "kinference:{ns/acme}:x")
					return now == replica
				})
			} else {
				primary.Stop()
				deny.phase(t, "refusals", &deny.degraded, 20)
			}
			deny.phase(t, "requests after the failover", &deny.granted, 100)
			end()
			for what, l := range map[string]*load{"deny": deny, "allow": allow, "local": local} {
				l.waited(t, what)
			}
			for _, l := range []*load{deny, allow} {
				want := l.committed.Load()
				left := func() int64 { return 1<<40 - remaining(t, rpc, l.bucket).Remaining }
				until(t, "end of all permits", func() bool {
					return remaining(t, rpc, concurrency(l.bucket.Key+" streams", 100)).Remaining == 100
				})
				// What was let through meanwhile is settled afterwards. What a killed
				// primary had not replicated is lost, so the end is when no more comes.
				last, since := left(), time.Now()
				until(t, fmt.Sprintf("every settlement: %d", want), func() bool {
					if now := left(); now != last {
						last, since = now, time.Now()
					}
					return last == want || mode == "killed" && time.Since(since) > 3*time.Second
				})
				got := left()
				if got > want {
					t.Errorf("%d charged of %d used: something is charged twice", got, want)
				}
				t.Logf("%s: %d used, %d charged, %d lost with the primary", l.bucket.Key, want, got, want-got)
			}
		})
	}
}

func TestSentinelReplacesThePrimary(t *testing.T) {
	primary, _, sentinel := testenv.RedisSentinel(t)
	rpc, _ := serve(t, limiter.Config{RedisAddrs: sentinel.Addr, RedisMode: limiter.ModeSentinel, RedisMaster: "m", RedisTimeout: 50 * time.Millisecond})
	deny, allow, local, end := three(t, rpc)
	defer end()
	deny.phase(t, "load", &deny.granted, 100)
	primary.Stop()
	deny.phase(t, "refusals", &deny.degraded, 20)
	deny.phase(t, "requests after the failover", &deny.granted, 100)
	end()
	for what, l := range map[string]*load{"deny": deny, "allow": allow, "local": local} {
		l.waited(t, what)
	}
	for _, l := range []*load{deny, allow} {
		until(t, "end of all permits", func() bool {
			return remaining(t, rpc, concurrency(l.bucket.Key+" streams", 100)).Remaining == 100
		})
		if got, want := 1<<40-remaining(t, rpc, l.bucket).Remaining, l.committed.Load(); got > want {
			t.Errorf("%d charged of %d used: something is charged twice", got, want)
		}
	}
}
