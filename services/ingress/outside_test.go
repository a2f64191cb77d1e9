package ingress_test

import (
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

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
