package limit

import (
	"context"
	"encoding/json"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
)

// settlement is the end of a request at the limiter. It is sent until it is
// answered; the limiter knows what it has done already.
type settlement struct {
	Organisation, ID string
	// Request is the marshalled commit, in the spill file only.
	Request []byte `json:",omitempty"`
	// Tried is the first time that it was sent and not answered, Unix seconds.
	Tried int64 `json:",omitempty"`

	commit *limiterv1.CommitRequest // nil: release
}

const (
	settlers = 4
	// giveUp after the first try without an answer. The limiter remembers what
	// it settled for longer, so nothing is charged twice.
	giveUp = 5 * time.Minute
	// settleTimeout is for calls that nobody waits for.
	settleTimeout = 250 * time.Millisecond
	retryPause    = 100 * time.Millisecond
)

// settle queues s. It never blocks.
func (c *Client) settle(s *settlement) {
	if !c.closed.Load() {
		select {
		case c.queue <- s:
			return
		default:
		}
	}
	c.spillOver(s)
}

func (c *Client) spillOver(s *settlement) {
	if s.commit != nil {
		data, err := proto.Marshal(s.commit)
		if err != nil {
			c.metrics.drop("malformed")
			return
		}
		s.Request = data
	}
	line, err := json.Marshal(s)
	switch {
	case err != nil:
		c.metrics.drop("malformed")
	case !c.spill.push(line):
		c.metrics.drop("full")
	default:
		c.metrics.spilled()
	}
}

// refill takes lines from the spill file while the queue has room.
func (c *Client) refill() {
	if c.spill.empty() || len(c.queue) > cap(c.queue)/2 || c.breaker.open() || !c.refilling.TryLock() {
		return
	}
	defer c.refilling.Unlock()
	lines, err := c.spill.pop()
	if err != nil {
		c.log.Warn("spilled settlements cannot be read", "err", err)
		return
	}
	for _, line := range lines {
		s := new(settlement)
		if err := json.Unmarshal(line, s); err != nil {
			c.metrics.drop("malformed")
			continue
		}
		if s.Request != nil {
			s.commit = new(limiterv1.CommitRequest)
			if err := proto.Unmarshal(s.Request, s.commit); err != nil {
				c.metrics.drop("malformed")
				continue
			}
			s.Request = nil
		}
		c.settle(s)
	}
}

// settler sends what is queued, until the client closes and the queue is empty.
// What it cannot send before hard is done goes to the spill file.
func (c *Client) settler(hard context.Context) {
	for {
		select {
		case s := <-c.queue:
			c.deliver(hard, s)
			c.refill()
			continue
		default:
		}
		select {
		case s := <-c.queue:
			c.deliver(hard, s)
			c.refill()
		case <-c.closing:
			return
		}
	}
}

func (c *Client) deliver(hard context.Context, s *settlement) {
	for {
		if hard.Err() != nil {
			c.spillOver(s)
			return
		}
		if s.Tried != 0 && time.Since(time.Unix(s.Tried, 0)) > giveUp {
			c.metrics.drop("old")
			return
		}
		if ok, try := c.breaker.admit(); ok {
			// The time is noted before: a process that dies in between must not
			// send it again much later.
			before := s.Tried
			if before == 0 {
				s.Tried = time.Now().Unix()
			}
			err := c.send(hard, s)
			if !c.report(try, err) {
				if err != nil {
					c.log.Warn("settlement refused", "err", err)
					c.metrics.drop("refused")
				}
				return
			}
		}
		select {
		case <-time.After(retryPause):
		case <-hard.Done():
		}
	}
}

func (c *Client) send(ctx context.Context, s *settlement) error {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	if s.commit != nil {
		_, err := c.s.Limiter.Commit(ctx, s.commit)
		return err
	}
	_, err := c.s.Limiter.Release(ctx, &limiterv1.ReleaseRequest{Organisation: s.Organisation, RequestId: s.ID})
	return err
}

// report tells the breaker how a call ended, and returns whether it is worth
// repeating.
func (c *Client) report(try bool, err error) (again bool) {
	code := connect.CodeOf(err)
	answered := err == nil || code == connect.CodeInvalidArgument || code == connect.CodeUnimplemented || code == connect.CodePermissionDenied || code == connect.CodeUnauthenticated
	c.breaker.done(try, !answered, code == connect.CodeCanceled && err != nil)
	return !answered
}
