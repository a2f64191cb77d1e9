package report_test

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
	"github.com/kinference/kinference/services/ingress/internal/report"
)

// peer is a router that fails, hangs or notes down.
type peer struct {
	mu   sync.Mutex
	err  error
	took time.Duration
	got  []string
	n    []int // sizes of batches
}

func (p *peer) Report(ctx context.Context, r *routerv1.ReportRequest) (*routerv1.ReportResponse, error) {
	select {
	case <-time.After(p.took):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return nil, p.err
	}
	p.n = append(p.n, len(r.GetReports()))
	for _, e := range r.GetReports() {
		p.got = append(p.got, e.GetRequestId())
	}
	return &routerv1.ReportResponse{}, nil
}

func (p *peer) set(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = err
}

func (p *peer) list() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string{}, p.got...)
}

// run gives a queue to f in a bubble of its own time.
func run(t *testing.T, p *peer, f func(q *report.Queue, lost *int)) {
	synctest.Test(t, func(t *testing.T) {
		lost := 0
		q := report.New(p, func(n int) { lost += n })
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); q.Run(ctx) }()
		f(q, &lost)
		stop()
		<-ended
	})
}

func done(q *report.Queue, id string, after func()) {
	q.Done(nil, id, routerv1.Outcome_OUTCOME_OK, openai.NoUsage, after)
}

// The first goes at once; what comes during a call goes with the next.
func TestBatches(t *testing.T) {
	p := &peer{took: 10 * time.Millisecond}
	run(t, p, func(q *report.Queue, _ *int) {
		q.FirstToken(nil, "a", time.Second)
		synctest.Wait()
		q.Moved(nil, "b", "w", "closed")
		done(q, "c", nil)
		done(q, "d", nil)
		if err := q.Flush(context.Background()); err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff([]string{"a", "b", "c", "d"}, p.list()); diff != "" {
			t.Error(diff)
		}
		if diff := cmp.Diff([]int{1, 3}, p.n); diff != "" {
			t.Error(diff)
		}
	})
}

// While the router is away reports wait, in order, and ids stay taken.
func TestRouterAway(t *testing.T) {
	p := &peer{err: connect.NewError(connect.CodeUnavailable, errors.New("away"))}
	run(t, p, func(q *report.Queue, lost *int) {
		free := false
		done(q, "a", func() { free = true })
		done(q, "b", nil)
		time.Sleep(time.Minute) // of the bubble
		synctest.Wait()
		if free || len(p.list()) > 0 {
			t.Error("reported to nobody")
		}
		short, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if q.Flush(short) == nil {
			t.Error("Flush did not wait")
		}
		p.set(nil)
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if diff := cmp.Diff([]string{"a", "b"}, p.list()); diff != "" || !free || *lost != 0 {
			t.Errorf("free %v, lost %d %s", free, *lost, diff)
		}
	})
}

// A full queue drops the oldest, a stop what is left, a refusal the batch.
func TestLosses(t *testing.T) {
	const more = 1<<15 + 10
	p := &peer{err: connect.NewError(connect.CodeUnavailable, errors.New("away"))}
	freed := 0
	run(t, p, func(q *report.Queue, lost *int) {
		for range more {
			done(q, "x", func() { freed++ })
		}
		synctest.Wait()
		if *lost != 10 || freed != 10 {
			t.Errorf("lost %d, freed %d of a full queue", *lost, freed)
		}
	})
	if freed != more {
		t.Errorf("%d ids of %d are free after the stop", freed, more)
	}

	p = &peer{err: connect.NewError(connect.CodeInvalidArgument, errors.New("no"))}
	run(t, p, func(q *report.Queue, lost *int) {
		done(q, "a", nil)
		synctest.Wait()
		if *lost != 1 {
			t.Errorf("lost %d of a refused batch", *lost)
		}
	})
}

// A stop sends what is queued.
func TestStop(t *testing.T) {
	p := &peer{took: 10 * time.Millisecond}
	run(t, p, func(q *report.Queue, _ *int) {
		done(q, "a", nil)
		done(q, "b", nil)
	})
	if diff := cmp.Diff([]string{"a", "b"}, p.list()); diff != "" {
		t.Error(diff)
	}
}

// replica is a router among several.
type replica struct {
	routerv1connect.UnimplementedRouterServiceHandler
	peer
	addr string
}

func (r *replica) Route(context.Context, *routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
	return &routerv1.RouteResponse{}, nil
}

func (r *replica) Report(ctx context.Context, q *routerv1.ReportRequest) (*routerv1.ReportResponse, error) {
	return r.peer.Report(ctx, q)
}

func (r *replica) serve(t *testing.T) (stop func()) {
	t.Helper()
	l, err := net.Listen("tcp", r.addr)
	if err != nil {
		t.Fatal(err)
	}
	shell, err := daemon.NewShell(t.Context(), daemon.Settings{Output: io.Discard, DrainTimeout: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(shell.Context(context.Background(), "router"))
	daemon.Ready(ctx, true)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = rpc.Serve(ctx, l, rpc.Mount[routerv1connect.RouterServiceHandler](ctx, r, routerv1connect.NewRouterServiceHandler))
	}()
	stop = sync.OnceFunc(func() { cancel(); <-ended; shell.Close() })
	t.Cleanup(stop)
	return stop
}

// Reports go to the router that the request was routed by, though all else goes to
// another one.
func TestReportsGoWhereItWasRouted(t *testing.T) {
	list := []*replica{{addr: testenv.FreeAddr(t)}, {addr: testenv.FreeAddr(t)}}
	stop := []func(){list[0].serve(t), list[1].serve(t)}
	ctx, cancel := context.WithCancel(context.Background())
	client := rpc.Client(ctx, "http://"+list[0].addr+",http://"+list[1].addr, routerv1connect.NewRouterServiceClient)
	route := func() *rpc.Place {
		t.Helper()
		place := new(rpc.Place)
		if _, err := client.Route(rpc.Stay(t.Context(), place), &routerv1.RouteRequest{}); err != nil {
			t.Fatal(err)
		}
		return place
	}
	q := report.New(client, nil)
	ended := make(chan struct{})
	go func() { defer close(ended); q.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	tell := func(places ...*rpc.Place) {
		t.Helper()
		for _, place := range places {
			q.FirstToken(place, "id", time.Second)
		}
		if err := q.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
	}

	first := route()
	tell(first)
	used, other, end := list[0], list[1], stop[0]
	if len(used.list()) == 0 {
		used, other, end = list[1], list[0], stop[1]
	}
	end() // which all leave
	second := route()
	used.serve(t)
	deadline, tick := time.After(time.Minute), time.NewTicker(10*time.Millisecond)
	defer tick.Stop()
	for len(used.list()) < 2 { // until it is seen to be back
		select {
		case <-tick.C:
			tell(first)
		case <-deadline:
			t.Fatal("what was routed by the first replica is not told there")
		}
	}
	before := len(other.list())
	tell(second, first, second, second)
	if a, b := len(used.list()), len(other.list())-before; a != 3 || b != 3 {
		t.Errorf("%d and %d reports, want 3 and 3", a, b)
	}
}
