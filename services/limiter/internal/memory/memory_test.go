package memory_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kinference/kinference/services/limiter/internal/memory"
	"github.com/kinference/kinference/services/limiter/internal/store"
	"github.com/kinference/kinference/services/limiter/internal/store/storetest"
)

func TestStore(t *testing.T) { storetest.Run(t, memory.New(0, nil)) }

func TestStoreIsTheModel(t *testing.T) {
	for seed := range uint64(30) {
		now := time.Now().UnixMicro()
		s := memory.New(0, func() int64 { return now })
		storetest.RunModel(t, s, seed, 2000, nil, func(r *rand.Rand) { now += r.Int64N(1 << r.IntN(22)) })
		if t.Failed() {
			return
		}
	}
}

func TestStoreIsBounded(t *testing.T) {
	now := time.Now().UnixMicro()
	s := memory.New(100, func() int64 { return now })
	reserve := func(i int) error {
		b := store.Bucket{Key: fmt.Sprint(i), Capacity: 10, Rate: 10, Period: time.Second}
		_, err := s.Reserve(t.Context(), fmt.Sprint("org", i), "r", time.Minute, []store.Charge{{Bucket: b, Amount: 1}})
		return err
	}
	for i := range 50 {
		if err := reserve(i); err != nil {
			t.Fatalf("reservation %d of 2 things each: %v", i, err)
		}
	}
	if err := reserve(50); !errors.Is(err, store.ErrFull) {
		t.Errorf("got %v, want ErrFull", err)
	}
	now += time.Hour.Microseconds()
	if err := reserve(50); err != nil || s.Held() != 2 {
		t.Errorf("after an hour: got %v and %d things, want 2", err, s.Held())
	}
}
