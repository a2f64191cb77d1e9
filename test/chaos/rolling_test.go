package chaos

import (
	"testing"
	"time"
)

// Every replica of every service is restarted in turn under load, as a roll-out
// does it, and no request fails or waits in vain. A worker that is killed then
// fails the streams that it had, and no others.
func TestRollingRestart(t *testing.T) {
	c := startCluster(t, perSecond(40))
	c.warm()
	before := c.settled()
	s := c.start()
	pause(time.Second)
	for _, list := range [][]*process{c.accounting, c.classifier, c.limiter, c.kvtracker, c.relay, c.router, c.ingress} {
		for _, p := range list {
			at := s.sent.Load()
			began := time.Now()
			c.restart(p)
			pause(time.Second)
			t.Logf("%s restarted: ready after %v, %d requests meanwhile", p.name, (time.Since(began) - time.Second).Round(time.Millisecond), s.sent.Load()-at)
		}
	}
	upgraded := time.Now()
	c.fleet[0].Kill()
	died := time.Now()
	pause(time.Second)
	if err := c.fleet[0].Restart(); err != nil {
		t.Fatal(err)
	}
	s.calm(time.Second, time.Minute)
	results := s.stop()

	failed, withWorker, denied, slowest := 0, 0, 0, time.Duration(0)
	for _, r := range results {
		slowest = max(slowest, r.end.Sub(r.began))
		switch {
		case r.kind == "denied":
			denied++
		case !r.failed():
			continue
		// It had begun to answer when the worker died.
		case r.began.Before(died) && r.end.After(upgraded) && (r.kind == "error in stream" || r.kind == "cut off"):
			withWorker++
			continue
		default:
			failed++
		}
		t.Logf("%s: %s after %v, began %v into the test, %.200s", r.id, r.kind, r.end.Sub(r.began).Round(time.Millisecond), r.began.Sub(s.began).Round(time.Millisecond), r.detail)
	}
	sum := s.checkLimits(before, time.Since(s.began))
	ledger := s.audit(results)
	index := c.compareIndex()
	t.Logf("%d requests at %d/s while 12 processes were restarted: %d failed, %d denied, slowest %v; %d streams ended with the worker that was killed; ledger %+v; index %+v; limits %+v; %d prompts with personal data at the provider, of %d",
		len(results), c.rate, failed, denied, slowest.Round(time.Millisecond), withWorker, ledger, index, sum, c.leaked.Load(), c.out.Load())
	// On a machine that is busy with other tests a limit may not be checked in time.
	if failed > 0 || *full && denied > 0 {
		t.Errorf("%d requests failed, %d were denied", failed, denied)
	}
	if ledger.Lost+ledger.Doubled+ledger.Different > 0 || index.Missing+index.False > 0 || sum.Granted > sum.Bound || c.leaked.Load() > 0 {
		t.Error("what was counted is wrong")
	}
}
