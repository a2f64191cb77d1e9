package ingress_test

import (
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/provider/fake"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// A request whose tags are not known, or are those that a rule keeps inside, is
// kept from a provider at the moment of dispatch as well, on a failover hop and
// even if the router names one: the router is asked again instead.
func TestTagsAreLookedAtOnEachHop(t *testing.T) {
	e := start(t, nil).ready()
	broken := newWorker(t, "broken", refuses(500, `{}`))
	good := newWorker(t, "good", answers(textChunk("a"), usageChunk, doneEvent))
	var left atomic.Int32
	cloud := newWorker(t, "provider ns/cloud", func(w http.ResponseWriter, r *http.Request) {
		left.Add(1)
		answers(textChunk("leaked"), usageChunk, doneEvent)(w, r)
	})
	pii := []*routerv1.TagBar{{Any: []string{"pii-detected"}, Assumed: []string{"pii-detected"}}}
	route := func(bars []*routerv1.TagBar) {
		e.router.set(func(r *routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
			if slices.Contains(r.GetExclude(), "broken") {
				return &routerv1.RouteResponse{Endpoints: []*routerv1.Endpoint{{Worker: good.name, Url: good.url}}}, nil
			}
			return &routerv1.RouteResponse{Endpoints: []*routerv1.Endpoint{
				{Worker: broken.name, Url: broken.url}, {Worker: cloud.name, Url: cloud.url, Provider: "ns/cloud", UpstreamModel: "m", Bars: bars},
			}}, nil
		})
	}
	route(pii)
	if resp, text := e.post(chatPath, chatRequest(true, "")); resp.StatusCode != http.StatusOK || strings.Contains(text, "leaked") {
		t.Errorf("%d %s", resp.StatusCode, text)
	}
	if n := left.Load(); n != 0 {
		t.Errorf("the provider got %d requests", n)
	}
	if page := e.metrics(); !strings.Contains(page, `event="barred"`) {
		t.Error("nobody counted it")
	}
	route([]*routerv1.TagBar{{Any: []string{"complexity-low"}}}) // unknown counts as absent
	if resp, text := e.post(chatPath, chatRequest(true, "")); resp.StatusCode != http.StatusOK || !strings.Contains(text, "leaked") {
		t.Errorf("%d %s", resp.StatusCode, text)
	}
}

// A provider without the credentials that it needs gets nothing, and the client
// does not learn which are missing.
func TestNoCredentials(t *testing.T) {
	s := fake.New(v1alpha1.SchemaOpenAI, "gpt-9")
	defer s.Close()
	dir := t.TempDir()
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) { c.ProviderCredentials = dir }).ready()
	for _, secret := range []string{"", "ns/gone", "../etc", "ns/../../etc", "ns"} {
		e.router.set(func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
			return &routerv1.RouteResponse{Endpoints: []*routerv1.Endpoint{{
				Worker: "provider ns/cloud", Provider: "ns/cloud", UpstreamModel: "gpt-9", Target: &routerv1.ProviderTarget{Schema: "OpenAI", Endpoint: s.URL, Secret: secret},
			}}}, nil
		})
		resp, text := e.post(chatPath, chatRequest(false, ""))
		if resp.StatusCode != http.StatusBadGateway || strings.Contains(text, "gone") || strings.Contains(text, dir) {
			t.Errorf("%q: %d %s", secret, resp.StatusCode, text)
		}
	}
	if len(s.Seen())+len(s.Refused()) > 0 {
		t.Error("something was sent")
	}
	// To pass it over is no attempt, which the policy may count.
	good := newWorker(t, "good", answers(textChunk("a"), usageChunk, doneEvent))
	e.router.set(func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
		return &routerv1.RouteResponse{Attempts: 1, RetryOn: []string{"ConnectFailure"}, Endpoints: []*routerv1.Endpoint{
			{Worker: "provider ns/cloud", Provider: "ns/cloud", UpstreamModel: "gpt-9", Target: &routerv1.ProviderTarget{Schema: "OpenAI", Endpoint: s.URL}},
			{Worker: good.name, Url: good.url},
		}}, nil
	})
	if resp, text := e.post(chatPath, chatRequest(true, "")); resp.StatusCode != http.StatusOK {
		t.Errorf("%d %s", resp.StatusCode, text)
	}
}

// Tries that were not made, because the endpoint could not be asked, are none of
// the retry budget.
func TestPassedOverCostsNoTry(t *testing.T) {
	e := start(t, nil).ready()
	busy := newWorker(t, "busy", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusServiceUnavailable)
	})
	good := newWorker(t, "good", answers(textChunk("a"), usageChunk, doneEvent))
	cloud := func(name string) *routerv1.Endpoint {
		return &routerv1.Endpoint{Worker: "provider " + name, Provider: name, Target: &routerv1.ProviderTarget{Schema: "OpenAI", Endpoint: "https://127.0.0.1:1"}}
	}
	e.router.set(func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
		return &routerv1.RouteResponse{Endpoints: []*routerv1.Endpoint{busy.endpoint(), cloud("ns/a"), cloud("ns/b"), good.endpoint()}}, nil
	})
	for i := range 10 { // ten tries are there, and two more for ten requests
		if resp, text := e.post(chatPath, chatRequest(true, "")); resp.StatusCode != http.StatusOK {
			t.Fatalf("request %d: %d %s", i, resp.StatusCode, text)
		}
	}
}

// A client of a Secret becomes a token of the workspace, which is used for as long
// as it holds, and one of its own after the Secret has changed, without a restart.
func TestDatabricksClient(t *testing.T) {
	s := fake.New(v1alpha1.SchemaDatabricks, "llama")
	defer s.Close()
	s.SetKey("no key is let in")
	dir := t.TempDir()
	secret := func(id, text string) {
		if err := os.MkdirAll(filepath.Join(dir, "ns", "bricks"), 0o700); err != nil {
			t.Fatal(err)
		}
		for name, value := range map[string]string{"clientId": id, "clientSecret": text} {
			if err := os.WriteFile(filepath.Join(dir, "ns", "bricks", name), []byte(value+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	secret("principal", "first")
	s.SetClient("principal", "first")
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) {
		c.ProviderCredentials, c.ProviderPrivate = dir, "127.0.0.0/8"
	}).ready()
	e.router.set(func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
		return &routerv1.RouteResponse{Endpoints: []*routerv1.Endpoint{{
			Worker: "provider ns/bricks", Provider: "ns/bricks", UpstreamModel: "llama", Target: &routerv1.ProviderTarget{Schema: "Databricks", Endpoint: s.URL, Secret: "ns/bricks"},
		}}}, nil
	})
	for range 3 {
		if resp, text := e.post(chatPath, chatRequest(true, "")); resp.StatusCode != http.StatusOK || !strings.Contains(text, "[DONE]") {
			t.Fatalf("%d %s; refused %v", resp.StatusCode, text, s.Refused())
		}
	}
	if n := s.Given(); n != 1 {
		t.Errorf("%d tokens for three requests", n)
	}
	if got := s.Seen()[2].Header.Get("Authorization"); got != "Bearer workspace-token-1" {
		t.Errorf("sent with %q", got)
	}

	secret("principal", "second")
	s.SetClient("principal", "second")
	deadline := time.Now().Add(20 * time.Second)
	for {
		resp, text := e.post(chatPath, chatRequest(false, ""))
		if resp.StatusCode == http.StatusOK {
			break
		}
		if resp.StatusCode != http.StatusBadGateway || strings.Contains(text, "second") || strings.Contains(text, fake.Account) {
			t.Fatalf("%d %s", resp.StatusCode, text)
		}
		if time.Now().After(deadline) {
			t.Fatalf("the new secret is not used: %v", s.Refused())
		}
	}
	if n := s.Given(); n != 2 {
		t.Errorf("%d tokens", n)
	}
}
