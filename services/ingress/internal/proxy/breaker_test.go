package proxy

import (
	"testing"
	"time"
)

// A breaker opens after failures in a row, lets one request at a time try after
// a pause that grows, and closes when one is answered.
func TestBreaker(t *testing.T) {
	now := time.Unix(0, 0)
	b := &breaker{}
	send := func(v verdict) (ok, opened, closed bool) {
		ok, probe, _ := b.allow(now)
		if ok {
			opened, closed = b.done(now, v, probe, 0)
		}
		return ok, opened, closed
	}
	for _, v := range []verdict{bad, bad, bad, bad, good, bad, none, bad, none, bad, bad} {
		if ok, opened, _ := send(v); !ok || opened {
			t.Fatal("opened too soon")
		}
	}
	if _, opened, _ := send(bad); !opened {
		t.Fatal("five in a row do not open it")
	}
	for wait := pause; wait < maxPause; wait *= 2 {
		now = now.Add(wait - 1)
		if ok, _, _ := b.allow(now); ok {
			t.Fatalf("open for less than %v", wait)
		}
		now = now.Add(1)
		ok, probe, _ := b.allow(now)
		if again, _, _ := b.allow(now); !ok || !probe || again {
			t.Fatalf("after %v: %v %v, another %v", wait, ok, probe, again)
		}
		if opened, _ := b.done(now, bad, true, 0); !opened {
			t.Fatal("a failed probe does not open it again")
		}
	}
	now = now.Add(maxPause)
	if ok, _, _ := send(none); !ok { // the client left: the next one probes
		t.Fatal("no probe")
	}
	if ok, _, closed := send(good); !ok || !closed {
		t.Fatal("an answer does not close it")
	}
	for range 4 {
		if ok, opened, _ := send(bad); !ok || opened {
			t.Fatal("failures of before count")
		}
	}
	if _, opened, _ := send(bad); !opened {
		t.Fatal("five in a row do not open it again")
	}
	// Once the probe's answer has begun the next one may go, whose failure counts once.
	now = now.Add(pause)
	_, first, _ := b.allow(now)
	b.begun()
	_, second, _ := b.allow(now)
	if again, _, _ := b.allow(now); !first || !second || again {
		t.Fatalf("probes %v %v, a third one %v", first, second, again)
	}
	b.done(now, bad, true, 0)
	b.done(now, bad, true, 0)
	if _, closed := b.done(now, good, true, 0); closed {
		t.Fatal("closed by a request of before it opened again")
	}
	if ok, _, wait := b.allow(now); ok || wait != 2*pause {
		t.Fatalf("%v %v", ok, wait)
	}
	now = now.Add(2 * pause)
	_, first, _ = b.allow(now)
	b.begun()
	_, second, _ = b.allow(now)
	if _, closed := b.done(now, good, first, 0); !closed {
		t.Fatal("an answer does not close it")
	}
	if opened, closed := b.done(now, bad, second, 0); opened || closed {
		t.Fatal("one failure opens it again")
	}
	b.done(now, good, false, 0)
	ok, probe, _ := b.allow(now)
	if opened, _ := b.done(now, limited, probe, 30*time.Second); !ok || !opened {
		t.Fatal("a limit does not open it")
	}
	if ok, _, wait := b.allow(now.Add(29 * time.Second)); ok || wait != time.Second {
		t.Fatalf("%v %v", ok, wait)
	}
}

// Failures cause tries elsewhere for a fifth of the requests, and some more for
// a provider that gets few.
func TestBudget(t *testing.T) {
	b, now, tries := &Budget{}, time.Unix(0, 0), 0
	for range 1000 {
		now = now.Add(10 * time.Millisecond)
		b.Sent(now)
		if b.Take() {
			tries++
		}
	}
	if tries < 200 || tries > 200+spare {
		t.Errorf("%d tries for 1000 failures", tries)
	}
	burst := func() (n int) {
		for b.Take() {
			n++
		}
		return n
	}
	for range 1000 {
		now = now.Add(10 * time.Millisecond)
		b.Sent(now)
	}
	if n := burst(); n < 200 || n > 200+spare {
		t.Errorf("%d tries at once after 1000 good requests in 10 s", n)
	}
	for range 1000 {
		now = now.Add(10 * time.Second)
		b.Sent(now)
	}
	if n := burst(); n != spare {
		t.Errorf("%d tries at once where requests are rare", n)
	}
}
