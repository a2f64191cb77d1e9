package rpc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/testenv"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1/kvtrackerv1connect"
)

// counter is a replica that counts calls; while hangs is open it answers none.
type counter struct {
	kvtrackerv1connect.UnimplementedKVTrackerServiceHandler
	calls atomic.Int64
	hangs atomic.Pointer[chan struct{}]
	fails atomic.Bool
}

func (c *counter) Match(_ context.Context, _ *kvtrackerv1.MatchRequest) (*kvtrackerv1.MatchResponse, error) {
	c.calls.Add(1)
	if c.fails.Load() {
		return nil, connect.NewError(connect.CodeUnavailable, errors.New("no worker is ready"))
	}
	if h := c.hangs.Load(); h != nil {
		<-*h
	}
	return &kvtrackerv1.MatchResponse{}, nil
}

// member is a counter behind an address that stays.
type member struct {
	*counter
	addr string
	srv  *http.Server
}

func (m *member) start(t *testing.T) {
	t.Helper()
	if m.addr == "" {
		m.addr = testenv.FreeAddr(t)
	}
	l, err := net.Listen("tcp", m.addr)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	h := Mount[kvtrackerv1connect.KVTrackerServiceHandler](t.Context(), m.counter, kvtrackerv1connect.NewKVTrackerServiceHandler)
	mux.Handle(h.Path, h.Handler)
	mux.HandleFunc("/grpc.health.v1.Health/Check", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"status":"SERVING"}`))
	})
	p := new2()
	p.SetHTTP1(true)
	m.srv = &http.Server{Handler: mux, Protocols: p}
	ended := make(chan struct{})
	srv := m.srv
	go func() { defer close(ended); _ = srv.Serve(l) }()
	t.Cleanup(func() { srv.Close(); <-ended })
}

// group starts members and a client of them.
func group(t *testing.T, n int) (members []*member, p *replicas, client kvtrackerv1connect.KVTrackerServiceClient) {
	t.Helper()
	var seeds []*url.URL
	for range n {
		m := &member{counter: new(counter)}
		m.start(t)
		members = append(members, m)
		seeds = append(seeds, &url.URL{Scheme: "http", Host: m.addr})
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	p = several(ctx, seeds, 5*time.Millisecond, func(address string, several bool) *http.Transport { return transport(ctx, address, several) })
	go func() { defer close(ended); p.follow(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	return members, p, kvtrackerv1connect.NewKVTrackerServiceClient(p, seeds[0].String())
}

func (p *replicas) inUse() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.current.base.Host
}

// find splits members into the one in use and the others.
func find(p *replicas, members []*member) (used *member, others []*member) {
	at := p.inUse()
	for _, m := range members {
		if m.addr == at {
			used = m
		} else {
			others = append(others, m)
		}
	}
	return used, others
}

func match(t *testing.T, client kvtrackerv1connect.KVTrackerServiceClient, timeout time.Duration) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	_, err := client.Match(ctx, &kvtrackerv1.MatchRequest{Queries: []*kvtrackerv1.Query{{WorkerSet: strings.Repeat("x", 40_000)}}})
	return err
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline, tick := time.After(time.Minute), time.NewTicker(2*time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("not within a minute: " + what)
		}
	}
}

// No call fails while a replica dies and comes back. Calls stay where they went, and
// go back when that one dies in turn.
func TestReplicaDies(t *testing.T) {
	members, p, client := group(t, 3)
	for range 20 {
		if err := match(t, client, time.Minute); err != nil {
			t.Fatal(err)
		}
	}
	first, others := find(p, members)
	if first.calls.Load() != 20 {
		t.Fatalf("%d of 20 calls went to one replica", first.calls.Load())
	}
	first.srv.Close()
	for range 20 {
		if err := match(t, client, time.Minute); err != nil {
			t.Fatal(err)
		}
	}
	if a, b := others[0].calls.Load(), others[1].calls.Load(); a+b != 20 || a*b != 0 {
		t.Errorf("calls of the others: %d and %d, want 20 of one", a, b)
	}
	first.start(t)
	eventually(t, "the first one is back", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return !slices.ContainsFunc(p.list, func(r *replica) bool { return r.away })
	})
	if err := match(t, client, time.Minute); err != nil || first.calls.Load() != 20 {
		t.Errorf("%v, %d calls at the first replica", err, first.calls.Load())
	}
	for _, m := range others {
		m.srv.Close()
	}
	if err := match(t, client, time.Minute); err != nil || first.calls.Load() != 21 {
		t.Errorf("%v, %d calls at the first replica", err, first.calls.Load())
	}
}

// Once the replica that a client prefers has been back for a while, calls go to it
// again, but for those that belong to the one that was used meanwhile.
func TestCallsGoHome(t *testing.T) {
	members, p, client := group(t, 3)
	home, _ := find(p, members)
	rests := func(d time.Duration) { p.mu.Lock(); p.rests = d; p.mu.Unlock() }
	call := func(place *Place) {
		t.Helper()
		if _, err := client.Match(Stay(t.Context(), place), &kvtrackerv1.MatchRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	rests(time.Hour)
	home.srv.Close()
	var before, after Place
	call(&before)
	used, others := find(p, members)
	home.start(t)
	eventually(t, "the first one is back", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return !p.list[0].away
	})
	if now, _ := find(p, members); now != used {
		t.Error("it went back at once")
	}
	rests(0)
	eventually(t, "it goes home", func() bool { return p.inUse() == home.addr })
	call(&after)
	call(&before)
	if home.calls.Load() != 1 || used.calls.Load() != 2 || before.Same(&after) || before.Same(nil) {
		t.Errorf("%d calls at home and %d at the other, want 1 and 2", home.calls.Load(), used.calls.Load())
	}
	used.srv.Close() // what belongs to it goes where all go, and stays there
	call(&before)
	if home.calls.Load() != 2 || !before.Same(&after) {
		t.Errorf("%d calls at home, want 2", home.calls.Load())
	}
	for _, m := range others {
		if m != home && m != used && m.calls.Load() > 0 {
			t.Error("the third one was asked")
		}
	}
}

// One that joins is gone to by its share of the clients.
func TestNewReplicaGetsClients(t *testing.T) {
	moved := 0
	for range 200 {
		old, joins := &url.URL{Scheme: "http", Host: "127.0.0.1:1"}, &url.URL{Scheme: "http", Host: "127.0.0.1:2"}
		p := several(t.Context(), []*url.URL{old}, time.Hour, func(string, bool) *http.Transport { return new(http.Transport) })
		p.seeds, p.rests = append(p.seeds, joins), 0
		p.resolve(t.Context())
		if p.prefer(); p.current != p.list[0] || len(p.list) != 2 {
			t.Fatalf("%v, in use %v", p.list, p.current)
		}
		if p.current.base == joins {
			moved++
		}
	}
	if moved < 50 || moved > 150 {
		t.Errorf("%d of 200 clients go to the second of two replicas", moved)
	}
}

// A call in progress at a replica that dies is answered by the next one.
func TestReplicaDiesWithACall(t *testing.T) {
	members, p, client := group(t, 2)
	first, others := find(p, members)
	hang := make(chan struct{})
	defer close(hang)
	first.hangs.Store(&hang)
	answered := make(chan error, 1)
	go func() { answered <- match(t, client, time.Minute) }()
	eventually(t, "the call is there", func() bool { return first.calls.Load() == 1 })
	first.srv.Close()
	if err := <-answered; err != nil || others[0].calls.Load() != 1 {
		t.Errorf("%v, %d calls at the other", err, others[0].calls.Load())
	}
}

// A call that has an effect each time is not made at a second replica when the first
// one may have had it; when nothing listens there it is.
func TestCallsThatAreMadeOnce(t *testing.T) {
	members, p, _ := group(t, 3)
	client := kvtrackerv1connect.NewKVTrackerServiceClient(p, "http://"+members[0].addr, Once(kvtrackerv1connect.KVTrackerServiceMatchProcedure))
	first, others := find(p, members)
	hang := make(chan struct{})
	defer close(hang)
	first.hangs.Store(&hang)
	answered := make(chan error, 1)
	go func() { answered <- match(t, client, time.Minute) }()
	eventually(t, "the call is there", func() bool { return first.calls.Load() == 1 })
	first.srv.Close()
	if err := <-answered; connect.CodeOf(err) != connect.CodeUnavailable || others[0].calls.Load()+others[1].calls.Load() > 0 {
		t.Errorf("%v, %d and %d calls at the others", err, others[0].calls.Load(), others[1].calls.Load())
	}
	if err := match(t, client, time.Minute); err != nil {
		t.Fatal(err)
	}
	second, _ := find(p, members)
	second.srv.Close()
	eventually(t, "its connection is gone", func() bool { return match(t, client, time.Minute) == nil })
	if n := first.calls.Load() + others[0].calls.Load() + others[1].calls.Load(); n != 3 {
		t.Errorf("%d calls, want 3", n)
	}
}

// A replica that hangs is left after few calls that ran out of time.
func TestReplicaHangs(t *testing.T) {
	members, p, client := group(t, 2)
	first, _ := find(p, members)
	hang := make(chan struct{})
	defer close(hang)
	first.hangs.Store(&hang)
	for i := range mostLate {
		if err := match(t, client, 20*time.Millisecond); connect.CodeOf(err) != connect.CodeDeadlineExceeded {
			t.Fatalf("call %d: %v", i, err)
		}
	}
	if err := match(t, client, time.Minute); err != nil {
		t.Error(err)
	}
	// A caller that leaves is no sign of anything.
	second, _ := find(p, members)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 2 * mostLate {
		_, _ = client.Match(ctx, &kvtrackerv1.MatchRequest{})
	}
	if p.mu.Lock(); p.current.away {
		t.Errorf("%s is away because callers left", second.addr)
	}
	p.mu.Unlock()
}

// What a replica answers stands, be it an error: it is not asked of another one.
func TestAnswerStands(t *testing.T) {
	members, p, client := group(t, 2)
	first, others := find(p, members)
	first.fails.Store(true)
	if err := match(t, client, time.Minute); connect.CodeOf(err) != connect.CodeUnavailable || others[0].calls.Load() != 0 {
		t.Errorf("%v, %d calls at the other", err, others[0].calls.Load())
	}
}

// With all of them away, the error comes back, and the first that is there again is
// used.
func TestAllReplicasAway(t *testing.T) {
	members, _, client := group(t, 2)
	for _, m := range members {
		m.srv.Close()
	}
	if err := match(t, client, time.Minute); connect.CodeOf(err) != connect.CodeUnavailable {
		t.Fatal(err)
	}
	members[1].start(t)
	eventually(t, "the one that is back is used", func() bool { return match(t, client, time.Minute) == nil })
}

// The addresses of a name are replicas; what stays the same keeps its connections.
func TestNamesAreResolved(t *testing.T) {
	ctx := t.Context()
	u := &url.URL{Scheme: "http", Host: "localhost:1"}
	p := several(ctx, []*url.URL{u, {Scheme: "http", Host: "127.0.0.1:2"}}, time.Hour, func(address string, several bool) *http.Transport { return transport(ctx, address, several) })
	before := map[*replica]bool{}
	for _, r := range p.list {
		before[r] = true
	}
	p.resolve(ctx)
	for _, r := range p.list {
		if !before[r] {
			t.Errorf("%s is new", r)
		}
	}
	// As if the name had had other addresses before.
	p.list = append(p.list, &replica{base: u, address: "127.0.0.9:1", Transport: p.open("127.0.0.9:1", true)})
	p.current = p.list[2]
	p.resolve(ctx)
	if len(p.list) != 2 || p.current.address != "" {
		t.Errorf("got %v, in use %v", p.list, p.current)
	}
}

// More addresses than a client takes change nothing of those that it has.
func TestReplicasAreBounded(t *testing.T) {
	ctx := t.Context()
	seeds := []*url.URL{{Scheme: "http", Host: "localhost:1"}}
	for port := range maxReplicas {
		seeds = append(seeds, &url.URL{Scheme: "http", Host: fmt.Sprintf("127.0.0.1:%d", port+1)})
	}
	p := several(ctx, seeds, time.Hour, func(address string, several bool) *http.Transport { return transport(ctx, address, several) })
	p.list = slices.DeleteFunc(p.list, func(r *replica) bool { return r.base == seeds[0] }) // as if it were new
	p.current = p.list[0]
	before := slices.Clone(p.list)
	p.resolve(ctx)
	if !slices.Equal(p.list, before) || p.current != before[0] {
		t.Errorf("%d replicas, of %d before, in use %v", len(p.list), len(before), p.current)
	}
}

func TestCheckURLs(t *testing.T) {
	for list, good := range map[string]bool{
		"http://a:1": true, "http://a:1, https://b": true, "": false, "a:1": false, "http://a:1,ftp://b": false, "http://": false,
	} {
		if err := CheckURLs(list); (err == nil) != good {
			t.Errorf("%q: %v", list, err)
		}
	}
}

// Health is what the service says of itself.
func TestHealthIsReadiness(t *testing.T) {
	sh, err := daemon.NewShell(t.Context(), daemon.Settings{Output: new(bytes.Buffer)})
	if err != nil {
		t.Fatal(err)
	}
	defer sh.Close()
	ctx, stop := context.WithCancel(sh.Context(context.Background(), "x"))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- Serve(ctx, l) }()
	u := &url.URL{Scheme: "http", Host: l.Addr().String()}
	r := &replica{base: u, Transport: transport(ctx, "", true)}
	defer r.CloseIdleConnections()
	if err := healthy(t.Context(), r); err == nil {
		t.Error("healthy before it is ready")
	}
	daemon.Ready(ctx, true)
	if err := healthy(t.Context(), r); err != nil {
		t.Error(err)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if err := healthy(t.Context(), r); err == nil {
		t.Error("healthy after its end")
	}
}
