package limiter

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinference/kinference/services/limiter/internal/store"
)

// failing answers Read as err says, or hangs until it is given up.
type failing struct {
	store.Store
	err   error
	hang  bool
	calls int
}

func (f *failing) Read(ctx context.Context, _ string, _ []store.Bucket) (store.Result, error) {
	f.calls++
	if f.hang {
		<-ctx.Done()
		return store.Result{}, ctx.Err()
	}
	return store.Result{}, f.err
}

func TestBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &failing{hang: true}
		opened := 0
		g := &guard{Store: f, timeout: 25 * time.Millisecond, failures: 3, pause: time.Second,
			observed: func(string, time.Duration, error) {}, opened: func() { opened++ }}
		read := func() (time.Duration, error) {
			start := time.Now()
			_, err := g.Read(t.Context(), "o", nil)
			return time.Since(start), err
		}
		for i := range 3 {
			if took, err := read(); took != 25*time.Millisecond || err == nil {
				t.Errorf("call %d of a store that hangs: got %v after %v, want an error after 25 ms", i, err, took)
			}
		}
		if took, err := read(); took != 0 || !errors.Is(err, store.ErrUnavailable) || f.calls != 3 || opened != 1 {
			t.Errorf("open: got %v after %v, %d calls, opened %d times", err, took, f.calls, opened)
		}
		time.Sleep(time.Second)
		if took, _ := read(); took != 25*time.Millisecond || f.calls != 4 {
			t.Errorf("try after the pause: took %v, %d calls", took, f.calls)
		}
		if took, _ := read(); took != 0 {
			t.Errorf("after a failed try: took %v, want none", took)
		}
		f.hang = false
		time.Sleep(time.Second)
		for range 3 {
			if _, err := read(); err != nil {
				t.Errorf("healed: %v", err)
			}
		}
		// Who leaves does not break it, and a full store works.
		f.err = store.ErrFull
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for range 5 {
			_, _ = g.Read(ctx, "o", nil)
			_, _ = read()
		}
		if g.open() {
			t.Error("open because of callers that left")
		}
	})
}
