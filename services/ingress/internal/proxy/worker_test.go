package proxy

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

// Workers that fail are ejected, at most half of a group, for longer each time;
// one request at a time finds out whether they are back.
func TestEjection(t *testing.T) {
	said := map[string]bool{}
	w := &workers{say: func(worker, group string, ejected bool) { said[group+"/"+worker] = ejected }}
	now := time.Unix(1000, 0)
	name := func(i int) Worker { return Worker{fmt.Sprint("w", i), "g"} }
	var all []*health
	for i := range 5 {
		all = append(all, w.named(now, name(i)))
	}
	w.named(now, Worker{"lonely", "other"})
	fail := func(h *health, v verdict, times int) {
		for range times {
			_, probe, _ := h.breaker.allow(now)
			w.done(now, h, v, probe)
		}
	}
	fail(all[0], bad, failures-1)
	fail(all[0], good, 1)
	fail(all[0], bad, failures-1)
	if all[0].breaker.opened() {
		t.Fatal("ejected though it served between the failures")
	}
	fail(all[0], none, 20)
	if all[0].breaker.opened() {
		t.Fatal("ejected for what is no fault of it")
	}
	for i := range all {
		fail(all[i], bad, failures)
	}
	for i, h := range all {
		if want := i < 2; h.breaker.opened() != want {
			t.Errorf("worker %d of 5: ejected %v, want the first two", i, !want)
		}
	}
	lonely := w.named(now, Worker{"lonely", "other"})
	fail(lonely, bad, 3*failures)
	if lonely.breaker.opened() {
		t.Error("the only worker of its group was ejected")
	}
	if len(said) != 2 || !said["g/w0"] || !said["g/w1"] {
		t.Errorf("said %v", said)
	}

	now = now.Add(pause)
	ok, probe, _ := all[0].breaker.allow(now)
	if !ok || !probe || all[0].breaker.wouldAllow(now) {
		t.Fatal("after the pause one request, and one only, goes there")
	}
	w.done(now, all[0], bad, probe)
	if all[0].breaker.wouldAllow(now.Add(pause)) || !all[0].breaker.wouldAllow(now.Add(2*pause)) {
		t.Error("the pause did not double")
	}
	now = now.Add(2 * pause)
	_, probe, _ = all[0].breaker.allow(now)
	w.done(now, all[0], good, probe)
	if all[0].breaker.opened() || said["g/w0"] {
		t.Error("it served, and is ejected still")
	}
	// Its place is free now.
	fail(all[2], bad, failures)
	if !all[2].breaker.opened() {
		t.Error("the next one that fails was not ejected")
	}
}

// What is kept of workers is bounded, and forgotten.
func TestWorkersAreBounded(t *testing.T) {
	w := &workers{}
	now := time.Unix(0, 0)
	for i := range maxWorkers {
		w.named(now, Worker{fmt.Sprint(i), "g"})
	}
	if w.named(now, Worker{"more", "g"}) != nil || len(w.all) != maxWorkers {
		t.Errorf("%d are known", len(w.all))
	}
	now = now.Add(2 * forgetAfter)
	if w.named(now, Worker{"more", "g"}) == nil || len(w.all) != 1 {
		t.Errorf("%d are known, want those that are still named", len(w.all))
	}
}

// An ejected worker gets its next request when the one that tries it has content,
// however long that stream goes on.
func TestLongProbe(t *testing.T) {
	more := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, `data: {"choices":[{"index":0,"delta":{"content":"a"}}]}`+"\n\n")
		_ = http.NewResponseController(w).Flush()
		<-more
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
	}))
	defer s.Close()
	p := New(Settings{Connect: time.Minute, FirstByte: time.Minute, Idle: time.Minute, Write: time.Minute, KeepAlive: time.Minute, PerHost: 1, MaxEvent: 1 << 10})
	defer p.Close()
	who := Worker{"w", "g"}
	h := p.workers.named(time.Now(), who)
	h.breaker.open(time.Now().Add(-2*pause), pause)
	begun, done := make(chan struct{}), make(chan Result)
	call := &Call{URL: s.URL, Header: http.Header{}, Worker: who, Stream: true, Model: []byte(`"m"`), OnFirst: func(time.Duration) { close(begun) }}
	go func() { done <- p.Do(t.Context(), httptest.NewRecorder(), call) }()
	select {
	case <-begun:
	case r := <-done:
		t.Fatalf("%+v", r)
	}
	if p.Ejected(who) || !h.breaker.opened() {
		t.Error("nobody else may go there, or all")
	}
	close(more)
	if r := <-done; r.Reason != Served || h.breaker.opened() {
		t.Errorf("%+v", r)
	}
}

// An attempt that comes too late is not sent, and can have used nothing.
func TestLateAttempt(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("asked") }))
	defer s.Close()
	p := New(Settings{})
	defer p.Close()
	race := &Race{}
	race.claim(&attempt{})
	if r := p.Do(t.Context(), httptest.NewRecorder(), &Call{URL: s.URL, Header: http.Header{}, Race: race}); r.Reason != Lost || !r.Unsent || r.Retry || !r.Sent.IsZero() {
		t.Errorf("%+v", r)
	}
}
