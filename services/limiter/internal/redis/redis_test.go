package redis_test

import (
	"context"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"

	goredis "github.com/redis/go-redis/v9"

	"github.com/kinference/kinference/internal/testenv"
	"github.com/kinference/kinference/services/limiter/internal/redis"
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
