package accounting_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	accountingv1 "github.com/kinference/kinference/proto/gen/kinference/accounting/v1"
	"github.com/kinference/kinference/proto/gen/kinference/accounting/v1/accountingv1connect"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
	"github.com/kinference/kinference/services/accounting"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// env is an accounting service.
type env struct {
	t      *testing.T
	client accountingv1connect.AccountingServiceClient
	url    string
	shell  *daemon.Shell
	stop   func()
}

func start(t *testing.T, c accounting.Config) *env {
	t.Helper()
	var log bytes.Buffer
	shell, err := daemon.NewShell(context.Background(), daemon.Settings{Output: &log})
	if err != nil {
		t.Fatal(err)
	}
	l := testenv.Listen(t)
	c.Listener = l
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- (&accounting.Service{Config: c}).Run(shell.Context(ctx, "accounting")) }()
	e := &env{t: t, url: "http://" + l.Addr().String(), shell: shell}
	e.client = rpc.Client(ctx, e.url, accountingv1connect.NewAccountingServiceClient)
	e.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		shell.Close()
		if t.Failed() {
			t.Logf("log:\n%s", log.Bytes())
		}
	})
	t.Cleanup(e.stop)
	return e
}

// requests waits until the ledger has n requests, and returns its sums.
func (e *env) requests(n uint64) *accountingv1.Sums {
	e.t.Helper()
	deadline, tick := time.After(time.Minute), time.NewTicker(5*time.Millisecond)
	defer tick.Stop()
	var last *accountingv1.QueryUsageResponse
	for {
		answer, err := e.client.QueryUsage(e.t.Context(), &accountingv1.QueryUsageRequest{})
		if err == nil {
			if last = answer; len(answer.GetRows()) == 1 && answer.GetRows()[0].GetSums().GetRequests() == n && answer.GetLag() == 0 {
				return answer.GetRows()[0].GetSums()
			}
		}
		select {
		case <-tick.C:
		case <-deadline:
			e.t.Fatalf("not %d requests: %v, %v", n, last, err)
		}
	}
}

func event(i int) *usagev1.Usage {
	return &usagev1.Usage{
		Id: fmt.Sprintf("id-%d", i), Ended: timestamppb.New(time.Now().Add(-time.Duration(i) * time.Minute)), Tenants: []string{"ns/" + string(rune('a'+i%3)), "ns/org"},
		Model: "m", Outcome: usagev1.Outcome_OUTCOME_OK, Tokens: &usagev1.Tokens{Input: proto.Uint32(10), Output: proto.Uint32(2)},
		Cost: &usagev1.Cost{Currency: "EUR", Input: "0.1", Output: "0.000000000001", PriceVersion: "v"},
	}
}

func publish(t *testing.T, url string, messages ...bus.UsageMessage) {
	t.Helper()
	c, err := bus.Connect(t.Context(), url, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for left := messages; len(left) > 0; {
		if t.Context().Err() != nil {
			t.Fatal("not published")
		}
		left = c.PublishUsage(t.Context(), bus.UsageSettings{}, left).Left
	}
}

func messages(from, to int) (list []bus.UsageMessage) {
	for i := from; i < to; i++ {
		u := event(i)
		list = append(list, bus.UsageMessage{ID: u.GetId(), Subject: bus.UsageSubject(u.GetTenants()[0]), Data: bus.EncodeUsage(nil, u)})
	}
	return list
}

// Events get from the stream into either database, through restarts and a time
// without it, and once; what is no event is left out.
func TestLedgerFollowsTheStream(t *testing.T) {
	for name, place := range map[string]func(t *testing.T) (string, func(), func()){
		"sqlite": func(t *testing.T) (string, func(), func()) {
			return filepath.Join(t.TempDir(), "ledger.db"), func() {}, func() {}
		},
		"postgres": func(t *testing.T) (string, func(), func()) {
			s := testenv.Postgres(t)
			return s.URL, s.Stop, func() { s.Start(t) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			nats := testenv.NATS(t)
			ledger, away, back := place(t)
			publish(t, nats, messages(0, 700)...)
			e := start(t, accounting.Config{NATSURL: nats, Ledger: ledger})
			e.requests(700)
			bad := messages(0, 1)[0]
			bad.ID, bad.Data = "bad", []byte(`{"specversion":"1.0","type":"kinference.usage.v1","id":"bad","data":{}}`)
			old := event(1)
			old.Id, old.Ended = "old", timestamppb.New(time.Now().Add(-50*24*time.Hour))
			publish(t, nats, bad, bus.UsageMessage{ID: "old", Subject: bus.UsageSubject(""), Data: bus.EncodeUsage(nil, old)})
			e.stop()

			publish(t, nats, messages(700, 900)...)
			second := start(t, accounting.Config{NATSURL: nats, Ledger: ledger})
			second.requests(900)
			away()
			publish(t, nats, messages(900, 1000)...)
			back()
			s := second.requests(1000)
			if s.GetInput() != 10_000 || s.GetOutput() != 2000 || s.GetCost() != "100.000000001" || s.GetCurrency() != "EUR" || s.GetFailed() != 0 {
				t.Errorf("got %v", s)
			}
			page := second.metrics()
			for _, want := range []string{"kinference_accounting_events_total", "kinference_accounting_ledger_size_bytes", "kinference_accounting_newest_age_seconds"} {
				if !strings.Contains(page, want) {
					t.Errorf("%s is missing", want)
				}
			}
		})
	}
}

func (e *env) metrics() string {
	var b bytes.Buffer
	w := &recorder{header: http.Header{}, b: &b}
	r, _ := http.NewRequest(http.MethodGet, "/metrics", nil)
	e.shell.Admin().ServeHTTP(w, r)
	return b.String()
}

type recorder struct {
	header http.Header
	b      *bytes.Buffer
}

func (r *recorder) Header() http.Header         { return r.header }
func (r *recorder) Write(p []byte) (int, error) { return r.b.Write(p) }
func (r *recorder) WriteHeader(int)             {}

// Two that share a database divide the stream; a ledger that was lost, or is
// rebuilt, reads all of it again.
func TestSharedAndRebuilt(t *testing.T) {
	nats, place := testenv.NATS(t), testenv.Postgres(t).URL
	one := start(t, accounting.Config{NATSURL: nats, Ledger: place})
	two := start(t, accounting.Config{NATSURL: nats, Ledger: place})
	publish(t, nats, messages(0, 2000)...)
	want := one.requests(2000)
	if got := two.requests(2000); !proto.Equal(got, want) {
		t.Errorf("got %v and %v", want, got)
	}
	one.stop()
	two.stop()
	for range 2 {
		rebuild := &accounting.Service{Config: accounting.Config{NATSURL: nats, Ledger: place, Rebuild: true, Listen: "127.0.0.1:0"}}
		if err := rebuild.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	again := start(t, accounting.Config{NATSURL: nats, Ledger: place})
	if got := again.requests(2000); !proto.Equal(got, want) {
		t.Errorf("rebuilt: got %v, want %v", got, want)
	}
	fresh := start(t, accounting.Config{NATSURL: nats}) // a ledger of its own
	if got := fresh.requests(2000); !proto.Equal(got, want) {
		t.Errorf("new ledger: got %v, want %v", got, want)
	}
}

// What the stream does not have any more stays when a ledger is made anew: all of it if
// the stream is empty, and what is older than a stream that took the place of a lost one.
func TestRebuildKeepsWhatTheStreamLost(t *testing.T) {
	nats, place := testenv.NATS(t), filepath.Join(t.TempDir(), "ledger.db")
	publish(t, nats, messages(0, 100)...)
	e := start(t, accounting.Config{NATSURL: nats, Ledger: place})
	e.requests(100)
	e.stop()
	rebuild := func() error {
		s := &accounting.Service{Config: accounting.Config{NATSURL: nats, Ledger: place, Rebuild: true, Listen: "127.0.0.1:0"}}
		return s.Run(t.Context())
	}
	c, err := bus.Connect(t.Context(), nats, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	stream, err := c.EnsureUsageStream(t.Context(), bus.UsageSettings{})
	if err == nil {
		err = stream.Purge(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := rebuild(); err == nil || !strings.Contains(err.Error(), "empty") {
		t.Errorf("of an empty stream: got %v", err)
	}
	if err := c.JetStream().DeleteStream(t.Context(), bus.UsageStream); err != nil {
		t.Fatal(err)
	}
	publish(t, nats, messages(100, 150)...)
	if err := rebuild(); err != nil {
		t.Fatal(err)
	}
	start(t, accounting.Config{NATSURL: nats, Ledger: place}).requests(150)
}

func TestQueriesAndExport(t *testing.T) {
	nats := testenv.NATS(t)
	e := start(t, accounting.Config{NATSURL: nats})
	publish(t, nats, messages(0, 900)...)
	e.requests(900)
	answer, err := e.client.QueryUsage(t.Context(), &accountingv1.QueryUsageRequest{
		Filter:  &accountingv1.Filter{Organisations: []string{"ns/org"}, From: timestamppb.New(time.Now().Add(-48 * time.Hour))},
		GroupBy: []accountingv1.Group{accountingv1.Group_GROUP_TENANT, accountingv1.Group_GROUP_MODEL}, Step: accountingv1.Step_STEP_MONTH,
	})
	if err != nil {
		t.Fatal(err)
	}
	sum := uint64(0)
	for _, r := range answer.GetRows() {
		sum += r.GetSums().GetRequests()
		if r.GetModel() != "m" || !strings.HasPrefix(r.GetTenant(), "ns/") || r.GetStart() == nil || r.GetOrganisation() != "" {
			t.Errorf("got %v", r)
		}
	}
	if sum != 900 || answer.GetNewest() == nil {
		t.Errorf("%d requests in %v", sum, answer)
	}
	stream, err := e.client.ExportUsage(t.Context(), &accountingv1.ExportUsageRequest{Filter: &accountingv1.Filter{Tenants: []string{"ns/b"}}})
	if err != nil {
		t.Fatal(err)
	}
	n, last := 0, time.Time{}
	for stream.Receive() {
		for _, u := range stream.Msg().GetUsage() {
			if at := u.GetEnded().AsTime(); at.Before(last) || u.GetTenants()[0] != "ns/b" {
				t.Errorf("got %v", u)
			} else {
				last = at
			}
			n++
		}
	}
	if err := errors.Join(stream.Err(), stream.Close()); err != nil || n != 300 {
		t.Errorf("exported %d, %v", n, err)
	}
	for name, bad := range map[string]*accountingv1.QueryUsageRequest{
		"group":   {GroupBy: []accountingv1.Group{99}},
		"twice":   {GroupBy: []accountingv1.Group{1, 1}},
		"step":    {Step: 99},
		"range":   {Filter: &accountingv1.Filter{From: timestamppb.New(time.Unix(10, 0)), To: timestamppb.New(time.Unix(5, 0))}},
		"no time": {Filter: &accountingv1.Filter{From: &timestamppb.Timestamp{Nanos: -5}}},
		"values":  {Filter: &accountingv1.Filter{Models: make([]string, 1001)}},
	} {
		if _, err := e.client.QueryUsage(t.Context(), bad); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestServesHealthUntilStopped(t *testing.T) {
	e := start(t, accounting.Config{})
	resp, err := http.Post(e.url+"/grpc.health.v1.Health/Check", "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("health: got %s, want 200", resp.Status)
	}
	e.stop()
	for name, c := range map[string]accounting.Config{
		"keeps too short": {Events: time.Hour},
		"rebuilds":        {Rebuild: true},
		"negative":        {Hours: -1},
	} {
		if err := (&accounting.Service{Config: c}).Run(t.Context()); err == nil {
			t.Errorf("%s: it runs", name)
		}
	}
}
