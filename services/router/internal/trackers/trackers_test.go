package trackers_test

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/shard"
	"github.com/kinference/kinference/internal/testenv"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1/kvtrackerv1connect"
	"github.com/kinference/kinference/services/router/internal/trackers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	patience   = time.Minute
	follows    = kvtrackerv1.TrackerState_TRACKER_STATE_FOLLOWS
	rebuilding = kvtrackerv1.TrackerState_TRACKER_STATE_REBUILDING
	late       = kvtrackerv1.TrackerState_TRACKER_STATE_LATE
)

// fake is a kvtracker of a shard. Its answers name it.
type fake struct {
	kvtrackerv1connect.UnimplementedKVTrackerServiceHandler
	name         string
	index, count int
	client       trackers.Tracker
	stop         func()

	mu      sync.Mutex
	state   kvtrackerv1.TrackerState
	fail    bool
	hang    bool
	expired bool // it finds that the time is over before the client does
	asked   int
	changed chan struct{}
}

// sets are the worker sets of the tests; each has one worker.
var sets = []string{"ns/a", "ns/b", "ns/c", "ns/d", "ns/e", "ns/f", "ns/g", "ns/h"}

func start(t *testing.T, name string, index, count int, state kvtrackerv1.TrackerState) *fake {
	t.Helper()
	f := &fake{name: name, index: index, count: count, state: state, changed: make(chan struct{})}
	l := testenv.Listen(t)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- rpc.Serve(ctx, l, rpc.Mount[kvtrackerv1connect.KVTrackerServiceHandler](ctx, f, kvtrackerv1connect.NewKVTrackerServiceHandler))
	}()
	f.stop = sync.OnceFunc(func() {
		cancel()
		f.set(func() { f.hang = false })
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(f.stop)
	url := "http://" + l.Addr().String()
	clients, hangUp := context.WithCancel(context.Background())
	t.Cleanup(hangUp)
	f.client = trackers.Tracker{URL: url, Client: rpc.Client(clients, url, kvtrackerv1connect.NewKVTrackerServiceClient)}
	return f
}

// set changes the tracker and tells its watchers.
func (f *fake) set(edit func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	edit()
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *fake) turn(state kvtrackerv1.TrackerState) { f.set(func() { f.state = state }) }

func (f *fake) asks() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asked
}

func (f *fake) Match(ctx context.Context, r *kvtrackerv1.MatchRequest) (*kvtrackerv1.MatchResponse, error) {
	f.mu.Lock()
	f.asked++
	fail, hang, expired, state := f.fail, f.hang, f.expired, f.state
	f.mu.Unlock()
	if expired {
		return nil, connect.NewError(connect.CodeDeadlineExceeded, context.DeadlineExceeded)
	}
	if hang {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if fail || state == rebuilding {
		return nil, rpc.Error(connect.CodeUnavailable, "as the test wants", 0)
	}
	out := &kvtrackerv1.MatchResponse{}
	for _, q := range r.Queries {
		if shard.Of(q.WorkerSet, f.count) != f.index {
			return nil, rpc.Error(connect.CodeFailedPrecondition, "of another shard", 0)
		}
		out.Results = append(out.Results, &kvtrackerv1.MatchResult{Matches: []*kvtrackerv1.WorkerMatch{{Worker: f.name + " " + q.WorkerSet}}})
	}
	return out, nil
}

func (f *fake) WatchWorkers(ctx context.Context, _ *kvtrackerv1.WatchWorkersRequest, out *connect.ServerStream[kvtrackerv1.WatchWorkersResponse]) error {
	for first := true; ; first = false {
		f.mu.Lock()
		m := &kvtrackerv1.WatchWorkersResponse{Synced: first, State: f.state, Shard: &kvtrackerv1.Shard{Index: uint32(f.index), Count: uint32(f.count)}}
		changed := f.changed
		f.mu.Unlock()
		for _, set := range sets {
			if shard.Of(set, f.count) == f.index && first {
				m.Workers = append(m.Workers, &kvtrackerv1.WorkerState{Worker: set + "/0", WorkerSet: set, Epoch: f.name})
			}
		}
		if err := out.Send(m); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// table notes what it is told.
type table struct {
	mu       sync.Mutex
	workers  map[string]string // who said it
	flowing  bool
	switches int
}

func (t *table) Update(_ time.Time, m *kvtrackerv1.WatchWorkersResponse) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, w := range m.Workers {
		t.workers[w.Worker] = w.Epoch
	}
	for _, id := range m.Removed {
		delete(t.workers, id)
	}
	t.flowing = t.flowing || m.Synced
}

func (t *table) Switch(now time.Time, m *kvtrackerv1.WatchWorkersResponse) {
	t.Update(now, m)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.switches++
}

func (t *table) Away() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.flowing = false
}

func (t *table) said() map[string]string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return maps.Clone(t.workers)
}

type world struct {
	*trackers.Set
	t     *testing.T
	table *table
}

func follow(t *testing.T, list ...*fake) *world {
	t.Helper()
	w := &world{t: t, table: &table{workers: map[string]string{}}}
	var clients []trackers.Tracker
	for _, f := range list {
		clients = append(clients, f.client)
	}
	w.Set = trackers.New(clients, w.table, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Follow(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return w
}

// until waits for a count of trackers by state.
func (w *world) until(states string) {
	w.t.Helper()
	now := ""
	deadline, tick := time.After(patience), time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		n := w.States()
		if now = fmt.Sprintf("%d asked %d spare %d late %d rebuilding %d away", n["asked"], n["spare"], n["late"], n["rebuilding"], n["away"]); now == states {
			return
		}
		select {
		case <-deadline:
			w.t.Fatalf("%s, want %s", now, states)
		case <-tick.C:
		}
	}
}

// ask returns who answers for each set; empty for nobody.
func (w *world) ask(ask ...string) []string {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	out := make([]string, len(ask))
	resp, err := w.Match(ctx, request(ask...))
	if err != nil {
		return out
	}
	for i, r := range resp.Results {
		if r == nil {
			continue
		}
		var set string
		if _, err := fmt.Sscan(r.Matches[0].Worker, &out[i], &set); err != nil || set != ask[i] {
			w.t.Errorf("asked for %s, got %v", ask[i], r)
		}
	}
	return out
}

func request(sets ...string) *kvtrackerv1.MatchRequest {
	r := &kvtrackerv1.MatchRequest{}
	for _, set := range sets {
		r.Queries = append(r.Queries, &kvtrackerv1.Query{WorkerSet: set, BlockSize: 1, BlockHashes: []uint64{1}})
	}
	return r
}

func (w *world) expect(what string, got []string, want ...string) {
	w.t.Helper()
	if diff := cmp.Diff(got, want); diff != "" {
		w.t.Errorf("%s (-got +want):\n%s", what, diff)
	}
}

// TestReplicas: one replica is asked while it keeps up, another one at once where it does
// not; one that rebuilds never is.
func TestReplicas(t *testing.T) {
	a, b, c := start(t, "A", 0, 1, follows), start(t, "B", 0, 1, follows), start(t, "C", 0, 1, rebuilding)
	w := follow(t, a, b, c)
	w.until("1 asked 1 spare 0 late 1 rebuilding 0 away")
	first := w.ask(sets[0])[0]
	one, other := a, b
	if first == "B" {
		one, other = b, a
	}
	w.expect("the same again", w.ask(sets[0]), one.name)
	if other.asks() != 0 {
		t.Error("both replicas are asked")
	}
	one.set(func() { one.fail = true })
	failed := time.Now()
	w.expect("it fails", w.ask(sets[0]), other.name)
	n := one.asks()
	w.expect("it has just failed", w.ask(sets[0]), other.name)
	if one.asks() != n && time.Since(failed) < time.Second {
		t.Error("who has just failed is asked first again")
	}
	other.set(func() { other.fail = true })
	w.expect("both fail", w.ask(sets[0]), "")
	one.set(func() { one.fail = false })
	other.set(func() { other.fail = false })

	one.turn(late)
	w.until("1 asked 0 spare 1 late 1 rebuilding 0 away")
	w.expect("it is late", w.ask(sets[0]), other.name)
	n = one.asks()
	for range 20 {
		w.ask(sets[0])
	}
	if one.asks() != n {
		t.Error("a late replica is asked beside one that keeps up")
	}
	other.turn(late)
	w.until("0 asked 0 spare 2 late 1 rebuilding 0 away")
	if got := w.ask(sets[0])[0]; got == "" {
		t.Error("where all are late nobody is asked")
	}
	other.stop()
	w.until("0 asked 0 spare 1 late 1 rebuilding 1 away")
	w.expect("one late replica is left", w.ask(sets[0]), one.name)
	one.stop()
	w.until("0 asked 0 spare 0 late 1 rebuilding 2 away")
	w.expect("only one is left, which rebuilds", w.ask(sets[0]), "")
	if w.Followed() || c.asks() != 0 {
		t.Errorf("followed %v, who rebuilds was asked %d times", w.Followed(), c.asks())
	}
	c.turn(follows)
	w.until("1 asked 0 spare 0 late 0 rebuilding 2 away")
	w.expect("it has caught up", w.ask(sets[0]), "C")
	if said := w.table.said(); len(said) != len(sets) || said["ns/a/0"] != "C" {
		t.Errorf("the table knows %v", said)
	}
}

// replicas are two of the same: the one that is asked, and the other.
func replicas(t *testing.T) (w *world, one, other *fake) {
	a, b := start(t, "A", 0, 1, follows), start(t, "B", 0, 1, follows)
	w = follow(t, a, b)
	w.until("1 asked 1 spare 0 late 0 rebuilding 0 away")
	if w.ask(sets[0])[0] == "B" {
		return w, b, a
	}
	return w, a, b
}

// TestHungReplica: a replica that does not answer costs one request its time, not each.
func TestHungReplica(t *testing.T) {
	w, one, other := replicas(t)
	one.set(func() { one.hang = true })
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, _ = w.Match(ctx, request(sets[0]))
	w.expect("the next request", w.ask(sets[0]), other.name)
}

// The other replica is not asked in the last moment of a request's time, and then avoided
// because it has not answered.
func TestTimeIsOver(t *testing.T) {
	w, one, other := replicas(t)
	one.set(func() { one.expired = true })
	before := other.asks()
	w.expect("the request whose time is over", w.ask(sets[0]), "")
	if other.asks() != before {
		t.Error("the other replica was asked")
	}
	w.expect("the next request", w.ask(sets[0]), other.name)
}

// TestShards: each set is asked for where it is, and a lost shard blinds its own sets only.
func TestShards(t *testing.T) {
	const n = 3
	var list []*fake
	for i := range n {
		list = append(list, start(t, fmt.Sprint("S", i), i, n, follows))
	}
	w := follow(t, list...)
	w.until("3 asked 0 spare 0 late 0 rebuilding 0 away")
	want := make([]string, len(sets))
	for i, set := range sets {
		want[i] = fmt.Sprint("S", shard.Of(set, n))
	}
	w.expect("all shards", w.ask(sets...), want...)
	if !w.Followed() || len(w.table.said()) != len(sets) {
		t.Errorf("followed %v, the table has %d workers of %d", w.Followed(), len(w.table.said()), len(sets))
	}
	lost := shard.Of(sets[0], n)
	list[lost].stop()
	w.until("2 asked 0 spare 0 late 0 rebuilding 1 away")
	for i, set := range sets {
		if shard.Of(set, n) == lost {
			want[i] = ""
		}
	}
	w.expect("a shard is lost", w.ask(sets...), want...)
	before := list[(lost+1)%n].asks() + list[(lost+2)%n].asks()
	w.expect("a set of the lost shard", w.ask(sets[0]), "")
	if after := list[(lost+1)%n].asks() + list[(lost+2)%n].asks(); after != before {
		t.Error("trackers are asked for sets that they do not hold")
	}
	if w.Followed() || len(w.table.said()) != len(sets) || !w.table.flowing {
		t.Error("the table forgets workers because their tracker is away")
	}
}

// TestMoreShards rolls out a third shard while requests are asked: the new trackers start
// beside the old ones, catch up, and then those stop. No query is without an answer.
func TestMoreShards(t *testing.T) {
	var list []*fake
	for n := 2; n <= 3; n++ {
		for i := range n {
			state := follows
			if n == 3 {
				state = rebuilding
			}
			list = append(list, start(t, fmt.Sprintf("%d/%d", i, n), i, n, state))
		}
	}
	w := follow(t, list...)
	w.until("2 asked 0 spare 0 late 3 rebuilding 0 away")
	stop, done := make(chan struct{}), make(chan int)
	go func() {
		n := 0
		defer func() { done <- n }()
		for {
			if answers := w.ask(sets...); slices.Contains(answers, "") {
				t.Errorf("after %d requests: %v", n, answers)
				return
			}
			n++
			select {
			case <-stop:
				return
			default:
			}
		}
	}()
	list[2].turn(follows)
	list[3].turn(follows)
	w.until("2 asked 2 spare 0 late 1 rebuilding 0 away") // incomplete: the old ones go on
	list[4].turn(follows)
	w.until("2 asked 3 spare 0 late 0 rebuilding 0 away") // no need to change yet
	list[0].stop()
	w.until("3 asked 1 spare 0 late 0 rebuilding 1 away")
	list[1].stop()
	w.until("3 asked 0 spare 0 late 0 rebuilding 2 away")
	close(stop)
	if n := <-done; n < 2 {
		t.Errorf("only %d requests were asked meanwhile", n)
	}
	for id, by := range w.table.said() {
		if !slices.Contains([]string{"0/3", "1/3", "2/3"}, by) {
			t.Errorf("what is known of %s is by %s", id, by)
		}
	}
	if len(w.table.said()) != len(sets) {
		t.Errorf("the table has %d workers of %d", len(w.table.said()), len(sets))
	}
}
