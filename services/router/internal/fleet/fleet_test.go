package fleet

import (
	"context"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/policy"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func message(synced bool, states ...*kvtrackerv1.WorkerState) *kvtrackerv1.WatchWorkersResponse {
	return &kvtrackerv1.WatchWorkersResponse{Workers: states, Synced: synced}
}

func state(id string, ready bool, age time.Duration) *kvtrackerv1.WorkerState {
	return &kvtrackerv1.WorkerState{Worker: id, WorkerSet: "ns/s", Ready: ready, Load: &kvtrackerv1.Load{Running: 2}, SampleAge: durationpb.New(age), BlockSize: 16}
}

// Of the tracker's word and the probe's the newer counts, unless the former
// is fresh.
func TestLookup(t *testing.T) {
	const s = time.Second
	tests := []struct {
		name    string
		tracked *kvtrackerv1.WorkerState
		away    bool
		probe   *probed
		at      time.Duration
		want    bool
	}{
		{name: "nothing known"},
		{name: "tracker says ready", tracked: state("w/0", true, 0), want: true},
		{name: "tracker says not ready", tracked: state("w/0", false, 0)},
		{name: "probe alone, good", probe: &probed{at: start, ok: true}, want: true},
		{name: "probe alone, bad", probe: &probed{at: start}},
		{name: "fresh word beats the probe", tracked: state("w/0", false, 0), probe: &probed{at: start.Add(s), ok: true}, at: s},
		{name: "old trouble is checked", tracked: state("w/0", false, 0), probe: &probed{at: start.Add(s), ok: true}, at: 2 * s, want: true},
		{name: "old trouble is confirmed", tracked: state("w/0", false, 0), probe: &probed{at: start.Add(s)}, at: 2 * s},
		{name: "the probe is older than the trouble", tracked: state("w/0", false, 0), probe: &probed{at: start.Add(-s), ok: true}, at: 2 * s},
		{name: "old good word is checked", tracked: state("w/0", true, 0), probe: &probed{at: start.Add(s)}, at: 6 * s},
		{name: "good word is trusted for a while", tracked: state("w/0", true, 0), probe: &probed{at: start.Add(s)}, at: 4 * s, want: true},
		{name: "tracker away, no probe since", tracked: state("w/0", true, 0), away: true, probe: &probed{at: start.Add(-s)}, at: s, want: true},
		{name: "tracker away, probe since", tracked: state("w/0", true, 0), away: true, probe: &probed{at: start.Add(s)}, at: 2 * s},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			table := New(nil)
			table.Watch([]Endpoint{{UID: "w"}})
			if tt.tracked != nil {
				table.Update(start, message(true, tt.tracked))
			}
			if tt.away {
				table.Away()
			}
			if tt.probe != nil {
				table.answered(Endpoint{UID: "w"}, *tt.probe)
			}
			got := table.Lookup(start.Add(tt.at), "w", "w/0")
			if got.Ready != tt.want || got.Ready == (got.Why != "") {
				t.Errorf("ready %v (%s), want %v", got.Ready, got.Why, tt.want)
			}
		})
	}
}

func TestSuspect(t *testing.T) {
	table := New(nil)
	table.Watch([]Endpoint{{UID: "w"}})
	table.Update(start, message(true, state("w/0", true, 0)))
	table.Suspect(start, "w")
	table.Suspect(start, "stranger")
	if s := table.Lookup(start.Add(suspicion/2), "w", "w/0"); s.Ready || !s.Suspect {
		t.Error("a suspect is ready")
	}
	table.Update(start, message(true, state("w/0", false, 0)))
	if s := table.Lookup(start.Add(suspicion/2), "w", "w/0"); s.Ready || s.Suspect {
		t.Error("one that says that it is not ready is only suspected")
	}
	table.Update(start, message(true, state("w/0", true, 0)))
	if !table.Lookup(start.Add(suspicion+1), "w", "w/0").Ready {
		t.Error("suspicion does not end")
	}
	if len(table.suspects) != 1 {
		t.Errorf("suspects %v", table.suspects)
	}
}

// A worker whose Pod ends is not picked, whatever it answers, until the catalog
// is without it.
func TestEnded(t *testing.T) {
	table := New(nil)
	endpoints := []Endpoint{{UID: "ns.s.pod-1"}, {UID: "ns.s.pod-1-8001"}, {UID: "ns.s.pod-11"}}
	table.Watch(endpoints)
	table.Update(start, message(true, state("ns.s.pod-1/0", true, 0), state("ns.s.pod-1-8001/0", true, 0), state("ns.s.pod-11/0", true, 0)))
	ready := func() (list []string) {
		for _, e := range endpoints {
			if table.Lookup(start, e.UID, e.UID+"/0").Ready {
				list = append(list, e.UID)
			}
		}
		return list
	}
	table.Ended("pod-1")
	table.Ended("stranger")
	for range 2 {
		if got := ready(); !slices.Equal(got, []string{"ns.s.pod-11"}) {
			t.Errorf("ready: %v", got)
		}
		table.Watch(endpoints) // a catalog that was under way
	}
	table.Watch(endpoints[2:])
	if len(table.ended) != 0 {
		t.Errorf("remembers %v", table.ended)
	}
}

func TestStreamListing(t *testing.T) {
	var restarted []string
	table := New(func(w string) { restarted = append(restarted, w) })
	a := state("a/0", true, 0)
	a.Epoch = "1"
	table.Update(start, message(false, a))
	if table.Flowing() {
		t.Error("flowing before the listing is complete")
	}
	b := state("b/0", true, 0)
	b.BlockSize = 784
	table.Update(start, message(true, b, state("c/0", true, 0)))
	if got := table.BlockSize("ns/s"); got != 16 || table.BlockSize("ns/other") != 0 {
		t.Errorf("block size %d, want that of most workers: 16", got)
	}
	table.Away()
	again := state("a/0", true, 0)
	again.Epoch = "2"
	gone := message(true, again)
	gone.Removed = []string{"b/0", "c/0"}
	table.Update(start, gone)
	if len(table.tracked) != 1 || !table.Flowing() {
		t.Errorf("workers that the new stream did not list: %v", table.tracked)
	}
	if len(restarted) != 1 || restarted[0] != "a/0" {
		t.Errorf("restarted %v", restarted)
	}
	table.Update(start, &kvtrackerv1.WatchWorkersResponse{Removed: []string{"a/0"}})
	if len(table.tracked) != 0 {
		t.Errorf("removed worker is still there")
	}
}

func TestProbe(t *testing.T) {
	tests := []struct {
		name           string
		health, models int
		body           string
		ok             bool
		maxLen         int
	}{
		{"vLLM", 200, 200, `{"data":[{"id":"m","max_model_len":4096},{"id":"lora","max_model_len":null}]}`, true, 4096},
		{"no health check", 404, 200, `{"data":[{"id":"m"}]}`, true, 0},
		{"engine dead, server alive", 503, 200, `{"data":[]}`, false, 0},
		{"key required", 200, 401, ``, true, 0},
		{"models broken", 200, 500, ``, false, 0},
		{"nonsense", 200, 200, `<html>`, true, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/health" {
					w.WriteHeader(tt.health)
					return
				}
				w.WriteHeader(tt.models)
				_, _ = w.Write([]byte(tt.body))
			}))
			defer srv.Close()
			client := &http.Client{Transport: &http.Transport{}}
			defer client.CloseIdleConnections()
			p := probe(context.Background(), client, srv.URL)
			if p.ok != tt.ok || p.maxLen["m"] != tt.maxLen {
				t.Errorf("probe %+v", p)
			}
		})
	}
	if p := probe(context.Background(), http.DefaultClient, "http://127.0.0.1:1"); p.ok {
		t.Error("nobody there, yet ok")
	}
}

func TestMaxModelLenIsTheLeast(t *testing.T) {
	table := New(nil)
	table.Watch([]Endpoint{{UID: "a"}, {UID: "b"}})
	table.answered(Endpoint{UID: "a"}, probed{at: start, ok: true, maxLen: map[string]int{"m": 4096}})
	table.answered(Endpoint{UID: "b"}, probed{at: start, ok: true, maxLen: map[string]int{"m": 2048}})
	table.answered(Endpoint{UID: "b"}, probed{at: start}) // what it said before still holds
	if got := table.MaxModelLen([]string{"a", "b", "c"}, "m"); got != 2048 {
		t.Errorf("got %d, want 2048", got)
	}
}

// Workers that are fine are left alone, however often another one flaps.
func TestDue(t *testing.T) {
	table := New(nil)
	a, b, c := Endpoint{"a", "http://a"}, Endpoint{"b", "http://b"}, Endpoint{"c", "http://c"}
	table.Watch([]Endpoint{a, b, c})
	table.Update(start, message(true, state("a/0", true, 0), state("b/0", true, 0), state("b/1", false, 0)))
	expect := func(what string, at time.Time, gap time.Duration, want ...Endpoint) {
		t.Helper()
		if got := table.due(at, gap); !slices.Equal(got, want) {
			t.Errorf("%s: due are %v, want %v", what, got, want)
		}
	}
	expect("never asked", start, time.Second, a, b, c)
	for _, e := range []Endpoint{a, b, c} {
		table.answered(e, probed{at: start, ok: true})
	}
	expect("just asked", start.Add(time.Second/2), time.Second)
	expect("not ready, and unknown to the tracker", start.Add(time.Second), time.Second, b, c)
	expect("word too old", start.Add(trustReady), time.Second, a, b, c)

	// At another address is another engine, of which nothing is known.
	moved := Endpoint{"a", "http://a2"}
	table.Watch([]Endpoint{moved, b, c})
	table.answered(a, probed{at: start, ok: true}) // was under way
	expect("moved", start, time.Second, moved)
}

// A cache can be lost without a new process: the engine emptied it, or the
// connection went and who answers next may be another one. What the router
// remembers of the worker is void then, and only then.
func TestLostCacheIsForgotten(t *testing.T) {
	var lost int
	table := New(func(string) { lost++ })
	for _, step := range []struct {
		name   string
		clears uint64
		live   bool
		want   int
	}{
		{"first sight", 1, true, 0},
		{"nothing new", 1, true, 0},
		{"emptied", 2, true, 1},
		{"still so", 2, true, 1},
		{"connection lost", 2, false, 2},
		{"back", 2, true, 2},
		{"tracker restarted and counts anew", 0, true, 2},
	} {
		s := state("a/0", true, 0)
		s.Epoch, s.Clears, s.Index = "e", step.clears, &kvtrackerv1.IndexState{Live: step.live}
		table.Update(start, message(true, s))
		if lost != step.want {
			t.Errorf("%s: the cache was lost %d times, want %d", step.name, lost, step.want)
		}
	}
	// Another tracker counts for itself, but an epoch is everybody's.
	s := state("a/0", true, 0)
	s.Epoch, s.Clears, s.Index = "e", 9, &kvtrackerv1.IndexState{}
	if table.Switch(start, message(true, s)); lost != 2 {
		t.Error("another tracker's count is compared")
	}
	s = state("a/0", true, 0)
	s.Epoch = "f"
	if table.Switch(start, message(true, s)); lost != 3 {
		t.Error("a restart is missed where trackers are switched")
	}
}

// Who waits in line for a worker counts among its waiting in all means, and not in the
// gauge itself.
func TestMeansCountTheLine(t *testing.T) {
	table := New(nil)
	line := map[string]int{"w/0": 6}
	table.CountLine(func() map[string]int { return line })
	threshold := policy.Threshold{Metric: policy.QueuedPrompts, Window: policy.DefaultWindow, Above: 4, Until: 3}
	table.Keep(10*time.Second, []policy.Threshold{threshold})
	table.Watch([]Endpoint{{UID: "w"}})
	now := start
	hear := func() State {
		w := state("w/0", true, 0)
		w.Load.Waiting = 1
		w.LoadMean_30S = w.Load
		table.Update(now, message(true, w))
		now = now.Add(250 * time.Millisecond)
		return table.Lookup(now, "w", "w/0")
	}
	first := hear()
	own := first.Waiting
	if got := first.Mean30s.Waiting; got != own+6 {
		t.Errorf("mean %v with %v in the engine and 6 in line", got, own)
	}
	for range 60 {
		hear()
	}
	if s := hear(); s.Waiting != own || s.Mean30s.Waiting != own+6 || !slices.Contains(s.Held, threshold) {
		t.Errorf("after 15 s: %v waiting, %+v, above %v", s.Waiting, s.Mean30s, s.Held)
	}
	line = nil
	for range 60 {
		hear()
	}
	if s, m := hear(), mean(table, 10*time.Second); s.Mean30s.Waiting < own+2.8 || s.Mean30s.Waiting > own+3.2 || m != own {
		t.Errorf("after 15 s without a line: mean of 30 s %v, of 10 s %v", s.Mean30s.Waiting, m)
	}
}

func mean(t *Table, over time.Duration) float64 {
	m, _ := t.Mean("w/0", over)
	return m.Waiting
}
