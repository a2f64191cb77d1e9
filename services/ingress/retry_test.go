package ingress_test

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// attempts records what endpoints did with each request, in the order in which
// they were asked.
type attempts struct {
	mu  sync.Mutex
	all map[string][]string // "worker fault", by request id
}

// faulty is a worker that does what fault says with each request, and names
// itself in its text.
func (a *attempts) faulty(t *testing.T, name string, fault func() string) *worker {
	return newWorker(t, name, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		word := fault()
		id := r.Header.Get("X-Request-Id")
		a.mu.Lock()
		a.all[id] = append(a.all[id], name+" "+word)
		a.mu.Unlock()
		text := textChunk(name + ";")
		switch word {
		case "ok":
			answers(roleChunk(), text, text, usageChunk, doneEvent)(w, r)
		case "error":
			refuses(500, "{}")(w, r)
		case "busy":
			w.Header().Set("Retry-After", "1")
			refuses(503, "{}")(w, r)
		case "bad":
			refuses(400, `{"error":{"message":"bad"}}`)(w, r)
		case "close":
			panic(http.ErrAbortHandler)
		case "role": // and no content
			answers(roleChunk())(w, r)
			panic(http.ErrAbortHandler)
		case "cut":
			answers(roleChunk(), text)(w, r)
			panic(http.ErrAbortHandler)
		case "event":
			answers(roleChunk(), text, `data: {"error":{"message":"x","code":500}}`+"\n\n", doneEvent)(w, r)
		case "slow":
			select {
			case <-r.Context().Done():
			case <-time.After(5 * time.Millisecond):
				answers(roleChunk(), text, text, usageChunk, doneEvent)(w, r)
			}
		}
	})
}

// sentContent are the faults that come after content.
var sentContent = []string{"ok", "cut", "event", "slow"}

// Whatever workers do, in whatever order: a client gets the text of one worker,
// whole or with an error behind it; nothing is tried again once content was there;
// and tries beyond the first are a fifth of the requests and ten more at most.
func TestRandomFaults(t *testing.T) {
	words := []string{"ok", "error", "busy", "bad", "close", "role", "cut", "event", "slow"}
	for seed := range uint64(6) {
		hedged := seed%2 == 1
		t.Run(fmt.Sprintf("seed %d hedged %v", seed, hedged), func(t *testing.T) {
			var mu sync.Mutex
			random := rand.New(rand.NewPCG(seed, 7))
			healthy := 0.2 + 0.25*float64(seed/2) // share of attempts without a fault
			fault := func() string {
				mu.Lock()
				defer mu.Unlock()
				if random.Float64() < healthy {
					return "ok"
				}
				return words[random.IntN(len(words))]
			}
			a := &attempts{all: map[string][]string{}}
			var workers []*worker
			for _, name := range []string{"a", "b", "c", "d"} {
				workers = append(workers, a.faulty(t, name, fault))
			}
			e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) { c.PromptRetry = time.Hour }).ready()
			e.router.set(func(req *routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
				out := &routerv1.RouteResponse{}
				if hedged {
					out.Attempts, out.Hedge = 4, &routerv1.Hedge{After: durationpb.New(2 * time.Millisecond)}
				}
				mu.Lock()
				defer mu.Unlock()
				for _, i := range random.Perm(len(workers)) {
					if !slices.Contains(req.GetExclude(), workers[i].name) {
						out.Endpoints = append(out.Endpoints, workers[i].endpoint())
					}
				}
				return out, nil
			})
			const clients, each = 8, 25
			var wg sync.WaitGroup
			for c := range clients {
				wg.Go(func() {
					for i := range each {
						id := fmt.Sprintf("r-%d-%d", c, i)
						resp, err := e.begin(t.Context(), chatPath, chatRequest(true, ""), "X-Request-Id", id)
						if err != nil {
							t.Error(err)
							return
						}
						text, err := io.ReadAll(resp.Body)
						resp.Body.Close()
						if err != nil {
							t.Errorf("%s: %v", id, err)
						}
						a.check(t, id, resp.StatusCode, string(text), hedged)
					}
				})
			}
			wg.Wait()
			tries := 0
			a.mu.Lock() // who was left may hear of its request only now
			for _, list := range a.all {
				tries += len(list) - 1
			}
			a.mu.Unlock()
			t.Logf("%d requests, %d tries beyond the first", clients*each, tries)
			if most := clients*each/5 + 10; tries > most {
				t.Errorf("%d tries beyond the first for %d requests, at most %d are allowed", tries, clients*each, most)
			}
		})
	}
}

// check looks at what one client got.
func (a *attempts) check(t *testing.T, id string, status int, text string, hedged bool) {
	a.mu.Lock()
	list := slices.Clone(a.all[id])
	a.mu.Unlock()
	var speakers []string
	for _, name := range []string{"a", "b", "c", "d"} {
		if strings.Contains(text, `"content":"`+name+`;"`) {
			speakers = append(speakers, name)
		}
	}
	failed := strings.Contains(text, `"error":{`)
	switch {
	case len(speakers) > 1:
		t.Errorf("%s: text of %v: %s", id, speakers, text)
	case status == http.StatusOK && len(speakers) == 0:
		t.Errorf("%s: status 200 without content after %v: %s", id, list, text)
	case status != http.StatusOK && (len(speakers) > 0 || !failed):
		t.Errorf("%s: %d %s", id, status, text)
	case status == http.StatusOK && !failed && (strings.Count(text, ";") != 2 || !strings.HasSuffix(text, doneEvent)):
		t.Errorf("%s: looks whole and is not, after %v: %s", id, list, text)
	}
	for i, word := range list {
		_, fault, _ := strings.Cut(word, " ")
		if i < len(list)-1 && !hedged && slices.Contains(sentContent, fault) {
			t.Errorf("%s: tried again after content: %v", id, list)
		}
		if i < len(list)-1 && !hedged && fault == "bad" {
			t.Errorf("%s: tried again though the request is at fault: %v", id, list)
		}
	}
}

// A worker that fails each request is asked for a few, then the others are asked
// at once; when it is well again it gets requests again.
func TestEjectedWorkerReturns(t *testing.T) {
	e := start(t, nil).ready()
	a := &attempts{all: map[string][]string{}}
	var mu sync.Mutex
	state := "error"
	bad := a.faulty(t, "bad", func() string { mu.Lock(); defer mu.Unlock(); return state })
	good := a.faulty(t, "good", func() string { return "ok" })
	e.router.routes(bad, good)
	n := 0
	ask := func() (asked []string) {
		t.Helper()
		n++
		id := fmt.Sprint("r-", n)
		resp, text := e.post(chatPath, chatRequest(true, ""), "X-Request-Id", id)
		if resp.StatusCode != http.StatusOK || !strings.HasSuffix(text, doneEvent) {
			t.Fatalf("got %d %s", resp.StatusCode, text)
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.all[id]
	}
	for range 5 {
		if got := strings.Join(ask(), ", "); got != "bad error, good ok" {
			t.Fatalf("asked %s", got)
		}
	}
	if got := strings.Join(ask(), ", "); got != "good ok" {
		t.Errorf("after five failures asked %s", got)
	}
	if _, words := e.router.done(fmt.Sprint("r-", n)); strings.Join(words, ", ") != "moved to good after ejected, first token, ok" {
		t.Errorf("reported %v", words)
	}
	e.wantMetric(t, `event="ejected"`)
	e.wantMetric(t, `event="avoided"`)
	// It is asked when nobody else can be.
	e.router.routes(bad)
	if resp, _ := e.post(chatPath, chatRequest(true, "")); resp.StatusCode != http.StatusBadGateway {
		t.Errorf("got %d", resp.StatusCode)
	}
	mu.Lock()
	state = "ok"
	mu.Unlock()
	e.router.routes(bad, good)
	deadline := time.After(patience)
	for tick := time.NewTicker(50 * time.Millisecond); ; {
		if got := strings.Join(ask(), ", "); got == "bad ok" {
			break
		} else if got != "good ok" {
			t.Fatalf("asked %s", got)
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("it never got a request again")
		}
	}
	e.wantMetric(t, `event="returned"`)
}

// A 4xx, overload that says so and clients that leave are no reason to eject.
func TestNoVerdict(t *testing.T) {
	e := start(t, nil).ready()
	a := &attempts{all: map[string][]string{}}
	var mu sync.Mutex
	state := "bad"
	w := a.faulty(t, "w", func() string { mu.Lock(); defer mu.Unlock(); return state })
	other := a.faulty(t, "other", func() string { return "ok" })
	e.router.routes(w, other)
	for _, word := range []string{"bad", "busy"} {
		mu.Lock()
		state = word
		mu.Unlock()
		for i := range 8 {
			id := fmt.Sprint(word, i)
			e.post(chatPath, chatRequest(true, ""), "X-Request-Id", id)
			a.mu.Lock()
			if got := a.all[id]; len(got) == 0 || got[0] != "w "+word {
				t.Errorf("%s: asked %v", id, got)
			}
			a.mu.Unlock()
		}
	}
	if strings.Contains(e.metrics(), `event="ejected"`) {
		t.Error("it was ejected")
	}
}
