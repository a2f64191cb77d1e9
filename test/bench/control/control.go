// Package control starts the whole control plane for the wall-clock benchmarks:
// all services in one process over real Connect and NATS, as `kinference
// serve` does.
//
// The benchmark command and tests use it. A Control's methods are for one
// goroutine.
package control

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/kinference/kinference/cmd/stack"
	"github.com/kinference/kinference/internal/bench/load"
	"github.com/kinference/kinference/internal/bench/wall"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	"github.com/kinference/kinference/proto/gen/kinference/admin/v1/adminv1connect"
)

// Control is a running control plane.
type Control struct {
	URL    string
	admin  adminv1connect.AdminServiceClient
	stack  *stack.Stack
	dir    string
	cancel context.CancelFunc
	log    tail
}

// tail keeps the end of the services' log, which says why they do not start.
// It is safe for concurrent use.
type tail struct {
	mu   sync.Mutex
	text []byte
}

const tailBytes = 4 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p...)
	t.text = t.text[max(len(t.text)-tailBytes, 0):]
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.text)
}

// readyTimeout is how long a control plane may take to serve.
var readyTimeout = 30 * time.Second

// Start starts all services in front of what write describes, and
// returns once a request gets through. scale is the fleet's time scale. changes may set other
// options of the services.
func Start(ctx context.Context, scale float64, seed uint64, write func(dir string) error, changes ...func(*stack.Options)) (*Control, error) {
	dir, err := os.MkdirTemp("", "kinference-bench-")
	if err != nil {
		return nil, err
	}
	c := &Control{dir: dir}
	ctx, c.cancel = context.WithCancel(ctx)
	if err := c.start(ctx, scale, seed, write, changes); err != nil {
		_ = c.Stop()
		return nil, fmt.Errorf("%w\n%s", err, &c.log)
	}
	return c, nil
}

func (c *Control) start(ctx context.Context, scale float64, seed uint64, write func(dir string) error, changes []func(*stack.Options)) (err error) {
	if err = write(c.dir); err != nil {
		return err
	}
	options := stack.Options{ConfigDir: c.dir, Seed: seed, TimeScale: scale, DrainTimeout: time.Second, Output: &c.log, LogLevel: slog.LevelWarn}
	for _, change := range changes {
		change(&options)
	}
	if c.stack, err = stack.Start(ctx, options); err != nil {
		return err
	}
	c.URL = c.stack.URL()
	c.admin = c.stack.Admin(ctx)
	ready, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	if err = c.stack.WaitReady(ready); err != nil {
		return fmt.Errorf("wait until ready: %w", err)
	}
	client := load.NewClient()
	defer client.Close()
	body := load.Chat(wall.Model, []load.Message{{Role: "user", Content: " ready"}}, 1)
	return wall.WaitServing(ready, c.URL, func(ctx context.Context) error {
		return client.Do(ctx, load.Request{URL: c.URL + "/v1/chat/completions", Body: body}).Err
	})
}

// Explain returns the router's record of a recent decision.
func (c *Control) Explain(ctx context.Context, requestID string) (*adminv1.Decision, error) {
	res, err := c.admin.Explain(ctx, &adminv1.ExplainRequest{RequestId: requestID})
	if err != nil {
		return nil, err
	}
	return res.Decision, nil
}

// Stop stops the services and removes their files.
func (c *Control) Stop() error {
	c.cancel()
	var err error
	if c.stack != nil {
		err = c.stack.Stop()
	}
	if e := os.RemoveAll(c.dir); err == nil {
		err = e
	}
	return err
}
