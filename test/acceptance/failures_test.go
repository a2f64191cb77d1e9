package acceptance

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/fleetsim"
)

// A worker that dies before the first byte costs the client nothing.
func TestFailureBeforeTheFirstByteIsRetriedElsewhere(t *testing.T) {
	for name, fault := range map[string]fleetsim.Faults{
		"connection closed": {CloseNext: 1000},
		"status 500":        {ErrorNext: 1000},
	} {
		t.Run(name, func(t *testing.T) {
			e := start(t, settings{workers: 2})
			prefix := words(1, 800)
			home := e.explain(e.chat(req{text: prefix, max: 1})).Chosen
			e.worker(home).SetFaults(fault)
			for _, stream := range []bool{true, false} {
				r := e.chat(req{text: prefix, max: 3, stream: stream})
				if r.status != http.StatusOK || r.text == "" {
					t.Fatalf("stream %v: got status %d, text %q: %s", stream, r.status, r.text, r.body)
				}
				e.eventually("record says where it went", func() bool {
					d := e.explain(r)
					return d.ServedBy != "" && d.ServedBy != home
				})
			}
		})
	}
}

// worker finds the simulated worker behind a worker id.
func (e *env) worker(id string) *fleetsim.Worker {
	e.t.Helper()
	for _, w := range e.workers {
		if strings.HasSuffix(strings.TrimSuffix(id, "/0"), "."+w.Name()) {
			return w
		}
	}
	e.t.Fatalf("no worker %s", id)
	return nil
}

// After the first byte there is no second try: the stream ends with an error
// event, never in silence.
func TestFailureAfterTheFirstByteIsATypedError(t *testing.T) {
	e := start(t, settings{workers: 2})
	for _, w := range e.workers {
		w.SetFaults(fleetsim.Faults{CloseAfterNext: 1000, CloseAfterTokens: 3})
	}
	r := e.chat(req{text: "tell me a story", max: 50, stream: true})
	if r.status != http.StatusOK || len(r.events) < 2 {
		t.Fatalf("got status %d and %d events", r.status, len(r.events))
	}
	var last struct {
		Error *struct{ Message, Type string }
	}
	if err := json.Unmarshal([]byte(r.events[len(r.events)-1]), &last); err != nil || last.Error == nil || last.Error.Type == "" || last.Error.Message == "" {
		t.Errorf("last event is %q, want a typed error", r.events[len(r.events)-1])
	}
	if strings.Contains(r.body, "[DONE]") {
		t.Error("a broken stream ends with [DONE], as if it were whole")
	}
}

// A client that leaves takes its request out of the engine.
func TestDisconnectReachesTheWorker(t *testing.T) {
	e := start(t, settings{workers: 1, scale: 1})
	for _, stream := range []bool{true, false} {
		ctx, leave := context.WithCancel(t.Context())
		hr, err := http.NewRequestWithContext(ctx, http.MethodPost, e.stack.URL()+"/v1/chat/completions", strings.NewReader(req{text: "a long answer please", max: 4000, stream: stream, extra: `,"ignore_eos":true`}.body()))
		if err != nil {
			t.Fatal(err)
		}
		hr.Header.Set("Content-Type", "application/json")
		before := e.workers[0].Aborted()
		done := make(chan struct{})
		go func() {
			defer close(done)
			resp, err := e.client.Do(hr)
			if err != nil {
				return
			}
			defer resp.Body.Close()
			in := bufio.NewReader(resp.Body)
			for {
				if _, err := in.ReadString('\n'); err != nil {
					return
				}
			}
		}()
		e.eventually("request runs", func() bool { return e.workers[0].Stats(0).Running == 1 })
		left := time.Now()
		leave()
		e.eventually(fmt.Sprintf("stream %v: the engine stops to generate", stream), func() bool { return e.workers[0].Aborted() > before })
		t.Logf("stream %v: disconnect reached the engine after %v (goal 100 ms)", stream, time.Since(left).Round(time.Millisecond))
		<-done
	}
}

// No worker is ready: the client learns when to come back.
func TestNoWorkerReady(t *testing.T) {
	e := start(t, settings{workers: 2})
	for _, w := range e.workers {
		w.SetFaults(fleetsim.Faults{Unhealthy: true})
	}
	var r answer
	e.eventually("workers are out", func() bool {
		r = e.chat(req{text: "x", max: 1})
		return r.status == http.StatusServiceUnavailable
	})
	if r.header.Get("Retry-After") == "" {
		t.Errorf("503 without Retry-After: %v", r.header)
	}
	if r.errorBody().Message == "" {
		t.Errorf("503 is not an OpenAI error: %s", r.body)
	}
	for _, w := range e.workers {
		w.SetFaults(fleetsim.Faults{})
	}
	e.eventually("workers are back", func() bool { return e.chat(req{text: "x", max: 1}).status == http.StatusOK })
}

// Restarting any part of the control plane but ingress and router, or NATS,
// under load fails no request.
func TestRestartsUnderLoad(t *testing.T) {
	for _, part := range []string{"relay", "kvtracker", "nats"} {
		t.Run(part, func(t *testing.T) {
			e := start(t, settings{data: t.TempDir()})
			var sent, failed atomic.Int64
			var wg sync.WaitGroup
			stop := make(chan struct{})
			for c := range 4 {
				wg.Go(func() {
					for i := 0; ; i++ {
						select {
						case <-stop:
							return
						default:
						}
						r := e.chat(req{text: words(c, 300) + words(i, 20), max: 4, stream: i%2 == 0})
						sent.Add(1)
						if r.status != http.StatusOK || r.err != nil {
							failed.Add(1)
							t.Logf("request failed: status %d, %v: %s", r.status, r.err, r.body)
						}
					}
				})
			}
			e.eventually("load runs", func() bool { return sent.Load() > 20 })
			if err := e.stack.Restart(part); err != nil {
				t.Fatal(err)
			}
			target := sent.Load() + 100
			e.eventually("load goes on", func() bool { return sent.Load() > target })
			close(stop)
			wg.Wait()
			if n := failed.Load(); n > 0 {
				t.Errorf("%d of %d requests failed", n, sent.Load())
			}
			// And the view of the caches comes back.
			prefix := words(77, 1000)
			e.eventually("cache is in view again", func() bool {
				r := e.chat(req{text: prefix, max: 1})
				if r.status != http.StatusOK {
					return false
				}
				for _, c := range e.explain(r).Candidates {
					if c.MatchedTokens >= 900 {
						return true
					}
				}
				return false
			})
		})
	}
}

// A stop signal lets streams finish.
func TestDrainFinishesStreams(t *testing.T) {
	e := start(t, settings{workers: 1, scale: 10})
	started := make(chan struct{})
	result := make(chan string, 1)
	go func() {
		resp, err := e.client.Post(e.stack.URL()+"/v1/chat/completions", "application/json", strings.NewReader(req{text: "story", max: 100, stream: true, extra: `,"ignore_eos":true`}.body()))
		if err != nil {
			result <- err.Error()
			close(started)
			return
		}
		defer resp.Body.Close()
		in := bufio.NewReader(resp.Body)
		var all strings.Builder
		for first := true; ; first = false {
			line, err := in.ReadString('\n')
			all.WriteString(line)
			if first {
				close(started)
			}
			if err != nil {
				result <- all.String()
				return
			}
		}
	}()
	<-started
	if err := e.stack.Restart("ingress"); err != nil {
		t.Fatal(err)
	}
	if got := <-result; !strings.HasSuffix(strings.TrimSpace(got), "[DONE]") {
		t.Errorf("stream was cut by the drain: ends %q", got[max(0, len(got)-200):])
	}
}
