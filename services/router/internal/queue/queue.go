// Package queue lets requests wait, first come first served, until an endpoint
// is free for them.
//
// The router asks it for requests whose rule says onEmpty: Queue. Each line is
// for requests that wait for the same thing; only its head asks again, so that
// nobody overtakes and the cost of waiting does not grow with the line. Queue is
// bounded: who finds it full does not wait. It is safe for concurrent use.
package queue

import (
	"context"
	"sync"
	"time"
)

// again is how often the head of a line asks: about twice in a scrape.
const again = 100 * time.Millisecond

// Queue holds the lines. Use New.
type Queue struct {
	most int

	mu    sync.Mutex
	lines map[string][]chan struct{} // waiters; the first one's channel is closed
	n     int
}

// New returns a queue of at most this many requests.
func New(most int) *Queue { return &Queue{most: most, lines: map[string][]chan struct{}{}} }

// Len is the number of requests that wait.
func (q *Queue) Len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.n
}

// Wait waits in a line until try, called by the head of the line only, reports
// success; false if that took longer than the timeout, if ctx is done, or if the
// queue is full.
func (q *Queue) Wait(ctx context.Context, line string, timeout time.Duration, try func() bool) bool {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	turn := make(chan struct{})
	if !q.enter(line, turn) {
		return false
	}
	defer q.leave(line, turn)
	select {
	case <-ctx.Done():
		return false
	case <-turn:
	}
	tick := time.NewTicker(again)
	defer tick.Stop()
	for !try() {
		select {
		case <-ctx.Done():
			return false
		case <-tick.C:
		}
	}
	return true
}

func (q *Queue) enter(line string, turn chan struct{}) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.n >= q.most {
		return false
	}
	q.n++
	if q.lines[line] = append(q.lines[line], turn); len(q.lines[line]) == 1 {
		close(turn)
	}
	return true
}

func (q *Queue) leave(line string, turn chan struct{}) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.n--
	waiters := q.lines[line]
	for i, w := range waiters {
		if w != turn {
			continue
		}
		waiters = append(waiters[:i], waiters[i+1:]...)
		if i == 0 && len(waiters) > 0 {
			close(waiters[0])
		}
		break
	}
	if q.lines[line] = waiters; len(waiters) == 0 {
		delete(q.lines, line)
	}
}
