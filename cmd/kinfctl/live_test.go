package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
)

// fakeRouter answers with a status and one decision.
type fakeRouter struct {
	routerv1connect.UnimplementedRouterServiceHandler
	status *routerv1.StatusResponse
}

func (f *fakeRouter) Status(context.Context, *routerv1.StatusRequest) (*routerv1.StatusResponse, error) {
	return f.status, nil
}

func (*fakeRouter) Explain(_ context.Context, r *routerv1.ExplainRequest) (*routerv1.ExplainResponse, error) {
	if r.RequestId != "r1" {
		return nil, connect.NewError(connect.CodeNotFound, errors.New("no record"))
	}
	return &routerv1.ExplainResponse{Decision: &routerv1.Decision{RequestId: "r1", Model: "m", Chosen: "x/0", Policy: "predicted-ttft"}}, nil
}

func serve(t *testing.T, s *routerv1.StatusResponse) string {
	t.Helper()
	mux := http.NewServeMux()
	mux.Handle(routerv1connect.NewRouterServiceHandler(&fakeRouter{status: s}))
	srv := httptest.NewUnstartedServer(mux)
	srv.Config.Protocols = new(http.Protocols)
	srv.Config.Protocols.SetHTTP1(true)
	srv.Config.Protocols.SetUnencryptedHTTP2(true)
	srv.Start()
	t.Cleanup(srv.Close)
	return srv.URL
}

const (
	agrees  = routerv1.ParityState_PARITY_STATE_AGREES
	differs = routerv1.ParityState_PARITY_STATE_DIFFERS
	local   = routerv1.TokenSource_TOKEN_SOURCE_LOCAL
)

func good() *routerv1.StatusResponse {
	return &routerv1.StatusResponse{
		CatalogVersion: 3, TrackerConnected: true,
		Workers: []*routerv1.WorkerStatus{{
			Worker: "x/0", WorkerSet: "n/s", Url: "http://10.0.0.1:8000", Ready: true, MaxModelLen: 4096, SampleAge: durationpb.New(120 * time.Millisecond),
			Index: &routerv1.WorkerIndex{Live: true, Complete: true, Blocks: 12, Lag: durationpb.New(3 * time.Millisecond)},
		}},
		Profiles: []*routerv1.ProfileStatus{
			{Profile: "n/s/m", Source: local, Tokens: agrees, Cached: agrees},
			{Profile: "n/s/asked", Source: routerv1.TokenSource_TOKEN_SOURCE_ASKED, Cached: agrees},
		},
	}
}

func bad() *routerv1.StatusResponse {
	s := good()
	s.CatalogVersion, s.TrackerConnected = 0, false
	s.Workers = append(s.Workers, &routerv1.WorkerStatus{Worker: "y/0", WorkerSet: "n/s", Url: "http://10.0.0.2:8000", Reason: "not ready: no answer"})
	s.Profiles = []*routerv1.ProfileStatus{
		{Profile: "n/s/m", Source: routerv1.TokenSource_TOKEN_SOURCE_DISTRUSTED, Tokens: differs, TokensCause: routerv1.ParityCause_PARITY_CAUSE_TEMPLATE,
			Cached: differs, CachedCause: routerv1.ParityCause_PARITY_CAUSE_BLOCK_SIZE, CachedDiffers: []string{"y/0"}},
		{Profile: "n/s/new", Source: local},
	}
	return s
}

func TestLive(t *testing.T) {
	for _, c := range []struct {
		name   string
		args   string
		status *routerv1.StatusResponse
		code   int
	}{
		{"workers", "get workers", bad(), 0},
		{"top", "top --once", bad(), 0},
		{"check-good", "check", good(), 0},
		{"check-bad", "check", bad(), 1},
		{"check-empty", "check", &routerv1.StatusResponse{CatalogVersion: 1, TrackerConnected: true}, 0},
		{"check-yaml", "check -o yaml", good(), 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			url := serve(t, c.status)
			out, errs, code := kinfctl(t, append(strings.Fields(c.args), "--router", url)...)
			if code != c.code {
				t.Errorf("code %d, want %d: %s", code, c.code, errs)
			}
			golden(t, "testdata/live/"+c.name+".golden", strings.ReplaceAll(out, url, "ROUTER"))
		})
	}
}

func TestLiveJSON(t *testing.T) {
	url := serve(t, good())
	out, _, _ := kinfctl(t, "get", "workers", "-o", "json", "--router", url)
	var got struct {
		Workers []struct{ Worker string }
	}
	if err := json.Unmarshal([]byte(out), &got); err != nil || len(got.Workers) != 1 || got.Workers[0].Worker != "x/0" {
		t.Errorf("%v: %s", err, out)
	}
	if out, errs, code := kinfctl(t, "explain", "r1", "-o", "json", "--router", url); code != 0 || out != `{"requestId":"r1","model":"m","policy":"predicted-ttft","chosen":"x/0"}`+"\n" {
		t.Errorf("%d %s: %s", code, errs, out)
	}
	if _, errs, code := kinfctl(t, "explain", "r2", "--router", url); code != 2 || !strings.Contains(errs, "no decision on record for request r2") {
		t.Errorf("%d %s", code, errs)
	}
}

// A router that does not answer is the first thing that check finds.
func TestCheckAway(t *testing.T) {
	srv := httptest.NewServer(http.NotFoundHandler())
	srv.Close()
	out, _, code := kinfctl(t, "check", "--router", srv.URL)
	if code != 1 || !strings.HasPrefix(out, "router\n  × answers at http://127.0.0.1") || !strings.Contains(out, "is it running") {
		t.Errorf("code %d\n%s", code, out)
	}
	if _, errs, code := kinfctl(t, "top", "--router", srv.URL); code != 1 || !strings.Contains(errs, "ask router") {
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
	err := top(ctx, &out, tick, func() (*routerv1.StatusResponse, error) {
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
		if _, errs, code := kinfctl(t, "get", what); code != 2 || !strings.Contains(errs, "--config") {
			t.Errorf("%s: %d %s", what, code, errs)
		}
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
