package acceptance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/cmd/stack"
	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
)

// status is what the router says of itself.
func (e *env) status() *adminv1.StatusResponse {
	e.t.Helper()
	s, err := e.admin.Status(e.t.Context(), &adminv1.StatusRequest{})
	if err != nil {
		e.t.Fatal(err)
	}
	return s
}

// inFlight is the number of requests in the router's ledger.
func (e *env) inFlight() (n int) {
	for _, w := range e.status().GetWorkers() {
		n += int(w.GetInFlight())
	}
	return n
}

// long is a request that nobody sends to an engine: the router thinks that its
// prefill takes some seconds of an engine's time.
func (e *env) long(id, tenant, qos string) *routerv1.RouteRequest {
	return &routerv1.RouteRequest{RequestId: id, Model: modelName, Tenant: tenant, Attributes: &routerv1.Attributes{Tenants: []string{tenant}, Qos: qos},
		Prompts: []*routerv1.Prompt{{Profile: "test/sim/" + modelName, Tokens: 20_000, BlockSize: 16}}}
}

// line makes requests that wait behind a first one, one after the other, and keeps
// the order in which they get their turn.
type line struct {
	*env
	router routerv1connect.RouterServiceClient
	wg     sync.WaitGroup

	mu    sync.Mutex
	turns []string
	wrong []error
}

func (l *line) join(ctx context.Context, r *routerv1.RouteRequest) {
	l.t.Helper()
	before := l.status().GetQueued()
	l.wg.Go(func() {
		_, err := l.router.Route(ctx, r)
		l.mu.Lock()
		defer l.mu.Unlock()
		if err != nil {
			l.wrong = append(l.wrong, err)
			return
		}
		l.turns = append(l.turns, r.RequestId)
	})
	l.eventually(r.RequestId+" waits", func() bool { return l.status().GetQueued() > before })
}

// serve ends what was sent to the engines, again and again, until nobody waits.
func (l *line) serve(first string) {
	l.t.Helper()
	done := func(id string) {
		_, err := l.router.Report(l.t.Context(), &routerv1.ReportRequest{Reports: []*routerv1.Report{{RequestId: id, Event: &routerv1.Report_Done{Done: &routerv1.Done{}}}}})
		if err != nil {
			l.t.Fatal(err)
		}
	}
	done(first)
	next := 0
	l.eventually("all had their turn", func() bool {
		l.mu.Lock()
		turns := l.turns
		l.mu.Unlock()
		for ; next < len(turns); next++ {
			done(turns[next])
		}
		return l.status().GetQueued() == 0
	})
	l.wg.Wait()
}

// occupied is one worker at the speed of real hardware with a request whose prefills,
// which the router only thinks of, take more than two minutes: within these a test does
// what it has to, however busy the machine is.
func occupied(t *testing.T, more settings) *line {
	more.workers, more.scale = 1, 1
	more.stack.MaxWait = cmp.Or(more.stack.MaxWait, -1) // no bound
	e := start(t, more)
	l := &line{env: e, router: e.router()}
	first := e.long("first", "", "")
	for range 12 {
		first.Prompts[0].Others = append(first.Prompts[0].Others, &routerv1.OtherPrompt{Tokens: 20_000})
	}
	if _, err := l.router.Route(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	return l
}

// One tenant floods: another one's request is not behind all of that (fair line,
// user-pains 14 and 40).
func TestFloodDoesNotStarveOthers(t *testing.T) {
	l := occupied(t, settings{})
	const flood, light = 12, 2
	for i := range flood {
		l.join(t.Context(), l.long(fmt.Sprint("flood", i), "test/flood", ""))
	}
	for i := range light {
		l.join(t.Context(), l.long(fmt.Sprint("light", i), "test/light", ""))
	}
	s := l.status()
	if len(s.GetQueue()) != 1 || s.GetQueue()[0].GetWaiting() != flood+light || len(s.GetWaiting()) != flood+light || s.GetWaiting()[0].GetWhy() != "queue" {
		t.Errorf("the line is shown as %v, %v", s.GetQueue(), s.GetWaiting())
	}
	l.serve("first")
	last := 0
	for i, id := range l.turns {
		if id == "light1" {
			last = i
		}
	}
	if len(l.turns) != flood+light || last > 5 {
		t.Errorf("the light tenant is served by turn %d of %v, %v", last+1, l.turns, l.wrong)
	}
}

// Batch goes behind all that somebody waits for, and is served when that is done
// (user-pains 40).
func TestBatchWaitsBehindInteractive(t *testing.T) {
	l := occupied(t, settings{})
	for i, qos := range []string{"deferrable", "batch", "batch", "interactive", "interactive", "interactive"} {
		l.join(t.Context(), l.long(fmt.Sprint(qos, i), "test/"+qos, qos))
	}
	classes := map[string]uint32{}
	for _, c := range l.status().GetQueue() {
		classes[c.GetQos()] = c.GetWaiting()
	}
	if classes["interactive"] != 3 || classes["batch"] != 2 || classes["deferrable"] != 1 {
		t.Errorf("classes %v", classes)
	}
	l.serve("first")
	want := []string{"interactive3", "interactive4", "interactive5", "batch1", "batch2", "deferrable0"}
	if fmt.Sprint(l.turns) != fmt.Sprint(want) {
		t.Errorf("turns %v, want %v; %v", l.turns, want, l.wrong)
	}
}

// Clients that leave while they wait leave nothing behind, in the router, in its
// ledger or in an engine.
func TestClientsLeaveTheLine(t *testing.T) {
	l := occupied(t, settings{})
	served := l.workerRequests()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	const clients = 8
	for i := range clients {
		wg.Go(func() {
			a := l.post(ctx, "/v1/chat/completions", req{text: words(700*i, 900), max: 5, stream: i%2 == 0}.body())
			if !errors.Is(a.err, context.Canceled) {
				t.Errorf("client %d: %d %v", i, a.status, a.err)
			}
		})
	}
	l.eventually("all wait", func() bool { return l.status().GetQueued() == clients })
	cancel()
	wg.Wait()
	l.eventually("their places are free", func() bool { return l.status().GetQueued() == 0 })
	if n := l.inFlight(); n != 1 {
		t.Errorf("%d in the ledger, want the one that holds the worker", n)
	}
	if got := l.workerRequests(); got != served {
		t.Errorf("engines saw them: %s, before %s", got, served)
	}
	l.serve("first")
	if n := l.inFlight(); n != 0 {
		t.Errorf("%d in the ledger at the end", n)
	}
	if a := l.chat(req{text: "hello", max: 1}); a.status != http.StatusOK {
		t.Errorf("afterwards: %d %s", a.status, a.body)
	}
}

// More requests wait than a connection has streams by default, all from one client.
func TestManyWaitAtOnce(t *testing.T) {
	const many = 600
	l := occupied(t, settings{})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var wrong sync.Map
	for i := range many {
		wg.Go(func() {
			if _, err := l.router.Route(ctx, l.long(fmt.Sprint("w", i), fmt.Sprint("t", i%9), "")); connect.CodeOf(err) != connect.CodeCanceled {
				wrong.Store(i, err)
			}
		})
	}
	l.eventually("all wait", func() bool { return l.status().GetQueued() == many })
	if n := len(l.status().GetWaiting()); n != 64 {
		t.Errorf("%d are listed", n)
	}
	cancel()
	wg.Wait()
	wrong.Range(func(i, err any) bool {
		t.Errorf("request %d: %v", i, err)
		return false // one is enough
	})
	l.eventually("none waits", func() bool { return l.status().GetQueued() == 0 })
	l.serve("first")
}

// A full line says when to come back, or the policies' next step is taken.
func TestFullLine(t *testing.T) {
	l := occupied(t, settings{stack: stack.Options{MaxWaiting: 2}})
	ctx, cancel := context.WithCancel(t.Context())
	for i := range 2 {
		l.join(ctx, l.long(fmt.Sprint("w", i), "", ""))
	}
	a := l.chat(req{text: "hello", max: 1})
	after, err := strconv.Atoi(a.header.Get("Retry-After"))
	if a.status != http.StatusTooManyRequests || err != nil || after < 1 {
		t.Errorf("status %d, Retry-After %q: %s", a.status, a.header.Get("Retry-After"), a.body)
	}
	if d := l.explain(a); d.GetVerdict().GetAction() != "saturated" || d.GetReason() != "the line is full with 2 requests" {
		t.Errorf("record: %v, %s", d.GetVerdict(), d.GetReason())
	}
	// The policy comes first: without it a provider is as good as a worker, also to those
	// that wait.
	l.policy("overflow", "\n  - { name: cloud-next, route: { select: [ { type: Local }, { type: Provider, order: [ cloud ] } ] } }\n")
	l.cloud()
	a = l.chat(req{text: "hello", max: 1})
	if d := l.explain(a); a.status != http.StatusOK || d.GetChosen() != "provider test/cloud" {
		t.Errorf("with a next step: %d at %s: %s", a.status, d.GetChosen(), a.body)
	}
	cancel()
	l.serve("first")
}

// A wait that is predicted to be too long is refused at once, and one that was too
// long at its end; each is told when to come back, which is then true.
func TestTooLongAWait(t *testing.T) {
	const most = 150 * time.Second // what is first and two or three more
	l := occupied(t, settings{stack: stack.Options{MaxWait: most}})
	ctx, cancel := context.WithCancel(t.Context())
	var after time.Duration
	waiting, refused := 0, false
	for i := 0; !refused; i++ {
		id, answer := fmt.Sprint("w", i), make(chan error, 1)
		go func() {
			_, err := l.router.Route(ctx, l.long(id, "", ""))
			answer <- err
		}()
		l.eventually("it waits or is refused", func() bool {
			select {
			case err := <-answer:
				if connect.CodeOf(err) != connect.CodeResourceExhausted {
					t.Fatalf("request %d: %v", i, err)
				}
				refused = true
				after, _ = rpc.RetryAfter(err)
				return true
			default:
			}
			if slices.ContainsFunc(l.status().GetWaiting(), func(w *adminv1.QueuedRequest) bool { return w.GetRequestId() == id }) {
				waiting++
				return true
			}
			return false
		})
	}
	// A request more is 6 s, of which the last one that waits left a part.
	if waiting == 0 || after <= 0 || after > 10*time.Second {
		t.Errorf("%d wait, the next one was told to come back after %v", waiting, after)
	}
	cancel()
	l.serve("first")
	t.Logf("refused with %v to wait", after)
}

// What waits is sent away at once when the router stops, with the time after which
// another one is there.
func TestStopSendsTheLineAway(t *testing.T) {
	l := occupied(t, settings{})
	got := make(chan answer, 1)
	go func() { got <- l.post(t.Context(), "/v1/chat/completions", req{text: words(1, 900), max: 1}.body()) }()
	l.eventually("it waits", func() bool { return l.status().GetQueued() == 1 })
	if err := l.stack.Halt("router"); err != nil {
		t.Fatal(err)
	}
	if a := <-got; a.status != http.StatusServiceUnavailable || a.header.Get("Retry-After") == "" {
		t.Errorf("status %d, Retry-After %q: %s", a.status, a.header.Get("Retry-After"), a.body)
	}
	if err := l.stack.Resume("router"); err != nil {
		t.Fatal(err)
	}
}

// Past saturation requests wait in the router, not in the engines, and what they
// have in common stays cached: the sum of work does not grow with the load.
func TestSaturationDoesNotCollapse(t *testing.T) {
	const groups, clients, rounds = 6, 24, 3
	cached := map[string]float64{}
	deepest := map[string]float64{}
	for _, policy := range []string{"k2", "predictedttft"} {
		e := start(t, settings{workers: 2, scale: 10, policy: policy, worker: func(_ int, c *fleetsim.Config) {
			c.Profile.Blocks, c.Profile.MaxModelLen = 700, 11_000 // of 16 tokens: two groups and what runs
		}})
		ctx, cancel := context.WithCancel(t.Context())
		var watch sync.WaitGroup
		queued := uint32(0)
		watch.Go(func() {
			tick := time.NewTicker(20 * time.Millisecond)
			defer tick.Stop()
			for ctx.Err() == nil {
				s := e.status()
				queued = max(queued, s.GetQueued())
				for _, w := range s.GetWorkers() {
					deepest[policy] = max(deepest[policy], w.GetLoad().GetWaiting())
				}
				<-tick.C
			}
		})
		var mu sync.Mutex
		var prompt, hits int
		var off []time.Duration // of predictions
		var wg sync.WaitGroup
		for c := range clients {
			wg.Go(func() {
				for i := range rounds {
					a := e.chat(req{text: words(10_000*(c%groups), 2500) + words(1_000_000+100*(rounds*c+i), 60), max: 40, stream: true, extra: `,"ignore_eos":true,"stream_options":{"include_usage":true}`})
					d := e.explain(a)
					mu.Lock()
					if len(d.GetCandidates()) > 0 && d.ActualTtft != nil {
						off = append(off, (d.Candidates[0].GetPredictedTtft().AsDuration() - d.ActualTtft.AsDuration()).Abs())
					}
					if a.status != http.StatusOK {
						t.Errorf("%s: client %d: %d %.300s", policy, c, a.status, a.body)
					}
					prompt, hits = prompt+a.usage.Prompt, hits+a.usage.Details.Cached
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		cancel()
		watch.Wait()
		cached[policy] = float64(hits) / float64(max(prompt, 1))
		if policy == "k2" && queued == 0 {
			t.Error("nobody waited in the router")
		}
		slices.Sort(off)
		t.Logf("%s: %.0f %% of %d prompt tokens cached, at most %d wait in the router and %.0f in an engine; half of %d predictions are off by at most %v",
			policy, 100*cached[policy], prompt, queued, deepest[policy], len(off), off[len(off)/2].Round(time.Millisecond))
	}
	if cached["k2"] < cached["predictedttft"] || deepest["k2"] >= deepest["predictedttft"] {
		t.Errorf("cached %v, waiting in an engine %v", cached, deepest)
	}
}

// Two routers in front of the same workers know of each other's requests before the
// gauges show them; when one is killed, what it had in flight is forgotten.
func TestRoutersTellEachOther(t *testing.T) {
	bin := build(t, "services/router/cmd/router")
	e := start(t, settings{workers: 2})
	addr := testenv.FreeAddr(t)
	second := &replica{log: &syncBuffer{}}
	second.Cmd = exec.Command(filepath.Join(bin, "router"), "--config", e.dir, "--listen", addr, "--admin-listen", testenv.FreeAddr(t), "--admin-api-listen", "",
		"--kvtracker-url", e.stack.KVTrackerURL(), "--nats-url", e.stack.NATSURL(), "--time-scale", "50")
	second.Stderr = second.log
	if err := second.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if !second.ended {
			second.end(t, syscall.SIGKILL)
		}
		if t.Failed() {
			t.Logf("the second router:\n%s", second.log.tail(4<<10))
		}
	})
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	other := rpc.Client(ctx, "http://"+addr, routerv1connect.NewRouterServiceClient)
	e.eventually("the routers know of each other", func() bool { return len(e.status().GetPeers()) == 1 })
	seen := func() (n uint32) { // by a decision of the first router
		resp, err := e.admin.Evaluate(t.Context(), &adminv1.EvaluateRequest{Model: modelName, PromptTokens: 100})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range resp.GetDecision().GetCandidates() {
			n += c.GetInFlight()
		}
		return n
	}
	e.eventually("nothing is in flight", func() bool { return seen() == 0 })
	e.eventually("the other one has its catalog", func() bool {
		_, err := other.Route(t.Context(), e.long("theirs", "", ""))
		return err == nil
	})
	n := 0
	e.eventually("its booking counts here", func() bool { // it tells nothing until it has heard of the first one
		n++
		_, err := other.Route(t.Context(), e.long(fmt.Sprint("theirs-", n), "", ""))
		return err == nil && seen() > 0
	})
	if n := e.inFlight(); n != 0 {
		t.Errorf("%d in flight here are shown as own", n)
	}
	second.end(t, syscall.SIGKILL)
	e.eventually("what it had in flight is forgotten", func() bool { return seen() == 0 })
}
