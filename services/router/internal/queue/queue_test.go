package queue_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinference/kinference/services/router/internal/queue"
)

func TestFirstComeFirstServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queue.New(10)
		free := 0
		var mu sync.Mutex
		var served []int
		for i := range 5 {
			go q.Wait(t.Context(), "line", time.Minute, func() bool {
				mu.Lock()
				defer mu.Unlock()
				if free == 0 {
					return false
				}
				free--
				served = append(served, i)
				return true
			})
			synctest.Wait() // one after the other
		}
		for range 5 {
			time.Sleep(time.Second)
			mu.Lock()
			free++
			mu.Unlock()
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if !slices.Equal(served, []int{0, 1, 2, 3, 4}) || q.Len() != 0 {
			t.Errorf("served %v, %d left", served, q.Len())
		}
	})
}

func TestLeaving(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queue.New(2)
		never := func() bool { return false }
		ctx, cancel := context.WithCancel(t.Context())
		results := make(chan bool, 3)
		go func() { results <- q.Wait(ctx, "line", time.Minute, never) }()
		synctest.Wait()
		go func() { results <- q.Wait(t.Context(), "line", time.Minute, func() bool { return true }) }()
		synctest.Wait()
		if q.Wait(t.Context(), "other", time.Minute, never) {
			t.Error("a full queue took one more")
		}
		cancel() // the head leaves: the next one's turn
		if first, second := <-results, <-results; first == second {
			t.Errorf("got %v and %v, want one of each", first, second)
		}
		began := time.Now()
		if q.Wait(t.Context(), "line", time.Second, never) || time.Since(began) != time.Second {
			t.Errorf("a wait of a second ended after %v", time.Since(began))
		}
		if q.Len() != 0 {
			t.Errorf("%d left", q.Len())
		}
	})
}
