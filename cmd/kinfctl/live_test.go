package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	"github.com/kinference/kinference/proto/gen/kinference/admin/v1/adminv1connect"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// fakeAdmin answers with a status, a catalog and two decisions.
type fakeAdmin struct {
	adminv1connect.UnimplementedAdminServiceHandler
	status *adminv1.StatusResponse
}

func (f *fakeAdmin) Status(context.Context, *adminv1.StatusRequest) (*adminv1.StatusResponse, error) {
	return f.status, nil
}

func (f *fakeAdmin) ListWorkers(context.Context, *adminv1.ListWorkersRequest) (*adminv1.ListWorkersResponse, error) {
	return &adminv1.ListWorkersResponse{Workers: f.status.Workers}, nil
}

func (*fakeAdmin) GetCatalog(context.Context, *adminv1.GetCatalogRequest) (*adminv1.GetCatalogResponse, error) {
	return &adminv1.GetCatalogResponse{
		Version: 3, Pools: []*adminv1.Pool{{Name: "n/p", WorkerSets: []string{"n/s"}, Providers: []string{"n/bedrock"}, Models: []string{"m"}, Workers: 3, ReadyWorkers: 2, Policies: []string{"n/burst"}}},
		Policies: []*adminv1.Policy{{Name: "n/burst", DryRun: true, Pools: []string{"p"}, Rules: []*adminv1.Rule{{Name: "a"}, {Name: "b"}}}},
		Tenants:  []*adminv1.Tenant{{Name: "n/team", Parent: "n/org", Qos: "batch", Weight: 2, CostCenter: "42", Limits: []string{"tokens"}}, {Name: "n/org"}},
		Problems: []*adminv1.Problem{{File: "a.yaml", Line: 3, Resource: "InferencePool n/q", Field: "spec", Message: "is wrong", Error: true}},
	}, nil
}

func decision(id string) *adminv1.Decision {
	return &adminv1.Decision{RequestId: id, Model: "m", Chosen: "x/0", ServedBy: "x/0", Policy: "predicted-ttft", Candidates: []*adminv1.Candidate{{Worker: "x/0", PredictedTtft: durationpb.New(time.Second)}}}
}

func (*fakeAdmin) Explain(_ context.Context, r *adminv1.ExplainRequest) (*adminv1.ExplainResponse, error) {
	if r.RequestId != "r1" {
		return nil, connect.NewError(connect.CodeNotFound, errors.New("no record"))
	}
	return &adminv1.ExplainResponse{Decision: &adminv1.Decision{RequestId: "r1", Model: "m", Chosen: "x/0", Policy: "predicted-ttft"}}, nil
}

func (*fakeAdmin) Evaluate(_ context.Context, r *adminv1.EvaluateRequest) (*adminv1.EvaluateResponse, error) {
	d := decision(r.RequestId)
	d.Tenant, d.Reason = strings.Join(r.Attributes.Tenants, ","), r.Attributes.ClaimsJson
	if slices.Contains(r.Attributes.Tenants, "search") {
		d.Chosen, d.Verdict = "", &adminv1.Verdict{Action: "saturated"}
	}
	return &adminv1.EvaluateResponse{Decision: d}, nil
}

func (*fakeAdmin) WatchDecisions(_ context.Context, r *adminv1.WatchDecisionsRequest, s *connect.ServerStream[adminv1.WatchDecisionsResponse]) error {
	if r.Model != "m" || !r.ShadowDiffers || r.Recent != 20 {
		return connect.NewError(connect.CodeInvalidArgument, errors.New("other filters"))
	}
	err := s.Send(&adminv1.WatchDecisionsResponse{Decision: decision("r1")})
	if !r.OnlyRecent {
		d := decision("r2")
		d.Chosen, d.ServedBy, d.Tenant, d.Verdict, d.Shadow = "", "", "team", &adminv1.Verdict{Action: "reject", Rule: "n/p/r"}, &adminv1.Verdict{Action: "route", Chosen: "x/0"}
		err = errors.Join(err, s.Send(&adminv1.WatchDecisionsResponse{Decision: d, Missed: 7}))
	}
	return err
}

const token = "token of the test"

// serve runs an admin API that wants a token, and tells kinfctl how to reach it.
func serve(t *testing.T, s *adminv1.StatusResponse) string {
	t.Helper()
	_, h := adminv1connect.NewAdminServiceHandler(&fakeAdmin{status: s})
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+token {
			_ = connect.NewErrorWriter().Write(w, r, connect.NewError(connect.CodeUnauthenticated, errors.New("a good bearer token is needed")))
			return
		}
		h.ServeHTTP(w, r)
	}))
	srv.Config.Protocols = new(http.Protocols)
	srv.Config.Protocols.SetHTTP1(true)
	srv.Config.Protocols.SetUnencryptedHTTP2(true)
	srv.Start()
	t.Cleanup(srv.Close)
	path := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(path, []byte(token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(envTokenFile, path)
	t.Setenv(envAdmin, srv.URL)
	return srv.URL
}

const (
	agrees  = routerv1.ParityState_PARITY_STATE_AGREES
	differs = routerv1.ParityState_PARITY_STATE_DIFFERS
	local   = adminv1.TokenSource_TOKEN_SOURCE_LOCAL
)

func good() *adminv1.StatusResponse {
	return &adminv1.StatusResponse{
		CatalogVersion: 3, TrackerConnected: true,
		Workers: []*adminv1.WorkerStatus{{
			Worker: "x/0", WorkerSet: "n/s", Url: "http://10.0.0.1:8000", Ready: true, MaxModelLen: 4096, SampleAge: durationpb.New(120 * time.Millisecond),
			Index: &adminv1.WorkerIndex{Live: true, Complete: true, Blocks: 12, Lag: durationpb.New(3 * time.Millisecond)},
			Load:  &adminv1.Load{Running: 3, Waiting: 1, KvUsage: 0.42}, Means: []*adminv1.LoadMean{{Window: durationpb.New(30 * time.Second), Load: &adminv1.Load{Running: 2.5, KvUsage: 0.4}}},
			InFlight: 4, Recent: &adminv1.RecentRequests{Requests: 9, Ttft: durationpb.New(250 * time.Millisecond), PromptTokens: 900, CachedTokens: 600},
		}},
		Providers: []*adminv1.ProviderStatus{{Provider: "n/bedrock", InFlight: 2, Concurrency: 2}},
		Profiles: []*adminv1.ProfileStatus{
			{Profile: "n/s/m", Source: local, Tokens: agrees, Cached: agrees},
			{Profile: "n/s/asked", Source: adminv1.TokenSource_TOKEN_SOURCE_ASKED, Cached: agrees},
		},
	}
}

func bad() *adminv1.StatusResponse {
	s := good()
	s.CatalogVersion, s.TrackerConnected = 0, false
	s.Workers = append(s.Workers, &adminv1.WorkerStatus{Worker: "y/0", WorkerSet: "n/s", Url: "http://10.0.0.2:8000", Reason: "not ready: no answer"})
	s.Profiles = []*adminv1.ProfileStatus{
		{Profile: "n/s/m", Source: adminv1.TokenSource_TOKEN_SOURCE_DISTRUSTED, Tokens: differs, TokensCause: routerv1.ParityCause_PARITY_CAUSE_TEMPLATE,
			Cached: differs, CachedCause: routerv1.ParityCause_PARITY_CAUSE_BLOCK_SIZE, CachedDiffers: []string{"y/0"}},
		{Profile: "n/s/new", Source: local},
	}
	return s
}

func TestLive(t *testing.T) {
	for _, c := range []struct {
		name   string
		args   string
		status *adminv1.StatusResponse
		code   int
	}{
		{"workers", "get workers", bad(), 0},
		{"top", "top --once", bad(), 0},
		{"check-good", "check", good(), 0},
		{"check-bad", "check", bad(), 1},
		{"check-empty", "check", &adminv1.StatusResponse{CatalogVersion: 1, TrackerConnected: true, Open: true}, 0},
		{"check-yaml", "check -o yaml", good(), 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			url := serve(t, c.status)
			out, errs, code := kinfctl(t, strings.Fields(c.args)...)
			if code != c.code {
				t.Errorf("code %d, want %d: %s", code, c.code, errs)
			}
			golden(t, "testdata/live/"+c.name+".golden", strings.ReplaceAll(out, url, "ROUTER"))
		})
	}
}

func TestLiveJSON(t *testing.T) {
	serve(t, good())
	out, _, _ := kinfctl(t, "get", "workers", "-o", "json")
	var got struct {
		Workers []struct{ Worker string }
	}
	if err := json.Unmarshal([]byte(out), &got); err != nil || len(got.Workers) != 1 || got.Workers[0].Worker != "x/0" {
		t.Errorf("%v: %s", err, out)
	}
	if out, errs, code := kinfctl(t, "explain", "r1", "-o", "json"); code != 0 || out != `{"requestId":"r1","model":"m","policy":"predicted-ttft","chosen":"x/0"}`+"\n" {
		t.Errorf("%d %s: %s", code, errs, out)
	}
	if _, errs, code := kinfctl(t, "explain", "r2"); code != 2 || !strings.Contains(errs, "no decision on record for request r2") {
		t.Errorf("%d %s", code, errs)
	}
}

// A router that does not answer is the first thing that check finds.
func TestCheckAway(t *testing.T) {
	srv := httptest.NewServer(http.NotFoundHandler())
	srv.Close()
	out, _, code := kinfctl(t, "check", "--admin", srv.URL)
	if code != 1 || !strings.HasPrefix(out, "router\n  × answers at http://127.0.0.1") || !strings.Contains(out, "is it running") {
		t.Errorf("code %d\n%s", code, out)
	}
	if _, errs, code := kinfctl(t, "top", "--admin", srv.URL); code != 1 || !strings.Contains(errs, "ask the admin API") {
		t.Errorf("top: %d %s", code, errs)
	}
}

// top goes on at each tick, also while the router is away, until it is told to end.
func TestTop(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	tick := make(chan time.Time, 2)
	tick <- time.Time{}
	tick <- time.Time{}
	n := 0
	var out bytes.Buffer
	err := top(ctx, &out, tick, func() (*adminv1.StatusResponse, error) {
		switch n++; n {
		case 2:
			return nil, errors.New("ask router: away")
		case 3:
			cancel()
			return nil, ctx.Err()
		}
		return good(), nil
	})
	if err != nil || n != 3 || strings.Count(out.String(), clear) != 1 || !strings.HasSuffix(out.String(), "ask router: away: asking on\n") {
		t.Errorf("%v after %d: %q", err, n, out.String())
	}
}

func TestGetResources(t *testing.T) {
	for _, what := range []string{"pools", "tenants", "policies"} {
		for _, o := range outputs {
			out, errs, code := kinfctl(t, "get", what, "--config", "testdata/conf", "-o", o)
			if code != 0 {
				t.Errorf("%s: %d %s", what, code, errs)
			}
			golden(t, "testdata/live/"+what+"."+o+".golden", out)
		}
	}
}

func TestGetLive(t *testing.T) {
	serve(t, good())
	for _, what := range []string{"pools", "tenants", "policies"} {
		out, errs, code := kinfctl(t, "get", what)
		if code != 0 || !strings.Contains(errs, "a.yaml:3: error: InferencePool n/q: spec: is wrong") {
			t.Errorf("%s: %d %s", what, code, errs)
		}
		golden(t, "testdata/live/"+what+".live.golden", out)
	}
	out, errs, code := kinfctl(t, "get", "workers", "--worker-set", "n/s")
	if code != 0 || !strings.Contains(out, "x/0") {
		t.Errorf("%d %s: %s", code, errs, out)
	}
}

func TestDecisions(t *testing.T) {
	serve(t, good())
	out, errs, code := kinfctl(t, "decisions", "--model", "m", "--shadow-differs")
	if want := "00:00:00.000  r1  m → x/0  predicted 1s\n"; code != 0 || out != want {
		t.Errorf("%d %s: %q", code, errs, out)
	}
	out, errs, code = kinfctl(t, "decisions", "-f", "--model", "m", "--shadow-differs")
	if want := "r2  m → reject by n/p/r  team, dry run: no rule matches: route to x/0 (stage 1)\n"; code != 0 || !strings.HasSuffix(out, want) || !strings.Contains(errs, "missed 7 decisions") {
		t.Errorf("%d %s: %q", code, errs, out)
	}
	if out, _, _ = kinfctl(t, "decisions", "-f", "--model", "m", "--shadow-differs", "-o", "json"); strings.Count(out, "\n") != 2 || !strings.HasPrefix(out, `{"requestId":"r1"`) {
		t.Errorf("json: %s", out)
	}
	if _, errs, code = kinfctl(t, "decisions"); code != 1 || !strings.Contains(errs, "other filters") {
		t.Errorf("%d %s", code, errs)
	}
}

// A request that nobody has made is sent as the file describes it.
func TestExplainWhatIf(t *testing.T) {
	serve(t, good())
	out, errs, code := kinfctl(t, "explain", "--request", "testdata/explain/clean.yaml")
	if code != 0 || !strings.Contains(out, "chosen     x/0") {
		t.Errorf("%d %s: %s", code, errs, out)
	}
	if out, errs, code = kinfctl(t, "explain", "--request", "testdata/explain/batch.yaml"); code != 2 || !strings.Contains(errs, "would not be routed: saturated") {
		t.Errorf("%d %s: %s", code, errs, out)
	}
}

// Without a token, or with another one, the answer says what to do.
func TestToken(t *testing.T) {
	url := serve(t, good())
	wrong := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(wrong, []byte("wrong"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, errs, code := kinfctl(t, "status", "--token-file", wrong); code != 1 || !strings.Contains(errs, "give a token with --token-file") || strings.Contains(errs, "wrong") {
		t.Errorf("%d %s", code, errs)
	}
	if _, errs, code := kinfctl(t, "status", "--token-file", "nowhere"); code != 2 || !strings.Contains(errs, "nowhere") {
		t.Errorf("%d %s", code, errs)
	}
	t.Setenv(envTokenFile, "")
	if _, _, code := kinfctl(t, "status"); code != 1 {
		t.Errorf("no token: %d", code)
	}
	t.Setenv(envToken, token)
	t.Setenv(envAdmin, "http://127.0.0.1:1")
	if _, errs, code := kinfctl(t, "status", "--admin", url+"/"); code != 0 {
		t.Errorf("%d %s", code, errs)
	}
}

// The shell is told the kinds, commands and values of flags.
func TestCompletion(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if out, errs, code := kinfctl(t, "completion", shell); code != 0 || !strings.Contains(out, "kinfctl") {
			t.Errorf("%s: %d %s", shell, code, errs)
		}
	}
	if out, _, _ := kinfctl(t, "__complete", "get", ""); !strings.HasPrefix(out, "policies") || !strings.Contains(out, "\nworkers") {
		t.Errorf("get: %s", out)
	}
	if out, _, _ := kinfctl(t, "__complete", "check", "-o", ""); !strings.HasPrefix(out, "table\njson\nyaml\n") {
		t.Errorf("-o: %s", out)
	}
}
