package overhead

import (
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/bench/load"
)

func TestRun(t *testing.T) {
	upstream := httptest.NewServer(&load.Fake{Model: "m", Interval: time.Millisecond})
	defer upstream.Close()
	target, _ := url.Parse(upstream.URL)
	proxy := httptest.NewServer(httputil.NewSingleHostReverseProxy(target))
	defer proxy.Close()
	o := Options{Model: "m", Paths: []Path{{Name: Direct, URL: upstream.URL}, {Name: ReverseProxy, URL: proxy.URL}},
		Cells: []Cell{{Prompt: 2000, Streams: 1}, {Body: 1000, Streams: 4}}, Rounds: 2, Probes: 10, Interval: time.Millisecond}
	got, err := Run(t.Context(), o)
	if err != nil || len(got) != 4 {
		t.Fatalf("%d results, error %v", len(got), err)
	}
	for _, r := range got {
		if r.Probes != 20 || r.Failed != 0 || r.P50 <= 0 || r.P99 < r.P50 || r.Path == Direct && (r.Added50 != 0 || r.Added99 != 0) {
			t.Errorf("%+v", r)
		}
	}
	upstream.Close()
	if _, err := Run(t.Context(), o); err == nil {
		t.Error("no error from a dead upstream")
	}
}

func TestCells(t *testing.T) {
	if got := Cells[1].Name(); got != "2k_prompt_64_streams" {
		t.Errorf("name %q", got)
	}
}

func TestCapacity(t *testing.T) {
	upstream := httptest.NewServer(&load.Fake{Model: "m", Interval: time.Millisecond})
	defer upstream.Close()
	o := Options{Model: "m", Paths: []Path{{Name: Direct, URL: upstream.URL}}}
	rates, err := Capacity(t.Context(), o, Cell{Prompt: 200, Streams: 4}, 50*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	if len(rates) != 1 || rates[0].PerSecond <= 0 || rates[0].P99 < rates[0].P50 || rates[0].Failed != 0 {
		t.Errorf("got %+v, want one path with a rate", rates)
	}
	o.Paths[0].URL = upstream.URL + "/nowhere"
	if _, err := Capacity(t.Context(), o, Cell{Prompt: 200, Streams: 1}, time.Millisecond); err == nil {
		t.Error("a path that answers nothing: got no error")
	}
}
