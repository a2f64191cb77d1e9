package accounting_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/testenv"
	accountingv1 "github.com/kinference/kinference/proto/gen/kinference/accounting/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
	"github.com/kinference/kinference/services/accounting"
)

// catalogs is a router that has a catalog.
type catalogs struct {
	routerv1connect.UnimplementedRouterServiceHandler
	next chan *routerv1.Catalog
}

func (c *catalogs) WatchCatalog(ctx context.Context, _ *routerv1.WatchCatalogRequest, s *connect.ServerStream[routerv1.WatchCatalogResponse]) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case m := <-c.next:
			if err := s.Send(&routerv1.WatchCatalogResponse{Catalog: m}); err != nil {
				return err
			}
		}
	}
}

func fakeRouter(t *testing.T) (*catalogs, string) {
	t.Helper()
	c := &catalogs{next: make(chan *routerv1.Catalog, 4)}
	mux := http.NewServeMux()
	mux.Handle(routerv1connect.NewRouterServiceHandler(c))
	s := httptest.NewUnstartedServer(mux)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetHTTP1(true)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	return c, s.URL
}

func objectiveOf(indicator, target string, threshold time.Duration) *routerv1.Objective {
	o := &routerv1.Objective{Kind: "InferencePool", Owner: "ns/chat", Name: strings.ToLower(indicator), Indicator: indicator, Target: target, Window: durationpb.New(24 * time.Hour)}
	if threshold > 0 {
		o.Threshold = durationpb.New(threshold)
	}
	return o
}

// An objective counts what is in the ledger when it comes and each request after
// that once: quotas and clients' faults not, overload yes, though overload is in
// no sum of usage.
func TestObjectives(t *testing.T) {
	router, url := fakeRouter(t)
	nats := testenv.NATS(t)
	e := start(t, accounting.Config{NATSURL: nats, RouterURL: url})
	if _, err := e.client.Objectives(t.Context(), &accountingv1.ObjectivesRequest{}); connect.CodeOf(err) != connect.CodeUnavailable {
		t.Errorf("without a catalog: %v", err)
	}
	id := 0
	send := func(n int, change func(*usagev1.Usage)) {
		var list []bus.UsageMessage
		for range n {
			u := event(0)
			id++
			u.Id, u.Ended, u.Pool, u.Ttft = "o-"+strings.Repeat("x", id), timestamppb.Now(), "ns/chat", proto.Float64(.5)
			if change != nil {
				change(u)
			}
			list = append(list, bus.UsageMessage{ID: u.GetId(), Subject: bus.UsageSubject("ns/a"), Data: bus.EncodeUsage(nil, u)})
		}
		publish(t, nats, list...)
	}
	send(6, nil)
	e.requests(6)
	router.next <- &routerv1.Catalog{Objectives: []*routerv1.Objective{objectiveOf("TTFT", "90", time.Second), objectiveOf("Availability", "99.9", 0)}}
	await := func(total, good, available uint64) *accountingv1.ObjectivesResponse {
		t.Helper()
		deadline, tick := time.After(time.Minute), time.NewTicker(5*time.Millisecond)
		defer tick.Stop()
		for {
			got, err := e.client.Objectives(t.Context(), &accountingv1.ObjectivesRequest{Rules: true})
			if o := got.GetObjectives(); len(o) == 2 && o[0].GetTotal() == total && o[0].GetGood() == good && o[1].GetGood() == available {
				return got
			}
			select {
			case <-tick.C:
			case <-deadline:
				t.Fatalf("want %d of %d: %v, %v", good, total, got.GetObjectives(), err)
			}
		}
	}
	await(6, 6, 6)
	send(2, func(u *usagev1.Usage) { u.Ttft = proto.Float64(3) })
	send(1, func(u *usagev1.Usage) { u.Outcome = usagev1.Outcome_OUTCOME_REFUSED })
	send(1, func(u *usagev1.Usage) { u.Route = "/tokenize" })
	send(1, func(u *usagev1.Usage) {
		u.Outcome, u.Overload, u.Ttft, u.Tokens, u.Cost = usagev1.Outcome_OUTCOME_REFUSED, true, nil, nil, nil
	})
	got := await(9, 6, 8)
	o := got.GetObjectives()[0]
	if a := o.GetAttainment(); a < .66 || a > .67 || o.GetBudgetLeft() > -2.3 {
		t.Errorf("state: %v", o)
	}
	if !strings.Contains(got.GetRules(), `objective="InferencePool/ns/chat/ttft"`) {
		t.Errorf("rules:\n%s", got.GetRules())
	}
	e.requests(10) // of 11 events one was refused for lack of room
	page := httptest.NewRecorder()
	e.shell.Admin().ServeHTTP(page, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if want := `kinference_objective_requests_total{objective="InferencePool/ns/chat/ttft",otel_scope_name`; !strings.Contains(page.Body.String(), want) || !strings.Contains(page.Body.String(), `result="bad"`) {
		t.Errorf("no counter in:\n%s", page.Body.String())
	}
}

// Two services that share a database divide the events, and answer alike: each counts
// what the other one took, also for an objective that comes later.
func TestReplicasAgreeOnObjectives(t *testing.T) {
	nats, place := testenv.NATS(t), testenv.Postgres(t).URL
	var routers []*catalogs
	var both []*env
	for range 2 {
		router, url := fakeRouter(t)
		routers = append(routers, router)
		both = append(both, start(t, accounting.Config{NATSURL: nats, Ledger: place, RouterURL: url}))
	}
	tell := func(list ...*routerv1.Objective) {
		for _, r := range routers {
			r.next <- &routerv1.Catalog{Objectives: list}
		}
	}
	id := 0
	send := func(n int) {
		var list []bus.UsageMessage
		for range n {
			u := event(0)
			id++
			u.Id, u.Ended, u.Pool, u.Ttft = fmt.Sprint("r-", id), timestamppb.Now(), "ns/chat", proto.Float64(float64(id%10)/4)
			list = append(list, bus.UsageMessage{ID: u.GetId(), Subject: bus.UsageSubject("ns/a"), Data: bus.EncodeUsage(nil, u)})
		}
		publish(t, nats, list...)
	}
	agree := func(objectives int, total, good uint64) {
		t.Helper()
		deadline, tick := time.After(time.Minute), time.NewTicker(10*time.Millisecond)
		defer tick.Stop()
		for {
			var answers []*accountingv1.ObjectivesResponse
			as := 0
			for _, e := range both {
				got, err := e.client.Objectives(t.Context(), &accountingv1.ObjectivesRequest{})
				if o := got.GetObjectives(); err == nil && len(o) == objectives && o[0].GetTotal() == total && o[0].GetGood() == good {
					as++
				}
				answers = append(answers, got)
			}
			if as == 2 && proto.Equal(answers[0], answers[1]) { // one may be asked before a minute ends, the other one after
				return
			}
			select {
			case <-tick.C:
			case <-deadline:
				t.Fatalf("want %d of %d: %v", good, total, answers)
			}
		}
	}
	send(400)
	tell(objectiveOf("TTFT", "90", time.Second))
	agree(1, 400, 200)
	for range 10 {
		send(100)
	}
	agree(1, 1400, 700)
	tell(objectiveOf("Availability", "99", 0), objectiveOf("TTFT", "90", time.Second))
	agree(2, 1400, 1400)
	// What was counted for Prometheus is in one of them, and all in both together.
	sum := 0.0
	for _, e := range both {
		for line := range strings.Lines(e.metrics()) {
			if strings.HasPrefix(line, "kinference_accounting_events_total") && strings.Contains(line, `result="new"`) {
				var n float64
				fmt.Sscan(line[strings.LastIndexByte(line, ' ')+1:], &n)
				sum += n
			}
		}
	}
	if sum != 1400 {
		t.Errorf("they took %v events", sum)
	}
}
