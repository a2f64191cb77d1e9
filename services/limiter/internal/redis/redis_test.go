package redis_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/kinference/kinference/internal/testenv"
	"github.com/kinference/kinference/services/limiter/internal/redis"
	"github.com/kinference/kinference/services/limiter/internal/store"
	"github.com/kinference/kinference/services/limiter/internal/store/storetest"
)

// open returns a store at addrs that closes with the test.
func open(t testing.TB, addrs ...string) *redis.Store {
	t.Helper()
	s := redis.New(goredis.NewUniversalClient(&goredis.UniversalOptions{Addrs: addrs, ContextTimeoutEnabled: true, IsClusterMode: len(addrs) > 1}))
	t.Cleanup(func() { s.Close() })
	return s
}

func TestStore(t *testing.T) { storetest.Run(t, open(t, testenv.Redis(t).Addr)) }

func TestStoreOnCluster(t *testing.T) {
	storetest.Run(t, open(t, testenv.RedisCluster(t, 0).Addrs()...))
}

func TestScriptIsTheModel(t *testing.T) {
	addr := testenv.Redis(t).Addr
	client := goredis.NewClient(&goredis.Options{Addr: addr})
	defer client.Close()
	age := func(org, key string, by int64) {
		ctx, name := context.Background(), "kinference:{"+org+"}:b:"+key
		text, err := client.Get(ctx, name).Result()
		if err == goredis.Nil {
			return
		}
		v := []byte(text) // four doubles, the second is the time
		at := math.Float64frombits(binary.LittleEndian.Uint64(v[8:]))
		binary.LittleEndian.PutUint64(v[8:], math.Float64bits(at-float64(by)))
		if err := client.SetArgs(ctx, name, v, goredis.SetArgs{KeepTTL: true}).Err(); err != nil {
			t.Fatal(err)
		}
	}
	s := open(t, addr)
	for seed := range uint64(15) {
		storetest.RunModel(t, s, seed, 1000, age, func(*rand.Rand) {})
		if t.Failed() {
			return
		}
	}
}

// Redis must not grow for ever: whatever a call leaves has a time to live, and a
// request leaves little.
func TestEveryKeyHasATimeToLive(t *testing.T) {
	ctx := t.Context()
	client := goredis.NewClient(&goredis.Options{Addr: testenv.Redis(t).Addr})
	defer client.Close()
	s := redis.New(client)
	memory := func() int64 {
		t.Helper()
		var n int64
		info, err := client.Info(ctx, "memory").Result()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Sscanf(info[strings.Index(info, "used_memory:"):], "used_memory:%d", &n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	buckets := []store.Bucket{
		{Key: "ns/team/tokens-per-minute", Capacity: 1 << 40, Rate: 1 << 40, Period: time.Minute, MaxDebt: 1, MaxLeased: 1 << 30},
		{Key: "ns/team/slow", Capacity: 1 << 50, Rate: 1, Period: store.MaxPeriod, MaxDebt: 1},
		{Key: "ns/team/pot", Capacity: 1 << 40, Period: time.Minute, MaxDebt: 1},
		{Key: "ns/team/usd@2026-11-01", Capacity: 1 << 40, Period: time.Minute, MaxDebt: 1, Ends: time.Now().Add(time.Hour)},
		{Key: "ns/team/streams", Set: true, Capacity: 1 << 20},
	}
	var charges []store.Charge
	for _, b := range buckets {
		charges = append(charges, store.Charge{Bucket: b, Amount: 1})
	}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	_, _, err := s.Lease(ctx, "ns/acme", "holder", time.Second, []store.Share{{Bucket: buckets[0], Sequence: 1, Want: 5}})
	check(err)
	_, err = s.Holders(ctx, []string{"a"})
	check(err)
	const n = 2000
	before := memory()
	for i := range n {
		_, err := s.Reserve(ctx, "ns/acme", fmt.Sprintf("0193a7c2-6b1e-7000-8000-%012d", i), time.Minute, charges)
		check(err)
	}
	running := memory()
	for i := range n {
		id := fmt.Sprintf("0193a7c2-6b1e-7000-8000-%012d", i)
		var err error
		switch i % 3 {
		case 0:
			_, err = s.Commit(ctx, "ns/acme", id, charges)
		case 1:
			_, err = s.Release(ctx, "ns/acme", id)
		default:
			_, _, err = s.Extend(ctx, "ns/acme", []string{id}, time.Minute)
		}
		check(err)
	}
	for iter := client.Scan(ctx, 0, "*", 1000).Iterator(); iter.Next(ctx); {
		if ttl := client.PTTL(ctx, iter.Val()).Val(); ttl <= 0 || ttl > store.Longest+time.Hour {
			t.Errorf("%s has time to live %v", iter.Val(), ttl)
		}
	}
	for i := range n {
		_, err := s.Commit(ctx, "ns/acme", fmt.Sprintf("0193a7c2-6b1e-7000-8000-%012d", i), nil)
		check(err)
	}
	t.Logf("a request of 5 buckets: %d bytes while it runs, %d afterwards", (running-before)/n, (memory()-before)/n)
	if perRequest := (memory() - before) / n; perRequest > 400 {
		t.Errorf("a settled request leaves %d bytes, want few", perRequest)
	}
}
