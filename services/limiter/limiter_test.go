package limiter_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
	"github.com/kinference/kinference/proto/gen/kinference/limiter/v1/limiterv1connect"
	"github.com/kinference/kinference/services/limiter"
)

func TestMain(m *testing.M) {
	if os.Getenv(memberEnv) != "" {
		os.Exit(m.Run())
	}
	goleak.VerifyTestMain(m,
		// The Redis library sleeps for a second before it sees that it is closed.
		goleak.IgnoreAnyFunction("github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial"))
}

// serve runs a limiter that ends with the test and returns a client of it.
func serve(t testing.TB, c limiter.Config) (limiterv1connect.LimiterServiceClient, string) {
	t.Helper()
	c.Listener = testenv.Listen(t)
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- (&limiter.Service{Config: c}).Run(ctx) }()
	clientCtx, closeClient := context.WithCancel(context.Background())
	t.Cleanup(func() {
		closeClient()
		stop()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	url := "http://" + c.Listener.Addr().String()
	return rpc.Client(clientCtx, url, limiterv1connect.NewLimiterServiceClient), url
}

func window(key string, limit int64, period time.Duration) *limiterv1.Bucket {
	return &limiterv1.Bucket{Key: key, Kind: &limiterv1.Bucket_Window{Window: &limiterv1.Window{Limit: limit, Period: durationpb.New(period)}}}
}

func month(key string, limit int64) *limiterv1.Bucket {
	return &limiterv1.Bucket{Key: key, Kind: &limiterv1.Bucket_Calendar{Calendar: &limiterv1.Calendar{Limit: limit, Period: limiterv1.Calendar_PERIOD_MONTH, TimeZone: testenv.Noon()}}}
}

func concurrency(key string, limit int64) *limiterv1.Bucket {
	return &limiterv1.Bucket{Key: key, Kind: &limiterv1.Bucket_Concurrency{Concurrency: &limiterv1.Concurrency{Limit: limit}}}
}

func reserve(t testing.TB, c limiterv1connect.LimiterServiceClient, id string, cs ...*limiterv1.Charge) *limiterv1.ReserveResponse {
	t.Helper()
	r, err := c.Reserve(t.Context(), &limiterv1.ReserveRequest{Organisation: "ns/acme", RequestId: id, Charges: cs})
	if err != nil {
		t.Fatalf("reserve %s: %v", id, err)
	}
	return r
}

func TestAnswersSayWhichWhenAndWhy(t *testing.T) {
	t.Parallel()
	c, _ := serve(t, limiter.Config{})
	minute, hour, budget, streams := window("minute", 100, time.Minute), window("hour", 1000, time.Hour), month("usd", 500), concurrency("streams", 1)
	charge := func(n int64, bs ...*limiterv1.Bucket) (out []*limiterv1.Charge) {
		for _, b := range bs {
			out = append(out, &limiterv1.Charge{Bucket: b, Amount: n})
			if b.GetConcurrency() != nil {
				out[len(out)-1].Amount = 1
			}
		}
		return out
	}
	r := reserve(t, c, "a", charge(80, hour, minute, budget, streams)...)
	if !r.Granted || r.GetTightest() != 3 || r.States[1].Remaining != 20 || r.States[3].Remaining != 0 || r.States[0].Limit != 1000 {
		t.Errorf("first: got %v", r)
	}
	if d := r.States[1].Reset_.AsDuration(); d < 47*time.Second || d > 48*time.Second {
		t.Errorf("80 of 100 a minute are back after %v, want 48 s", d)
	}
	r = reserve(t, c, "b", charge(50, minute, hour)...)
	if r.Granted || r.Reason != limiterv1.ReserveResponse_REASON_EXHAUSTED || r.GetRefused() != 0 || r.Refused == nil || r.GetTightest() != 0 {
		t.Errorf("second: got %v", r)
	}
	if d := r.RetryAfter.AsDuration(); d < 17*time.Second || d > 18*time.Second {
		t.Errorf("30 more of 100 a minute fit after %v, want 18 s", d)
	}
	// Of two that refuse, the one that takes longer is named.
	r = reserve(t, c, "c", charge(98, minute, streams)...)
	if r.Granted || r.GetRefused() != 0 || !r.States[1].Refused {
		t.Errorf("two refuse: got %v", r)
	}
	r = reserve(t, c, "d", charge(101, minute)...)
	if r.Granted || r.Reason != limiterv1.ReserveResponse_REASON_NEVER || r.RetryAfter != nil {
		t.Errorf("larger than the bucket: got %v", r)
	}
	r = reserve(t, c, "e", charge(450, budget)...)
	if d := r.RetryAfter.AsDuration(); r.Granted || d <= 0 || d > 32*24*time.Hour {
		t.Errorf("budget: got %v", r)
	}
	read, err := c.Read(t.Context(), &limiterv1.ReadRequest{Organisation: "ns/acme", Buckets: []*limiterv1.Bucket{minute, streams}})
	if err != nil || read.States[1].Remaining != 0 {
		t.Errorf("read: got %v, %v", read, err)
	}
	released, err := c.Release(t.Context(), &limiterv1.ReleaseRequest{Organisation: "ns/acme", RequestId: "a"})
	if err != nil || !released.Released {
		t.Errorf("release: got %v, %v", released, err)
	}
	if r = reserve(t, c, "f", charge(50, minute, streams)...); !r.Granted {
		t.Errorf("after the release: got %v", r)
	}
	committed, err := c.Commit(t.Context(), &limiterv1.CommitRequest{Organisation: "ns/acme", RequestId: "f", Charges: charge(60, minute, streams), ReservedUnixMicros: r.ReservedUnixMicros})
	if err != nil || !committed.Settled || committed.States[0].Remaining < 40 || committed.States[0].Remaining > 41 {
		t.Errorf("commit: got %v, %v", committed, err)
	}
	if _, err := c.Reserve(t.Context(), &limiterv1.ReserveRequest{Organisation: "a{b", RequestId: "x", Charges: charge(1, minute)}); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("brace: got %v", err)
	}
}

func TestBudgetOfTheMonthInWhichItBegan(t *testing.T) {
	t.Parallel()
	c, _ := serve(t, limiter.Config{})
	b := &limiterv1.Bucket{Key: "usd", Kind: &limiterv1.Bucket_Calendar{Calendar: &limiterv1.Calendar{Limit: 500, Period: limiterv1.Calendar_PERIOD_HOUR}}}
	commit := func(id string, at time.Time) int64 {
		r, err := c.Commit(t.Context(), &limiterv1.CommitRequest{Organisation: "ns/acme", RequestId: id, Charges: []*limiterv1.Charge{{Bucket: b, Amount: 10}}, ReservedUnixMicros: at.UnixMicro()})
		if err != nil {
			t.Fatal(err)
		}
		return r.States[0].Remaining
	}
	if a, b := commit("a", time.Now().Add(-time.Hour)), commit("b", time.Now()); a != 490 || b != 490 {
		t.Errorf("got %d and %d left, want 490 in each hour", a, b)
	}
	if got := commit("c", time.Unix(0, 1)); got != 480 {
		t.Errorf("a wrong clock: got %d left, want it charged now", got)
	}
}

func TestConfig(t *testing.T) {
	for _, tc := range []struct {
		name string
		c    limiter.Config
		want string
	}{
		{"empty", limiter.Config{}, ""},
		{"single", limiter.Config{RedisAddrs: "r:6379"}, ""},
		{"cluster", limiter.Config{RedisAddrs: "a:1,b:2", RedisMode: "cluster"}, ""},
		{"sentinel", limiter.Config{RedisAddrs: "a:1, b:2", RedisMode: "sentinel", RedisMaster: "m"}, ""},
		{"many single", limiter.Config{RedisAddrs: "a:1,b:2"}, "one address"},
		{"no address", limiter.Config{RedisMode: "cluster"}, "needs redis-addrs"},
		{"no port", limiter.Config{RedisAddrs: "redis"}, "host:port"},
		{"slow", limiter.Config{RedisTimeout: time.Second}, "at most 50ms"},
		{"mode", limiter.Config{RedisMode: "ring"}, "want single, cluster or sentinel"},
		{"master", limiter.Config{RedisAddrs: "a:1", RedisMaster: "m"}, "redis-master"},
		{"half a certificate", limiter.Config{RedisTLS: true, RedisCertFile: "c"}, "go together"},
		{"authorities without TLS", limiter.Config{RedisCAFile: "c"}, "need redis-tls"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := tc.c.Validate()
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

func TestPasswordAndTLSSettingsReachRedis(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t, "--requirepass", "open sesame")
	file := t.TempDir() + "/password"
	write(t, file, "open sesame\n")
	c, _ := serve(t, limiter.Config{RedisAddrs: r.Addr, RedisPasswordFile: file})
	until(t, "answer", func() bool {
		r, err := c.Reserve(t.Context(), &limiterv1.ReserveRequest{Organisation: "o", RequestId: "a", Charges: []*limiterv1.Charge{{Bucket: window("w", 10, time.Second), Amount: 1}}})
		return err == nil && r.Granted
	})
	bad, _ := serve(t, limiter.Config{RedisAddrs: r.Addr})
	_, err := bad.Reserve(t.Context(), &limiterv1.ReserveRequest{Organisation: "o", RequestId: "a", Charges: []*limiterv1.Charge{{Bucket: window("w", 10, time.Second)}}})
	if connect.CodeOf(err) != connect.CodeUnavailable || strings.Contains(fmt.Sprint(err), "NOAUTH") {
		t.Errorf("without the password: got %v, want unavailable and no detail", err)
	}
}
