package parity

import (
	"fmt"
	"strings"
	"testing"
	"time"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func verdict(profile, worker string, state routerv1.ParityState) *routerv1.Parity {
	v := &routerv1.Parity{Profile: profile, Worker: worker, State: state, CheckedUnixNanos: start.UnixNano()}
	if state == differs {
		v.Cause = routerv1.ParityCause_PARITY_CAUSE_TEMPLATE
	}
	return v
}

func from(ingress string, verdicts ...*routerv1.Parity) *routerv1.ParityReport {
	return &routerv1.ParityReport{Ingress: ingress, Verdicts: verdicts}
}

func TestTokens(t *testing.T) {
	var tokens Tokens
	uids := []string{"a", "b"}
	is := func(what string, at time.Time, profile, worker routerv1.ParityState) {
		t.Helper()
		if got := tokens.Profile(at, "p", uids).State; got != profile {
			t.Errorf("%s: profile is %v, want %v", what, got, profile)
		}
		if got := tokens.Worker(at, "a").State; got != worker {
			t.Errorf("%s: worker is %v, want %v", what, got, worker)
		}
	}
	is("nothing reported", start, unknown, unknown)
	if !tokens.Take(start, from("1", verdict("", "a", agrees))) {
		t.Error("a first verdict is no change")
	}
	is("one agrees", start, agrees, agrees)
	if tokens.Take(start, from("1", verdict("", "a", agrees))) {
		t.Error("the same verdict is a change")
	}
	// Another ingress has another folder: its word is the one to look into.
	tokens.Take(start, from("2", verdict("", "a", differs), verdict("p", "a", differs)))
	is("another differs", start, differs, differs)
	if v := tokens.Profile(start, "p", uids); v.Cause != routerv1.ParityCause_PARITY_CAUSE_TEMPLATE || !v.Checked.Equal(start) {
		t.Errorf("verdict %+v", v)
	}
	if tokens.Profile(start, "q", uids).State != unknown {
		t.Error("a profile inherits that a worker of it differs, though its tokenizer is in use")
	}
	if !tokens.Take(start, from("2", verdict("", "a", agrees))) {
		t.Error("healing is no change")
	}
	is("healed", start, agrees, agrees)
	is("all ingresses are gone", start.Add(life+1), unknown, unknown)
}

func TestTokensAreBounded(t *testing.T) {
	var tokens Tokens
	for i := range 1000 {
		tokens.Take(start.Add(time.Duration(i)), from(fmt.Sprint(i), verdict("p", "", differs)))
	}
	if len(tokens.reports) != maxIngresses || tokens.reports["999"] == nil || tokens.reports["0"] != nil {
		t.Errorf("%d ingresses are kept", len(tokens.reports))
	}
	tokens.Take(start.Add(life+2000), from("new"))
	if len(tokens.reports) != 1 {
		t.Errorf("%d ingresses are kept that are gone", len(tokens.reports)-1)
	}
	big := from("big")
	for i := range 3 * maxVerdicts {
		big.Verdicts = append(big.Verdicts, verdict(fmt.Sprint(i), "", differs))
	}
	big.Verdicts[0].Profile = strings.Repeat("x", maxName+1)
	tokens.Take(start, big)
	if n := len(tokens.reports["big"].profiles); n != maxVerdicts-1 {
		t.Errorf("%d verdicts are kept", n)
	}
	tokens.Take(start, from(strings.Repeat("x", maxName+1), verdict("p", "", differs)))
	tokens.Take(start, nil)
	if len(tokens.reports) > 3 {
		t.Errorf("%d ingresses", len(tokens.reports))
	}
	total := 0
	for i := range 100 {
		big.Ingress = fmt.Sprint("big", i)
		tokens.Take(start, big)
	}
	for _, r := range tokens.reports {
		total += r.size()
	}
	if total > maxTotal || total < maxTotal-maxVerdicts {
		t.Errorf("%d verdicts are kept of all", total)
	}
}
