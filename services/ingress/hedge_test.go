package ingress_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/fleetsim"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
	"github.com/kinference/kinference/services/ingress"
)

// hedges lets the router answer with these endpoints and a policy that hedges.
func hedges(e *env, after time.Duration, attempts uint32, endpoints ...*routerv1.Endpoint) {
	e.router.set(func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
		return &routerv1.RouteResponse{Endpoints: endpoints, Attempts: attempts, Hedge: &routerv1.Hedge{After: durationpb.New(after)}}, nil
	})
}

func (e *env) wantMetric(t *testing.T, text string) {
	t.Helper()
	if !strings.Contains(e.metrics(), text) {
		t.Errorf("the metrics lack %s", text)
	}
}

// An endpoint that is silent for too long gets company, and the first content
// answers: the text is of one endpoint, the other is left, and what it used has
// an event of its own.
func TestHedge(t *testing.T) {
	events, change := collectUsage(t)
	e := start(t, change).ready()
	hung, begun, left := hang(with(roleChunk(), running(12, 0)))
	slow := newWorker(t, "slow", hung)
	fast := newWorker(t, "fast", func(w http.ResponseWriter, r *http.Request) {
		<-begun // on a busy machine after this
		answers(roleChunk(), textChunk("a"), textChunk("b"), usageChunk, doneEvent)(w, r)
	})
	hedges(e, 20*time.Millisecond, 2, slow.endpoint(), fast.endpoint())
	resp, text := e.post(chatPath, chatRequest(true, ""))
	if want := renamed(roleChunk() + textChunk("a") + textChunk("b") + doneEvent); resp.StatusCode != http.StatusOK || text != want {
		t.Errorf("got %d %s", resp.StatusCode, text)
	}
	await(t, "the slow worker to be left", left)
	id := resp.Header.Get("X-Request-Id")
	done, words := e.router.done(id)
	if got := strings.Join(words, ", "); got != "moved to fast after hedged, first token, ok" || done.GetPromptTokens() != 12 {
		t.Errorf("reported %s, %v", got, done)
	}
	e.wantMetric(t, `kinference_ingress_hedges_total{model="chat"`)
	e.wantMetric(t, `result="first"`)

	var mine, other *usagev1.Usage
	deadline := time.After(patience)
	for tick := time.NewTicker(2 * time.Millisecond); mine == nil || other == nil; {
		events.mu.Lock()
		for _, u := range events.byID[id] {
			if u.GetHedge() {
				other = u
			} else {
				mine = u
			}
		}
		events.mu.Unlock()
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("events: %v and %v", mine, other)
		}
	}
	if mine.GetWorker() != "fast" || mine.GetAttempts() != 2 || counted(mine) != "12 8 2 ? ok" {
		t.Errorf("the request: %s at %s, %d attempts", counted(mine), mine.GetWorker(), mine.GetAttempts())
	}
	if other.GetWorker() != "slow" || other.GetId() == mine.GetId() || !strings.HasPrefix(counted(other), "12 ") || !strings.HasSuffix(counted(other), "canceled") {
		t.Errorf("the other endpoint: %s at %s", counted(other), other.GetWorker())
	}
}

// The second endpoint changes nothing if the first one is faster after all, fails
// while the second is at it, or if both fail.
func TestHedgeOutcomes(t *testing.T) {
	for _, tt := range []struct {
		name, want, words, result string
		first, second             http.HandlerFunc
	}{
		{"the first is faster", renamed(textChunk("first") + doneEvent), "first token, ok", "late", nil, nil},
		{"the first fails", renamed(textChunk("second") + doneEvent), "moved to second after hedged, first token, ok", "first", refuses(500, "{}"), answers(textChunk("second"), usageChunk, doneEvent)},
		{"the second fails", renamed(textChunk("first") + doneEvent), "first token, ok", "late", answers(textChunk("first"), usageChunk, doneEvent), refuses(500, "{}")},
		{"both fail", renamed(textChunk("third") + doneEvent), "moved to third after status, first token, ok", "failed", refuses(500, "{}"), refuses(500, "{}")},
		{"the request is at fault", "", "failed", "failed", refuses(500, "{}"), refuses(400, `{"error":{"message":"bad"}}`)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := start(t, nil).ready()
			asked := make(chan struct{}) // the second one
			waits := func(h http.HandlerFunc) http.HandlerFunc {
				return func(w http.ResponseWriter, r *http.Request) { <-asked; h(w, r) }
			}
			first, second := tt.first, tt.second
			if first == nil {
				first = answers(textChunk("first"), usageChunk, doneEvent)
				second = func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
			}
			a, c := newWorker(t, "first", waits(first)), newWorker(t, "third", answers(textChunk("third"), usageChunk, doneEvent))
			b := newWorker(t, "second", func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				close(asked)
				second(w, r)
			})
			hedges(e, 5*time.Millisecond, 3, a.endpoint(), b.endpoint(), c.endpoint())
			resp, text := e.post(chatPath, chatRequest(true, ""))
			if tt.want != "" && text != tt.want || tt.want == "" && resp.StatusCode != 400 {
				t.Errorf("got %d %s", resp.StatusCode, text)
			}
			if _, words := e.router.done(resp.Header.Get("X-Request-Id")); strings.Join(words, ", ") != tt.words {
				t.Errorf("reported %v", words)
			}
			e.wantMetric(t, fmt.Sprintf(`result=%q`, tt.result))
		})
	}
}

// No second endpoint is asked for an answer in one piece, beyond the attempts of
// the policy, if the first one answers in time, or if the request's tags keep it
// from there.
func TestNoHedge(t *testing.T) {
	e := start(t, nil).ready()
	other := newWorker(t, "other", func(http.ResponseWriter, *http.Request) { t.Error("a second endpoint was asked") })
	good := newWorker(t, "good", answers(textChunk("a"), usageChunk, doneEvent))
	wait := make(chan struct{})
	patient := newWorker(t, "patient", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-wait
		if strings.Contains(r.Header.Get("X-Request-Id"), "whole") {
			refuses(200, whole)(w, r)
			return
		}
		answers(textChunk("a"), usageChunk, doneEvent)(w, r)
	})
	post := func(name, id string, stream bool) {
		t.Helper()
		if resp, text := e.post(chatPath, chatRequest(stream, ""), "X-Request-Id", id); resp.StatusCode != http.StatusOK {
			t.Errorf("%s: %d %s", name, resp.StatusCode, text)
		}
	}
	hedges(e, time.Minute, 2, good.endpoint(), other.endpoint())
	post("in time", "in-time", true)

	barred := other.endpoint()
	barred.Provider, barred.Bars = "ns/cloud", []*routerv1.TagBar{{Any: []string{"pii-detected"}, Assumed: []string{"pii-detected"}}}
	hedges(e, time.Millisecond, 2, patient.endpoint(), barred)
	go func() { // what keeps it from there is counted
		defer close(wait)
		for tick := time.NewTicker(time.Millisecond); !strings.Contains(e.metrics(), `event="barred"`); {
			<-tick.C
		}
	}()
	post("tags", "tags", true)

	hedges(e, time.Nanosecond, 2, patient.endpoint(), other.endpoint())
	post("whole", "whole", false)
	hedges(e, time.Nanosecond, 1, patient.endpoint(), other.endpoint())
	post("one attempt", "one", true)
}

// A client that leaves takes both endpoints with it.
func TestHedgeClientLeaves(t *testing.T) {
	e := start(t, nil).ready()
	slow, slowBegun, slowLeft := hang()
	also, alsoBegun, alsoLeft := hang(roleChunk())
	hedges(e, time.Millisecond, 2, newWorker(t, "slow", slow).endpoint(), newWorker(t, "also", also).endpoint())
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if resp, err := e.begin(ctx, chatPath, chatRequest(true, ""), "X-Request-Id", "leaver"); err == nil {
			resp.Body.Close()
		}
	}()
	await(t, "the first endpoint to begin", slowBegun) // on a busy machine after the second
	await(t, "the second endpoint to begin", alsoBegun)
	cancel()
	await(t, "the first endpoint to be left", slowLeft)
	await(t, "the second endpoint to be left", alsoLeft)
	await(t, "the client", ended)
	if _, words := e.router.done("leaver"); strings.Join(words, ", ") != "canceled" {
		t.Errorf("reported %v", words)
	}
}

// However slow the first endpoints are, second ones are asked for a fifth of the
// requests and ten more.
func TestHedgeBudget(t *testing.T) {
	e := start(t, nil).ready()
	var asked atomic.Int32
	fast := newWorker(t, "fast", func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		answers(textChunk("b"), usageChunk, doneEvent)(w, r)
	})
	slow := newWorker(t, "slow", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		select {
		case <-r.Context().Done():
		case <-time.After(20 * time.Millisecond):
			answers(textChunk("a"), usageChunk, doneEvent)(w, r)
		}
	})
	hedges(e, time.Millisecond, 2, slow.endpoint(), fast.endpoint())
	const requests = 100
	for range requests {
		if resp, text := e.post(chatPath, chatRequest(true, "")); resp.StatusCode != http.StatusOK || !strings.HasSuffix(text, doneEvent) {
			t.Fatalf("got %d %s", resp.StatusCode, text)
		}
	}
	if n := asked.Load(); n < requests/5 || n > requests/5+10 {
		t.Errorf("%d of %d requests had a second endpoint", n, requests)
	}
	e.wantMetric(t, `result="refused"`)
}

// A simulated worker that hangs is made good by another one, and is free again.
func TestHedgeSimulated(t *testing.T) {
	e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) { c.Profiles[0].TokenizerPath = modelDir(t) }).ready()
	bad, good := simulate(t, "bad", fleetsim.Faults{Hang: true}), simulate(t, "good", fleetsim.Faults{})
	hedges(e, 30*time.Millisecond, 2, bad.endpoint(), good.endpoint())
	resp, text := e.post(chatPath, `{"model":"chat","stream":true,"max_tokens":20,"ignore_eos":true,"messages":[{"role":"user","content":"Count."}]}`)
	done, words := e.router.done(resp.Header.Get("X-Request-Id"))
	if strings.Join(words, ", ") != "moved to good after hedged, first token, ok" || done.GetOutputTokens() != 20 || len(content(t, text)) < 15 {
		t.Errorf("reported %v, %v: %s", words, done, text)
	}
	for _, w := range []*worker{bad, good} {
		awaitIdle(t, w.url)
	}
}

// awaitIdle waits until an engine has nothing running and nothing waiting.
func awaitIdle(t *testing.T, url string) {
	t.Helper()
	deadline := time.After(patience)
	for tick := time.NewTicker(5 * time.Millisecond); ; {
		resp, err := http.Get(url + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		busy := false
		for in := bufio.NewScanner(resp.Body); in.Scan(); {
			line := in.Text()
			if strings.HasPrefix(line, "vllm:num_requests_running") || strings.HasPrefix(line, "vllm:num_requests_waiting{") {
				busy = busy || !strings.HasSuffix(line, " 0") && !strings.HasSuffix(line, " 0.0")
			}
		}
		resp.Body.Close()
		if !busy {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%s is still busy", url)
		}
	}
}
