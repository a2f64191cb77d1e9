// Package chaos tests an installation with replicas of everything while its parts
// are killed, stopped, restarted and cut off the network, under steady load. What
// clients saw, what the ledger, the limits and the index have afterwards, and what
// a provider got to see are compared with what the simulated engines know.
//
// The short form runs with all tests. With -full it takes every service, each NATS
// role and the Redis primary through all faults and writes the table of
// docs/benchmarks/chaos.md: see there. Network namespaces need root on Linux;
// without them partitions are left out, and the log says so.
package chaos

import (
	"flag"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/testenv"
)

var (
	full   = flag.Bool("full", false, "all faults, and longer loads")
	rate   = flag.Int("rate", 0, "requests a second; 0: 20, 40 while all is restarted, and with -full 200")
	only   = flag.String("faults", "", "only faults whose name contains this, such as 'router paused'")
	docs   = flag.String("docs", "", "folder in which to write chaos.md; empty: none")
	bins   = flag.String("bin", "", "folder with the programs and nats-server; empty: they are built")
	outDir = flag.String("out", "", "folder in which to write chaos.json; empty: none")
)

func TestMain(m *testing.M) {
	flag.Parse()
	code := m.Run()
	if built != "" {
		_ = os.RemoveAll(built)
	}
	if code == 0 {
		if err := testenv.Leaks(); err != nil {
			println(err.Error())
			code = 1
		}
	}
	os.Exit(code)
}

func perSecond(short int) int {
	switch {
	case *rate > 0:
		return *rate
	case *full:
		return 200
	}
	return short
}

// Faults of each part, one after the other, under load. No fault loses a request of
// the ledger or counts one twice, lets personal data out, lets more through a limit
// than it may, or leaves the index wrong.
func TestChaos(t *testing.T) {
	c := startCluster(t, perSecond(20))
	c.warm()
	var rows []row
	for _, f := range faults(*full) {
		if f.how == partitioned && !c.site.separated || !strings.Contains(f.target+" "+f.how, *only) {
			continue
		}
		rows = append(rows, c.row(f))
		c.report(rows) // each time: a run may be cut short
	}
}

// warm sends requests until all paths are served and both trackers follow.
func (c *cluster) warm() {
	c.t.Helper()
	s := c.start()
	ok := eventually(time.Minute, func() bool { return c.balancer.all() }) && s.calm(2*time.Second, time.Minute)
	results := s.stop()
	if !ok {
		last := results[len(results)-1]
		c.t.Fatalf("the installation does not serve without failures after a minute: %s %s", last.kind, last.detail)
	}
	if i := c.compareIndex(); i.Missing+i.False > 0 {
		c.t.Fatalf("the index is not right before anything went wrong: %+v", i)
	}
}

// all reports whether all ingresses are ready.
func (b *balancer) all() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, ok := range b.ready {
		if !ok {
			return false
		}
	}
	return true
}

// row lets one thing go wrong under load, waits until all is well, and compares.
func (c *cluster) row(f fault) row {
	c.t.Helper()
	before := c.settled()
	out0, leaked0 := c.out.Load(), c.leaked.Load()
	s := c.start()
	pause(time.Second)
	at := time.Now()
	c.inflict(f)
	over := time.Now()
	calm := s.calm(1500*time.Millisecond, time.Minute)
	results := s.stop()
	r := row{
		Target: f.target, Fault: f.how, Hold: f.hold.Seconds(), Away: over.Sub(at).Seconds(), Rate: c.rate, Network: c.network(),
		Requests: len(results), Kinds: map[string]int{}, Calm: calm,
	}
	r.count(results, at)
	r.Limits = s.checkLimits(before, time.Since(s.began))
	r.Ledger = s.audit(results)
	r.Index = c.compareIndex()
	r.Out, r.Leaked = c.out.Load()-out0, c.leaked.Load()-leaked0
	r.check(c.t, f)
	c.t.Logf("%s", r)
	for _, res := range results {
		if res.failed() && testing.Verbose() {
			c.t.Logf("  %s after %v: %s, took %v: %.200s", res.id, res.began.Sub(at).Round(time.Millisecond), res.kind, res.end.Sub(res.began).Round(time.Millisecond), res.detail)
		}
	}
	return r
}

func (c *cluster) network() string {
	if c.site.separated {
		return "network namespaces"
	}
	return "loopback"
}
