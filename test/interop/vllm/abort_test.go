package vllm_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/vllm"
	"github.com/kinference/kinference/test/interop/vllm/rig"
)

const (
	abortTries = 7
	// abortLimit is how long after its client left an engine may still run or
	// queue a request: the bound that the project sets itself.
	abortLimit = 200 * time.Millisecond
)

// aborts: an engine stops what nobody waits for any more. An idle engine's
// gauges stay as its last step left them, so they cannot tell. Two other things
// can: its prefix cache can be reset when no request holds a block, and not
// before; and while another request, sent to the engine itself, makes it take
// steps, the gauges are those of a moment ago.
func aborts(t *testing.T, env rig.Env, e *rig.Engine) {
	front := rig.NewFront(t, env, rig.FrontOptions{}, e)
	g := newGen(31)
	long := func() string { return g.words(2200) } // 20 steps of the prefill and more
	for _, c := range []struct {
		name    string
		content func() string
		stream  bool
		// begun reports whether the moment to leave has come; events is how many
		// the client has got.
		begun func(events int) bool
	}{
		{"in the middle of a stream", func() string { return g.words(50) }, true, func(events int) bool { return events > 3 }},
		{"before the first token", long, true, func(events int) bool { return events == 0 && busy(t, e) }},
		{"waiting for a whole answer", func() string { return g.words(50) }, false, func(events int) bool { return events == 0 && busy(t, e) }},
	} {
		var times []time.Duration
		for range abortTries {
			front.Eventually("the engine is idle", func() bool { return !busy(t, e) })
			r := leaveOnce(t, front.URL(), request(e.Model, c.content(), c.stream, 500), c.begun)
			if r.ended {
				t.Errorf("%s: the answer was there before the client left", c.name)
				continue
			}
			front.Eventually("the engine is idle again", func() bool { return !busy(t, e) })
			times = append(times, time.Since(r.left))
		}
		judge(t, c.name+", until no block is in use", times)
	}

	// With a request that keeps the engine stepping, by the gauges.
	stop := background(t, e, 1)
	var times []time.Duration
	for range abortTries {
		r := leaveOnce(t, front.URL(), request(e.Model, g.words(50), true, 2000), func(events int) bool {
			running, _ := depth(t, e)
			return events > 3 && running == 2
		})
		front.Eventually("one request runs", func() bool { running, waiting := depth(t, e); return running == 1 && waiting == 0 })
		times = append(times, time.Since(r.left))
	}
	stop()
	judge(t, "in the middle of a stream, by the gauges", times)

	// And one that waits behind as many as the engine runs at a time.
	stop = background(t, e, 4)
	times = nil
	for range abortTries {
		r := leaveOnce(t, front.URL(), request(e.Model, g.words(50), true, 2000), func(int) bool { _, waiting := depth(t, e); return waiting == 1 })
		if r.events > 0 {
			t.Errorf("%d events of a request that waits", r.events)
		}
		front.Eventually("none waits", func() bool { running, waiting := depth(t, e); return running == 4 && waiting == 0 })
		times = append(times, time.Since(r.left))
	}
	stop()
	judge(t, "waiting in the engine's queue, by the gauges", times)
}

// judge logs all times and holds their median against the limit.
func judge(t *testing.T, what string, times []time.Duration) {
	t.Helper()
	if len(times) == 0 {
		t.Errorf("%s: not measured", what)
		return
	}
	sorted := slices.Sorted(slices.Values(times))
	var list []string
	for _, d := range times {
		list = append(list, fmt.Sprint(d.Round(100*time.Microsecond)))
	}
	median := sorted[len(sorted)/2]
	t.Logf("%s: median %v (%s)", what, median.Round(100*time.Microsecond), strings.Join(list, ", "))
	if median > abortLimit {
		t.Errorf("%s: median %v is over %v", what, median, abortLimit)
	}
}

// busy reports whether requests hold blocks of the engine. It empties the prefix
// cache when there are none.
func busy(t *testing.T, e *rig.Engine) bool {
	status, body, err := e.Post("/reset_prefix_cache", nil)
	if err != nil || status != http.StatusOK {
		t.Errorf("reset the prefix cache: status %d %v", status, err)
		return false
	}
	return !strings.Contains(string(body), "true")
}

// depth is how many requests the engine has, by its gauges.
func depth(t *testing.T, e *rig.Engine) (running, waiting float64) {
	_, page, err := e.Get("/metrics")
	if err != nil {
		t.Error(err)
		return -1, -1
	}
	all, err := vllm.ParseMetrics(page)
	if err != nil {
		t.Error(err)
	}
	return all[0].Running, all[0].Waiting
}

func request(model, content string, stream bool, tokens int) []byte {
	body, _ := json.Marshal(map[string]any{
		"model": model, "stream": stream, "max_tokens": tokens, "ignore_eos": true, "messages": []any{map[string]any{"role": "user", "content": content}},
	})
	return body
}

// departure is how a client that left fared.
type departure struct {
	left   time.Time
	events int  // that it got until then
	ended  bool // the answer was complete
}

// leaveOnce sends a request and closes the connection as soon as begun says so.
func leaveOnce(t *testing.T, url string, body []byte, begun func(events int) bool) departure {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	events, done := make(chan struct{}, 1<<16), make(chan struct{})
	go func() {
		defer close(done)
		resp, err := client.Do(req)
		if err != nil {
			return
		}
		defer resp.Body.Close()
		lines := bufio.NewScanner(resp.Body)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			if strings.HasPrefix(lines.Text(), "data: ") {
				events <- struct{}{}
			}
		}
	}()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !begun(len(events)) {
		select {
		case <-done:
			return departure{events: len(events), ended: true}
		case <-tick.C:
		}
	}
	d := departure{left: time.Now(), events: len(events)}
	cancel()
	<-done
	return d
}

// background keeps n requests running at the engine itself until stop.
func background(t *testing.T, e *rig.Engine, n int) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	for i := range n {
		go func() {
			defer func() { done <- struct{}{} }()
			for ctx.Err() == nil {
				req, _ := http.NewRequestWithContext(ctx, http.MethodPost, e.URL()+"/v1/chat/completions", bytes.NewReader(request(e.Model, fmt.Sprint("background ", i), false, 7000)))
				req.Header.Set("Content-Type", "application/json")
				if resp, err := http.DefaultClient.Do(req); err == nil {
					resp.Body.Close()
				}
			}
		}()
	}
	for running := 0.0; int(running) != n; running, _ = depth(t, e) {
		if t.Failed() {
			break
		}
	}
	return func() {
		cancel()
		for range n {
			<-done
		}
	}
}
